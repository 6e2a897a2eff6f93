"""Who may switch MIG, what that takes, and who else divides the node's GPUs."""

from pathlib import Path

import pytest
from carpool_core.kube.api import NODES
from carpool_core.kube.errors import Overloaded
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, NodeName, PartitionState, SharingMode
from carpool_deviceplugin.controller.mig_manager import LABEL, MigManager
from carpool_deviceplugin.devices.gpu import DeviceError, SetMode
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import Create
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.nvml.mig import apply_step
from carpool_deviceplugin.testing.mig_agent import MigAgent, mig_node, states

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED
EXCLUSIVE, TIME_SLICING, MPS, MIG = SharingMode


@pytest.mark.parametrize("kind", ["A100-40", "H100"])
async def test_mode_is_switched_where_allowed_and_nobody_is_there(tmp_path: Path, reserve, kind: str) -> None:
    agent = MigAgent(mig_node(tmp_path, kind, on=False, may_switch=True), reserve)
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
    agent = MigAgent(mig_node(tmp_path, on=False, may_switch=True), reserve)
    await agent.want(("a", "1g.5gb"))
    agent.node.nvml.raise_xid(0, 95)
    assert "XID 95" in agent.devices.describe(agent.gpu).health_message


async def test_mode_is_not_switched_where_not_allowed(tmp_path: Path, reserve) -> None:
    agent = MigAgent(mig_node(tmp_path, on=False), reserve)
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert (found.state, agent.node.nvml.gpus[0].mig.is_enabled) == (FAILED, False)
    assert "expected a mode out of Exclusive, MPS, TimeSlicing, found MIG" in found.message
    with pytest.raises(DeviceError, match=r"may not switch it; do it .* or set CARPOOL_MIG_SWITCH"):
        agent.devices.apply(agent.gpu, SetMode(MIG))


async def test_virtual_machine_cannot_reset_and_is_left_as_it_was(tmp_path: Path, reserve) -> None:
    agent = MigAgent(mig_node(tmp_path, on=False, may_switch=True), reserve)
    agent.node.nvml.gpus[0].mig.can_reset = False
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert found.state is FAILED
    assert "takes a reset that cannot be made from here" in found.message
    assert "it was undone" in found.message
    mig = agent.node.nvml.gpus[0].mig
    assert (mig.is_enabled, mig.is_pending) == (False, False), "no later reset switches it by surprise"


async def test_gpu_with_instances_of_others_is_never_switched(tmp_path: Path, reserve) -> None:
    agent = MigAgent(mig_node(tmp_path, may_switch=True), reserve)
    table = agent.node.nvml.gpus[0].mig.table
    apply_step(agent.devices.session, agent.gpu, Create(Placement(table.find("1g.5gb"), 0)))
    found = (await agent.want(("a", EXCLUSIVE)))["a"]
    assert found.state is FAILED
    assert "expected a mode out of MIG, found Exclusive" in found.message


async def test_hopper_forgets_its_mode_with_the_driver_and_is_divided_again(tmp_path: Path, reserve) -> None:
    agent = MigAgent(mig_node(tmp_path, "H100", on=False, may_switch=True), reserve)
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
    agent = MigAgent(mig_node(tmp_path), reserve, lambda: asked[0].confirm())
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
