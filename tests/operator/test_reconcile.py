"""State in, state out: each case is a job with what stands around it, and what is decided."""

from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_operator.actions import CheckTemplate, Decision, DeleteJob, Predict, WriteStatus
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import Refusal
from operator_decisions import again, condition, created, deleted, events, predicted_job, status_of
from operator_fixtures import A100, DIGEST, NOW, abstention, job, node, pod, prediction, reservation, snapshot, template


def test_new_job_asks_for_its_prediction_and_creates_nothing() -> None:
    of = job()
    decision = reconcile(snapshot(of))
    assert decision.actions == (Predict(DIGEST, (A100,)),), "not even a status, for a millisecond's sake"
    assert of.status.state == "Predicting"


def test_template_is_checked_before_its_model_is_traced() -> None:
    """Regression: a misspelt field was found out only when the first pod was created, minutes later."""
    decision = reconcile(snapshot(job(), is_template_checked=False))
    first, then = decision.actions
    assert isinstance(first, CheckTemplate)
    assert first.body["metadata"]["name"] == "x-worker-0-1"
    assert then == Predict(DIGEST, (A100,))


def test_job_whose_template_was_refused_is_not_traced() -> None:
    refusal = Refusal("InvalidTemplate", "spec.template.spec.containers[0].comand: a pod has no such field", True)
    of = job()
    decision = reconcile(snapshot(of, refusal=refusal))
    assert condition(decision, of, "Failed").message.startswith(f"{refusal.message}; ")
    assert not any(isinstance(action, Predict) for action in decision.actions)


def test_catalog_job_says_that_it_is_being_traced() -> None:
    of = job(model={"catalog": {"name": "timm/resnet50"}})
    found = condition(reconcile(snapshot(of)), of, "Predicted")
    assert (found.status, found.reason) == ("Unknown", "Tracing")
    assert "timm/resnet50" in found.message


def test_prediction_and_attempt_are_written_before_the_pods_are_created() -> None:
    of = job(workers=2)
    decision = reconcile(snapshot(of, prediction=prediction()))
    assert isinstance(decision.actions[0], WriteStatus)
    assert created(decision) == ["x-worker-0-1", "x-worker-1-1"]
    status = status_of(decision, of)
    assert (status.attempts[0].number, status.attempts[0].outcome) == (1, "Creating")
    assert condition(decision, of, "Predicted").status == "True"
    assert status.observed_generation == 2
    assert status.state == "Queued"
    assert "Predicted" in events(decision)


def test_nothing_is_decided_twice() -> None:
    before = snapshot(job(), prediction=prediction())
    first = reconcile(before)
    second = again(before, first, expected=frozenset({"x-worker-0-1"}))
    assert second.actions == ()


def test_unknown_model_runs_alone_and_says_why() -> None:
    of = job(model=None)
    one = snapshot(of, prediction=abstention())
    decision = reconcile(one)
    found = condition(decision, of, "Predicted")
    assert (found.status, found.reason) == ("False", "UnknownModel")
    assert created(decision) == ["x-worker-0-1"]
    placed_on = node(reservation("pod-0-1", mode="Exclusive", memoryLimitMib=None))
    bound = pod(nodeName="n1")
    placed = condition(again(one, decision, pods=(bound,), nodes=(placed_on,)), of, "Placed")
    assert placed.status == "True"
    assert "runs alone" in placed.message
    assert "spec.model is left out" in placed.message


def test_new_product_renews_the_prediction_without_disturbing_the_run() -> None:
    of = predicted_job()
    decision = reconcile(snapshot(of, products=(A100, "Tesla T4"), pods=(pod(phase="Running", nodeName="n1"),)))
    assert Predict(DIGEST, (A100, "Tesla T4")) in decision.actions
    assert deleted(decision) == []
    assert status_of(decision, of).attempts[0].outcome == "Running"


def test_changed_input_renews_the_prediction() -> None:
    of = predicted_job(attempts=[])
    decision = reconcile(snapshot(of, digest="digest-2"))
    assert Predict("digest-2", (A100,)) in decision.actions
    assert created(decision) == []


@pytest.mark.parametrize(
    ("nodes", "reason", "told"),
    [
        pytest.param((), "NoGpuNodes", "no node", id="no GPUs at all"),
        pytest.param((node(gpus=1),), "ExceedsEveryGpu", "needs 90,112 MiB", id="larger than every GPU"),
    ],
)
def test_job_that_never_fits_gets_no_pod_and_no_retry(nodes: tuple[Any, ...], reason: str, told: str) -> None:
    of = job(memory={"limit": "88Gi"})
    before = snapshot(of, prediction=prediction(), nodes=nodes)
    decision = reconcile(before)
    found = condition(decision, of, "Placed")
    assert (found.status, found.reason) == ("False", reason)
    assert told in found.message
    assert created(decision) == []
    assert decision.requeue_after_s is None
    assert reason in events(decision)
    assert again(before, decision).actions == ()


