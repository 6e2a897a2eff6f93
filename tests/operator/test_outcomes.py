"""How workers and attempts end, and whether it counts."""

from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.resources.job import RunPolicy
from carpool_core.resources.node import GpuNode
from carpool_operator.outcomes import MPS_REPORT_TIMEOUT_S, outcome_of
from carpool_operator.placement import placements
from carpool_operator.reconcile import reconcile
from operator_fixtures import (
    A100,
    NOW,
    again,
    condition,
    created,
    node,
    pod,
    predicted_job,
    reservation,
    snapshot,
    status_of,
    terminated,
)

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.49 GiB"
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}
ADMISSION = {"reason": "UnexpectedAdmissionError", "message": "Allocate failed"}


@pytest.mark.parametrize(
    ("status", "reason", "charged", "message"),
    [
        pytest.param(terminated(1, message=OOM), "GpuOutOfMemory", True, "2.00 GiB", id="GPU out of memory"),
        pytest.param(terminated(137, reason="OOMKilled"), "HostOutOfMemory", True, "host memory", id="OOMKilled"),
        pytest.param(terminated(3, message="bad"), "ContainerFailed", True, "exit code 3: bad", id="exit code"),
        pytest.param({"reason": "Evicted", "message": "low memory"}, "Evicted", True, "low memory", id="evicted"),
        pytest.param(ADMISSION, "UnexpectedAdmissionError", False, "Allocate failed", id="refused by the node"),
        pytest.param({"conditions": [DISRUPTED]}, "PreemptionByScheduler", False, "preempted", id="preempted"),
        pytest.param(
            {"conditions": [DISRUPTED], **terminated(143)},
            "PreemptionByScheduler",
            False,
            "preempted",
            id="exit code of a preempted pod",
        ),
        pytest.param({}, "PodFailed", True, "no reason given", id="nothing known"),
        pytest.param(
            terminated(1, message="x" * 5000 + "ValueError: the end"),
            "ContainerFailed",
            True,
            f"…{'x' * 581}ValueError: the end",
            id="a long message keeps its end",
        ),
    ],
)
def test_outcome(status: dict[str, Any], reason: str, charged: bool, message: str) -> None:
    outcome = outcome_of(pod(phase="Failed", status=status))
    assert (outcome.reason, outcome.charged) == (reason, charged)
    assert message in outcome.message
    assert "x-worker-0-1" in outcome.message


# Workers that ended with others behind an MPS server

ENDED = "2026-01-31T11:59:58Z"
FAULT = "GPU GPU-0: a client's fatal fault has hit its MPS server: pods that it ends together: pod-0-1, other"
PLACE = {"worker": 0, "pod": "x-worker-0-1", "podUid": "pod-0-1", "node": "n1", "gpuUuids": ["GPU-0"]}
PLACE |= {"product": A100, "mode": "MPS"}
CAME_FOURTH = {"pod": "x-worker-0-4", "podUid": "pod-0-4"}


def with_status(found: GpuNode, **status: Any) -> GpuNode:
    return msgspec.convert(
        {**msgspec.to_builtins(found), "status": msgspec.to_builtins(found.status) | status}, GpuNode
    )


def with_held(found: GpuNode, *held: dict[str, Any]) -> GpuNode:
    """The node with more reservations."""
    body = msgspec.to_builtins(found)
    return msgspec.convert({**body, "spec": {"reservations": [*body["spec"]["reservations"], *held]}}, GpuNode)


def mps_node(*struck: str, **status: Any) -> GpuNode:
    """The node; its agent reports that these pods ended together."""
    return with_status(node(), struck=[{"podUid": uid, "message": FAULT} for uid in struck], **status)


def failed(at: str = ENDED, attempt: int = 1, **ended: Any):
    status = terminated(1, **{"message": "CUDA error", "at": at, **ended})
    return pod(attempt=attempt, phase="Failed", nodeName="n1", status=status)


def placed(attempts: list[dict[str, Any]] | None = None, **place: Any):
    return predicted_job(attempts=attempts, status={"placement": [PLACE | place], "restarts": 0})


def after(outcome: str) -> list[dict[str, Any]]:
    """Three attempts that ended so, and a fourth that runs."""
    earlier = [{"number": n, "outcome": outcome, "endedAt": rfc3339(NOW)} for n in (1, 2, 3)]
    return [*earlier, {"number": 4, "outcome": "Running"}]


