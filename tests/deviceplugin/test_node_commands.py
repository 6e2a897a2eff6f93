"""`carpool node inspect` and `carpool node plan`, over the fake."""

import re
import socket
from pathlib import Path

import pynvml
import pytest
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.gpu import CreateInstance, DeviceError
from carpool_deviceplugin.inspection import inspect_node
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import plan_mig
from carpool_deviceplugin.node_commands import listening, mps_host
from carpool_deviceplugin.node_commands import node as command
from carpool_deviceplugin.node_input import InputError
from carpool_deviceplugin.nvidia_cdi import NvidiaCdi
from carpool_deviceplugin.nvml.mig import read_instances, read_table
from carpool_deviceplugin.nvml.mig_run import run_plan
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node
from click.testing import CliRunner, Result


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(FakeNvml(["A100-40", "T4"]), FakeMpsCommands(), tmp_path)
    found.nvml.gpus[0].mig.is_enabled = found.nvml.gpus[0].mig.is_pending = True
    return found


def run(node: Node, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), obj=node.devices())


def test_inspect_says_what_is_there_and_what_is_missing(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert "driver 580.95.05, CUDA 13.0" in lines
    assert "GPU 0: NVIDIA A100-SXM4-40GB" in lines
    assert "MIG: on" in lines
    assert "1g.5gb         4,864 MiB, 14 SMs, at {0,1,2,3,4,5,6}:1" in lines
    assert "instance 1 (3g.20gb on memory slices 4-7)  MIG-" in lines
    assert "GPU 1: Tesla T4" in lines
    assert "MIG: not supported" in lines
    assert "missing: NVIDIA's CDI specification" in lines
    assert "nvidia-ctk cdi generate" in lines
    assert "hostPID: true" in lines


class HostEngine:
    """DCGM's, which knows the first GPU."""

    name, is_public = "dcgm", False

    def __init__(self, node: Node) -> None:
        self._uuid = node.nvml.gpus[0].uuid

    def values(self) -> dict:
        return {(self._uuid, None): {"DCGM_FI_PROF_SM_ACTIVE": 0.5}}


def test_inspect_says_where_metrics_come_from(node: Node) -> None:
    node.sources = (HostEngine(node),)
    lines = [line for line in inspect_node(node.devices(), NvidiaCdi([]), node.root) if "metrics:" in line]
    assert ["DCGM's host engine" in lines[0], "no SM activity" in lines[1]] == [True, True]


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


def test_gpu_may_be_named_by_its_uuid_and_modes_in_capitals(node: Node) -> None:
    uuid = node.nvml.gpus[0].uuid
    assert "would create 3g.20gb" in run(node, "plan", "--gpu", uuid, "--to", "MIG:3G.20GB").output


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
    assert "expected mig:, found more, in use: instance 1 (3g.20gb" in for_nothing.output
    assert "done" not in for_nothing.output
    wanted = run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    assert (wanted.exit_code, wanted.output.splitlines()[-1]) == (0, "done")


def test_inspect_says_whose_instances_are_and_whether_they_are_in_use(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    devices.apply(devices.uuids[0], CreateInstance(Placement(profile, 0), PodUid("uid-a")))
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb,2g.10gb", "--apply")
    (larger,) = (n for n, i in node.nvml.gpus[0].mig.instances.items() if i.profile.name == "2g.10gb")
    node.start(0, 42, "x", instance=larger)
    lines = [line for line in inspect_node(node.devices(), NvidiaCdi([]), node.root) if "    instance " in line]
    assert {line.split("(")[1].split()[0]: line.rpartition("  ")[2] for line in lines} == {
        "1g.5gb": "made for pod uid-a, idle",
        "2g.10gb": "made by somebody else, in use",
    }


@pytest.mark.parametrize(("comm", "is_host"), [("kthreadd\n", True), ("pause\n", False)])
def test_the_hosts_processes_are_known_by_the_kernels(node: Node, comm: str, is_host: bool) -> None:
    (node.root / "2").mkdir()
    (node.root / "2" / "comm").write_text(comm)
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert ("the host's PIDs" not in lines) == is_host


def test_inspect_says_who_could_measure_more(node: Node) -> None:
    missing = "missing, for SM activity before Hopper: DCGM's library"
    assert missing in "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    newer = Node(FakeNvml(["H100"]), FakeMpsCommands(), node.root)
    assert missing not in "\n".join(inspect_node(newer.devices(), NvidiaCdi([]), node.root))


def test_inspect_looks_for_the_host_of_daemons_where_there_is_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, there = tmp_path / "nvidia-cuda-mps-control", tmp_path / "s"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # without unshare, which only a process that starts daemons needs
    monkeypatch.setenv("CARPOOL_MPS_HOST", str(there))
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path / "state"))
    inspected = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert f"missing, for mode MPS: the MPS daemons' host at {there}; look at the pod carpool-mps" in inspected
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        inspected = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert "for mode MPS" not in inspected
    monkeypatch.delenv("CARPOOL_MPS_HOST")
    assert "unshare on PATH" in CliRunner().invoke(command, ["inspect"], obj=node.nvml).output


