"""Places that are kept for a moment for those whose turn it is."""

import asyncio
import random

import pytest
from carpool_core.kube.api import PODS
from carpool_extender.queue.nominator import LOOK_S, REMINDED_S
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import until
from extender_world import args, background
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_world import BOTH, ask, counts, crowd, end, kept_for_first, seed, start, touched


async def test_whoever_came_first_gets_what_becomes_free_though_another_is_asked_about_first():
    """Regression: kube-scheduler puts whoever was refused last behind all others, and takes them in that order."""
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await start(world, extender, "busy")
        for job in ("first", "second"):
            assert (await ask(extender, job))[0] == []
        await end(world, extender, "busy")
        found, why = await ask(extender, "second")
        assert found == []
        assert why == "NoGpuFits: 1 node: kept for a job that comes first"
        assert (await ask(extender, "first"))[0] == ["a"]
        await start(world, extender, "first")
        assert counts(extender) == {"taken": 1, "passed": 0, "overtaken": 0, "refused": 0, "gone": 0}


async def test_nobody_is_waited_for_who_would_find_no_place():
    world = crowd("busy", "small", gpus=2)
    seed(world, "wide", 1, gpus=2)
    async with world.extender() as extender:
        await start(world, extender, "busy")
        assert (await ask(extender, "wide", gpus=2))[0] == []
        assert (await ask(extender, "small"))[0] == ["a"]


async def test_with_room_for_all_nobody_is_refused():
    world = crowd("busy", "first", "second", nodes=("a", "b"))
    async with world.extender() as extender:
        await start(world, extender, "busy")
        seed(world, "other", 9)
        await start(world, extender, "other", "b")
        for job in ("first", "second"):
            assert (await ask(extender, job, BOTH))[0] == []
        await end(world, extender, "busy")
        await end(world, extender, "other")
        (to_second,) = (await ask(extender, "second", BOTH))[0]
        (to_first,) = (await ask(extender, "first", BOTH))[0]
        assert {to_first, to_second} == {"a", "b"}


async def test_what_is_kept_counts_until_it_is_reserved():
    """Regression: between the answer and the bind another one found the place free, and both were bound to it."""
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await start(world, extender, "busy")
        for job in ("second", "first"):
            await ask(extender, job)
        await end(world, extender, "busy")
        assert (await ask(extender, "first"))[0] == ["a"]
        assert (await ask(extender, "second"))[0] == []
        async with background(world.agent.serve("a")):
            binding = asyncio.create_task(extender.service.bind(args("first", "a")))
            assert (await ask(extender, "second"))[0] == []
            assert (await binding).error == ""


async def test_a_place_that_nobody_comes_for_goes_to_others_who_hear_of_it():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        before = touched(world)
        await until(lambda: LOOK_S in world.clock.sleeping)
        world.clock.advance(REMINDED_S)
        await until(lambda: touched(world) != before)
        assert (await ask(extender, "second"))[0] == [], "it is kept still"
        reminded = touched(world)
        for _ in range(20):
            await until(lambda: LOOK_S in world.clock.sleeping or counts(extender)["passed"])
            world.clock.advance(LOOK_S)
        await until(lambda: touched(world) != reminded)
        assert counts(extender)["passed"] == 1
        assert (await ask(extender, "second"))[0] == ["a"]


async def test_who_was_passed_comes_first_again_once_it_is_asked_about():
    world = crowd("busy", "first", "second", "third")
    async with world.extender() as extender:
        await kept_for_first(world, extender, "third")
        for _ in range(20):
            await until(lambda: LOOK_S in world.clock.sleeping or counts(extender)["passed"])
            world.clock.advance(LOOK_S)
        assert (await ask(extender, "second"))[0] == ["a"]
        await start(world, extender, "second")
        assert (await ask(extender, "first"))[0] == []
        await end(world, extender, "second")
        assert (await ask(extender, "third"))[0] == []


@pytest.mark.parametrize("how", ["deleted", "Failed"])
async def test_what_was_kept_for_who_is_gone_goes_to_others(how):
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        before = touched(world)
        if how == "deleted":
            await world.kube.delete(PODS, "first-worker-0-1", namespace="default")
        else:
            ended = {"status": {"phase": how}}
            await world.kube.patch(PODS, "first-worker-0-1", ended, namespace="default", subresource="status")
        await until(lambda: counts(extender)["gone"] == 1)
        await until(lambda: touched(world) != before)
        assert (await ask(extender, "second"))[0] == ["a"]


async def test_nothing_is_kept_again_where_kube_scheduler_does_not_offer_it():
    """Of a taint, or of too little memory of the node, the extender knows nothing."""
    world = crowd("busy", "first", "second", nodes=("a", "b"))
    async with world.extender() as extender:
        seed(world, "other", 9)
        await start(world, extender, "other", "b")
        await kept_for_first(world, extender)
        assert (await ask(extender, "first", ["b"]))[0] == [], "it may not go to a"
        assert (await ask(extender, "second"))[0] == ["a"]


async def test_priority_comes_before_arrival():
    world = crowd("busy", "first", "urgent")
    async with world.extender() as extender:
        await start(world, extender, "busy")
        for job, priority in (("first", 0), ("urgent", 1000)):
            await ask(extender, job, priority=priority)
        await end(world, extender, "busy")
        assert (await ask(extender, "first", priority=0))[0] == []
        assert (await ask(extender, "urgent", priority=1000))[0] == ["a"]


def expected(order, rungs, apart):
    """The order in which jobs are to be served, in words of its own."""
    left, served = [*range(len(rungs))], []
    while left:
        among = left
        if order is QueueOrder.ARRIVAL:
            among = left[:1]
        elif order is QueueOrder.ALTERNATE:
            among = [one for one in left if one * apart // 600 == left[0] * apart // 600]
        wants_short = order is QueueOrder.ALTERNATE and not len(served) % 2  # a long one runs
        chosen = min(among, key=lambda one: (rungs[one] if wants_short else -rungs[one], one))
        left.remove(chosen)
        served.append(chosen)
    return served


@given(
    order=st.sampled_from(list(QueueOrder)),
    rungs=st.lists(st.integers(0, 20), min_size=2, max_size=6),
    apart=st.sampled_from([1, 250, 700]),
    seed_=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_jobs_are_served_in_order_in_whichever_they_are_asked_about(order, rungs, apart, seed_):
    """As kube-scheduler does: whenever something has become free, it asks about all, in an order of its own."""

    async def serve():
        world = crowd(queue_order=order)
        draw = random.Random(seed_)  # noqa: S311
        seed(world, "busy", 0)
        jobs = [f"job-{number}" for number in range(len(rungs))]
        for number, (job, rung) in enumerate(zip(jobs, rungs, strict=True)):
            seed(world, job, number * apart, steps=round(700 * 1.5**rung))  # of 0.1 s
        served, running = [], "busy"
        async with world.extender() as extender:
            assert (await ask(extender, "busy"))[0] == ["a"]
            await start(world, extender, "busy")
            for job in draw.sample(jobs, len(jobs)):
                assert (await ask(extender, job))[0] == []
            while len(served) < len(jobs):
                await end(world, extender, running)
                running = ""
                while not running:
                    for job in draw.sample(jobs, len(jobs)):
                        if job not in served and (await ask(extender, job))[0]:
                            running = job
                            break
                served.append(running)
                await start(world, extender, running)
        return [jobs.index(job) for job in served]

    assert asyncio.run(serve()) == expected(order, rungs, apart)
