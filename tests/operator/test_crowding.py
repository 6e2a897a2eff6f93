"""Whoever runs out of GPU memory because a job grew that had been counted as measured is started again for nothing."""

from typing import Any

import msgspec
import pytest
from carpool_core.resources.node import GpuNode
from carpool_operator.placement import placements
from carpool_operator.reconcile import reconcile
from operator_decisions import again, condition, created, predicted_job, status_of
from operator_fixtures import A100, node, pod, reservation, snapshot, terminated

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
PLACE = {"worker": 0, "pod": "x-worker-0-1", "podUid": "pod-0-1", "node": "n1", "gpuUuids": ["GPU-0"]}
PLACE |= {"memoryLimitMib": 4000}
PLACE |= {"product": A100, "mode": "MPS", "neighbours": [{"namespace": "default", "job": "lone", "gpuUuid": "GPU-0"}]}


def home(
    peak_mib: int,
    measured_mib: int | None = 5500,
    heartbeat: str = "2026-01-31T12:00:11Z",
    own_mib: int = 0,
    **held: Any,
) -> GpuNode:
    """The node of a job that was measured to take so much, and of its neighbour; its GPU has 40,960 MiB."""
    tenant = {"measuredMib": measured_mib, "memoryMib": 39000}
    there = node(reservation("lone", **({"jobUid": "lone", "jobName": "lone", "tenant": tenant} | held)))
    peaks = {"lone": peak_mib, "pod-0-1": own_mib}
    tenants = [
        {"podUid": of, "gpuUuid": "GPU-0", "memoryMib": mib, "peakMemoryMib": mib} for of, mib in peaks.items() if mib
    ]
    told = msgspec.to_builtins(there)
    told["status"] |= {"tenants": tenants, "heartbeatTime": heartbeat}
    return msgspec.convert(told, GpuNode)


def failed():
    return pod(phase="Failed", nodeName="n1", status=terminated(1, message=OOM, at="2026-01-31T11:59:58Z"))


def placed(attempts: list[dict[str, Any]] | None = None, **place: Any):
    return predicted_job(attempts=attempts, status={"placement": [PLACE | place], "restarts": 0})


TAKEN, OWN = ("GpuMemoryTaken", 0), ("GpuOutOfMemory", 1)
TURNS = {"mode": "TimeSlicing", "memoryLimitMib": None}


@pytest.mark.parametrize(
    ("there", "place", "expected"),
    [
        pytest.param(home(37000), {}, TAKEN, id="a neighbour has grown and left less than was promised"),
        pytest.param(home(36700), {}, TAKEN, id="so little more that the agent does not tell of it"),
        pytest.param(home(37000, None), {}, TAKEN, id="what was measured of the neighbour is void by now"),
        pytest.param(home(37000, own_mib=2000), {}, TAKEN, id="it took less than its limit"),
        pytest.param(home(6000), {}, OWN, id="a neighbour has grown, and there was room"),
        pytest.param(home(37000, own_mib=3980), {}, OWN, id="it was at its own limit"),
        pytest.param(home(5500), {}, OWN, id="nobody has grown"),
        pytest.param(home(6000, **TURNS), TURNS, TAKEN, id="by turns, beside one that has grown"),
        pytest.param(home(6000, own_mib=35400, **TURNS), TURNS, OWN, id="by turns, having taken all that was left"),
        pytest.param(home(5000, **TURNS), TURNS, OWN, id="by turns, beside one that has not grown"),
        pytest.param(home(39500, None, **TURNS), TURNS, TAKEN, id="by turns, beside one beyond its promise"),
    ],
)
def test_a_neighbour_is_charged_unless_others_left_it_less_than_it_was_promised(there, place, expected) -> None:
    of = placed(**place)
    before = snapshot(of, pods=(failed(),), nodes=(there,))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == expected
    if expected == TAKEN:
        assert "beside default/lone, which took more than before" in condition(decision, of, "Placed").message
        assert created(again(before, decision)) == ["x-worker-0-2"], "the first time nothing is waited for"


def test_who_grew_is_not_charged_but_learned_from() -> None:
    of = placed(measuredMib=5500)
    decision = reconcile(snapshot(of, pods=(failed(),), nodes=(home(1),)))
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("GpuOutOfMemory", 0)
    assert "it counted with its measured 5,500 MiB, less than its bound" in condition(decision, of, "Placed").message


def test_who_had_nobody_beside_it_is_charged() -> None:
    of = placed(measuredMib=5500, neighbours=[])
    assert status_of(reconcile(snapshot(of, pods=(failed(),), nodes=(home(1),))), of).restarts == 1


def test_the_agents_word_on_the_neighbour_is_waited_for() -> None:
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(home(5000, heartbeat="2026-01-31T11:59:50Z"),))
    waiting = reconcile(before)
    assert waiting.requeue_after_s == 2
    assert status_of(waiting, of).attempts[0].outcome == "Running"
    later = again(before, waiting, now=snapshot(of, after_s=6).now, nodes=(home(37000),))
    assert status_of(later, of).attempts[0].outcome == "GpuMemoryTaken"
    silent = again(before, waiting, now=snapshot(of, after_s=19).now)
    assert status_of(silent, of).attempts[0].outcome == "GpuOutOfMemory"


def test_a_job_that_never_finds_peace_is_charged_in_the_end() -> None:
    told = [{"number": n, "outcome": "GpuMemoryTaken", "endedAt": "2026-01-31T11:00:00Z"} for n in (1, 2, 3)]
    of = placed([*told, {"number": 4, "outcome": "Running"}], pod="x-worker-0-4", podUid="pod-0-4")
    ended = terminated(1, message=OOM, at="2026-01-31T11:59:58Z")
    fourth = pod(attempt=4, phase="Failed", nodeName="n1", status=ended)
    decision = reconcile(snapshot(of, pods=(fourth,), nodes=(home(37000),)))
    status = status_of(decision, of)
    assert (status.attempts[-1].outcome, status.restarts) == ("GpuOutOfMemory", 1), "which is learned from"
    assert "because 3 attempts ended so before" in status.attempts[-1].message


def test_who_grew_is_known_after_what_was_measured_of_it_is_void() -> None:
    of = placed(measuredMib=5500)
    running = pod(phase="Running", nodeName="n1")
    there = node(reservation("pod-0-1", tenant={"memoryMib": 9000}))
    [place] = placements(of, [running], [there])
    assert (place.measured_mib, place.memory_limit_mib) == (5500, 3000)
