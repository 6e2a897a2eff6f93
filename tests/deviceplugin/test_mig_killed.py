"""Agents that die while they divide a GPU, and steps that fail: the next one goes on, or undoes."""

import shutil
from pathlib import Path

import pynvml
import pytest
from carpool_core.values import PartitionState
from carpool_deviceplugin.partitions.plan import plan
from carpool_deviceplugin.testing.mig_agent import MigAgent, mig_node, states

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED

READY, FAILED = PartitionState.READY, PartitionState.FAILED


@pytest.fixture
def agent(tmp_path: Path, reserve) -> MigAgent:
    return MigAgent(mig_node(tmp_path), reserve)


async def test_new_agent_goes_on(agent: MigAgent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    before = agent.instances
    agent.begin()
    assert states(await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))) == {"a": READY, "b": READY}
    assert agent.instances == before


async def test_who_runs_is_recognised_when_all_state_is_lost_and_the_rest_is_nobodys(agent: MigAgent) -> None:
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
        agent = MigAgent(mig_node(tmp_path / str(at), kind, on=False, may_switch=True), reserve)
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


def direct(agent: MigAgent, profiles: tuple[str, str]) -> None:
    """What a worker does, without its threads, so that a kill ends it where it stands."""
    wanted = agent.reservations(*zip("ab", profiles, strict=True))
    for step in plan(agent.devices.actual(agent.gpu), wanted).steps:
        agent.devices.apply(agent.gpu, step)
    for step in plan(agent.devices.actual(agent.gpu), []).steps:
        agent.devices.apply(agent.gpu, step)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
async def test_instance_that_cannot_be_made_is_said_and_undone(agent: MigAgent, function: str) -> None:
    agent.node.nvml.fail_next(function, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    found = (await agent.want(("a", "3g.20gb")))["a"]
    assert found.state is FAILED
    assert f"{function} failed" in found.message
    assert "it was undone" in found.message
    assert agent.instances == {}
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}


async def test_gpu_that_vanishes_during_a_plan(agent: MigAgent) -> None:
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