def test_a_product_that_no_node_has_is_not_called_too_small() -> None:
    of = job(gpu={"product": "B200"})
    decision = reconcile(snapshot(of, prediction=prediction()))
    found = condition(decision, of, "Placed")
    assert found.reason == "NoSuchGpu"
    assert "wrong product: wants B200" in found.message
    assert status_of(decision, of).state == "Unplaceable"


def test_gang_that_needs_more_gpus_than_any_node_has() -> None:
    of = job(gpusPerWorker=2)
    found = condition(reconcile(snapshot(of, prediction=prediction())), of, "Placed")
    assert found.message == "needs 2 suitable GPUs on one node, the best node has 1"


def test_job_suspended_from_the_start_is_predicted_but_has_no_pods() -> None:
    of = job(runPolicy={"suspend": True})
    decision = reconcile(snapshot(of, prediction=prediction()))
    assert created(decision) == []
    assert condition(decision, of, "Predicted").status == "True"
    assert status_of(decision, of).state == "Suspended"


def test_deadline_fails_the_job() -> None:
    started = {"startTime": rfc3339(NOW)}
    of = predicted_job(runPolicy={"activeDeadlineSeconds": 60}, status=started)
    pods = (pod(phase="Running"),)
    assert reconcile(snapshot(of, pods=pods, after_s=20)).requeue_after_s == 40
    decision = reconcile(snapshot(of, pods=pods, after_s=60))
    assert condition(decision, of, "Failed").reason == "DeadlineExceeded"
    assert deleted(decision) == ["x-worker-0-1"]


FINISHED = {
    "completionTime": rfc3339(NOW),
    "state": "Complete",
    "observedGeneration": 2,
    "conditions": [{"type": "Complete", "status": "True", "reason": "Complete"}],
}


def test_finished_job_is_deleted_after_its_time() -> None:
    of = job(FINISHED, runPolicy={"ttlSecondsAfterFinished": 30})
    assert reconcile(snapshot(of)) == Decision((), 30)
    assert reconcile(snapshot(of, after_s=30)).actions == (DeleteJob(),)


def test_finished_job_keeps_nothing_running() -> None:
    decision = reconcile(snapshot(job(FINISHED), pods=(pod(phase="Running"), pod(1, phase="Succeeded"))))
    assert deleted(decision) == ["x-worker-0-1"]


def test_job_being_deleted_is_left_to_the_garbage_collector() -> None:
    of = job()
    going = msgspec.structs.replace(of.metadata, deletion_timestamp=rfc3339(NOW))
    assert reconcile(snapshot(msgspec.structs.replace(of, metadata=going))) == Decision()


def test_bad_template_fails_with_the_sentence() -> None:
    of = job(template=template(nodeName="n1"))
    decision = reconcile(snapshot(of))
    found = condition(decision, of, "Failed")
    assert found.reason == "InvalidTemplate"
    assert "spec.template.spec.nodeName is set to n1" in found.message
    assert found.message.endswith("delete it, and apply the corrected one")


@pytest.mark.parametrize(
    ("refusal", "condition_type", "status"),
    [
        pytest.param(Refusal("InvalidTemplate", "image: Required", is_final=True), "Failed", "True", id="invalid"),
        pytest.param(Refusal("PodForbidden", "exceeded quota", is_final=False), "Placed", "False", id="quota"),
        pytest.param(Refusal("PodNameTaken", "belongs to y", is_final=False), "Placed", "False", id="name taken"),
    ],
)
def test_refused_pod(refusal: Refusal, condition_type: str, status: str) -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}])
    decision = reconcile(snapshot(of, refusal=refusal))
    found = condition(decision, of, condition_type)
    assert (found.status, found.reason) == (status, refusal.reason)
    assert found.message.startswith(refusal.message)
    assert created(decision) == [], "not at once"
    if not refusal.is_final:
        assert decision.requeue_after_s == 15
        assert created(again(snapshot(of), decision)) == ["x-worker-0-1"]


def test_unreadable_quantity_fails_with_what_was_expected() -> None:
    of = predicted_job(memory={"limit": "12Q"}, attempts=[])
    found = condition(reconcile(snapshot(of)), of, "Failed")
    assert found.reason == "InvalidSpec"
    assert "such as 12Gi" in found.message
