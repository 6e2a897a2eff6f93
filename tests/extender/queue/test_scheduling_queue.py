"""Admission of pending jobs: order, whole gangs, EASY backfill, forecasts."""

import time
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from carpool_core.values import JobUid, PodUid, RequestedMode, SharingMode
from carpool_extender.cache.gpu_table import CODES
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.gang import place_gang
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.queue.order import QueueOrder, queue_order
from carpool_extender.queue.scheduling_queue import PodRef, QueuedJobInfo, SchedulingQueue, WaitReason, refusal_message
from carpool_extender.testing import cluster, demand, device, gpu_node, tenant
from hypothesis import given, settings
from hypothesis import strategies as st

CONFIG = SchedulerConfig(find_policy("least-slowdown"), 8)


def job(
    name, arrived_s=0.0, *, gpus=1, workers=1, duration_s=None, priority=0, number=None, mode="Exclusive", **changes
):
    wants = demand(name, gpus=gpus, mode=RequestedMode(mode), **changes)
    pods = tuple(PodRef(PodUid(f"{name}-{worker}"), f"{name}-worker-{worker}-1") for worker in range(workers))
    number = int(arrived_s) if number is None else number
    request = PodRequest(wants, workers=workers)
    return QueuedJobInfo(wants.job_uid, f"default/{name}", priority, arrived_s, number, request, pods, duration_s)


def queue(*nodes, order=QueueOrder.ARRIVAL, backfill=True):
    gpus = cluster(*nodes)
    return SchedulingQueue(gpus, EvaluationCache(gpus, CONFIG), order=order, backfill=backfill), gpus


def ends(**times):
    """Return a function from reservations to predicted ends by job."""
    return lambda held: times.get(held.job_name)


class Result(NamedTuple):
    """Outcome of one pass."""

    admitted: list
    waiting: list
    reserved: object


def one_pass(queued, pending, end_of, now_s):
    """Replace the pending jobs, and run one pass."""
    for job in [*queued]:
        queued.remove(job)
    for info in pending:
        queued.add(info)
    admitted = [*queued.admit(end_of, now_s)]
    return Result(admitted, [one for job in queued if (one := queued.waiting(job)) is not None], queued.reserved)


def names(result):
    return [one.info.name.removeprefix("default/") for one in result.admitted]


def reasons(result):
    return {one.info.name.removeprefix("default/"): one.reason for one in result.waiting}


def busy(name, gpu, node="a"):
    return tenant(name, [f"GPU-{node}-{gpu}"], SharingMode.EXCLUSIVE)


class TestOrder:
    def test_jobs_are_admitted_by_priority_then_arrival(self):
        queued, _ = queue(gpu_node("a", 2))
        pending = [job("late", 2), job("early", 1), job("urgent", 3, priority=5)]
        result = one_pass(queued, pending, ends(), 10.0)
        assert names(result) == ["urgent", "early"]
        assert reasons(result) == {"late": WaitReason.NO_GPU_FITS}

    def test_a_resumed_job_queues_by_the_time_it_became_admissible(self):
        queued, _ = queue(gpu_node("a", 1))
        assert names(one_pass(queued, [job("resumed", 50, number=0), job("other", 40, number=1)], ends(), 60.0)) == [
            "other"
        ]

    def test_alternate_takes_the_other_end_after_each_start_but_not_after_a_backfilled_job(self):
        queued, gpus = queue(gpu_node("a", 1), order=QueueOrder.ALTERNATE)
        pending = [job(str(d), number, duration_s=d) for number, d in enumerate((60, 600, 6000, 60000))]
        started, running, now = [], {}, 10.0
        while pending:
            (one,) = one_pass(queued, pending, lambda held: running.get(held.job_uid), now).admitted
            started.append(one.info.name.removeprefix("default/"))
            pending = [info for info in pending if info is not one.info]
            gpus.forget("a", one.claims[0].reservation.pod_uid)
        assert started == ["60000", "60", "6000", "600"]

    def test_a_job_in_backoff_lets_others_pass(self):
        queued, _ = queue(gpu_node("a", 1))
        waits = replace(job("backoff", 1), retry_at_s=100.0)
        result = one_pass(queued, [waits, job("other", 2)], ends(), 50.0)
        assert names(result) == ["other"]
        assert reasons(result) == {"backoff": WaitReason.BACKOFF}
        assert result.reserved is None


