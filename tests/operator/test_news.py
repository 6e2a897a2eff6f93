"""How often jobs are looked at for what only their status tells."""

import msgspec
from carpool_core.keys import CONDITION_PLACED
from carpool_core.kube.api import GPU_NODES
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.testing.clock import FakeClock
from carpool_operator.conditions import find, is_true
from carpool_operator.informers import NodeCache
from carpool_operator.work_queue import DEBOUNCE_S, RATE_LIMIT_PER_S, WorkQueue
from msgspec.structs import replace
from operator_fixtures import reservation
from operator_world import World


class Recorder(WorkQueue):
    """Records what is added."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.debounced: list[str] = []
        self.rate_limited: list[str] = []

    def add_debounced(self, key: str) -> None:
        self.debounced.append(key)

    def add_rate_limited(self, key: str) -> None:
        self.rate_limited.append(key)


def status_writes(world: World) -> int:
    return sum(call.verb == "replace" for call in world.kube.calls)


async def test_pod_and_its_place_are_told_with_one_write() -> None:
    world = World()
    world.apply()
    await world.settle()
    before = status_writes(world)
    world.run_pods()
    await world.settle()
    assert status_writes(world) == before + 1
    attempt = world.job().status.attempts[-1]
    assert attempt.pod_uids == [pod["metadata"]["uid"] for pod in world.pods()]
    assert world.job().status.placement[0].node == "n1"


async def test_pod_that_finds_no_place_at_once_is_told_of() -> None:
    world = World()
    world.apply()
    await world.settle()
    world.clock.advance(DEBOUNCE_S)
    await world.settle()
    placed = find(world.job().status, CONDITION_PLACED)
    assert placed is not None
    assert placed.reason == "Scheduling"
    assert len(world.job().status.attempts[-1].pod_uids) == 1


def test_news_of_one_job_share_a_look() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    for _ in range(3):
        queue.add_rate_limited("a")
    assert queue.take_now() is None
    clock.advance(DEBOUNCE_S)
    assert queue.take_now() == "a"
    assert queue.release_due() is None


def test_news_of_many_jobs_are_spread_over_time() -> None:
    """Regression: each of thousands of running jobs was looked at, and written, two seconds after any measure moved."""
    clock = FakeClock()
    queue = WorkQueue(clock)
    for number in range(100):
        queue.add_rate_limited(f"job-{number}")
    taken = []
    clock.advance(DEBOUNCE_S)
    for _ in range(4):
        while (key := queue.take_now()) is not None:
            taken.append(key)
            queue.done(key)
            queue.add_rate_limited("job-0")
        clock.advance(1)
    assert taken[0] == "job-0"
    assert len(taken) <= 4 * RATE_LIMIT_PER_S + 2
    clock.advance(100 / RATE_LIMIT_PER_S)
    while (key := queue.take_now()) is not None:
        taken.append(key)
        queue.done(key)
    assert {f"job-{number}" for number in range(100)} <= {*taken}


def test_news_wait_for_nothing_that_comes_later() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_after("a", 3600)
    queue.add_rate_limited("a")
    clock.advance(DEBOUNCE_S)
    assert queue.take_now() == "a"


async def test_place_that_is_heard_of_late_waits_for_no_news_of_others() -> None:
    """Regression: it had its turn after the news of all jobs that run, minutes later."""
    world = World()
    world.apply()
    await world.settle()
    world.run_pods()
    node = world.kube.dump(GPU_NODES, "n1")
    late, node["spec"]["reservations"] = node["spec"]["reservations"], []
    world.kube.seed(GPU_NODES, node)
    await world.settle()
    assert not world.job().status.placement
    queue = world.operator.queue
    for number in range(1000):
        queue.add_rate_limited(f"default/other-{number}")
    node["spec"]["reservations"] = late
    world.kube.seed(GPU_NODES, node)
    world.hear()
    world.clock.advance(DEBOUNCE_S)
    await world.settle(rounds=100)
    assert world.job().status.placement


async def test_change_of_a_jobs_own_reservation_waits_for_no_news_of_others() -> None:
    """Regression: it was told after the news of all jobs that run, minutes later."""
    world = World()
    world.apply()
    await world.settle()
    world.run_pods()
    await world.settle()
    assert is_true(world.job().status, CONDITION_PLACED)
    queue = Recorder(world.clock)
    nodes = NodeCache(queue, world.operator.pods, world.operator.jobs)
    alone = msgspec.convert(world.kube.dump(GPU_NODES, "n1"), GpuNode)
    stranger = msgspec.convert(reservation("other-pod", "other-uid", name="other"), Reservation)
    shared = with_reservations(alone, [*alone.spec.reservations, stranger])
    nodes.changed(alone, shared)
    assert (queue.debounced, queue.rate_limited) == ([], ["default/x"]), "a neighbour came"
    nodes.changed(shared, with_reservations(alone, [stranger]))
    assert (queue.debounced, queue.rate_limited) == (["default/x"], ["default/x"])


def with_reservations(node: GpuNode, reservations: list[Reservation]) -> GpuNode:
    return replace(node, spec=replace(node.spec, reservations=reservations))
