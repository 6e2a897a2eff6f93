"""Conditions of jobs that behave unusually: the likeliest worker, stragglers, events and the end."""

from typing import Any

import msgspec
import pytest
from carpool_core.keys import ANOMALIES
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode
from carpool_operator.actions import Decision, RecordEvent
from carpool_operator.conditions import find
from carpool_operator.metrics import Metrics
from carpool_operator.reconcile import reconcile
from operator_fixtures import node, pod, predicted_job, reservation, snapshot, status_of, terminated

STALL = {"type": "Stalled", "reason": "DataWait", "message": "no step for 60 s"}
BUSY_STALL = {"type": "Stalled", "reason": "BusyGpu", "message": "no step for 61 s"}
DRIFT = {"type": "StepTimeDrift", "reason": "Unknown", "message": "a step takes 150 ms"}
CLOCK_DRIFT = {"type": "StepTimeDrift", "reason": "LowerClock", "message": "a step takes 150 ms: 900 MHz"}


class Job:
    """A running job; each reconciliation sees other measurements of its workers."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.job: GpuTrainingJob = predicted_job(workers=workers)
        self.pods = tuple(pod(n, phase="Running", nodeName="n1") for n in range(workers))
        self.see(*[{} for _ in range(workers)])  # the first reconciliation reports that it runs

    def see(self, *measured: dict[str, Any] | None) -> list[str]:
        """Reconcile with the measurements of each worker, None for one without; return the events."""
        return self.decide(self.node(*measured))

    def node(self, *measured: dict[str, Any] | None) -> GpuNode:
        held = [reservation(f"pod-{n}-1", gpuUuids=[f"GPU-{n}"]) for n in range(self.workers)]
        basis = {"steps": 100, "stepTimeSeconds": 0.1, "settled": True}
        tenants = [
            {"podUid": f"pod-{n}-1", "gpuUuid": f"GPU-{n}", **basis, **one}
            for n, one in enumerate(measured)
            if one is not None
        ]
        return node(*held, tenants=tenants, gpus=self.workers)

    def decide(self, *nodes: GpuNode, lags_s: float = 120.0, **changes: Any) -> list[str]:
        changes = {"pods": self.pods, "nodes": nodes, "lags_s": dict.fromkeys(ANOMALIES, lags_s), **changes}
        decision: Decision = reconcile(snapshot(self.job, **changes))
        self.requeue_after_s = decision.requeue_after_s
        self.job = msgspec.structs.replace(self.job, status=status_of(decision, self.job))
        found = [a for a in decision.actions if isinstance(a, RecordEvent)]
        return [f"{a.type} {a.reason}: {a.message}" for a in found if a.reason in (*ANOMALIES, "Recovered")]

    def condition(self, type_: str) -> tuple[str, str, str] | None:
        found = find(self.job.status, type_)
        return None if found is None else (found.status, found.reason, found.message)


def test_an_anomaly_of_a_worker_is_a_condition_with_one_event_each_way() -> None:
    job = Job()
    assert job.condition("Stalled") is None
    text = "worker 0: no step for 60 s"
    assert job.see({"anomalies": [STALL]}) == [f"Warning Stalled: DataWait: {text}"]
    assert job.condition("Stalled") == ("True", "DataWait", text)
    assert job.see({"anomalies": [STALL], "memoryMib": 700}) == []
    assert job.see({}) == [f"Normal Recovered: Stalled is over: {text}"]
    assert job.condition("Stalled") == ("False", "Recovered", f"over; it was: DataWait: {text}")
    assert job.see({}) == []


def test_another_operator_continues_from_the_status() -> None:
    """Nothing is kept in the process: the job's status and the GpuNodes are all that a new one needs."""
    first, second = Job(), Job()
    first.see({"anomalies": [STALL]})
    second.job = msgspec.json.decode(msgspec.json.encode(first.job), type=GpuTrainingJob)
    assert second.see({"anomalies": [STALL]}) == []
    assert len(second.see({})) == 1


def test_a_worker_whose_agent_starts_again_keeps_what_is_known() -> None:
    job = Job(2)
    job.see({"anomalies": [STALL]}, {})
    assert job.see(None, {}) == []
    assert job.condition("Stalled") == ("True", "DataWait", "worker 0: no step for 60 s")
    assert len(job.see({}, {})) == 1