class TestGangs:
    def test_a_gang_is_admitted_whole_or_not_at_all(self):
        queued, gpus = queue(gpu_node("a", 2), gpu_node("b", 1))
        result = one_pass(queued, [job("wide", 1, workers=4), job("gang", 2, workers=3)], ends(), 10.0)
        assert names(result) == ["gang"]
        assert sorted(claim.node for claim in result.admitted[0].claims) == ["a", "a", "b"]
        assert reasons(result) == {"wide": WaitReason.NO_GPU_FITS}
        assert len(gpus.pods_of_job(JobUid("job-gang"))) == 3

    def test_a_job_whose_earlier_pods_still_hold_gpus_waits(self):
        queued, _ = queue(gpu_node("a", 2, [msgspec.structs.replace(busy("x", 0), pod_uid=PodUid("old"))]))
        assert reasons(one_pass(queued, [job("x", 1)], ends(), 10.0)) == {"x": WaitReason.TOO_MANY_WORKERS}

    def test_refused_jobs_are_evaluated_again_only_after_gpus_were_freed(self, monkeypatch):
        evaluated = []

        def recorded(cached, workers, among):
            evaluated.append(workers)
            return place_gang(cached, workers, among)

        monkeypatch.setattr("carpool_extender.queue.scheduling_queue.place_gang", recorded)
        queued, gpus = queue(gpu_node("a", 2))
        pending = [job("holds", workers=2), job("waits", 1), job("gang", 2, workers=2)]
        first = one_pass(queued, pending, ends(), 3.0)
        evaluated.clear()
        assert [*queued.admit(ends(), 4.0)] == []
        assert evaluated == []
        gpus.forget("a", first.admitted[0].claims[0].reservation.pod_uid)
        assert [one.info.name for one in queued.admit(ends(), 5.0)] == ["default/waits"]
        assert evaluated == [1, 2]


