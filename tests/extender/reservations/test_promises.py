"""What workers of a job were told, and what became of it: nobody waits for it in vain, and nothing counts twice."""

from contextlib import AsyncExitStack

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.kube.pods import Pod
from carpool_core.values import JobUid, PartitionState, PodUid, SharingMode
from carpool_extender.cache.health import KEPT
from carpool_extender.extender_api import ExtenderArgs
from carpool_extender.testing import gpu_node, pod_of, prediction, seed_node, seed_pod, tenant, until
from extender_world import World, background, filtering
from keeper_world import ask, bind_of, crowd, end, gang_of, pass_s, seed, start, told_to

EIGHT = [f"n{number}" for number in range(8)]
GANG = JobUid("job-gang")


async def test_gpus_are_not_kept_for_ever_for_a_job_whose_worker_can_never_be_bound():
    """Regression: each try renewed the patience, and those that waited for the seven other GPUs never got one."""
    world = gang_of(8, EIGHT)
    async with world.extender() as extender, AsyncExitStack() as agents:
        for name in EIGHT:
            await agents.enter_async_context(background(world.agent.serve(name)))
        tries = 0
        while not tries or not (await ask(extender, "late", EIGHT))[0]:
            await pass_s(world, 2)
            await world.agent.beat(*EIGHT)
            ((node,),) = await told_to(extender, 0, names=EIGHT)
            world.kube.fail_next("create", PODS, Forbidden("no", status=403), subresource="binding")
            assert "no" in (await extender.service.bind(bind_of(0, node))).error
            tries += 1
            assert tries < 6
        assert tries > 1


async def test_a_job_whose_only_worker_with_a_place_lost_it_has_not_begun():
    """Regression: it went on with one GPU of two, and its first worker waited for the second for ever."""
    world = gang_of(2, "ab")
    async with world.extender() as extender:
        ((node,),) = await told_to(extender, 0, names="ab")
        async with background(extender.service.bind(bind_of(0, node))) as binding:
            await until(lambda: world.reservations(node))
            await world.agent.report(node, PartitionState.FAILED, "no")
            assert "could not prepare" in (await binding).error
        assert "room for 1;" in (await ask(extender, "gang", "ab"))[1]


async def test_a_job_whose_only_worker_with_a_place_is_gone_has_not_begun():
    world = gang_of(3, "abc")
    async with world.extender() as extender:
        assert await told_to(extender, 0, names="abc") == [["a"]]
        assert await told_to(extender, 1) == [[]]
        await world.kube.delete(PODS, "gang-worker-0-1", namespace="default")
        await until(lambda: extender.informers.pod(PodUid("pod-gang")) is None)
        assert "3 workers of 1 GPU at once, there is room for 2;" in (await ask(extender, "gang", "ab", worker=1))[1]


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_the_place_that_a_worker_was_told_scores_best(workers):
    """Regression: it counted as if somebody had it, and kube-scheduler went to the worst of the others."""
    world = World(candidates=8)
    heavy, light = prediction(memory_mib=8000, util=95, sm=0.9), {"mode": "TimeSlicing", "maxSlowdown": 9.0}
    seed_node(world.kube, gpu_node("idle", 1))
    for name in "abcd":
        other = tenant(name, [f"GPU-{name}-0"], SharingMode.TIME_SLICING, prediction=heavy, max_slowdown=9.0)
        seed_node(world.kube, gpu_node(name, 1, [other]))
    seed(world, "gang", 1, workers=workers, spec={"sharing": light, "memory": {"limit": "4Gi"}})
    async with world.extender() as extender:
        fits = (await extender.service.filter(filtering("gang", ["idle", *"abcd"]))).node_names
        assert len(fits) == 5
        scores = await extender.service.prioritize(filtering("gang", fits))
        assert {one.host: one.score for one in scores} == {"idle": 10} | dict.fromkeys("abcd", 0)
        counted = {PodUid("pod-gang")} if workers > 1 else set()
        assert extender.informers.cluster.pods_of_job(GANG) == counted, "counts again after that"


async def test_for_a_large_job_everything_is_kept_that_it_needs():
    """Regression: 32 GPUs at most, what had been told among them, so that later jobs got into the rest."""
    world = gang_of(40, EIGHT[:5], 8)
    async with world.extender() as extender:
        for worker in range(40):
            assert len((await told_to(extender, worker, names=EIGHT[:5]))[0]) == 1
            assert (await ask(extender, "late", EIGHT[:5]))[0] == []


async def test_the_order_is_kept_beside_a_large_job_that_begins():
    """Regression: what was kept for it left none of the 32 GPUs for those that come first."""
    world = crowd("busy", nodes=("x",), candidates=1, queue_order="Arrival")
    for second, name in enumerate(("first", "second"), start=1):
        seed(world, name, second)
    for name in EIGHT[:4]:
        seed_node(world.kube, gpu_node(name, 8))
    seed(world, "gang", 9, workers=32)
    for worker in range(1, 32):
        seed_pod(world.kube, "gang", worker=worker)
    async with world.extender() as extender:
        await start(world, extender, "busy", "x")
        for job in ("first", "second"):
            assert (await ask(extender, job, ["x"]))[0] == []
        assert all(await told_to(extender, *range(32), names=EIGHT[:4]))
        await end(world, extender, "busy")
        assert (await ask(extender, "second", ["x"]))[0] == []
        assert (await ask(extender, "first", ["x"]))[0] == ["x"]


