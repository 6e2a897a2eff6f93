"""Jobs of several workers for all of which there is room at once: nobody gets between them."""

import asyncio

import msgspec
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.pods import Pod
from carpool_core.values import JobUid, PodUid
from carpool_extender.extender_api import ExtenderArgs
from carpool_extender.testing import pod_of, until
from extender_world import background
from keeper_world import ask, bind_of, counts, end, gang_of, pass_s, seed, start, told_to


def slow_writes(world):
    """Let GpuNodes take a while to be written."""
    write = world.kube.patch

    async def patch(kind, *args, **more):
        for _ in range(50 if kind is GPU_NODES else 0):
            await asyncio.sleep(0)
        return await write(kind, *args, **more)

    world.kube.patch = patch


async def test_nobody_gets_between_workers_that_fit_at_once_while_they_are_being_bound():
    """Regression: both had been told their places, the first was written, and a later job took the other's."""
    world = gang_of(2, "a", 2)
    slow_writes(world)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, 0, 1) == [["a"], ["a"]]
        binds = [asyncio.create_task(extender.service.bind(bind_of(worker, "a"))) for worker in range(2)]
        while not all(bind.done() for bind in binds):
            assert (await ask(extender, "late"))[0] == []
            await asyncio.sleep(0)
        assert [(await bind).error for bind in binds] == ["", ""]


async def test_nobody_takes_the_place_of_a_worker_that_was_not_asked_about_yet():
    """Regression: a later job got a GPU between two workers, of which the second waited while the first ran."""
    world = gang_of(3, "a", 3)
    async with world.extender() as extender, background(world.agent.serve("a")):
        for worker in range(3):
            assert await told_to(extender, worker) == [["a"]]
            assert (await ask(extender, "late"))[0] == []
            assert (await extender.service.bind(bind_of(worker, "a"))).error == ""
            assert (await ask(extender, "late"))[0] == []
        assert (await ask(extender, "late"))[1].startswith("NoGpuFits: 3 GPUs: used exclusively")


async def test_a_worker_is_not_refused_while_another_of_its_job_is_being_written():
    """Regression: the first one's GPU was taken, and the first one not known to have it: room for 1 of 2, it said."""
    world = gang_of(2, "a", 2)
    slow_writes(world)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, 0) == [["a"]]
        bind, told = asyncio.create_task(extender.service.bind(bind_of(0, "a"))), []
        while not bind.done():
            told += await told_to(extender, 1)
            await asyncio.sleep(0)
        assert (len(told) > 20, set(map(tuple, told)), (await bind).error) == (True, {("a",)}, "")


async def test_workers_that_share_a_gpu_are_told_what_is_left_beside_the_others():
    world = gang_of(4, "a", 2, sharing={"mode": "TimeSlicing"}, memory={"limit": "15Gi"})
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, *range(4)) == [["a"]] * 4
        for worker in (3, 0, 2, 1):
            assert (await extender.service.bind(bind_of(worker, "a"))).error == ""
    held = [gpu for one in world.reservations("a") for gpu in one["gpuUuids"]]
    assert sorted(held) == ["GPU-a-0", "GPU-a-0", "GPU-a-1", "GPU-a-1"]


async def test_what_is_kept_for_workers_that_never_come_is_kept_for_a_moment_after_the_last_that_came():
    world = gang_of(3, "a", 3)
    async with world.extender() as extender, background(world.agent.serve("a")):
        for worker in range(2):
            assert await told_to(extender, worker) == [["a"]]
            assert (await extender.service.bind(bind_of(worker, "a"))).error == ""
            await pass_s(world, 2)
            assert (await ask(extender, "late"))[0] == []
        await pass_s(world, 3)
        assert counts(extender)["passed"] == 1
        assert (await ask(extender, "late"))[0] == ["a"]


async def test_what_was_told_to_workers_that_are_never_bound_counts_for_a_moment():
    world = gang_of(2, "a", 2)
    async with world.extender() as extender:
        assert await told_to(extender, 0, 1) == [["a"], ["a"]]
        assert (await ask(extender, "late"))[0] == []
        await pass_s(world, 5)
        assert not extender.informers.cluster.pods_of_job(JobUid("job-gang"))
        assert (await ask(extender, "late"))[0] == ["a"]


async def test_what_a_worker_was_told_counts_no_more_once_it_is_gone():
    world = gang_of(2, "a", 2)
    async with world.extender() as extender:
        assert await told_to(extender, 0, 1) == [["a"], ["a"]]
        assert (await ask(extender, "late"))[0] == []
        for worker, left in enumerate(({"pod-gang-1"}, set())):
            await world.kube.delete(PODS, f"gang-worker-{worker}-1", namespace="default")
            await until(lambda left=left: extender.informers.cluster.pods_of_job(JobUid("job-gang")) == left)
        assert (await ask(extender, "late"))[0] == ["a"]


async def test_what_is_kept_for_the_next_worker_outlives_pods_that_are_through():
    """The first worker is bound, or a pod of the attempt before is cleared away, while the second is yet to come."""
    world = gang_of(2, "a", 2)
    old = pod_of("gang", worker=1)
    old["metadata"] |= {"name": "gang-worker-1-7", "uid": "old"}
    world.kube.seed(PODS, old | {"status": {"phase": "Failed"}, "spec": old["spec"] | {"nodeName": "a"}})
    seed(world, "busy", 0)
    async with world.extender() as extender:
        await start(world, extender, "busy")
        assert await told_to(extender, 0) == [[]]
        await end(world, extender, "busy")
        assert await told_to(extender, 0) == [["a"]]
        async with background(world.agent.serve("a")):
            assert (await extender.service.bind(bind_of(0, "a"))).error == ""
        await until(lambda: extender.informers.pod(PodUid("pod-gang")).spec.node_name)
        assert (await ask(extender, "late"))[0] == []
        await world.kube.delete(PODS, "gang-worker-1-7", namespace="default")
        await until(lambda: extender.informers.pod(PodUid("old")) is None)
        assert (await ask(extender, "late"))[0] == []
        assert await told_to(extender, 1) == [["a"]]


async def test_a_worker_that_is_asked_about_again_does_not_stand_in_its_own_way():
    world = gang_of(2, "a", 2)
    async with world.extender() as extender:
        for _ in range(3):
            assert await told_to(extender, 0, 1) == [["a"], ["a"]]


async def test_workers_of_the_attempt_before_do_not_count_as_done():
    """Regression: their pods are there still, so that the next attempt began with a place too few."""
    world = gang_of(2, "a", 1)
    for worker, phase in enumerate(("Succeeded", "Failed")):
        old = pod_of("gang", worker=worker)
        old["metadata"] |= {"uid": f"old-{worker}"}
        world.kube.seed(PODS, old | {"status": {"phase": phase}})
        new = pod_of("gang", worker=worker)
        new["metadata"] |= {"name": f"gang-worker-{worker}-2", "uid": f"new-{worker}"}
        world.kube.seed(PODS, new)
    async with world.extender() as extender:
        informers, job = extender.informers, JobUid("job-gang")
        assert [informers.succeeded(job, PodUid(uid)) for uid in ("old-1", "new-1", "unknown")] == [1, 0, 0]
        answer = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(new, Pod), node_names=["a"]))
        assert "2 workers of 1 GPU at once, there is room for 1" in answer.failed_nodes["a"]
        await world.kube.delete(PODS, "gang-worker-0-1", namespace="default")
        await until(lambda: informers.succeeded(job, PodUid("old-1")) == 0)