OOM_PLACE = {"memoryLimitMib": 4000, "neighbours": [{"namespace": "default", "job": "lone", "gpuUuid": "GPU-0"}]}


def shared(peak_mib: int, measured_mib: int | None = 5500, own_mib: int = 0, **held: Any) -> GpuNode:
    """The node with a co-tenant of that peak; its GPU has 40,960 MiB. The agent has looked since the failure."""
    tenant = {"measuredMib": measured_mib, "memoryMib": 39000}
    there = node(reservation("lone", **({"jobUid": "lone", "jobName": "lone", "tenant": tenant} | held)))
    peaks = {"lone": peak_mib, "pod-0-1": own_mib}
    tenants = [
        {"podUid": of, "gpuUuid": "GPU-0", "memoryMib": mib, "peakMemoryMib": mib} for of, mib in peaks.items() if mib
    ]
    return with_status(there, tenants=tenants)


def beside(attempts: list[dict[str, Any]] | None = None, **place: Any):
    return placed(attempts, **(OOM_PLACE | place))


UNREPORTED = shared(5000)


def ended(of, one, there: GpuNode, **changes: Any) -> tuple[str, int]:
    """Outcome of the latest attempt, and the restarts."""
    status = status_of(reconcile(snapshot(of, pods=(one,), nodes=(there,), **changes)), of)
    return status.attempts[-1].outcome, status.restarts


def test_mps_co_client_restarts_at_once_and_is_not_charged() -> None:
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(mps_node("pod-0-1", "other"),))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("MpsClientsEnded", 0)
    message = condition(decision, of, "Placed").message
    assert f"pod x-worker-0-1: {FAULT}" in message
    assert "not counted, 0 of 3 restarts used" in message
    assert created(again(before, decision)) == ["x-worker-0-2"], "no backoff the first time"


@pytest.mark.parametrize(
    ("of", "message", "early", "late", "outcome", "silent"),
    [
        pytest.param(
            placed(), "CUDA error", mps_node(), mps_node("pod-0-1"), "MpsClientsEnded", "ContainerFailed", id="MPS"
        ),
        pytest.param(beside(), OOM, UNREPORTED, shared(37000), "GpuMemoryTaken", "GpuOutOfMemory", id="out of memory"),
    ],
)
def test_agent_report_is_awaited(of, message: str, early: GpuNode, late: GpuNode, outcome: str, silent: str) -> None:
    """It comes a moment after the pod has failed, which alone would count as the job's own failure."""
    before = snapshot(of, pods=(failed(message=message),), nodes=(early,))
    waiting = reconcile(before)
    assert waiting.requeue_after_s == 2
    assert status_of(waiting, of).attempts[0].outcome == "Running"
    reported = again(before, waiting, now=snapshot(of, after_s=6).now, nodes=(late,))
    assert status_of(reported, of).attempts[0].outcome == outcome
    timed_out = again(before, waiting, now=snapshot(of, after_s=19).now)
    assert (status_of(timed_out, of).attempts[0].outcome, status_of(timed_out, of).restarts) == (silent, 1)


def test_worker_is_not_running_while_the_report_is_awaited() -> None:
    """Regression: a container that died of an ImportError stayed Running while the agent's report was awaited."""
    since = {"status": "True", "lastTransitionTime": "2026-01-31T11:00:00Z"}
    conditions = [{"type": "Placed", "reason": "Placed"} | since, {"type": "Running", "reason": "Running"} | since]
    of = predicted_job(status={"placement": [PLACE], "conditions": conditions, "state": "Running"})
    waiting = reconcile(snapshot(of, pods=(failed(message="ImportError: no torch"),), nodes=(mps_node(),)))
    running = condition(waiting, of, "Running")
    assert (running.status, running.reason) == ("False", "WorkerFailed")
    assert "ImportError: no torch; waits for the node agent's report" in running.message
    assert status_of(waiting, of).state != "Running"


