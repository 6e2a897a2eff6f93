"""Reservations in mode MIG, from the reservation to the instance in the container, over the fake."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pynvml
import pytest
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.kube.errors import Overloaded
from carpool_core.resources.node import Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.gpu import DeviceError, SetMode
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import Create
from carpool_deviceplugin.mig_manager import LABEL, MigManager
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.nvml.mig import apply_step
from carpool_deviceplugin.patience import Rhythm
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import Inline, flowing, running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid
from carpool_deviceplugin.worker import GpuWorker, Outcome

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED
EXCLUSIVE, TIME_SLICING, MPS, MIG = SharingMode
FIXTURES = Path(__file__).parent / "cdi"


class Agent:
    """The part of one that looks after one GPU."""

    def __init__(
        self, node: Node, reserve: Callable[..., Reservation], confirm: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        self.node, self._reserve, self._confirm = node, reserve, confirm
        self.begin()

    def begin(self) -> None:
        """A new agent on the same node, that remembers nothing but what the status says."""
        promised = frozenset(p for p, o in self.worker.outcomes.items() if o.state is READY) if self.node_began else ()
        self.devices = self.node.devices()
        more = (self._confirm,) if self._confirm else ()
        self.worker = GpuWorker(self.gpu, self.devices, lambda: None, Rhythm(), *more, caller=Inline())
        self.worker.remember(frozenset(promised))

    @property
    def node_began(self) -> bool:
        return hasattr(self, "worker")

    @property
    def gpu(self) -> GpuUuid:
        return self.devices.uuids[0]

    async def want(self, *wanted: tuple[str, str | SharingMode]) -> dict[str, Outcome]:
        """Reserve profiles, or other modes, for pods; return the outcomes."""
        reservations = [
            msgspec.structs.replace(
                self._reserve(pod, self.gpu, mode=MIG if isinstance(what, str) and "g." in what else what),
                pod_uid=PodUid(uid(pod)),
                mig_profile=what if isinstance(what, str) and "g." in what else None,
            )
            for pod, what in wanted
        ]
        self.worker.want(reservations)
        await self.worker.once()
        return {pod: self.worker.outcomes[PodUid(uid(pod))] for pod, _ in wanted}

    @property
    def instances(self) -> dict[str, int]:
        """What the hardware has: start by profile and place."""
        return {f"{i.profile.name}@{i.start}": i.id for i in self.node.nvml.gpus[0].mig.instances.values()}


def mig_node(tmp_path: Path, kind: str = "A100-40", *, on: bool = True, may_switch: bool = False) -> Node:
    node = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path, may_switch_mig=may_switch)
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = on
    return node


@pytest.fixture
def agent(tmp_path: Path, reserve) -> Agent:
    return Agent(mig_node(tmp_path), reserve)


def states(outcomes: dict[str, Outcome]) -> dict[str, PartitionState]:
    return {pod: outcome.state for pod, outcome in outcomes.items()}


async def test_instances_come_and_go_with_reservations(agent: Agent) -> None:
    assert agent.devices.describe(agent.gpu).modes == [MIG]
    assert states(await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))) == {"a": READY, "b": READY}
    assert {name.partition("@")[0] for name in agent.instances} == {"3g.20gb", "1g.5gb"}
    assert agent.devices.describe(agent.gpu).mode is MIG
    kept = agent.instances
    assert states(await agent.want(("b", "1g.5gb"), ("c", "2g.10gb"))) == {"b": READY, "c": READY}
    assert {name.partition("@")[0] for name in agent.instances} == {"1g.5gb", "2g.10gb"}
    assert [n for n in agent.instances if n.startswith("1g")] == [n for n in kept if n.startswith("1g")]
    await agent.want()
    assert agent.instances == {}
    assert agent.devices.actual(agent.gpu).mode is None


async def test_whoever_still_runs_keeps_its_instance_and_others_wait_for_it(agent: Agent) -> None:
    await agent.want(("a", "7g.40gb"))
    (instance,) = agent.instances.values()
    agent.node.start(0, 42, "a", instance=instance)
    found = (await agent.want(("b", "3g.20gb")))["b"]
    assert (found.state, agent.instances) == (PREPARING, {"7g.40gb@0": instance})
    assert f"waits for the processes of pod {uid('a')}" in found.message
    agent.node.end(0, 42)
    assert states(await agent.want(("b", "3g.20gb"))) == {"b": READY}
    assert set(agent.instances) == {"3g.20gb@4"}


async def test_idle_instance_is_used_again(agent: Agent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "3g.20gb"))
    before = agent.instances
    assert states(await agent.want(("b", "3g.20gb"), ("c", "3g.20gb"))) == {"b": READY, "c": READY}
    assert agent.instances == before


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([("a", "4g.20gb"), ("b", "4g.20gb")], "expected room for 4g.20gb, 4g.20gb, found too little room in the way"),
        ([("a", "3g.20gb"), ("b", "7g.40gb")], "expected room for 3g.20gb, 7g.40gb"),
        ([("a", "1g.5gb"), ("b", "9g.90gb")], "expected migProfile out of 7g.40gb, 4g.20gb"),
        ([("a", "1g.5gb"), ("b", TIME_SLICING)], "expected a mode out of MIG, found TimeSlicing"),
    ],
)
async def test_what_does_not_fit_is_refused_alone(agent: Agent, wanted, says: str) -> None:
    found = await agent.want(*wanted)
    assert states(found) == {"a": READY, "b": FAILED}
    assert says in found["b"].message


async def test_hostile_profile_is_quoted_and_cut(agent: Agent) -> None:
    found = (await agent.want(("a", "1g.5gb/../../$(id)" + "x" * 500)))["a"]
    assert (found.state, agent.instances) == (FAILED, {})
    assert len(found.message) < 400


async def test_instances_of_others_are_neither_given_out_nor_touched(agent: Agent) -> None:
    session, table = agent.devices.session, agent.node.nvml.gpus[0].mig.table
    apply_step(session, agent.gpu, Create(Placement(table.find("3g.20gb"), 0)))
    theirs = agent.instances["3g.20gb@0"]
    agent.node.start(0, 99, "stranger", instance=theirs)
    agent.node.start(0, 98, None, instance=theirs)
    found = await agent.want(("a", "3g.20gb"), ("b", "3g.20gb"))
    assert states(found) == {"a": READY, "b": FAILED}
    assert f"found instance {theirs} (3g.20gb on memory slices 0-3) in the way" in found["b"].message
    assert agent.instances == {"3g.20gb@0": theirs, "3g.20gb@4": agent.instances["3g.20gb@4"]}
    assert agent.devices.describe(agent.gpu).health is DeviceHealth.HEALTHY, "who is there is none of our business"
    await agent.want()
    assert agent.instances == {"3g.20gb@0": theirs}
    assert agent.devices.actual(agent.gpu).mode is None


async def test_instance_that_somebody_put_in_the_place_of_ours_is_theirs(agent: Agent) -> None:
    await agent.want(("a", "3g.20gb"))
    mig = agent.node.nvml.gpus[0].mig
    mig.instances.clear()
    apply_step(agent.devices.session, agent.gpu, Create(Placement(mig.table.find("3g.20gb"), 4)))
    await agent.want()
    assert set(agent.instances) == {"3g.20gb@4"}


# Who may switch MIG, and what that takes.


@pytest.mark.parametrize("kind", ["A100-40", "H100"])
async def test_mode_is_switched_where_allowed_and_nobody_is_there(tmp_path: Path, reserve, kind: str) -> None:
    agent = Agent(mig_node(tmp_path, kind, on=False, may_switch=True), reserve)
    profile = "1g.5gb" if kind == "A100-40" else "1g.10gb"
    assert agent.devices.describe(agent.gpu).modes == [EXCLUSIVE, TIME_SLICING, MPS, MIG]
    assert states(await agent.want(("a", EXCLUSIVE))) == {"a": READY}
    agent.node.start(0, 42, "a")
    assert states(await agent.want(("b", profile))) == {"b": PREPARING}
    assert not agent.node.nvml.gpus[0].mig.is_enabled
    agent.node.end(0, 42)
    assert states(await agent.want(("b", profile))) == {"b": READY}
    assert agent.node.nvml.gpus[0].mig.is_enabled
    assert states(await agent.want(("c", TIME_SLICING))) == {"c": READY}
    assert not agent.node.nvml.gpus[0].mig.is_enabled


async def test_xids_are_heard_after_a_reset_in_place(tmp_path: Path, reserve) -> None:
    agent = Agent(mig_node(tmp_path, on=False, may_switch=True), reserve)
    await agent.want(("a", "1g.5gb"))
    agent.node.nvml.raise_xid(0, 95)
    assert "XID 95" in agent.devices.describe(agent.gpu).health_message


async def test_mode_is_not_switched_where_not_allowed(tmp_path: Path, reserve) -> None:
    agent = Agent(mig_node(tmp_path, on=False), reserve)
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert (found.state, agent.node.nvml.gpus[0].mig.is_enabled) == (FAILED, False)
    assert "expected a mode out of Exclusive, MPS, TimeSlicing, found MIG" in found.message
    with pytest.raises(DeviceError, match=r"may not switch it; do it .* or set CARPOOL_MIG_SWITCH"):
        agent.devices.apply(agent.gpu, SetMode(MIG))


async def test_virtual_machine_cannot_reset_and_is_left_as_it_was(tmp_path: Path, reserve) -> None:
    agent = Agent(mig_node(tmp_path, on=False, may_switch=True), reserve)
    agent.node.nvml.gpus[0].mig.can_reset = False
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert found.state is FAILED
    assert "takes a reset that cannot be made from here" in found.message
    assert "it was undone" in found.message
    mig = agent.node.nvml.gpus[0].mig
    assert (mig.is_enabled, mig.is_pending) == (False, False), "no later reset switches it by surprise"


async def test_gpu_with_instances_of_others_is_never_switched(tmp_path: Path, reserve) -> None:
    agent = Agent(mig_node(tmp_path, may_switch=True), reserve)
    table = agent.node.nvml.gpus[0].mig.table
    apply_step(agent.devices.session, agent.gpu, Create(Placement(table.find("1g.5gb"), 0)))
    found = (await agent.want(("a", EXCLUSIVE)))["a"]
    assert found.state is FAILED
    assert "expected a mode out of MIG, found Exclusive" in found.message


async def test_hopper_forgets_its_mode_with_the_driver_and_is_divided_again(tmp_path: Path, reserve) -> None:
    agent = Agent(mig_node(tmp_path, "H100", on=False, may_switch=True), reserve)
    await agent.want(("a", "3g.40gb"))
    agent.node.nvml.restart_driver()
    assert not agent.node.nvml.gpus[0].mig.is_enabled
    for _ in range(3):
        found = await agent.want(("a", "3g.40gb"))
    assert states(found) == {"a": READY}
    assert set(agent.instances) == {"3g.40gb@4"}


# Another manager.


class Labels:
    """The API server, as far as a Node's labels go."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.kube.seed(NODES, {"metadata": {"name": "n"}})

    async def set(self, value: str | None) -> None:
        await self.kube.patch(NODES, "n", {"metadata": {"labels": {LABEL: value}}})

    def manager(self, devices: NvmlDevices) -> MigManager:
        return MigManager(NodeName("n"), self.kube, devices)


