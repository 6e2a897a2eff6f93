"""GPUs that are kept for jobs of several workers: all of them get theirs, one after the other."""

import asyncio

from carpool_core.kube.api import PODS
from carpool_core.values import PodUid
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import seed_pod, until
from extender_world import args, background
from keeper_world import BOTH, ask, bind_of, busy_both, crowd, end, seed, start, touched


def gang_in(world, second=1, **spec):
    """A job of two workers, each of which wants a GPU to itself."""
    seed(world, "gang", second, workers=2, **spec)
    seed_pod(world.kube, "gang", worker=1)


def beside_others(*others, order=QueueOrder.ALTERNATE):
    """A long job of two workers, and others that came a little later, on two nodes of one GPU."""
    world = crowd("busy", nodes=BOTH, candidates=1, queue_order=order)
    gang_in(world, steps=10**8)
    for second, (name, steps) in enumerate(others, start=2):
        seed(world, name, second, steps=steps)
    return world


async def refused(world, extender, *others):
    """Have everybody refused, then both nodes free."""
    await busy_both(world, extender)
    for worker in range(2):
        assert (await ask(extender, "gang", BOTH, worker=worker))[0] == []
    for job in others:
        assert (await ask(extender, job, BOTH))[0] == []
    for job in ("busy", "other"):
        await end(world, extender, job)


async def test_all_workers_of_a_job_have_their_places_kept():
    world = crowd("busy", nodes=("a", "b"), candidates=1)
    seed(world, "gang", 1, workers=2)
    seed(world, "late", 2)
    seed_pod(world.kube, "gang", worker=1)
    async with world.extender() as extender:
        await start(world, extender, "busy")
        for worker in range(2):
            assert (await ask(extender, "gang", BOTH, worker=worker))[0] == []
        await end(world, extender, "busy")
        assert (await ask(extender, "late", BOTH))[0] == []
        assert (await ask(extender, "gang", BOTH))[0] != []
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            for worker in range(2):
                ((node,), _) = await ask(extender, "gang", BOTH, worker=worker)
                assert (await ask(extender, "late", BOTH))[0] == []
                assert (await extender.service.bind(bind_of(worker, node))).error == ""


async def test_a_job_is_not_overtaken_between_its_workers():
    """Regression: a worker that was served made the next one's place go to a job from the other end."""
    world = beside_others(("short", 10))
    async with world.extender() as extender:
        await refused(world, extender, "short")
        ((node,), _) = await ask(extender, "gang", BOTH)
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            assert (await extender.service.bind(args("gang", node))).error == ""
            assert (await ask(extender, "gang", BOTH, worker=1))[0] != []


async def test_a_job_is_told_different_gpus_for_its_workers_and_both_bind():
    world = beside_others(("short", 10))
    async with world.extender() as extender:
        await refused(world, extender, "short")
        nodes = [(await ask(extender, "gang", BOTH, worker=worker))[0][0] for worker in range(2)]
        assert sorted(nodes) == ["a", "b"]
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            for worker, node in enumerate(nodes):
                assert (await extender.service.bind(bind_of(worker, node))).error == ""


async def test_what_is_kept_for_a_job_is_enough_for_all_of_it():
    """Regression: a place was kept for one worker, the next one for a job from the other end, and the gang refused."""
    world = beside_others(("short", 10), ("late", 36_000))
    async with world.extender() as extender:
        await refused(world, extender, "short", "late")
        assert (await ask(extender, "late", BOTH))[0] == []
        assert (await ask(extender, "gang", BOTH))[0] != []


async def test_nobody_gets_between_two_workers_while_the_first_is_being_reserved():
    world = beside_others(("late", None), order=QueueOrder.ARRIVAL)
    async with world.extender() as extender:
        await refused(world, extender, "late")
        assert (await ask(extender, "late", BOTH))[0] == []
        ((node,), _) = await ask(extender, "gang", BOTH)
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            binding = asyncio.create_task(extender.service.bind(args("gang", node)))
            found = []
            while not binding.done():
                found.append((await ask(extender, "late", BOTH))[0])
                await asyncio.sleep(0)
            assert (await binding).error == ""
        assert len(found) > 1
        assert not any(found)


async def test_what_was_kept_for_a_worker_that_is_gone_goes_to_others_who_hear_of_it():
    world = beside_others(("late", None), order=QueueOrder.ARRIVAL)
    async with world.extender() as extender:
        await refused(world, extender, "late")
        assert (await ask(extender, "late", BOTH))[0] == []
        ((node,), _) = await ask(extender, "gang", BOTH)
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            assert (await extender.service.bind(args("gang", node))).error == ""
        await until(lambda: extender.informers.pod(PodUid("pod-gang")).spec.node_name)
        before = [touched(world, name) for name in BOTH]
        world.clock.advance(0.01)
        await world.kube.delete(PODS, "gang-worker-1-1", namespace="default")
        await until(lambda: [touched(world, name) for name in BOTH] != before)
        assert (await ask(extender, "late", BOTH))[0] != []


async def test_nothing_is_kept_for_workers_that_find_no_room_where_they_may_go():
    """Regression: one of two found a GPU, both were refused when they came, and so on for as long as they waited."""
    world = crowd("busy", nodes=BOTH)
    gang_in(world)
    seed(world, "late", 5)
    async with world.extender() as extender:
        await busy_both(world, extender)
        for worker in range(2):
            assert (await ask(extender, "gang", ["b"], worker=worker))[0] == []
        assert (await ask(extender, "late", ["b"]))[0] == []
        for job in ("busy", "other"):
            await end(world, extender, job)
        assert (await ask(extender, "late", ["b"]))[0] == ["b"]


async def test_the_second_worker_may_bind_before_the_first():
    """Regression: it took what the first had been told, and what it had been told itself went to others."""
    world = crowd("busy", gpus=2, candidates=1, queue_order=QueueOrder.ARRIVAL)
    gang_in(world)
    for second, name in enumerate(("late", "other"), start=5):
        seed(world, name, second)
    async with world.extender() as extender:
        for job in ("busy", "other"):
            await start(world, extender, job)
        for worker in range(2):
            assert (await ask(extender, "gang", worker=worker))[0] == []
        assert (await ask(extender, "late"))[0] == []
        for job in ("busy", "other"):
            await end(world, extender, job)
        assert (await ask(extender, "late"))[0] == []
        for worker in range(2):
            assert (await ask(extender, "gang", worker=worker))[0] == ["a"]
        async with background(world.agent.serve("a")):
            assert (await extender.service.bind(bind_of(1, "a"))).error == ""
            assert (await ask(extender, "late"))[0] == []
            assert (await extender.service.bind(bind_of(0, "a"))).error == ""


async def test_the_second_worker_is_asked_about_while_the_first_is_being_written():
    world = beside_others(("late", None), order=QueueOrder.ARRIVAL)
    async with world.extender() as extender:
        await refused(world, extender, "late")
        assert (await ask(extender, "late", BOTH))[0] == []
        ((node,), _) = await ask(extender, "gang", BOTH)
        told = []
        async with background(world.agent.serve("a")), background(world.agent.serve("b")):
            binding = asyncio.create_task(extender.service.bind(args("gang", node)))
            while not binding.done():
                told.append((await ask(extender, "gang", BOTH, worker=1))[0])
                assert (await ask(extender, "late", BOTH))[0] == []
                await asyncio.sleep(0)
            assert (await binding).error == ""
        assert len(told) > 1
        assert all(told)