@pytest.mark.parametrize(
    ("of", "one", "there", "expected"),
    [
        pytest.param(placed(mode="TimeSlicing"), failed(), mps_node(), ("ContainerFailed", 1), id="no MPS daemon"),
        pytest.param(placed(), failed(), mps_node(simulated=True), ("ContainerFailed", 1), id="simulated GPUs"),
        pytest.param(placed(), failed("2026-01-31T11:59:39Z"), mps_node(), ("ContainerFailed", 1), id="long ago"),
        pytest.param(placed(), failed("2026-01-31T15:00:00Z"), mps_node(), ("ContainerFailed", 1), id="wrong clock"),
        pytest.param(placed(), failed(""), mps_node(), ("ContainerFailed", 1), id="unknown time"),
        pytest.param(placed(), failed(message=OOM), mps_node("pod-0-1"), ("GpuOutOfMemory", 1), id="own message"),
        pytest.param(placed(), failed(reason="OOMKilled"), mps_node("pod-0-1"), ("HostOutOfMemory", 1), id="host"),
    ],
)
def test_report_is_awaited_only_where_one_may_come(of, one, there: GpuNode, expected: tuple[str, int]) -> None:
    assert ended(of, one, there) == expected


def test_fourth_mps_failure_is_charged() -> None:
    """The job may cause the fault itself, and would end its co-clients again and again."""
    of = placed(after("MpsClientsEnded"), **CAME_FOURTH)
    decision = reconcile(snapshot(of, pods=(failed(attempt=4),), nodes=(mps_node("pod-0-4"),)))
    status = status_of(decision, of)
    assert (status.attempts[-1].outcome, status.restarts) == ("MpsClientsEnded", 1)
    assert "this counts because 3 attempts ended so before" in condition(decision, of, "Placed").message


def test_mps_failure_is_known_after_the_release_of_the_reservation() -> None:
    of = predicted_job()
    there = node(reservation("pod-0-1"))
    running = reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(there,)))
    assert status_of(running, of).placement[0].mode.value == "MPS"
    later = again(snapshot(of), running, pods=(failed(),), nodes=(mps_node("pod-0-1"),))
    assert status_of(later, of).attempts[0].outcome == "MpsClientsEnded"


# GPU out of memory beside co-tenants

TAKEN, OWN = ("GpuMemoryTaken", 0), ("GpuOutOfMemory", 1)
SLICED = {"mode": "TimeSlicing", "memoryLimitMib": None}


@pytest.mark.parametrize(
    ("there", "place", "expected"),
    [
        pytest.param(shared(37000), {}, TAKEN, id="a co-tenant has grown and left less than the share"),
        pytest.param(shared(36700), {}, TAKEN, id="by so little that the agent does not report it"),
        pytest.param(shared(37000, None), {}, TAKEN, id="the co-tenant's measured peak is void by now"),
        pytest.param(shared(37000, own_mib=2000), {}, TAKEN, id="the worker took less than its limit"),
        pytest.param(shared(6000), {}, OWN, id="a co-tenant has grown, and there was room"),
        pytest.param(shared(37000, own_mib=3980), {}, OWN, id="the worker was at its own limit"),
        pytest.param(shared(5500), {}, OWN, id="no co-tenant has grown"),
        pytest.param(shared(6000, **SLICED), SLICED, TAKEN, id="time-slicing, beside one that has grown"),
        pytest.param(shared(6000, own_mib=35400, **SLICED), SLICED, OWN, id="time-slicing, all of the rest taken"),
        pytest.param(shared(5000, **SLICED), SLICED, OWN, id="time-slicing, beside one that has not grown"),
        pytest.param(shared(39500, None, **SLICED), SLICED, TAKEN, id="time-slicing, beside one beyond its share"),
        pytest.param(shared(1), {"measuredMib": 5500, "neighbours": []}, OWN, id="without co-tenants"),
    ],
)
def test_oom_is_charged_unless_co_tenants_took_the_share(there: GpuNode, place: dict[str, Any], expected) -> None:
    of = beside(**place)
    before = snapshot(of, pods=(failed(message=OOM),), nodes=(there,), after_s=MPS_REPORT_TIMEOUT_S)
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == expected
    if expected == TAKEN:
        assert "beside default/lone, which took more than before" in condition(decision, of, "Placed").message
        assert created(again(before, decision)) == ["x-worker-0-2"], "no backoff the first time"


TORCHRUN = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Root Cause (first observed failure):
  exitcode  : 1 (pid: 30435)