async def test_label_keeps_the_agent_off_whoever_runs_stays(tmp_path: Path, reserve) -> None:
    labels = Labels()
    asked: list[MigManager] = []
    agent = Agent(mig_node(tmp_path), reserve, lambda: asked[0].confirm())
    asked.append(labels.manager(agent.devices))
    assert agent.devices.describe(agent.gpu).modes == [], "nobody knows yet"
    await asked[0].confirm()
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}
    agent.node.start(0, 42, "a", instance=next(iter(agent.instances.values())))
    await labels.set("all-1g.5gb")
    found = await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    assert states(found) == {"a": READY, "b": FAILED}, "the label is read before anything is divided"
    assert f"the Node's label {LABEL} is all-1g.5gb" in found["b"].message
    described = agent.devices.describe(agent.gpu)
    assert (described.modes, described.health) == ([], DeviceHealth.UNHEALTHY)
    agent.node.end(0, 42)
    await agent.want()
    assert len(agent.instances) == 1, "the other manager does with it as it likes"
    with pytest.raises(DeviceError, match="expected nobody else to divide it"):
        agent.devices.apply(agent.gpu, SetMode(EXCLUSIVE))
    await labels.set(None)
    await asked[0].confirm()
    assert states(await agent.want(("c", "7g.40gb"))) == {"c": READY}


