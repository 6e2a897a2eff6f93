"""Reservations in mode MIG, from the reservation to the instance and back, over the fake."""

from pathlib import Path

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, PartitionState, SharingMode
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import Create
from carpool_deviceplugin.nvml.mig import apply_step
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until
from carpool_deviceplugin.testing.mig_agent import MigAgent, mig_node, states
from carpool_deviceplugin.testing.nvml_node import uid

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED
MIG, TIME_SLICING = SharingMode.MIG, SharingMode.TIME_SLICING


@pytest.fixture
def agent(tmp_path: Path, reserve) -> MigAgent:
    return MigAgent(mig_node(tmp_path), reserve)


async def test_instances_come_and_go_with_reservations(agent: MigAgent) -> None:
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


async def test_whoever_still_runs_keeps_its_instance_and_others_wait_for_it(agent: MigAgent) -> None:
    await agent.want(("a", "7g.40gb"))
    (instance,) = agent.instances.values()
    agent.node.start(0, 42, "a", instance=instance)
    found = (await agent.want(("b", "3g.20gb")))["b"]
    assert (found.state, agent.instances) == (PREPARING, {"7g.40gb@0": instance})
    assert f"waits for the processes of pod {uid('a')}" in found.message
    agent.node.end(0, 42)
    assert states(await agent.want(("b", "3g.20gb"))) == {"b": READY}
    assert set(agent.instances) == {"3g.20gb@4"}


async def test_idle_instance_is_used_again(agent: MigAgent) -> None:
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
async def test_what_does_not_fit_is_refused_alone(agent: MigAgent, wanted, says: str) -> None:
    found = await agent.want(*wanted)
    assert states(found) == {"a": READY, "b": FAILED}
    assert says in found["b"].message


async def test_hostile_profile_is_quoted_and_cut(agent: MigAgent) -> None:
    found = (await agent.want(("a", "1g.5gb/../../$(id)" + "x" * 500)))["a"]
    assert (found.state, agent.instances) == (FAILED, {})
    assert len(found.message) < 400


async def test_instances_of_others_are_neither_given_out_nor_touched(agent: MigAgent) -> None:
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


async def test_instance_that_somebody_put_in_the_place_of_ours_is_theirs(agent: MigAgent) -> None:
    await agent.want(("a", "3g.20gb"))
    mig = agent.node.nvml.gpus[0].mig
    mig.instances.clear()
    apply_step(agent.devices.session, agent.gpu, Create(Placement(mig.table.find("3g.20gb"), 4)))
    await agent.want()
    assert set(agent.instances) == {"3g.20gb@4"}


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