class TestBackfill:
    def test_the_first_job_that_does_not_fit_gets_a_reservation_in_time(self):
        queued, _ = queue(gpu_node("a", 4, [busy("p", 0), busy("q", 1), busy("r", 2)]))
        until = ends(p=100.0, q=900.0, r=300.0)
        result = one_pass(queued, [job("wide", 1, gpus=3), job("small", 2)], until, 10.0)
        assert result.reserved.info.name == "default/wide"
        assert result.reserved.start_s == 300.0
        assert result.reserved.gpus == {("a", "GPU-a-0"), ("a", "GPU-a-2"), ("a", "GPU-a-3")}

    @pytest.mark.parametrize(("duration_s", "passes"), [(190, True), (210, False), (None, False)])
    def test_a_job_passes_on_reserved_gpus_only_if_it_ends_in_time(self, duration_s, passes):
        queued, _ = queue(gpu_node("a", 2, [busy("p", 0)]))
        result = one_pass(queued, [job("wide", 1, gpus=2), job("small", 2, duration_s=duration_s)], ends(p=210.0), 10.0)
        assert names(result) == (["small"] if passes else [])
        if not passes:
            assert reasons(result)["small"] is WaitReason.WOULD_DELAY

    def test_a_job_passes_outside_the_reserved_gpus(self):
        queued, _ = queue(gpu_node("a", 2, [busy("p", 0)]), gpu_node("b", 1))
        result = one_pass(queued, [job("wide", 1, gpus=2), job("long", 2, duration_s=1e6)], ends(p=50.0), 10.0)
        assert names(result) == ["long"]
        assert result.admitted[0].claims[0].node == "b"

    def test_a_job_that_no_gpu_could_hold_blocks_no_other(self):
        queued, _ = queue(gpu_node("a", 1, [busy("p", 0)]), gpu_node("b", 1))
        result = one_pass(queued, [job("wide", 1, gpus=2), job("small", 2, duration_s=1e6)], ends(), 10.0)
        assert names(result) == ["small"]
        assert result.reserved is None

    @pytest.mark.parametrize("changes", [{}, {"duration_s": 5.0}], ids=["same entry", "another length"])
    def test_a_reservation_in_time_survives_a_new_entry_of_its_job(self, changes):
        queued, _ = queue(gpu_node("a", 2, [busy("p", 0)]))
        wide = job("wide", 1, gpus=2)
        before = one_pass(queued, [wide, job("small", 2, duration_s=1e6)], ends(p=210.0), 10.0).reserved
        queued.add(replace(wide, **changes))
        list(queued.admit(ends(p=900.0), 20.0))
        assert (queued.reserved.start_s, queued.reserved.gpus) == (before.start_s, before.gpus)

    def test_a_job_ahead_that_no_gpu_could_hold_moves_no_reservation_in_time(self):
        queued, _ = queue(gpu_node("a", 2, [busy("p", 0)]))
        small = job("small", 3, duration_s=1e6)
        before = one_pass(queued, [job("never", 1, gpus=9), job("wide", 2, gpus=2), small], ends(p=210.0), 10.0)
        queued.remove(small.job)
        queued.add(small)
        list(queued.admit(ends(p=900.0), 20.0))
        assert queued.reserved is before.reserved

    def test_more_demands_ahead_than_any_limit(self):
        """Regression: the order ended at eight kinds of demand, so a ninth kind passed a large job forever."""
        queued, _ = queue(gpu_node("a", 4, [busy("p", 0)]))
        kinds = [job(f"k{n}", n, gpus=4, max_slowdown=1.1 + n / 10) for n in range(1, 20)]
        result = one_pass(queued, [*kinds, job("small", 30)], ends(p=100.0), 10.0)
        assert names(result) == []
        assert reasons(result)["small"] is WaitReason.WOULD_DELAY

    @pytest.mark.parametrize("predicted_s", [200.0, None], ids=["known lengths", "unknown lengths"])
    def test_a_large_job_starts_although_small_ones_keep_coming(self, predicted_s):
        """Regression: a 4-GPU job, first in line, had not started after 100 later single-GPU jobs."""
        queued, gpus = queue(gpu_node("a", 4))
        ends_s, held, big_started = {}, {}, None
        for small, now in enumerate(range(0, 4000, 10)):
            for uid in [uid for uid, end_s in ends_s.items() if end_s <= now]:
                del ends_s[uid]
                for claim in held.pop(uid):
                    gpus.forget(claim.node, claim.reservation.pod_uid)
            queued.add(job(f"s{small}", now, number=small, duration_s=predicted_s))
            if now == 100:
                queued.add(job("big", 105, number=-1, gpus=4, duration_s=100))
            for one in queued.admit(lambda held: None if predicted_s is None else ends_s.get(held.job_uid), float(now)):
                ends_s[one.info.job], held[one.info.job] = now + 200.0, one.claims
                big_started = now if one.info.name == "default/big" else big_started
        assert big_started is not None
        assert big_started <= 700


@st.composite
def histories(draw):
    jobs = []
    for number in range(draw(st.integers(2, 9))):
        gpus, workers = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 5)]))
        jobs.append(
            job(
                f"j{number}",
                float(draw(st.integers(0, 300))),
                gpus=gpus,
                workers=workers,
                duration_s=float(draw(st.sampled_from([20, 50, 130, 400, 900]))),
                priority=draw(st.sampled_from([0, 0, 0, 10])),
                number=number,
                mode=draw(st.sampled_from(["Exclusive", "Exclusive", "Auto"])),
            )
        )
    return jobs


