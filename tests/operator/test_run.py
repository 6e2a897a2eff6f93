"""The operator with its own tasks running: what is heard through the reflectors reaches the jobs."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.resources.job import GpuTrainingJob
from operator_world import World


async def until(is_true: Callable[[], bool], turns: int = 5000) -> None:
    """Let the loop turn until something holds; the estimator's thread needs real time, but little."""
    for turn in range(turns):
        if is_true():
            return
        await asyncio.sleep(0 if turn % 50 else 0.001)
    raise AssertionError("it never came to that")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    running = asyncio.create_task(world.operator.run())
    yield world
    running.cancel()
    await asyncio.wait([running])
    await world.operator.close()


def hear_jobs(world: World) -> None:
    """What kopf does."""
    for item in world.kube.dump_all(GPU_TRAINING_JOBS):
        world.operator.job_changed(msgspec.convert(item, GpuTrainingJob), is_deleted=False)


async def test_job_runs_through(world: World) -> None:
    assert world.operator.unready() == "the pods are not listed yet"
    world.apply()
    hear_jobs(world)
    await until(lambda: world.living() == ["x-worker-0-1"])
    assert world.operator.unready() is None
    world.run_pods()
    await until(lambda: world.job().status.state == "Running")
    world.end_pod("x-worker-0-1")
    await until(lambda: world.job().status.state == "Complete")


async def test_pod_deleted_during_an_expired_watch_is_noticed(world: World) -> None:
    """Regression for informers that list again without a diff: the job would wait for its pod for ever."""
    world.apply()
    hear_jobs(world)
    await until(lambda: world.job().status.attempts != [] and world.job().status.attempts[0].outcome == "Running")
    world.kube.end_watches()
    world.kube.lose(PODS, "x-worker-0-1", "default")
    world.kube.compact()
    await until(lambda: world.living() == ["x-worker-0-2"])
