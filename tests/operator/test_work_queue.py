"""The work queue, and which events are debounced or rate-limited."""

import asyncio

import msgspec
from carpool_core.keys import CONDITION_PLACED
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.testing.clock import FakeClock
from carpool_operator.informers import NodeCache
from carpool_operator.work_queue import DEBOUNCE_S, LOW_PRIORITY_EVERY, RATE_LIMIT_PER_S, WorkQueue
from msgspec.structs import replace
from operator_fixtures import reservation
from operator_world import status_writes, submitted


def test_key_waits_once_and_is_processed_by_one_worker() -> None:
    queue = WorkQueue(FakeClock())
    queue.add("a")
    queue.add("a")
    assert queue.take_now() == "a"
    assert queue.take_now() is None
    queue.add("a")
    assert queue.take_now() is None
    queue.done("a")
    assert queue.take_now() == "a"
    queue.done("a")
    assert queue.is_idle


def test_delayed_key_keeps_its_earliest_time() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    for seconds in (10, 5, 20):
        queue.add_after("a", seconds)
        queue.add_after("dropped", 1)
        queue.forget("dropped")
    assert queue.release_due() == 5
    assert queue.take_now() is None
    clock.advance(5)
    assert queue.take_now() == "a"
    assert queue.release_due() is None
    queue.add_after("a", 3600)
    queue.add_rate_limited("a")
    queue.done("a")
    clock.advance(DEBOUNCE_S)
    assert queue.take_now() == "a", "a later delay does not postpone it"


def test_low_priority_keys_come_after_others_but_come() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_debounced("low")
    clock.advance(DEBOUNCE_S)
    taken = []
    for number in range(LOW_PRIORITY_EVERY):
        queue.add(f"urgent-{number}")
        queue.add(f"and-{number}")
        key = queue.take_now()
        assert key is not None
        taken.append(key)
        queue.done(key)
    assert taken[0] == "urgent-0"
    assert taken.count("low") == 1


def test_low_priority_key_that_becomes_urgent_is_taken_once() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_debounced("a")
    clock.advance(DEBOUNCE_S)
    queue.release_due()
    queue.add("a")
    assert queue.take_now() == "a"
    assert queue.take_now() is None
    queue.add_debounced("a")
    clock.advance(DEBOUNCE_S)
    queue.release_due()
    queue.done("a")
    assert queue.take_now() == "a", "an event that came while it was processed"


def test_dropped_and_processed_keys_leave_no_gap_in_the_rate_limit() -> None:
    """Regression: the slots of jobs that were deleted, or reconciled meanwhile, stayed reserved."""
    clock = FakeClock()
    queue = WorkQueue(clock)
    for number in range(1000):
        queue.add_rate_limited(f"job-{number}")
    queue.add("job-0")
    assert queue.take_now() == "job-0"
    for number in range(1, 1000):
        queue.forget(f"job-{number}")
    queue.add_rate_limited("quiet")
    queue.done("job-0")
    assert queue.release_due() == DEBOUNCE_S
    clock.advance(DEBOUNCE_S)
    assert queue.take_now() == "quiet"
    assert queue.take_now() is None


def test_rate_limited_keys_keep_their_distance_and_order() -> None:
    """Regression: each of thousands of running jobs was reconciled two seconds after any measurement changed."""
    clock = FakeClock()
    queue = WorkQueue(clock)
    for _ in range(2):
        for key in "abc":
            queue.add_rate_limited(key)
    clock.advance(DEBOUNCE_S)
    taken = []
    for _ in range(3):
        taken.append(queue.take_now())
        assert queue.take_now() is None
        queue.done(str(taken[-1]))
        queue.add_rate_limited("a")  # comes again after the others
        clock.advance(1 / RATE_LIMIT_PER_S + 1e-6)
    assert taken == ["a", "b", "c"]


async def test_each_key_goes_to_one_of_many_workers() -> None:
    queue = WorkQueue(FakeClock())
    queue.add_after("far", 3600)
    workers = [asyncio.create_task(queue.take()) for _ in range(16)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")
    for _ in range(10):
        await asyncio.sleep(0)
    done = [worker for worker in workers if worker.done()]
    assert sorted(worker.result() for worker in done) == ["a", "b"]
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def test_cancelled_worker_leaves_the_next_key_to_others() -> None:
    queue = WorkQueue(FakeClock())
    first, second = (asyncio.create_task(queue.take()) for _ in range(2))
    await asyncio.sleep(0)
    assert not second.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    queue.add("a")
    assert await asyncio.wait_for(second, 60) == "a"


# Which events are debounced


async def test_pod_and_placement_are_reported_with_one_write() -> None:
    world = await submitted()
    before = status_writes(world)
    await world.start_pods()
    assert status_writes(world) == before + 1
    attempt = world.job().status.attempts[-1]
    assert attempt.pod_uids == [pod["metadata"]["uid"] for pod in world.pods()]
    assert world.job().status.placement[0].node == "n1"


async def test_pod_that_is_not_placed_at_once_is_reported() -> None:
    world = await submitted()
    await world.settle(after_s=DEBOUNCE_S)
    placed = world.condition(CONDITION_PLACED)
    assert placed.reason == "Queued"
    assert len(world.job().status.attempts[-1].pod_uids) == 1


async def test_admission_of_a_pod_is_no_write() -> None:
    """Regression: each job wrote that its pod is blocked by gates, after its last gate was removed."""
    world = await submitted()
    before, pod = status_writes(world), world.pods()[0]
    pod["spec"]["schedulingGates"] = []
    world.kube.seed(PODS, pod)
    await world.settle()
    await world.settle(after_s=DEBOUNCE_S)
    assert status_writes(world) == before
    assert "SchedulingGated" in {one["reason"] for one in world.pods()[0]["status"]["conditions"]}
    assert world.condition(CONDITION_PLACED).reason == "Queued"


class Recorder(WorkQueue):
    """Records what is added."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.added: list[str] = []

    def add_debounced(self, key: str) -> None:
        self.added.append(f"debounced {key}")

    def add_rate_limited(self, key: str) -> None:
        self.added.append(f"rate-limited {key}")


async def test_only_changes_of_co_tenants_are_rate_limited() -> None:
    """Regression: a job's own reservation was reported after the measurements of all running jobs."""
    world = await submitted()
    world.run_pods()
    alone = msgspec.convert(world.kube.dump(GPU_NODES, "n1"), GpuNode)
    other = msgspec.convert(reservation("other-pod", "other-uid", name="other"), Reservation)
    shared = replace(alone, spec=replace(alone.spec, reservations=[*alone.spec.reservations, other]))
    before = msgspec.convert(world.pods()[0], Pod)
    world.operator.pod_changed(None, before)
    queue = Recorder(world.clock)
    nodes = NodeCache(queue, world.operator.pods, world.operator.jobs)
    nodes.changed(alone, shared)
    assert queue.added == ["debounced default/x"], "the job is not placed yet"
    queue.added.clear()
    await world.settle()
    nodes.changed(alone, shared)
    assert queue.added == ["rate-limited default/x"]
    nodes.changed(shared, replace(alone, spec=replace(alone.spec, reservations=[other])))
    assert queue.added == ["rate-limited default/x", "debounced default/x"]
