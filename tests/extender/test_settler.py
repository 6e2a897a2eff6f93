"""Measured peaks become part of reservations, on a server, across restarts."""

import asyncio

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.errors import Unreachable
from carpool_extender.book import ATTEMPTS
from carpool_extender.testing import prediction, until
from extender_world import args, background, filtering, named

GPU = "GPU-a-0"


def a_world(world, **predicted):
    """A job that is alone because nothing was measured, and one that waits, for one GPU."""
    world.add("x", "y", nodes=["a"])
    told = {"prediction": msgspec.to_builtins(prediction(trusted=False, **predicted))}
    world.kube.seed(GPU_TRAINING_JOBS, world.kube.dump(GPU_TRAINING_JOBS, "x", "") | {"status": told})


async def place(world, extender, job="x"):
    async with background(world.agent.serve("a")):
        answer = await extender.service.bind(args(job))
    assert answer.error == ""


async def tell(world, for_s, *, peak_mib=5000, busy=80.0):
    """Let the agent report x twice a minute."""
    for _ in range(round(for_s / 25)):
        world.clock.advance(25)
        tenant = {"podUid": "pod-x", "gpuUuid": GPU, "memoryMib": peak_mib, "peakMemoryMib": peak_mib}
        status = {"tenants": [tenant | {"gpuUtilPercent": busy}], "heartbeatTime": world.clock.now().isoformat()}
        await world.kube.patch(GPU_NODES, "a", {"status": status}, subresource="status")
        for _ in range(20):
            await asyncio.sleep(0)


def counted(world):
    return [reservation["tenant"].get("measuredMib") for reservation in world.reservations("a")]


async def test_a_lone_job_is_joined_once_its_peak_was_measured(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        [lone] = world.reservations("a")
        assert (lone["mode"], lone.get("memoryLimitMib"), lone["tenant"].get("memoryMib")) == ("MPS", None, None)
        assert "counts with the whole GPU until its own peak was measured" in lone["reason"]
        assert named(await extender.service.filter(filtering("y"))) == []
        await tell(world, 100)
        assert counted(world) == [None]
        await tell(world, 25)
        await until(lambda: counted(world) == [7500])
        assert ANNOTATION_CAPACITY_FREED in world.kube.dump(GPU_NODES, "a")["metadata"]["annotations"]
        assert named(await extender.service.filter(filtering("y"))) == ["a"]
        await place(world, extender, "y")
        await tell(world, 500)
        await until(lambda: counted(world) == [5500, None])
    assert world.reservations("a")[0]["generation"] == lone["generation"]  # its agent need not act


async def test_what_counts_outlives_the_extender_and_only_waiting_begins_anew(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        await tell(world, 100)
    async with world.extender() as extender:
        await tell(world, 100)
        assert counted(world) == [None]
        await tell(world, 25)
        await until(lambda: counted(world) == [7500])
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering("y"))) == ["a"]


async def test_what_could_not_be_written_is_written_with_the_agents_next_word(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        await tell(world, 100)
        for _ in range(ATTEMPTS):
            world.kube.fail_next("patch", GPU_NODES, Unreachable("gone"), subresource="")
        await tell(world, 400)
        await until(lambda: counted(world) == [7500])


@pytest.mark.parametrize("outcome", ["GpuOutOfMemory", "ContainerFailed"])
async def test_a_job_that_died_of_memory_stays_alone(world, outcome):
    a_world(world)
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "")
    world.kube.seed(GPU_TRAINING_JOBS, job | {"status": job["status"] | {"attempts": [{"outcome": outcome}]}})
    async with world.extender() as extender:
        await place(world, extender)
    [lone] = world.reservations("a")
    expected = ("Exclusive", False) if outcome == "GpuOutOfMemory" else ("MPS", True)
    assert (lone["mode"], lone["tenant"].get("provisional", False)) == expected