def test_the_worker_with_a_cause_of_its_own_is_named() -> None:
    job = Job(3)
    job.see({"anomalies": [BUSY_STALL]}, {"anomalies": [BUSY_STALL]}, {"anomalies": [STALL]})
    assert job.condition("Stalled") == ("True", "DataWait", "worker 2: no step for 60 s")


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        pytest.param([[DRIFT], [DRIFT]], ("True", "Unknown", "worker 0: a step takes 150 ms"), id="all"),
        pytest.param([[DRIFT], []], None, id="one-is-explained-by-its-cotenant"),
        pytest.param([[], [CLOCK_DRIFT]], ("True", "LowerClock", "worker 1: a step takes 150 ms: 900 MHz"), id="cause"),
    ],
)
def test_a_cotenant_of_one_worker_explains_the_drift_of_all(
    measured: list[list[dict[str, str]]], expected: tuple[str, str, str] | None
) -> None:
    job = Job(2)
    job.see(*({"anomalies": one} for one in measured))
    assert job.condition("StepTimeDrift") == expected


def test_a_worker_that_lags_for_less_than_two_minutes_is_no_straggler() -> None:
    """Regression: a reading between the same step of two workers made one of them a straggler for some seconds."""
    job = Job(2)
    slow = job.node({}, {"stepTimeSeconds": 0.2})
    assert job.decide(slow, lags_s=30.0) == []
    assert job.requeue_after_s == 90.0
    assert len(job.decide(slow, lags_s=120.0)) == 1
    assert job.decide(slow, lags_s=0.0) == [], "another operator goes on"
    assert job.condition("Straggler") is not None


@pytest.mark.parametrize("fresh", [{"settled": False}, {"settled": False, "stepTimeSeconds": None}])
def test_a_straggler_whose_agent_starts_again_has_not_recovered(fresh: dict[str, Any]) -> None:
    """Regression: a worker that was not measured yet ended the condition, which began again two minutes later."""
    job = Job(2)
    job.see({}, {"stepTimeSeconds": 0.2})
    before = job.condition("Straggler")
    assert job.see({}, fresh) == []
    assert job.condition("Straggler") == before
    assert len(job.see({}, {})) == 1


def test_one_reading_does_not_rename_a_straggler() -> None:
    job, slow, waits = Job(5), {"stepTimeSeconds": 0.2}, {"dataWaitRatio": 0.9}
    job.see({}, slow, {}, {}, {})
    assert job.see({}, slow, waits, {}, {}) == [], "the named one still lags"
    later = job.node({}, {}, waits, {}, {})
    assert job.decide(later, lags_s=30.0) == []
    assert job.requeue_after_s == 90.0
    (event,) = job.decide(later, lags_s=120.0)
    assert event.startswith("Warning Straggler: DataWait: worker 2: ")


def test_a_hang_that_workers_report_one_after_another_and_leave_again_is_one_event_each_way() -> None:
    """Regression: the worker with the lowest number was named each time."""
    job, events = Job(4), list[str]()
    orders = [{3}, {3, 2}, {3, 2, 1}, {0, 1, 2, 3}, {0, 1, 2}, {1, 2}, {2}, set[int]()]
    for hung in orders:
        workers = [{"anomalies": [BUSY_STALL] if n in hung else []} for n in range(4)]
        events += job.decide(job.node(*workers), lags_s=10.0)
    text = "worker 3: no step for 61 s"
    assert events == [f"Warning Stalled: BusyGpu: {text}", f"Normal Recovered: Stalled is over: {text}"]


