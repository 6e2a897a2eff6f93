"""Attempts: how they begin, end and follow each other."""

from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.resources.job import GpuTrainingJob
from carpool_operator.attempts import spec_digest
from carpool_operator.reconcile import reconcile
from operator_decisions import again, condition, created, deleted, events, predicted_job, settled, status_of
from operator_fixtures import NOW, node, pod, reservation, snapshot, terminated


def test_all_pods_seen_turns_the_attempt_running() -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}])
    assert status_of(reconcile(snapshot(of, pods=(pod(),))), of).attempts[0].outcome == "Running"


def test_missing_pod_of_an_attempt_being_created_is_created() -> None:
    of = predicted_job(attempts=[{"number": 3, "outcome": "Creating"}], workers=2)
    decision = reconcile(snapshot(of, pods=(pod(attempt=3),)))
    assert created(decision) == ["x-worker-1-3"]


def test_pod_deleted_by_somebody_is_a_new_attempt_and_not_charged() -> None:
    of = predicted_job(workers=2)
    before = snapshot(of, pods=(pod(1, phase="Running"),))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("PodDeleted", 0)
    assert deleted(decision) == ["x-worker-1-1"]
    assert created(again(before, decision)) == [], "the other worker still runs"
    assert created(again(before, decision, pods=())) == ["x-worker-0-2", "x-worker-1-2"]


def test_pod_that_failed_because_it_is_being_deleted_is_not_charged() -> None:
    of = predicted_job()
    ending = pod(phase="Failed", metadata={"deletionTimestamp": "2026-01-31T11:59:30Z"}, status=terminated(143))
    assert status_of(reconcile(snapshot(of, pods=(ending,))), of).restarts == 0


def test_pods_taken_away_again_and_again_back_off() -> None:
    ended = [{"number": n, "outcome": "PodDeleted", "endedAt": rfc3339(NOW)} for n in (1, 2, 3)]
    decision = reconcile(snapshot(predicted_job(attempts=ended)))
    assert created(decision) == []
    assert decision.requeue_after_s == 20


def test_failed_worker_ends_the_attempt_of_all() -> None:
    known = [{"type": "Predicted", "status": "True", "reason": "Estimated"}]
    of = predicted_job(workers=2, status={"conditions": known})
    out_of_memory = terminated(1, message="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    pods = (pod(0, phase="Failed", status=out_of_memory), pod(1, phase="Running"))
    before = snapshot(of, pods=pods)
    decision = reconcile(before)
    status = status_of(decision, of)
    assert status.attempts[0].outcome == "GpuOutOfMemory"
    assert status.restarts == 1
    assert deleted(decision) == ["x-worker-1-1"], "the failed pod stays for its logs"
    assert decision.requeue_after_s == 10
    assert condition(decision, of, "Placed").reason == "BackingOff"
    assert status.state == "BackingOff"
    assert "1 of 3 restarts used" in condition(decision, of, "Placed").message
    assert events(decision) == ["Restarting"]
    later = again(before, decision, now=snapshot(of, after_s=11).now, pods=pods[:1])
    assert created(later) == ["x-worker-0-2", "x-worker-1-2"]


def test_pods_that_outlived_a_crash_after_their_attempt_had_ended_are_deleted() -> None:
    """Regression: the operator was killed after it wrote the failure and before it deleted the other workers."""
    of = predicted_job(attempts=[{"number": 1, "outcome": "ContainerFailed", "endedAt": rfc3339(NOW)}], workers=2)
    pods = (pod(0, phase="Failed", status=terminated(1)), pod(1, phase="Running"))
    assert deleted(reconcile(snapshot(of, pods=pods))) == ["x-worker-1-1"]


def test_first_to_end_is_the_cause() -> None:
    of = predicted_job(workers=2)
    victim = pod(0, phase="Failed", status=terminated(7, at="2026-01-31T11:59:09Z"))
    culprit = pod(1, phase="Failed", status=terminated(137, reason="OOMKilled", at="2026-01-31T11:59:01Z"))
    assert status_of(reconcile(snapshot(of, pods=(victim, culprit))), of).attempts[0].outcome == "HostOutOfMemory"


def test_backoff_doubles_and_the_limit_fails_the_job() -> None:
    ended = [{"number": n, "outcome": "ContainerFailed", "endedAt": rfc3339(NOW)} for n in (1, 2, 3)]
    waiting = reconcile(snapshot(predicted_job(attempts=ended, status={"restarts": 3}), after_s=1))
    assert waiting.requeue_after_s == 39
    of = predicted_job(attempts=[*ended, {"number": 4, "outcome": "Running"}], status={"restarts": 3})
    decision = reconcile(snapshot(of, pods=(pod(attempt=4, phase="Failed", status=terminated(3)),)))
    found = condition(decision, of, "Failed")
    assert (found.status, found.reason) == ("True", "ContainerFailed")
    assert "exit code 3" in found.message
    assert "all 3 restarts" in found.message
    status = status_of(decision, of)
    assert (status.state, status.restarts, status.completion_time) == ("Failed", 3, rfc3339(NOW))


def test_all_workers_succeeded() -> None:
    of = predicted_job(workers=2)
    decision = reconcile(snapshot(of, pods=(pod(0, phase="Succeeded"), pod(1, phase="Succeeded"))))
    status = status_of(decision, of)
    assert status.state == "Complete"
    assert status.attempts[0].outcome == "Complete"
    assert status.completion_time == rfc3339(NOW)
    assert events(decision) == ["Complete"]


def edited(of: GpuTrainingJob, **spec: Any) -> GpuTrainingJob:
    """A job after its user has changed its spec: the attempt under way knows which spec it was built from."""
    digest = spec_digest(of.spec)
    tried = [msgspec.structs.replace(a, spec_digest=digest) for a in of.status.attempts]
    after = predicted_job(**spec)
    metadata = msgspec.structs.replace(after.metadata, generation=3)
    return msgspec.structs.replace(after, metadata=metadata, status=msgspec.structs.replace(of.status, attempts=tried))


def test_spec_changed_before_placement_begins_again_with_new_pods() -> None:
    changed = edited(predicted_job(workers=2), workers=1)
    before = snapshot(changed, pods=(pod(0), pod(1)))
    decision = reconcile(before)
    status = status_of(decision, changed)
    assert (status.attempts[0].outcome, status.restarts) == ("SpecChanged", 0)
    assert deleted(decision) == ["x-worker-1-1", "x-worker-0-1"]
    after = again(before, decision, pods=())
    assert created(after) == ["x-worker-0-2"]
    assert status_of(after, changed).attempts[-1].spec_digest == spec_digest(changed.spec)


def test_run_policy_changed_leaves_a_queued_attempt_alone() -> None:
    """Regression: raising backoffLimit of a job that had waited for a GPU sent it back to the end of the queue."""
    changed = edited(predicted_job(), runPolicy={"backoffLimit": 9, "activeDeadlineSeconds": 3600})
    decision = reconcile(snapshot(changed, pods=(pod(),)))
    assert deleted(decision) == []
    status = status_of(decision, changed)
    assert (status.attempts[0].outcome, status.observed_generation) == ("Running", 3)


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_spec_changed_between_binding_and_placement_begins_again(phase: str) -> None:
    """Regression: a bound pod of the old spec went on under the new one, as nothing had locked the spec yet."""
    changed = edited(predicted_job(), memory={"limit": "8Gi"})
    bound = pod(phase=phase, nodeName="n1")
    before = snapshot(changed, pods=(bound,), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    status = status_of(decision, changed)
    assert (status.attempts[0].outcome, status.restarts, status.placement) == ("SpecChanged", 0, [])
    assert deleted(decision) == ["x-worker-0-1"]
    assert created(again(before, decision, pods=())) == ["x-worker-0-2"]


def test_digest_that_a_new_version_computes_otherwise_disturbs_nobody() -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Running", "specDigest": "of another version"}])
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),)))
    assert deleted(decision) == []