async def test_workers_that_were_told_a_place_are_not_too_many_yet():
    """Regression: it was said that they have reservations, to a worker of the next attempt."""
    world = gang_of(2, "a", 4)
    async with world.extender() as extender:
        assert await told_to(extender, 0, 1) == [["a"], ["a"]]
        new = pod_of("gang")
        new["metadata"] |= {"name": "gang-worker-0-2", "uid": "new-0"}
        answer = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(new, Pod), node_names=["a"]))
        assert answer.node_names == ["a"]


async def test_nobody_who_is_bound_waits_or_is_told_anything():
    """Regression: who was asked about once more, with its GpuNode gone, waited as being bound, and was waited for."""
    world = gang_of(1, "a", 2)
    async with world.extender() as extender:
        await start(world, extender, "gang")
        await world.kube.delete(GPU_NODES, "a")
        await until(lambda: not extender.informers.cluster.nodes)
        assert (await ask(extender, "gang"))[0] == []
        seed_node(world.kube, gpu_node("b", 1))
        await until(lambda: extender.informers.cluster.nodes)
        assert (await ask(extender, "gang", "b"))[0] == ["b"]
        assert (await ask(extender, "late", "b"))[0] == ["b"], "who came later, and goes before nobody"
        assert (await extender.service.filter(filtering("late", "b"))).node_names == ["b"]


def kept(extender):
    """How many GPUs are kept for somebody, or were set aside."""
    return sum(why.kind == KEPT for why in extender.informers.cluster.snapshot().unavailable.values())


async def test_once_a_worker_is_bound_after_all_gpus_are_kept_for_the_others_again():
    world = gang_of(3, "a", 3)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, 0) == [["a"]]
        assert kept(extender) == 3
        await pass_s(world, 4)
        await world.agent.beat("a")
        assert await told_to(extender, 0) == [["a"]]
        assert kept(extender) == 0, "it was in vain"
        assert (await extender.service.bind(bind_of(0, "a"))).error == ""
        await until(lambda: extender.informers.pod(PodUid("pod-gang")).spec.node_name)
        assert await told_to(extender, 1) == [["a"]]
        assert kept(extender) == 2
        assert (await ask(extender, "late"))[0] == []
        assert await told_to(extender, 2) == [["a"]]


async def test_workers_for_which_gpus_were_kept_in_vain_get_different_ones_all_the_same():
    world = gang_of(2, "a", 2)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, 0, 1) == [["a"], ["a"]]
        await pass_s(world, 4)
        await world.agent.beat("a")
        for worker in range(2):
            assert await told_to(extender, worker) == [["a"]]
            assert (await extender.service.bind(bind_of(worker, "a"))).error == ""


@pytest.mark.parametrize("has_waited", [False, True])
async def test_a_job_for_which_gpus_were_kept_in_vain_does_not_begin_with_some_of_its_workers(has_waited):
    """Regression: it counted as begun once a worker was told its place, while nothing was kept for the other."""
    world = gang_of(2, "ab")
    seed(world, "busy", 0)
    async with world.extender() as extender, AsyncExitStack() as agents:
        for name in "ab":
            await agents.enter_async_context(background(world.agent.serve(name)))
        if has_waited:
            await start(world, extender, "busy", "a")
            assert await told_to(extender, 0, names="ab") == [[]]
            await end(world, extender, "busy")
        ((node,),) = await told_to(extender, 0, names="ab")
        await pass_s(world, 4)
        await world.agent.beat("a", "b")
        assert await told_to(extender, 0, names="ab") == [[node]]
        await start(world, extender, "late", "b" if node == "a" else "a")
        told = (await extender.service.bind(bind_of(0, node))).error
        assert "2 workers of 1 GPU at once, there is room for 1" in told


async def test_what_is_kept_for_a_worker_that_waits_beside_one_that_runs_is_no_matter_to_who_comes_before():
    """Regression: the job counted as having begun to find its places, as if that GPU had been told to it."""
    world = crowd("busy", nodes=("b",), candidates=1, queue_order="Arrival")
    running = msgspec.structs.replace(
        tenant("gang", ["GPU-a-0"], SharingMode.EXCLUSIVE), job_uid=GANG, pod_uid=PodUid("pod-gang")
    )
    seed_node(world.kube, gpu_node("a", 1, [running]))
    seed(world, "gang", 5, workers=2)
    seed_pod(world.kube, "gang", worker=1)
    for second, name in ((3, "early"), (7, "late")):
        seed(world, name, second)
    async with world.extender() as extender:
        await start(world, extender, "busy", "b")
        assert await told_to(extender, 1, names="b") == [[]]
        await end(world, extender, "busy")
        assert (await ask(extender, "late", "b"))[0] == []
        assert kept(extender) == 1
        assert (await ask(extender, "early", "b"))[0] == ["b"]


async def test_who_came_before_a_job_that_has_begun_does_not_get_between_its_workers_either():
    world = gang_of(2, "a", 2)
    seed(world, "early", 0)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert await told_to(extender, 0) == [["a"]]
        assert (await extender.service.bind(bind_of(0, "a"))).error == ""
        assert (await ask(extender, "early"))[0] == []
        assert await told_to(extender, 1) == [["a"]]