def test_a_cause_that_is_found_later_is_named_after_two_minutes() -> None:
    job = Job(2)
    job.see({"anomalies": [BUSY_STALL]}, {})
    both = job.node({"anomalies": [BUSY_STALL]}, {"anomalies": [STALL]})
    assert job.decide(both, lags_s=30.0) == []
    assert job.decide(both) == ["Warning Stalled: DataWait: worker 1: no step for 60 s"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(pod(phase="Pending", nodeName="n1"), id="a-pod-that-waits"),
        pytest.param(
            pod(phase="Failed", nodeName="n1", status=terminated(1, at="2026-01-31T12:00:00Z")),
            id="a-failed-pod-without-a-verdict",
        ),
    ],
)
def test_no_anomaly_outlasts_a_running_job(body: Pod) -> None:
    job = Job()
    home = job.node({"anomalies": [STALL]})
    job.decide(home)
    job.decide(home, pods=(body,))
    assert [(job.condition(one) or ("",))[0] for one in ("Running", "Stalled")] == ["False", "False"]


STRAGGLERS = [
    pytest.param({"stepTimeSeconds": 0.16}, "SlowWorker",
                 "worker 1: a step takes 160 ms, 1.60 times that of the other workers", id="slow"),
    pytest.param({"dataWaitRatio": 0.45}, "DataWait",
                 "worker 1: waits 45% of its time for input data, 40% more than the other workers, which wait for it",
                 id="data"),
    pytest.param({"copyRatio": 0.3}, "Copies",
                 "worker 1: waits 30% of its time for copies to the GPU, 30% more than the other workers, which wait "
                 "for it", id="copies"),
]  # fmt: skip


@pytest.mark.parametrize(("slow", "reason", "message"), STRAGGLERS)
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_worker_that_others_wait_for_is_a_straggler(
    workers: int, slow: dict[str, float], reason: str, message: str
) -> None:
    job, usual = Job(workers), {"dataWaitRatio": 0.05}
    events = job.see(usual, usual | slow, *[usual] * (workers - 2))
    assert events == [f"Warning Straggler: {reason}: {message}"]
    assert job.condition("Straggler") == ("True", reason, message)
    half = {name: (value - 0.1) / 2.4 + 0.1 if name == "stepTimeSeconds" else 0.18 for name, value in slow.items()}
    assert job.see(usual, usual | half, *[usual] * (workers - 2)) == [], "it has not caught up yet"
    assert len(job.see(*[usual] * workers)) == 1
    assert job.see(usual, usual | half, *[usual] * (workers - 2)) == [], "and is no new one with half the lag"


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param([{"stepTimeSeconds": 0.08, "checkpointRatio": 0.2}, {}, {}], id="one-writes-the-checkpoints"),
        pytest.param([{"stepTimeSeconds": 0.2, "settled": False}, {}, {}], id="not-settled"),
        pytest.param([{"stepTimeSeconds": 0.2, "steps": 5}, {}, {}], id="few-steps"),
        pytest.param([None, {"stepTimeSeconds": 0.2}, {}], id="one-not-measured"),
        pytest.param([{"stepTimeSeconds": 0.125}, {}, {}], id="a-little-slower"),
        pytest.param([{"dataWaitRatio": 0.5}] * 3, id="all-wait"),
    ],
)
def test_workers_that_lag_little_or_were_measured_little_are_none(measured: list[dict[str, Any]]) -> None:
    job = Job(3)
    job.see(*measured)
    assert job.condition("Straggler") is None


def test_a_new_attempt_begins_without_anomalies() -> None:
    job = Job()
    home = job.node({"anomalies": [STALL]})
    job.decide(home)
    job.decide(home, pods=(pod(phase="Failed", nodeName="n1"),))
    status = job.condition("Stalled")
    assert status is not None
    assert status[0] == "False"


def test_tenants_of_others_are_not_read() -> None:
    job = Job()
    other = {"podUid": "pod-9-1", "gpuUuid": "GPU-0", "anomalies": [STALL]}
    job.decide(node(reservation("pod-0-1"), tenants=[other]))
    assert job.condition("Stalled") is None


def test_the_metric_follows_the_condition() -> None:
    job = Job()
    labels = {"namespace": "default", "training_job": "x", "anomaly": "Stalled"}
    values = []
    for measured in ({}, {"anomalies": [STALL]}, {}):
        job.see(measured)
        placed = msgspec.structs.replace(job.job, metadata=ObjectMeta(name="x", namespace="default"))
        values.append(Metrics("1", lambda: [placed]).registry.get_sample_value("carpool_job_anomaly", labels))  # noqa: B023
    assert values == [None, 1, 0]