def test_suspended_job_loses_its_pods_and_comes_back_in_a_new_attempt() -> None:
    of = predicted_job(runPolicy={"suspend": True}, status={"startTime": "2026-01-31T11:00:00Z"})
    before = snapshot(of, pods=(pod(phase="Running"),))
    decision = reconcile(before)
    assert deleted(decision) == ["x-worker-0-1"]
    status = status_of(decision, of)
    assert (status.state, status.attempts[0].outcome, status.start_time) == ("Suspended", "Suspended", None)
    resumed = settled(msgspec.structs.replace(predicted_job(), status=status))
    decision = reconcile(snapshot(resumed))
    assert created(decision) == ["x-worker-0-2"]
    assert status_of(decision, resumed).restarts == 0
    assert condition(decision, resumed, "Suspended").status == "False"


def test_stray_pods_are_deleted_and_old_failures_too() -> None:
    of = predicted_job(attempts=[{"number": 4, "outcome": "Running"}])
    strays = (pod(0, 3, phase="Running"), pod(0, 2, phase="Failed"), pod(0, 3, phase="Failed"))
    odd = pod(metadata={"name": "odd", "labels": {}}, phase="Running")
    decision = reconcile(snapshot(of, pods=(pod(0, 4, phase="Running"), *strays, odd)))
    assert deleted(decision) == ["odd", "x-worker-0-3", "x-worker-0-2"]


def test_pods_are_recorded_once_all_of_them_exist() -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}], workers=2)
    assert status_of(reconcile(snapshot(of, pods=(pod(0),))), of).attempts[0].pod_uids == []
    assert status_of(reconcile(snapshot(of, pods=(pod(0), pod(1)))), of).attempts[0].pod_uids == ["pod-0-1", "pod-1-1"]


def test_only_the_latest_attempt_keeps_its_pods() -> None:
    ended = {"number": 1, "outcome": "PodDeleted", "endedAt": rfc3339(NOW), "podUids": ["pod-0-1"]}
    of = predicted_job(attempts=[ended])
    assert [a.pod_uids for a in status_of(reconcile(snapshot(of)), of).attempts] == [[], []]