async def test_label_that_cannot_be_read_stays_as_it_was(tmp_path: Path) -> None:
    labels = Labels()
    devices = mig_node(tmp_path).devices()
    manager = labels.manager(devices)
    labels.kube.fail_next("get", NODES, Overloaded("busy", status=500))
    assert not await manager.confirm()
    assert devices.describe(devices.uuids[0]).modes == []
    assert await manager.confirm()
    labels.kube.fail_next("get", NODES, Overloaded("busy", status=500))
    assert not await manager.confirm()
    assert devices.describe(devices.uuids[0]).modes == [MIG]


# An agent that dies.


async def test_new_agent_goes_on(agent: Agent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    before = agent.instances
    agent.begin()
    assert states(await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))) == {"a": READY, "b": READY}
    assert agent.instances == before


async def test_who_runs_is_recognised_when_all_state_is_lost_and_the_rest_is_nobodys(agent: Agent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    before = agent.instances
    agent.node.start(0, 42, "a", instance=before["3g.20gb@4"])
    shutil.rmtree(agent.node.root / "state")
    agent.begin()
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}
    assert agent.instances == before, "an idle instance that nobody can be shown to have made is left"
    agent.node.end(0, 42)
    await agent.want()
    assert set(agent.instances) == {n for n in before if n.startswith("1g")}