"""


@pytest.mark.parametrize(
    ("message", "exit_code", "own_mib", "expected"),
    [
        pytest.param("", 1, 3960, "GpuOutOfMemory", id="no log, at the limit"),
        pytest.param(TORCHRUN, 1, 3960, "GpuOutOfMemory", id="only torchrun's summary, at the limit"),
        pytest.param(TORCHRUN, 1, 3900, "ContainerFailed", id="only torchrun's summary, below the limit"),
        pytest.param("", 1, 0, "ContainerFailed", id="no log, not measured"),
        pytest.param("", 137, 3960, "ContainerFailed", id="killed"),
        pytest.param(TORCHRUN.replace("1 (pid", "-9 (pid"), 1, 3960, "ContainerFailed", id="torchrun's child killed"),
        pytest.param("CUBLAS_STATUS_NOT_INITIALIZED", 1, 3960, "GpuOutOfMemory", id="many causes, at the limit"),
        pytest.param("CUBLAS_STATUS_NOT_INITIALIZED", 1, 3900, "ContainerFailed", id="many causes, below the limit"),
        pytest.param("KeyError: 'losses'", 1, 3960, "ContainerFailed", id="the log names a cause"),
    ],
)
def test_memory_at_the_limit_is_the_cause_if_the_log_names_none(
    message: str, exit_code: int, own_mib: int, expected: str
) -> None:
    of = beside(mode="TimeSlicing")
    status = terminated(exit_code, message=message, at=ENDED)
    worker = pod(phase="Failed", nodeName="n1", status=status)
    assert ended(of, worker, shared(5000, own_mib=own_mib)) == (expected, 1)


def test_peaks_of_co_tenants_beyond_the_gpu_leave_the_limit_unknown() -> None:
    """Regression: any exit without a log counted as out of memory, since no memory exceeded a negative limit."""
    of = beside(**SLICED)
    assert ended(of, failed(message=""), shared(41_000, **SLICED)) == ("ContainerFailed", 1)


def test_failure_that_a_co_tenant_caused_matches_no_rule() -> None:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}]
    of = beside()
    spec = msgspec.convert({"podFailurePolicy": {"rules": rules}}, RunPolicy)
    of = msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, run_policy=spec))
    for peak_mib, outcome, has_failed in ((37000, "GpuMemoryTaken", False), (5500, "GpuOutOfMemory", True)):
        there = shared(peak_mib)
        decision = reconcile(snapshot(of, pods=(failed(message=OOM),), nodes=(there,), after_s=MPS_REPORT_TIMEOUT_S))
        status = status_of(decision, of)
        assert (status.attempts[0].outcome, status.state == "Failed") == (outcome, has_failed)


def test_oom_is_attributed_beyond_the_placements_that_the_status_lists() -> None:
    """Regression: worker 64 and later ones were charged if their reservation was released before the agent's report."""
    running = [pod(n, phase="Running", nodeName="n1") for n in range(69)]
    last = pod(69, phase="Failed", nodeName="n1", status=terminated(1, message=OOM, at=ENDED))
    elsewhere = [reservation(one.metadata.uid, gpuUuids=["GPU-1"]) for one in running]
    own = reservation("pod-69-1", memoryLimitMib=4000)
    of = predicted_job(workers=70)
    with_all, released = with_held(UNREPORTED, *elsewhere, own), with_held(shared(37000), *elsewhere)
    before = snapshot(of, pods=(*running, last), nodes=(with_all,))
    decision = reconcile(before)
    assert condition(decision, of, "Running").reason == "WorkerFailed"
    status = status_of(again(before, decision, nodes=(released,)), of)
    assert (status.attempts[0].outcome, status.restarts) == TAKEN


def test_worker_that_outgrew_its_measured_peak_is_not_charged() -> None:
    of = beside(measuredMib=5500)
    decision = reconcile(snapshot(of, pods=(failed(message=OOM),), nodes=(shared(1),)))
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("GpuOutOfMemory", 0)
    assert "it counted with its measured 5,500 MiB, less than its bound" in condition(decision, of, "Placed").message


def test_fourth_oom_beside_grown_co_tenants_is_charged() -> None:
    of = beside(after("GpuMemoryTaken"), **CAME_FOURTH)
    decision = reconcile(snapshot(of, pods=(failed(attempt=4, message=OOM),), nodes=(shared(37000),)))
    status = status_of(decision, of)
    assert (status.attempts[-1].outcome, status.restarts) == ("GpuOutOfMemory", 1), "which is learned from"
    assert "because 3 attempts ended so before" in status.attempts[-1].message


def test_measured_peak_of_a_placement_stays_known() -> None:
    there = node(reservation("pod-0-1", tenant={"memoryMib": 9000}))
    [place] = placements(beside(measuredMib=5500), [pod(phase="Running", nodeName="n1")], [there])
    assert (place.measured_mib, place.memory_limit_mib) == (5500, 3000)