def test_inspect_says_what_is_reserved_for_whom(node: Node) -> None:
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert re.search(r"40,960 MiB \([1-9]\d* the driver's, 256 more kept free\)", lines), lines
    assert "; now no mode set" in lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "7", "--to", "mig:1g.5gb"], "expected a GPU from 0 to 1, or its UUID, found 7"),
        (["--gpu", "1", "--to", "mig:1g.5gb"], "expected a GPU with MIG, found Tesla T4"),
        (["--gpu", "-1", "--to", "mig:1g.5gb"], "expected a GPU from 0 to 1, or its UUID, found -1"),
        (["--gpu", "first", "--to", "mig:1g.5gb"], "expected a GPU from 0 to 1, or its UUID, found first"),
        (["--to", "mig:1g.5gb"], "Missing option '--gpu'"),
        (["--gpu", "0", "--too", "mig:1g.5gb"], "No such option"),
        (["--gpu", "0", "--to", "mig:9g.90gb"], "expected a MIG profile out of 7g.40gb, 4g.20gb"),
        (["--gpu", "0", "--to", "mig:3g.20"], "found '3g.20'"),
        (["--gpu", "0", "--to", "3g.20gb,1G.5gb"], "found '3g.20gb,1G.5gb'; did you mean mig:3g.20gb,1g.5gb"),
        (["--gpu", "0", "--to", "mig:3g.20gb,$(reboot)"], "found '$(reboot)'"),
        (["--gpu", "0", "--to", "mps"], "expected --to mig:PROFILE"),
        (["--gpu", "0", "--to", "mig:7g.40gb,1g.5gb"], "expected profiles that fit on one GPU together"),
    ],
)
def test_refusals_are_sentences(node: Node, arguments: list[str], says: str) -> None:
    result = run(node, "plan", *arguments)
    assert result.exit_code == 2
    assert says in result.output


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
    assert (refused.exit_code, refused.output.splitlines()[0][:31]) == (2, "Error: MIG is switched off. Swi")
    assert run(node, "plan", "--gpu", "0", "--to", "mig:").output == "nothing to do: MIG is switched off\n"


def test_host_of_daemons_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(command, ["mps-host", "--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "found missing: nvidia-cuda-mps-control on PATH" in result.output


def test_host_of_daemons_wants_both_names_of_its_memory(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["mps-host", "--socket", str(tmp_path / "s"), "--shm-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2,
        "Error: expected both --shm-dir and --shm-dir-on-node, or none of them, found one; add the other\n",
    )


@pytest.mark.parametrize(
    ("path", "state", "says"),
    [
        ("missing/s", "", "--socket: expected to listen on "),
        ("s", "/proc/x", "--state-dir: expected a directory, or to make one, found "),
    ],
)
def test_host_of_daemons_says_where_it_cannot_be(tmp_path: Path, path: str, state: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        listening(tmp_path / path, Path(state) if state else tmp_path)
    assert raised.value.exit_code == 2


def test_environment_is_the_agents(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = node.nvml.gpus[1].uuid
    (node.root / "state" / "gpus").mkdir(parents=True)
    (node.root / "state" / "gpus" / f"{uuid}.json").write_text('{"mode": "TimeSlicing"}')
    (node.root / "cdi").mkdir()
    (node.root / "cdi" / "odd.json").write_text('{"kind": "nvidia.com/gpu", "devices": 3}')
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(node.root / "state"))
    monkeypatch.setenv("CARPOOL_CDI_DIR", str(node.root / "cdi"))
    result = CliRunner().invoke(command, ["inspect"], obj=node.nvml)
    assert result.exit_code == 0, result.output
    assert "now TimeSlicing" in result.output
    assert f"wrong: {node.root / 'cdi' / 'odd.json'}: expected a CDI specification" in result.output


def test_nothing_is_written_beside_a_living_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.nvml.gpus[0].remap = (0, 0, 1, 0)
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(node.root / "state"))
    for arguments in (["inspect"], ["plan", "--gpu", "0", "--to", "mig:1g.5gb"]):
        result = CliRunner().invoke(command, arguments, obj=node.nvml)
        assert result.exit_code == 0, result.output
    assert not (node.root / "state").exists()
    assert "remapped" in CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    node.devices().inventory()  # an agent, which keeps it
    assert len(list((node.root / "state" / "gpus").glob("*.health.json"))) == 1


@pytest.mark.parametrize("arguments", [["inspect"], ["plan", "--gpu", "0", "--to", "mig:"], ["battery"]])
def test_variable_of_the_wrong_kind_is_a_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments, env={"CARPOOL_METRICS_PORT": "many"})
    assert (result.exit_code, result.output) == (
        2,
        "Error: CARPOOL_METRICS_PORT: expected an integer, found 'many'\n",
    )


def test_state_directory_of_the_host_is_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path))
    with mps_host.make_context("mps-host", ["--socket", "s"]) as context:
        assert context.params["state_dir"] == tmp_path


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
