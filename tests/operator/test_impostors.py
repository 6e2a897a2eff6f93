"""Pods that name a job as their controller and are not its workers."""

import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_operator.reconcile import reconcile
from operator_decisions import created, deleted, events, predicted_job, status_of
from operator_fixtures import NOW, node, pod, reservation, snapshot, terminated


def test_forged_labels_do_not_make_a_pod_a_worker() -> None:
    """Regression: another pod with our UID as controller and a worker's labels stood in for the real, failed one."""
    of = predicted_job()
    forged = pod(0, 1, phase="Running", nodeName="n1", metadata={"name": "forged", "uid": "forged"})
    real = pod(0, 1, phase="Failed", status=terminated(1))
    decision = reconcile(snapshot(of, pods=(real, forged)))
    assert status_of(decision, of).attempts[0].outcome == "ContainerFailed"
    assert deleted(decision) == ["forged"]
    assert events(decision) == ["ForeignPod", "Restarting"]


@pytest.mark.parametrize("name", ["forged", "x-worker-0-999"])
def test_pod_of_an_attempt_that_never_was_disturbs_nobody(name: str) -> None:
    """Regression: one pod labelled attempt=999 made the operator adopt attempt 999 and delete the running worker."""
    of = predicted_job()
    real = pod(phase="Running", nodeName="n1")
    forged = pod(0, 999, phase="Running", metadata={"name": name, "uid": "forged"})
    decision = reconcile(snapshot(of, pods=(real, forged), nodes=(node(reservation("pod-0-1")),)))
    status = status_of(decision, of)
    assert [attempt.number for attempt in status.attempts] == [1]
    assert status.state == "Running"
    assert deleted(decision) == [name]


def test_changed_labels_of_a_running_worker_disturb_nobody() -> None:
    """Regression: `kubectl label pod x-worker-0-1 carpool.dev/attempt=999 --overwrite` ended the attempt."""
    of = predicted_job()
    labels = {keys.LABEL_JOB: "x", keys.LABEL_WORKER: "7", keys.LABEL_ATTEMPT: "999"}
    real = pod(phase="Running", nodeName="n1", metadata={"labels": labels})
    decision = reconcile(snapshot(of, pods=(real,), nodes=(node(reservation("pod-0-1")),)))
    assert deleted(decision) == []
    assert [a.outcome for a in status_of(decision, of).attempts] == ["Running"]


def test_impostor_that_cannot_be_deleted_holds_nothing_up() -> None:
    of = predicted_job(attempts=[])
    going = {"name": "forged", "uid": "forged", "deletionTimestamp": rfc3339(NOW), "finalizers": ["test/slow"]}
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", metadata=going),)))
    assert created(decision) == ["x-worker-0-1"]
    assert "ForeignPod" not in events(decision), "it is on its way out"