class History:
    """Plays arrivals and exact ends of jobs through one queue."""

    def __init__(self, jobs, queued, gpus):
        self.coming = sorted(jobs, key=lambda one: one.arrived_s)
        self.queued, self.gpus, self.running, self.now = queued, gpus, {}, 0.0
        self.starts, self.arrived = {}, False

    def passes(self):
        """Yield after each pass, until nothing can happen any more."""
        while True:
            arriving = [one for one in self.coming if one.arrived_s <= self.now]
            self.arrived, self.coming = bool(arriving), self.coming[len(arriving) :]
            for one in arriving:
                self.queued.add(one)
            for one in [one for one in self.running.values() if one.end_s <= self.now]:
                del self.running[one.info.job]
                for claim in one.claims:
                    self.gpus.forget(claim.node, claim.reservation.pod_uid)
            for one in self.queued.admit(lambda held: self.running[held.job_uid].end_s, self.now):
                self.running[one.info.job], self.starts[one.info.name] = one, self.now
                assert [claim.reservation.pod_uid for claim in one.claims] == [pod.uid for pod in one.info.pods]
            yield
            times = [one.end_s for one in self.running.values()] + [one.arrived_s for one in self.coming]
            if not times:
                return
            self.now = max(self.now, min(times))


def overcommitted(gpus):
    """Return the GPUs with an exclusive tenant and another one, or with more memory promised than they have."""
    table = gpus.snapshot().gpus
    exclusive = (table.mode == CODES[SharingMode.EXCLUSIVE]) & (table.count > 1)
    return (exclusive | (table.memory_mib.sum(axis=1) > table.usable_mib)) & table.alive


class TestProperties:
    @settings(max_examples=80, deadline=None)
    @given(histories(), st.sampled_from(list(QueueOrder)))
    def test_backfill_delays_no_reservation_in_time_and_no_gpu_is_over_committed(self, jobs, order):
        """A reserved start never moves later unless a job arrives that may come first, if predicted ends hold."""
        queued, gpus = queue(gpu_node("a", 4), gpu_node("b", 2), gpu_node("c", 1), order=order)
        history, promised = History(jobs, queued, gpus), None
        for _ in history.passes():
            assert not overcommitted(gpus).any()
            if history.arrived:
                promised = None
            if promised is not None:
                assert promised.info.name in history.starts or history.now < promised.start_s
            promised = queued.reserved or promised
            assert all(queued.waiting(job) is not None for job in queued)
        assert len(history.starts) == len(jobs)

    @settings(max_examples=40, deadline=None)
    @given(histories())
    def test_a_refusal_that_is_remembered_is_the_one_that_a_new_queue_decides(self, jobs):
        """Regression: an event that frees GPUs must reach every group that was refused."""
        queued, gpus = queue(gpu_node("a", 4), gpu_node("b", 2))
        history = History(jobs, queued, gpus)
        evaluations = EvaluationCache(gpus, CONFIG)
        for _ in history.passes():
            for job in queued:
                waiting = queued.waiting(job)
                fits = place_gang(evaluations.of(waiting.info.request), len(waiting.info.pods)) is not None
                assert not fits or waiting.reason is WaitReason.WOULD_DELAY
                assert refusal_message(waiting, evaluations).startswith(f"{waiting.reason}: "), "one word for one cause"

    @settings(max_examples=30, deadline=None)
    @given(histories(), st.sampled_from(list(QueueOrder)))
    def test_without_backfill_jobs_start_in_queue_order(self, jobs, order):
        together = [replace(one, arrived_s=0.0) for one in jobs]
        queued, gpus = queue(gpu_node("a", 4), gpu_node("b", 2), order=order, backfill=False)
        history = History(together, queued, gpus)
        for _ in history.passes():
            pass
        of_number = {one.number: one.name for one in together}
        assert [*history.starts] == [of_number[key.number] for key in queue_order((j.key() for j in together), order)]


def test_a_pass_over_ten_thousand_pending_jobs_of_few_shapes_is_quick():
    queued, _ = queue(*(gpu_node(f"n{n}", [device(i, f"n{n}") for i in range(8)]) for n in range(20)))
    assert names(one_pass(queued, [job("all", 0, workers=160, duration_s=100)], ends(), 0.0)) == ["all"]
    pending = [job(f"j{n}", n, gpus=1 + n % 4, duration_s=1e5) for n in range(10_000)]
    until = ends(all=100.0)
    began = time.process_time()
    result = one_pass(queued, pending, until, 1.0)
    assert len(result.waiting) == 10_000
    assert time.process_time() - began < 2.0  # about 0.1 s where nothing else runs
