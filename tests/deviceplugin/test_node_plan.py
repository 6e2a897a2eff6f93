"""`carpool node plan`, over the fake: what is printed, taken, and undone."""

from pathlib import Path

import pynvml
import pytest
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.devices.gpu import CreateInstance, DeviceError
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import plan_mig
from carpool_deviceplugin.nvml.mig import read_instances, read_table
from carpool_deviceplugin.nvml.mig_run import run_plan
from carpool_deviceplugin.testing.nvml_node import Node
from node_world import inspectable, run


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return inspectable(tmp_path)


def test_plan_prints_and_applies(node: Node) -> None:
    printed = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb,2g.10gb")
    assert (printed.exit_code, len(printed.output.splitlines())) == (0, 3)
    assert printed.output.startswith("note: Carpool's agent divides GPUs by itself, and gives instances that were made")
    assert [line.split()[:2] for line in printed.output.splitlines()[1:]] == [["would", "create"]] * 2
    assert node.nvml.gpus[0].mig.instances == {}
    applied = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb,2g.10gb", "--apply")
    assert [line.split()[0] for line in applied.output.splitlines()[1:]] == ["create", "create", "done"]
    assert sorted(i.profile.name for i in node.nvml.gpus[0].mig.instances.values()) == ["2g.10gb", "3g.20gb"]
    assert "nothing to do" in run(node, "plan", "--gpu", "0", "--to", "mig:2g.10gb,3g.20gb").output
    assert "done" in run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply", "--destroy-others").output
    assert node.nvml.gpus[0].mig.instances == {}


def test_instances_of_others_are_destroyed_only_where_that_is_said(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    dry = run(node, "plan", "--gpu", "0", "--to", "mig:")
    assert "(made by somebody else: takes --destroy-others)" in dry.output
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply")
    assert (refused.exit_code, len(node.nvml.gpus[0].mig.instances)) == (2, 1)
    assert "found made by somebody else: instance 1 (3g.20gb on memory slices 4-7)" in refused.output


def test_idle_instances_of_the_agent_go_without_a_word(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    devices.apply(devices.uuids[0], CreateInstance(Placement(profile, 6), None))
    done = run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply")
    assert (done.exit_code, node.nvml.gpus[0].mig.instances) == (0, {}), done.output


def test_what_stays_in_use_is_told_and_is_not_done(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    node.nvml.start(0, 42, 100, instance=1)
    for_nothing = run(node, "plan", "--gpu", "0", "--to", "mig:", "--apply", "--destroy-others")
    assert for_nothing.exit_code == 1
    assert for_nothing.output.splitlines()[:2] == [
        "stays: instance 1 (3g.20gb on memory slices 4-7), in use",
        "nothing to do",
    ]
    assert "expected 'mig:', found more, in use: instance 1 (3g.20gb" in for_nothing.output
    assert "done" not in for_nothing.output
    wanted = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    assert (wanted.exit_code, wanted.output.splitlines()[-1]) == (0, "done")


def test_who_is_in_the_way_is_named(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    (instance,) = node.nvml.gpus[0].mig.instances
    node.nvml.start(0, 42, 100, instance=instance)
    assert (
        f"found instance {instance} (1g.5gb on memory slice 6) in use"
        in run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb", "--apply").output
    )


def test_instance_that_is_promised_to_a_pod_is_in_use(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    devices.apply(devices.uuids[0], CreateInstance(Placement(profile, 6), PodUid("uid-a")))
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb", "--apply")
    assert "(1g.5gb on memory slice 6) in use" in refused.output
    assert len(node.nvml.gpus[0].mig.instances) == 1


def test_switched_off_says_how_to_switch_on(node: Node) -> None:
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = False
    printed = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb").output.splitlines()
    assert [line.split()[0] for line in printed] == ["before:", "note:", "would"]
    refused = run(node, "plan", "--gpu", "0", "--to", "mig:7g.40gb", "--apply")
    assert refused.exit_code == 2
    assert ": expected MIG to be switched on, found: MIG is switched off. Switching it on takes" in refused.output
    assert run(node, "plan", "--gpu", "0", "--to", "mig:").output == "nothing to do: MIG is switched off\n"


def test_what_the_gpu_refuses_is_told_apart_from_what_was_asked(node: Node) -> None:
    node.nvml.fail_next("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_NO_PERMISSION)
    result = run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    assert result.exit_code == 1
    assert "Insufficient Permissions; run the agent as root with the device nodes and, for MIG, CAP_SYS_ADMIN" in (
        result.output
    )
    assert "it was undone" in result.output
    assert result.output.count(node.nvml.gpus[0].uuid) == 1


FAILING = ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceGetInfo"]


@pytest.mark.parametrize("function", FAILING)
@pytest.mark.parametrize("at", range(6))
def test_step_that_fails_is_undone(node: Node, function: str, at: int) -> None:
    devices = node.devices()
    uuid: GpuUuid = devices.uuids[0]
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb,1g.5gb", "--apply")
    table = read_table(devices.session, uuid)
    before = read_instances(devices.session, uuid, table)
    plan = plan_mig(table, before, set(), [table.find("3g.20gb"), table.find("4g.20gb")])
    calls = iter(range(1000))

    def fail(name: str) -> None:
        if name == function and next(calls) == at:
            node.nvml.fail_next(function, pynvml.NVML_ERROR_UNKNOWN)

    node.nvml.before_each(fail)
    try:
        run_plan(devices.session, uuid, table, plan, lambda: 0.0)
    except DeviceError as e:
        assert "it was undone" in str(e)  # noqa: PT017  # some calls are made fewer times than others
        assert {i.placement for i in read_instances(devices.session, uuid, table)} == {i.placement for i in before}
    else:
        assert len(read_instances(devices.session, uuid, table)) == 2


def test_who_came_since_the_plan_is_left_alone(node: Node) -> None:
    devices = node.devices()
    uuid = devices.uuids[0]
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    table = read_table(devices.session, uuid)
    (instance,) = read_instances(devices.session, uuid, table)
    plan = plan_mig(table, [instance], set(), [table.find("7g.40gb")])
    node.nvml.start(0, 42, 100, instance=instance.id)
    with pytest.raises(DeviceError, match=r": destroy instance 7 .* failed: .* make a new plan; it was undone"):
        run_plan(devices.session, uuid, table, plan, lambda: 0.0)
    assert read_instances(devices.session, uuid, table) == [instance]


def test_deadline_holds(node: Node) -> None:
    devices = node.devices()
    uuid = devices.uuids[0]
    table = read_table(devices.session, uuid)
    plan = plan_mig(table, [], set(), [table.find("1g.5gb")] * 3)
    seconds = iter(range(0, 1000, 20))
    with pytest.raises(DeviceError, match=r"expected all steps within 30 s.*it was undone"):
        run_plan(devices.session, uuid, table, plan, lambda: float(next(seconds)))
    assert read_instances(devices.session, uuid, table) == []
