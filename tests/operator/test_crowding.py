"""Whoever runs out of GPU memory because a job grew that had been counted as measured is started again for nothing."""

from typing import Any

import msgspec
import pytest
from carpool_core.resources.node import GpuNode
from carpool_operator.reconcile import reconcile
from operator_decisions import again, condition, created, predicted_job, status_of
from operator_fixtures import A100, node, pod, reservation, snapshot, terminated

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
PLACE = {"worker": 0, "pod": "x-worker-0-1", "podUid": "pod-0-1", "node": "n1", "gpuUuids": ["GPU-0"]}
PLACE |= {"product": A100, "mode": "MPS", "neighbours": [{"namespace": "default", "job": "lone", "gpuUuid": "GPU-0"}]}


def home(peak_mib: int, measured_mib: int | None = 5500, heartbeat: str = "2026-01-31T12:00:11Z") -> GpuNode:
    """The node of a job that was measured to take so much, and of its neighbour."""
    there = node(reservation("lone", jobUid="lone", jobName="lone", tenant={"measuredMib": measured_mib}))
    tenant = {"podUid": "lone", "gpuUuid": "GPU-0", "memoryMib": peak_mib, "peakMemoryMib": peak_mib}
    told = msgspec.to_builtins(there)
    told["status"] |= {"tenants": [tenant], "heartbeatTime": heartbeat}
    return msgspec.convert(told, GpuNode)


def failed():
    return pod(phase="Failed", nodeName="n1", status=terminated(1, message=OOM, at="2026-01-31T11:59:58Z"))


def placed(attempts: list[dict[str, Any]] | None = None, **place: Any):
    return predicted_job(attempts=attempts, status={"placement": [PLACE | place], "restarts": 0})


@pytest.mark.parametrize(
    ("peak_mib", "measured_mib", "outcome", "restarts"),
    [
        pytest.param(6000, 5500, "GpuMemoryTaken", 0, id="a neighbour has grown"),
        pytest.param(5500, 5500, "GpuOutOfMemory", 1, id="it has not"),
        pytest.param(6000, None, "GpuOutOfMemory", 1, id="it counts with its promise"),
    ],
)
def test_a_neighbour_is_not_charged_for_who_grew(peak_mib, measured_mib, outcome, restarts) -> None:
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(home(peak_mib, measured_mib),))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == (outcome, restarts)
    if not restarts:
        assert "beside default/lone, which took more than before" in condition(decision, of, "Placed").message
        assert created(again(before, decision)) == ["x-worker-0-2"], "the first time nothing is waited for"


def test_who_grew_is_not_charged_but_learned_from() -> None:
    of = placed(measuredMib=5500)
    decision = reconcile(snapshot(of, pods=(failed(),), nodes=(home(1),)))
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("GpuOutOfMemory", 0)
    assert "promised more than the 5,500 MiB that it counted with" in condition(decision, of, "Placed").message


def test_who_had_nobody_beside_it_is_charged() -> None:
    of = placed(measuredMib=5500, neighbours=[])
    assert status_of(reconcile(snapshot(of, pods=(failed(),), nodes=(home(1),))), of).restarts == 1


def test_the_agents_word_on_the_neighbour_is_waited_for() -> None:
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(home(5000, heartbeat="2026-01-31T11:59:50Z"),))
    waiting = reconcile(before)
    assert waiting.requeue_after_s == 2
    assert status_of(waiting, of).attempts[0].outcome == "Running"
    later = again(before, waiting, now=snapshot(of, after_s=6).now, nodes=(home(6000),))
    assert status_of(later, of).attempts[0].outcome == "GpuMemoryTaken"
    silent = again(before, waiting, now=snapshot(of, after_s=19).now)
    assert status_of(silent, of).attempts[0].outcome == "GpuOutOfMemory"


def test_a_job_that_never_finds_peace_is_charged_in_the_end() -> None:
    told = [{"number": n, "outcome": "GpuMemoryTaken", "endedAt": "2026-01-31T11:00:00Z"} for n in (1, 2, 3)]
    of = placed([*told, {"number": 4, "outcome": "Running"}], pod="x-worker-0-4", podUid="pod-0-4")
    ended = terminated(1, message=OOM, at="2026-01-31T11:59:58Z")
    fourth = pod(attempt=4, phase="Failed", nodeName="n1", status=ended)
    decision = reconcile(snapshot(of, pods=(fourth,), nodes=(home(6000),)))
    status = status_of(decision, of)
    assert (status.attempts[-1].outcome, status.restarts) == ("GpuMemoryTaken", 1)
