"""The operator is killed at each of its writes, before and after it takes effect, and started again."""

import asyncio
from typing import Any

import pytest
from carpool_core.kube.api import PODS
from carpool_operator.pods import pod_name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_world import World

_PATIENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MOST_WRITES = 12


def one_pod_per_worker(world: World) -> None:
    """The promise: no worker ever has two pods that have not finished."""
    workers = [name.rsplit("-", 1)[0] for name in world.living()]
    assert len(workers) == len(set(workers)), f"two pods of one worker: {world.living()}"


async def stage(world: World, kills: list[tuple[int, bool]]) -> None:
    """Let the operator settle, with these kills on the way."""
    for write, happens in kills:
        await world.survive(write, happens=happens)
        one_pod_per_worker(world)
    await world.settle()
    # The expectation of a pod whose creation got no answer ends by then.
    await world.settle(after_s=6)
    one_pod_per_worker(world)


async def life(workers: int, fails: list[bool], kills: list[list[tuple[int, bool]]]) -> dict[str, Any]:
    """Run a job whose attempts fail or lose a pod; return its final state."""
    world = World()
    world.apply(workers=workers, runPolicy={"backoffLimit": 2})
    turns = iter(kills)
    await stage(world, next(turns, []))
    for number, is_failure in enumerate(fails, start=1):
        world.run_pods()
        await stage(world, next(turns, []))
        victim = pod_name("x", (number - 1) % workers, number)
        if is_failure:
            world.end_pod(victim, exit_code=1)
        else:
            await world.kube.delete(PODS, victim, namespace="default")
        await stage(world, next(turns, []))
        world.clock.advance(400)
        await stage(world, next(turns, []))
    world.run_pods()
    await stage(world, next(turns, []))
    running = sorted(world.living())
    for name in running:
        world.end_pod(name)
    await stage(world, next(turns, []))
    status = world.job().status
    return {
        "running": running,
        "state": str(status.state),
        "restarts": status.restarts,
        "outcomes": [(a.number, a.outcome) for a in status.attempts],
        "placement": [(p.worker, p.pod) for p in status.placement],
        "conditions": sorted((c.type, c.status, c.reason) for c in status.conditions),
    }


@pytest.mark.parametrize("happens", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("write", range(1, MOST_WRITES))
@pytest.mark.parametrize("is_failure", [True, False], ids=["failure", "pod deleted"])
async def test_killed_at_each_write_of_each_stage(write: int, happens: bool, is_failure: bool) -> None:
    expected = await life(2, [is_failure], [])
    assert expected["running"] == ["x-worker-0-2", "x-worker-1-2"]
    assert await life(2, [is_failure], [[(write, happens)]] * 6) == expected


_KILLS = st.lists(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=4), max_size=8)


@_PATIENT
@given(workers=st.integers(1, 3), fails=st.lists(st.booleans(), max_size=3), kills=_KILLS)
def test_no_crash_changes_what_a_job_comes_to(
    workers: int, fails: list[bool], kills: list[list[tuple[int, bool]]]
) -> None:
    found = asyncio.run(life(workers, fails, kills))
    assert found == asyncio.run(life(workers, fails, []))
