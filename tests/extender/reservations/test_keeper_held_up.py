"""Jobs that come before others, and are held up: by the extender, by kube-scheduler, or by themselves."""

import pytest
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.values import PodUid
from carpool_extender.queue.nominator import LOOK_S
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import gpu_node, seed_job, seed_node, seed_pod, until
from extender_world import World, args
from keeper_world import BOTH, ask, born, busy_both, counts, crowd, end, kept_for_first, seed, start, touched


@pytest.mark.parametrize("many", [1, 5])
async def test_nothing_is_kept_for_pods_of_another_pool(many):
    """Regression: for each of them that might not go there the GPU was kept once, one wave of questions each."""
    others = [f"other-{number}" for number in range(many)]
    world = crowd("busy", *others, "second", nodes=BOTH)
    async with world.extender() as extender:
        await busy_both(world, extender)
        for job in others:
            assert (await ask(extender, job, ["b"]))[0] == []
        assert (await ask(extender, "second", ["a"]))[0] == []
        await end(world, extender, "busy")
        assert (await ask(extender, "second", ["a"]))[0] == ["a"]


async def test_who_is_told_a_place_and_then_gone_leaves_it_to_others_who_hear_of_it():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        assert (await ask(extender, "first"))[0] == ["a"]
        before = touched(world)
        world.clock.advance(0.01)
        await world.kube.delete(PODS, "first-worker-0-1", namespace="default")
        await until(lambda: touched(world) != before)
        assert counts(extender)["gone"] == 1
        assert (await ask(extender, "second"))[0] == ["a"]


async def test_what_is_kept_is_no_matter_to_who_comes_before_its_owner():
    world = crowd("busy", "first", "second", "urgent")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        assert (await ask(extender, "urgent", priority=1000))[0] == ["a"]
        assert counts(extender)["overtaken"] == 1
        assert (await ask(extender, "first"))[0] == [], "it is as good as taken"


async def test_who_was_told_a_place_keeps_it_whoever_comes():
    world = crowd("busy", "first", "second", "urgent")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        assert (await ask(extender, "first"))[0] == ["a"]
        assert (await ask(extender, "urgent", priority=1000))[0] == []
        await start(world, extender, "first")


async def test_who_waits_for_its_own_last_attempt_hides_nobody_of_its_kind():
    world = crowd("busy", "again", "first", "second", nodes=BOTH, queue_order=QueueOrder.ARRIVAL)
    async with world.extender() as extender:
        await start(world, extender, "busy", "a")
        await start(world, extender, "again", "b")
        seed_pod(world.kube, "again", uid="pod-again-2")
        await until(lambda: extender.informers.pod(PodUid("pod-again-2")) is not None)
        assert (await ask(extender, "again", BOTH, uid="pod-again-2"))[0] == []
        for job in ("first", "second"):
            assert (await ask(extender, job, BOTH))[0] == []
        await end(world, extender, "busy")
        assert (await ask(extender, "second", BOTH))[0] == []
        assert (await ask(extender, "first", BOTH))[0] == ["a"]


async def test_a_bind_that_fails_costs_nobody_its_turn():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        assert (await ask(extender, "first"))[0] == ["a"]
        world.kube.fail_next("patch", GPU_NODES, Forbidden("not now"))
        assert "not now" in (await extender.service.bind(args("first"))).error
        assert (await ask(extender, "second"))[0] == []
        assert (await ask(extender, "first"))[0] == ["a"]


async def test_who_is_asked_about_when_it_is_gone_already_does_not_wait():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await start(world, extender, "busy")
        await world.kube.delete(PODS, "first-worker-0-1", namespace="default")
        await until(lambda: extender.informers.pod(PodUid("pod-first")) is None)
        for job in ("first", "second"):
            assert (await ask(extender, job))[0] == []
        await end(world, extender, "busy")
        assert (await ask(extender, "second"))[0] == ["a"]


async def test_nobody_shares_beside_somebody_who_is_not_there_yet():
    """Regression: whoever was bound beside a place that was kept had its threads limited, and was told a neighbour."""
    world = World(candidates=1)
    seed_node(world.kube, gpu_node("a", 1))
    for second, name in enumerate(("busy", "first", "second")):
        spec = {"sharing": {"mode": "Exclusive"}} if name == "busy" else {}
        seed_job(world.kube, name, spec=spec, created=born(second))
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        assert (await ask(extender, "first"))[0] == ["a"]
        await start(world, extender, "first")
        (alone,) = world.reservations("a")
        assert " alone;" in alone["reason"]
        assert alone.get("threadPercentage") in (None, 100)
        assert (await ask(extender, "second"))[0] == ["a"], "as soon as the first is there, there is room beside it"


async def test_what_is_kept_on_a_node_that_goes_is_forgotten():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        await world.kube.delete(GPU_NODES, "a")
        await until(lambda: counts(extender)["gone"] == 1)
        assert (await ask(extender, "first"))[0] == []


async def test_nobody_is_passed_while_the_extender_keeps_kube_scheduler_waiting():
    world = crowd("busy", "first", "second")
    async with world.extender() as extender:
        await kept_for_first(world, extender)
        with extender.keeper.held_up():
            for _ in range(20):
                await until(lambda: LOOK_S in world.clock.sleeping)
                world.clock.advance(LOOK_S)
        await until(lambda: LOOK_S in world.clock.sleeping)
        assert counts(extender)["passed"] == 0
        assert (await ask(extender, "first"))[0] == ["a"]


async def test_no_gpu_is_kept_for_two():
    """Regression: whoever was asked about opened what was kept for who comes after it, and it was kept for a third."""
    world = crowd("busy", gpus=2, queue_order=QueueOrder.ARRIVAL)
    seed(world, "wide", 1, gpus=2)
    for second, name in enumerate(("between", "after", "last", "other"), start=2):
        seed(world, name, second)
    async with world.extender() as extender:
        for job in ("busy", "other"):
            await start(world, extender, job)
        assert (await ask(extender, "wide", gpus=2))[0] == []
        for job in ("after", "last"):
            assert (await ask(extender, job))[0] == []
        await end(world, extender, "busy")
        assert (await ask(extender, "last"))[0] == [], "kept for who comes before it"
        await end(world, extender, "other")
        assert (await ask(extender, "between"))[0] == [], "kept for who wants both"
        assert (await ask(extender, "after"))[0] == [], "and so no longer for this one"
        assert (await ask(extender, "wide", gpus=2))[0] == ["a"]


async def test_who_has_a_gpu_kept_takes_no_other_that_somebody_before_it_waits_for():
    world = crowd("busy", "first", "second", "third", nodes=BOTH, candidates=1, queue_order=QueueOrder.ARRIVAL)
    async with world.extender() as extender:
        await busy_both(world, extender)
        assert (await ask(extender, "first", ["a"]))[0] == []
        for job in ("second", "third"):
            assert (await ask(extender, job, BOTH))[0] == []
        await end(world, extender, "other")
        assert (await ask(extender, "third", BOTH))[0] == [], "b is kept for the second"
        await end(world, extender, "busy")
        assert (await ask(extender, "second", BOTH))[0] == ["b"]
        assert (await ask(extender, "first", ["a"]))[0] == ["a"]
