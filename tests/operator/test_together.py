"""Workers that end together with others behind an MPS server are started again, and the job is not charged for it."""

from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.resources.node import GpuNode
from carpool_operator.reconcile import reconcile
from operator_decisions import again, condition, created, predicted_job, status_of
from operator_fixtures import A100, NOW, node, pod, reservation, snapshot, terminated

ENDED = "2026-01-31T11:59:58Z"
FAULT = "GPU GPU-0: a client's fatal fault has hit its MPS server: pods that it ends together: pod-0-1, other"
PLACE = {"worker": 0, "pod": "x-worker-0-1", "podUid": "pod-0-1", "node": "n1", "gpuUuids": ["GPU-0"]}
PLACE |= {"product": A100, "mode": "MPS"}


def home(*struck: str, simulated: bool = False) -> GpuNode:
    """The node; its agent says that these pods ended together."""
    found = node()
    status = msgspec.to_builtins(found.status)
    status |= {"simulated": simulated, "struck": [{"podUid": uid, "message": FAULT} for uid in struck]}
    return msgspec.convert({**msgspec.to_builtins(found), "status": status}, GpuNode)


def failed(at: str = ENDED, **ended: Any):
    return pod(phase="Failed", nodeName="n1", status=terminated(1, **{"message": "CUDA error", "at": at, **ended}))


def placed(attempts: list[dict[str, Any]] | None = None, **place: Any):
    return predicted_job(attempts=attempts, status={"placement": [PLACE | place], "restarts": 0})


def test_co_client_is_started_again_at_once_and_not_charged() -> None:
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(home("pod-0-1", "other"),))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("MpsClientsEnded", 0)
    assert f"pod x-worker-0-1: {FAULT}" in condition(decision, of, "Placed").message
    assert "not counted, 0 of 3 restarts used" in condition(decision, of, "Placed").message
    assert created(again(before, decision)) == ["x-worker-0-2"], "the first time nothing is waited for"


def test_agents_word_is_waited_for() -> None:
    """It comes a moment after the pod has failed, which alone would count as the job's own failure."""
    of = placed()
    before = snapshot(of, pods=(failed(),), nodes=(home(),))
    waiting = reconcile(before)
    assert waiting.requeue_after_s == 2
    assert status_of(waiting, of).attempts[0].outcome == "Running"
    later = again(before, waiting, now=snapshot(of, after_s=6).now, nodes=(home("pod-0-1"),))
    assert status_of(later, of).attempts[0].outcome == "MpsClientsEnded"
    silent = again(before, waiting, now=snapshot(of, after_s=19).now)
    assert (status_of(silent, of).attempts[0].outcome, status_of(silent, of).restarts) == ("ContainerFailed", 1)


def test_worker_that_is_waited_for_does_not_run() -> None:
    """Regression: a container that died of an ImportError was said to run for as long as the agent was waited for."""
    since = {"status": "True", "lastTransitionTime": "2026-01-31T11:00:00Z"}
    conditions = [{"type": "Placed", "reason": "Placed"} | since, {"type": "Running", "reason": "Running"} | since]
    of = predicted_job(status={"placement": [PLACE], "conditions": conditions, "state": "Running"})
    waiting = reconcile(snapshot(of, pods=(failed(message="ImportError: no torch"),), nodes=(home(),)))
    running = condition(waiting, of, "Running")
    assert (running.status, running.reason) == ("False", "WorkerFailed")
    assert "ImportError: no torch; waits for the node agent's report" in running.message
    assert status_of(waiting, of).state != "Running"
    unheard = placed()
    early = reconcile(snapshot(unheard, pods=(failed(),), nodes=(home(),)))
    assert condition(early, unheard, "Running").status == "False", "also where it ended before it was seen to run"


@pytest.mark.parametrize(
    ("wrote", "outcome"),
    [
        pytest.param("2026-01-31T12:00:09Z", "Running", id="before-it-has-looked-at-its-gpus"),
        pytest.param("2026-01-31T12:00:10.5Z", "ContainerFailed", id="after-it-has"),
    ],
)
def test_agent_that_has_written_since_and_told_nothing_is_waited_for_no_longer(wrote: str, outcome: str) -> None:
    there = home()
    there = msgspec.structs.replace(there, status=msgspec.structs.replace(there.status, heartbeat_time=wrote))
    of = placed()
    status = status_of(reconcile(snapshot(of, after_s=11, pods=(failed(),), nodes=(there,))), of)
    assert status.attempts[0].outcome == outcome


@pytest.mark.parametrize(
    ("of", "one", "there"),
    [
        pytest.param(placed(mode="TimeSlicing"), failed(), home(), id="no-daemon"),
        pytest.param(placed(), failed(), home(simulated=True), id="simulated-gpus-have-no-such-faults"),
        pytest.param(placed(), failed(at="2026-01-31T11:59:39Z"), home(), id="long-ago"),
        pytest.param(placed(), failed(at="2026-01-31T15:00:00Z"), home(), id="a-clock-that-is-hours-ahead"),
        pytest.param(placed(), failed(at=""), home(), id="nobody-knows-when"),
    ],
)
def test_nobodys_word_is_waited_for_where_none_comes(of, one, there: GpuNode) -> None:
    status = status_of(reconcile(snapshot(of, pods=(one,), nodes=(there,))), of)
    assert (status.attempts[0].outcome, status.restarts) == ("ContainerFailed", 1)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"message": "torch.OutOfMemoryError: CUDA out of memory"}, "GpuOutOfMemory"),
        ({"reason": "OOMKilled"}, "HostOutOfMemory"),
    ],
)
def test_who_says_what_was_wrong_with_it_is_believed(ended: dict[str, str], reason: str) -> None:
    of = placed()
    status = status_of(reconcile(snapshot(of, pods=(failed(**ended),), nodes=(home("pod-0-1"),))), of)
    assert (status.attempts[0].outcome, status.restarts) == (reason, 1)


def test_a_job_that_is_there_each_time_is_charged_in_the_end() -> None:
    """Its own fault, maybe: without an end it would take its neighbours with it for ever."""
    told = [{"number": n, "outcome": "MpsClientsEnded", "endedAt": rfc3339(NOW)} for n in (1, 2, 3)]
    of = placed([*told, {"number": 4, "outcome": "Running"}], pod="x-worker-0-4", podUid="pod-0-4")
    fourth = pod(attempt=4, phase="Failed", nodeName="n1", status=terminated(1, at=ENDED))
    decision = reconcile(snapshot(of, pods=(fourth,), nodes=(home("pod-0-4"),)))
    status = status_of(decision, of)
    assert (status.attempts[-1].outcome, status.restarts) == ("MpsClientsEnded", 1)
    assert "this counts because 3 attempts ended so before" in condition(decision, of, "Placed").message


def test_reservations_may_be_gone_by_then() -> None:
    of = predicted_job()
    running = reconcile(
        snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    )
    assert status_of(running, of).placement[0].mode.value == "MPS"
    later = again(snapshot(of), running, pods=(failed(),), nodes=(home("pod-0-1"),))
    assert status_of(later, of).attempts[0].outcome == "MpsClientsEnded"
