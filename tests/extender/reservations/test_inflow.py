"""How many pods are let on their way at once, and that a pod which is on its way goes nowhere else."""

import asyncio
from contextlib import suppress

import pytest
from carpool_core.kube.api import PODS
from carpool_core.testing.clock import FakeClock
from carpool_extender.extender_api import BindingArgs
from carpool_extender.reservations.binder import (
    CUT_EVERY_S,
    FIRST,
    LEAST,
    MORE,
    MOST,
    PATIENCE_S,
    BindError,
    BindLimiter,
    Turns,
)
from carpool_extender.testing import pod_of, seed_job, seed_pod, until
from extender_world import World, args, background, filtering, named
from msgspec import json
from prometheus_client import generate_latest

QUICK_S, SLOW_S = 3.0, 12.0


class Binds:
    """Binds that take as long as a test says."""

    def __init__(self, timeout_s=20):
        self.clock = FakeClock()
        self.bind_limiter = BindLimiter(self.clock, self.clock.sleep, timeout_s)

    def enter(self, number):
        for _ in range(number):
            self.bind_limiter.enter()

    def take(self, seconds):
        with self.bind_limiter.measured():
            self.clock.advance(seconds)


async def test_a_pod_waits_while_as_many_are_under_way_as_may_be():
    binds = Binds()
    binds.enter(FIRST - 1)
    await binds.bind_limiter.room()
    binds.enter(1)
    async with background(binds.bind_limiter.room()) as waiting:
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        binds.bind_limiter.leave()
        await waiting
    assert binds.clock.now().second == 0


async def test_a_pod_waits_no_longer_than_its_patience_lasts():
    binds = Binds()
    binds.enter(FIRST)
    async with background(binds.bind_limiter.room()) as waiting:
        await until(lambda: binds.clock.sleeping == [PATIENCE_S])
        binds.clock.advance(PATIENCE_S)
        await waiting


def test_slow_binds_lower_the_number_once_in_a_while_and_never_below_the_least():
    binds = Binds()
    binds.enter(FIRST)
    binds.take(SLOW_S)
    binds.clock.advance(CUT_EVERY_S - 0.1)
    assert binds.bind_limiter.limit == 96
    for _ in range(30):
        binds.take(SLOW_S)
    assert binds.bind_limiter.limit == LEAST


@pytest.mark.parametrize("timeout_s", [5, 20, 300])
def test_what_is_slow_depends_on_how_long_reservations_last(timeout_s):
    """Regression: where that was less than twelve seconds, binds that all came too late lowered nothing."""
    binds = Binds(timeout_s)
    binds.enter(FIRST)
    binds.take(0.5 * timeout_s)
    assert binds.bind_limiter.limit == FIRST
    binds.take(0.1 * timeout_s)
    assert binds.bind_limiter.limit == FIRST + MORE
    binds.take(timeout_s)
    assert binds.bind_limiter.limit == 0.75 * (FIRST + MORE)


async def test_the_site_says_how_long_reservations_last():
    world, names = World(bind_timeout_seconds=5), [f"x{number}" for number in range(int(0.75 * FIRST) + 2)]
    world.add(nodes=["a", "b"], gpus=16)
    for name in names:
        seed_job(world.kube, name, memory_mib=1000)
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        late = asyncio.create_task(extender.service.bind(args(names[0])))
        await until(lambda: any(4 < seconds <= 5 for seconds in world.clock.sleeping))
        world.clock.advance(5)
        assert "within 5 s" in (await late).error
        binds = [asyncio.create_task(extender.service.bind(args(name, "b"))) for name in names[1:-1]]
        await until(lambda: len(world.reservations("b")) == len(binds))
        async with background(extender.service.filter(filtering(names[-1]))) as answer:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not answer.done()


def test_many_slow_binds_that_end_together_are_one_sign():
    binds = Binds()
    binds.enter(FIRST)
    passages = [binds.bind_limiter.measured() for _ in range(20)]
    for passage in passages:
        passage.__enter__()
    binds.clock.advance(SLOW_S)
    for passage in passages:
        passage.__exit__(None, None, None)
    assert binds.bind_limiter.limit == 96


def test_quick_binds_raise_the_number_only_where_it_is_used():
    binds = Binds()
    binds.take(QUICK_S - 1)
    assert binds.bind_limiter.limit == FIRST
    binds.enter(FIRST)
    binds.take(QUICK_S - 1)
    assert binds.bind_limiter.limit == FIRST + MORE
    binds.take((QUICK_S + SLOW_S) / 2)
    assert binds.bind_limiter.limit == FIRST + MORE
    binds.enter(MOST)
    for _ in range(int(MOST / MORE)):
        binds.take(0)
    assert binds.bind_limiter.limit == MOST


def test_a_bind_that_failed_at_once_tells_nothing_and_a_slow_one_that_failed_does():
    binds = Binds()
    binds.enter(FIRST)

    def fail(seconds):
        with suppress(BindError), binds.bind_limiter.measured():
            binds.clock.advance(seconds)
            raise BindError

    fail(0)
    assert binds.bind_limiter.limit == FIRST
    fail(SLOW_S)
    assert binds.bind_limiter.limit == 96