class KilledError(BaseException):
    """The agent is gone at once."""


@pytest.mark.parametrize("kind", ["A100-40", "H100"])
async def test_agent_killed_at_each_call_goes_on_or_undoes(tmp_path: Path, reserve, kind: str) -> None:
    """At every call of the driver in turn; the next agent ends with what is wanted, and leaves nothing behind."""
    small, large = ("1g.5gb", "4g.20gb") if kind == "A100-40" else ("1g.10gb", "4g.40gb")
    at = 0
    while True:
        agent = Agent(mig_node(tmp_path / str(at), kind, on=False, may_switch=True), reserve)
        calls = iter(range(at + 1))

        def kill(_: str, calls=calls) -> None:
            if next(calls, None) is None:
                raise KilledError

        agent.node.nvml.before_each(kill)
        try:
            direct(agent, (small, large))
        except KilledError:
            agent.node.nvml.before_each(lambda _: None)
        else:
            break
        agent.begin()
        found = await agent.want(("a", small), ("b", large))
        assert states(found) == {"a": READY, "b": READY}, at
        assert sorted(n.partition("@")[0] for n in agent.instances) == [small, large], at
        await agent.want()
        assert agent.instances == {}, at
        at += 1
    assert at > 100


def direct(agent: Agent, profiles: tuple[str, str]) -> None:
    """What a worker does, without its threads, so that a kill ends it where it stands."""
    from carpool_deviceplugin.plan import plan

    wanted = [
        msgspec.structs.replace(agent._reserve(pod, agent.gpu, mode=MIG), pod_uid=PodUid(uid(pod)), mig_profile=profile)
        for pod, profile in zip("ab", profiles, strict=True)
    ]
    for step in plan(agent.devices.actual(agent.gpu), wanted).steps:
        agent.devices.apply(agent.gpu, step)
    for step in plan(agent.devices.actual(agent.gpu), []).steps:
        agent.devices.apply(agent.gpu, step)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
async def test_instance_that_cannot_be_made_is_said_and_undone(agent: Agent, function: str) -> None:
    agent.node.nvml.fail_next(function, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    found = (await agent.want(("a", "3g.20gb")))["a"]
    assert found.state is FAILED
    assert f"{function} failed" in found.message
    assert "it was undone" in found.message
    assert agent.instances == {}
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}