async def test_a_control_plane_that_can_carry_little_is_given_no_more_than_that():
    """Regression: with 1,000 pods waiting, all binds took longer than a reservation lasts, and none came to an end."""
    binds, queue = Binds(), asyncio.Queue()

    async def bind():
        with binds.bind_limiter.measured():
            done = asyncio.get_running_loop().create_future()
            queue.put_nowait(done)
            await done
        binds.bind_limiter.leave()

    async def serve():
        while True:  # eight a second, whatever waits
            done = await queue.get()
            await binds.clock.sleep(0.125)
            done.set_result(None)

    async def offer():
        while True:
            await binds.bind_limiter.room()
            binds.bind_limiter.enter()
            tasks.append(asyncio.create_task(bind()))
            await asyncio.sleep(0)

    tasks, waits = [], []
    async with background(serve()), background(offer()):
        for _ in range(3200):
            for _ in range(8):
                await asyncio.sleep(0)
            waits.append(queue.qsize() * 0.125)
            binds.clock.advance(0.025)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert max(waits) < 20
    assert 2.0 < min(waits[1200:]) <= max(waits[1200:]) < 16


async def test_pods_are_kept_back_by_filter_until_a_bind_has_ended(world):
    names = [f"x{number}" for number in range(FIRST + 1)]
    world.add(nodes=["a", "b"], gpus=16)
    for name in names:
        seed_job(world.kube, name, memory_mib=1000, util=10)
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        binds = [asyncio.create_task(extender.service.bind(args(name))) for name in names[:-1]]
        await until(lambda: len(world.reservations("a")) == FIRST)
        async with background(extender.service.filter(filtering(names[-1]))) as answer:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not answer.done()
            await world.agent.report("a")
            assert named(await answer) == ["b"]
        assert not any(result.error for result in await asyncio.gather(*binds))


async def test_a_pod_that_is_being_bound_fits_only_where_that_is(world):
    """Regression: kube-scheduler hung up, tried the pod on another node each time, and was told to try again."""
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await asyncio.sleep(0)
        assert not world.held()
        found = await extender.service.filter(filtering())
        assert found.node_names == ["a"]
        assert found.failed_nodes == {"b": "NoGpuFits: this pod is being bound to node a at present"}
        assert [(p.host, p.score) for p in await extender.service.prioritize(filtering())] == [("a", 10), ("b", 0)]


def worker(number):
    node = "a" if number % 2 else "b"
    return BindingArgs(pod_name=f"x-worker-{number}-1", pod_namespace="default", pod_uid=f"pod-{number}", node=node)


async def test_workers_that_wait_for_others_of_their_job_keep_nobody_back(world):
    """Regression: a job of as many workers as may be under way at once kept everybody else back for five seconds."""
    world.add("y", nodes=["a", "b"], gpus=16)
    seed_job(world.kube, "x", spec={"workers": FIRST + 2}, memory_mib=1000, util=1, sm=0.01, dram=0.01)
    for number in range(FIRST + 2):
        pod = pod_of("x", uid=f"pod-{number}")
        world.kube.seed(PODS, pod | {"metadata": pod["metadata"] | {"name": f"x-worker-{number}-1"}})
    async with world.extender(gather_s=4) as extender:
        bodies = [worker(n) for n in range(FIRST + 2)]
        binds = [asyncio.create_task(extender.service.bind(body)) for body in bodies]
        await until(lambda: world.reservations("b") and 4 in world.clock.sleeping)
        answer = asyncio.create_task(extender.service.filter(filtering("y")))
        await until(answer.done)
        assert {*named(answer.result())} == {"a", "b"}
        for bind in binds:
            bind.cancel()


async def test_a_worker_whose_turn_has_come_waits_for_room_as_one_that_begins():
    binds = Binds()
    turns, order = Turns(binds.bind_limiter), []

    async def reserve(name):
        binds.bind_limiter.enter()
        async with turns.of("job"):
            order.append(name)
            await binds.clock.sleep(1)

    binds.enter(FIRST - 1)
    tasks = [asyncio.create_task(reserve(name)) for name in "ab"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (order, binds.bind_limiter.is_full) == (["a"], True)
    binds.clock.advance(1)
    await until(lambda: tasks[0].done() and PATIENCE_S in binds.clock.sleeping)
    assert order == ["a"]
    binds.bind_limiter.leave()
    await until(lambda: order == ["a", "b"])
    assert binds.bind_limiter.is_full
    binds.clock.advance(1)
    await tasks[1]


async def asked(app, body):
    """Post a body to the verb filter of an ASGI application."""
    arrived, sent = [{"type": "http.request", "body": body}], []

    async def receive():
        return arrived.pop()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/filter", "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent[0]["status"]


async def test_time_for_which_a_pod_is_kept_back_is_told_apart_from_that_of_its_request(world):
    """Regression: five seconds of patience counted as a filter of five seconds."""
    names = [f"x{number}" for number in range(FIRST)]
    world.add("y", nodes=["a", "b"], gpus=16)
    for name in names:
        seed_job(world.kube, name)
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        body = json.encode({"Pod": world.pod("y"), "NodeNames": ["a", "b"]})
        assert await asked(extender.app, body) == 200
        binds = [asyncio.create_task(extender.service.bind(args(name))) for name in names]
        await asyncio.sleep(0)
        asking = asyncio.create_task(asked(extender.app, body))
        await until(lambda: PATIENCE_S in world.clock.sleeping)
        world.clock.advance(PATIENCE_S)
        assert await asking == 200
        for bind in binds:
            bind.cancel()
        told = generate_latest(extender.registry).decode()
    assert "carpool_extender_kept_back_seconds_sum 5.0" in told
    assert "carpool_extender_kept_back_seconds_count 1.0" in told
    assert 'carpool_extender_request_seconds_sum{verb="filter"} 0.0' in told
    assert 'carpool_extender_request_seconds_count{verb="filter"} 2.0' in told