async def test_gpu_that_vanishes_during_a_plan(agent: Agent) -> None:
    def vanish(name: str) -> None:
        if name == "nvmlGpuInstanceCreateComputeInstance":
            agent.node.nvml.gpus[0].is_lost = True

    agent.node.nvml.before_each(vanish)
    found = (await agent.want(("a", "3g.20gb"), ("b", "1g.5gb")))["a"]
    assert found.state is FAILED
    assert "fallen off the bus" in found.message
    agent.node.nvml.before_each(lambda _: None)
    agent.node.nvml.gpus[0].is_lost = False
    await agent.want()
    agent.node.advance(61)
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}


# What the container gets.


def specification(agent: Agent, pod: str, check: Callable[[dict], None] = lambda _: None) -> dict:
    reservation = next(r for r in agent.worker._wanted if r.pod_uid == uid(pod))
    access = {agent.gpu: agent.devices.access(agent.gpu, reservation.pod_uid)}
    spec = cdi.specifications(reservation, ["slot-0"], access)["slot-0"]
    check(spec)
    return spec["devices"][0]["containerEdits"]


async def test_runtime_is_told_the_mig_device(agent: Agent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    names = {}
    for pod in "ab":
        env = dict(e.split("=", 1) for e in specification(agent, pod, valid_cdi)["env"])
        names[pod] = env["NVIDIA_VISIBLE_DEVICES"]
        assert (names[pod][:4], env["CARPOOL_GPU_MODE"]) == ("MIG-", "MIG")
        assert "CUDA_MPS_PIPE_DIRECTORY" not in env
    assert names["a"] != names["b"]


async def test_specification_is_composed_of_the_gpus_and_the_instances_files(agent: Agent, valid_cdi) -> None:
    (agent.node.root / "cdi").mkdir()
    shutil.copy(FIXTURES / "host.yaml", agent.node.root / "cdi" / "nvidia.yaml")
    await agent.want(("a", "3g.20gb"))
    (instance,) = agent.instances.values()
    (agent.node.root / "mig-minors").write_text(
        f"config 1\nmonitor 2\ngpu0/gi{instance}/access 30\ngpu0/gi{instance}/ci0/access 31\ngpu0/gi9/access 66\n"
    )
    edits = specification(agent, "a", valid_cdi)
    nodes = [n["path"] for n in edits["deviceNodes"]]
    assert {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"} <= set(nodes)
    assert "/dev/nvidia-caps/nvidia-cap66" not in nodes
    assert "NVIDIA_VISIBLE_DEVICES=void" in edits["env"]


async def test_specification_of_the_mig_device_itself_comes_first(agent: Agent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"))
    device = next(iter(agent.node.nvml.gpus[0].mig.instances.values())).compute[0].uuid
    (agent.node.root / "cdi").mkdir()
    theirs = {"kind": "nvidia.com/gpu", "devices": [{"name": device, "containerEdits": {"env": ["THEIRS=1"]}}]}
    (agent.node.root / "cdi" / "nvidia.json").write_text(json.dumps(theirs))
    assert "THEIRS=1" in specification(agent, "a", valid_cdi)["env"]


async def test_pod_without_an_instance_gets_none(agent: Agent) -> None:
    await agent.want(("a", "3g.20gb"))
    with pytest.raises(DeviceError, match="expected a MIG instance of pod other, found none"):
        agent.devices.access(agent.gpu, PodUid("other"))


# The whole agent.


async def test_from_the_api_server_to_the_instance_and_back(tmp_path: Path, reserve) -> None:
    kube, node = FakeKube(), mig_node(tmp_path)
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    devices = node.devices()
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    wanted = msgspec.structs.replace(reserve("a", devices.uuids[0], mode=MIG), mig_profile="2g.10gb")

    def status() -> dict:
        found = kube.dump_all(GPU_NODES)
        return found[0].get("status", {}) if found else {}

    async with running(flowing(settings, kube, devices)):
        await until(lambda: status().get("devices"))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": [msgspec.to_builtins(wanted)]}})
        await until(lambda: [p["state"] for p in status()["partitions"]] == ["Ready"])
        assert [i.profile.name for i in node.nvml.gpus[0].mig.instances.values()] == ["2g.10gb"]
        await until(lambda: status()["devices"][0].get("mode") == "MIG")
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": []}})
        await until(lambda: not node.nvml.gpus[0].mig.instances)
