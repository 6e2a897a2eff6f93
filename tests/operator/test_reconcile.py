"""Decisions: each case is a snapshot and the actions that follow."""

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob
from carpool_operator.actions import (
    CheckTemplate,
    CreatePod,
    Decision,
    DeleteJob,
    Predict,
    ReadWarnings,
    WriteStatus,
)
from carpool_operator.attempts import spec_digest
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import PodWarning, Refusal
from operator_fixtures import (
    A100,
    DIGEST,
    NOW,
    abstention,
    again,
    condition,
    created,
    deleted,
    events,
    job,
    node,
    pod,
    predicted_job,
    prediction,
    reservation,
    settled,
    snapshot,
    status_of,
    template,
    terminated,
)


def test_new_job_requests_its_prediction_and_creates_nothing() -> None:
    of = job()
    decision = reconcile(snapshot(of))
    assert decision.actions == (Predict(DIGEST, (A100,)),), "no status for a millisecond"
    assert of.status.state == "Predicting"


def test_template_is_checked_before_its_model_is_traced() -> None:
    """Regression: a misspelt field was reported only when the first pod was created, minutes later."""
    decision = reconcile(snapshot(job(), is_template_checked=False))
    first, then = decision.actions
    assert isinstance(first, CheckTemplate)
    assert first.body["metadata"]["name"] == "x-worker-0-1"
    assert then == Predict(DIGEST, (A100,))


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


def test_changed_input_renews_the_prediction() -> None:
    of = predicted_job(attempts=[])
    decision = reconcile(snapshot(of, digest="digest-2"))
    assert Predict("digest-2", (A100,)) in decision.actions
    assert created(decision) == []


@pytest.mark.parametrize(
    ("nodes", "spec", "reason", "message"),
    [
        pytest.param((), {}, "NoGpuNodes", "no node of this cluster reports GPUs", id="no GPUs"),
        pytest.param(
            (node(gpus=4), node(gpus=4)),
            {"memory": {"limit": "88Gi"}},
            "ExceedsEveryGpu",
            "no GPU of this cluster can hold it: 8 GPUs: too small: needs 90,112 MiB, has 40,960 MiB",
            id="too large",
        ),
        pytest.param((node(),), {"gpu": {"product": "B200"}}, "NoSuchGpu", "wrong product: wants B200", id="product"),
        pytest.param(
            (node(),),
            {"gpusPerWorker": 2},
            "ExceedsEveryGpu",
            "needs 2 suitable GPUs on one node, the best node has 1",
            id="too many GPUs",
        ),
    ],
)
def test_infeasible_job_gets_no_pods_and_no_retry(
    nodes: tuple[Any, ...], spec: dict[str, Any], reason: str, message: str
) -> None:
    of = job(**spec)
    before = snapshot(of, prediction=prediction(), nodes=nodes)
    decision = reconcile(before)
    found = condition(decision, of, "Placed")
    assert (found.status, found.reason) == ("False", reason)
    assert message in found.message
    assert created(decision) == []
    assert decision.requeue_after_s is None
    assert reason in events(decision)
    assert status_of(decision, of).state == ("Queued" if reason == "NoGpuNodes" else "Unplaceable")
    assert again(before, decision).actions == ()


@pytest.mark.parametrize(
    ("nodes", "spec", "avoided"),
    [
        pytest.param((), {}, None, id="no GPUs"),
        pytest.param(
            (node(gpus=4),), {"memory": {"limit": "88Gi"}}, ["Simulated-NVIDIA-A100-SXM4-40GB"], id="too large"
        ),
        pytest.param((node(),), {"gpusPerWorker": 2}, None, id="too many GPUs of a suitable product"),
    ],
)
def test_infeasible_job_gets_pods_if_a_node_may_be_added(
    nodes: tuple[Any, ...], spec: dict[str, Any], avoided: list[str] | None
) -> None:
    of = job(**spec)
    before = snapshot(of, prediction=prediction(), nodes=nodes, autoscaling=True)
    decision = reconcile(before)
    (body,) = [action.body["spec"] for action in decision.actions if isinstance(action, CreatePod)]
    assert body["schedulingGates"] == [{"name": "carpool.dev/admission"}]
    assert re.findall(r"'values': (\[.*?\])", str(body.get("affinity"))) == ([str(avoided)] if avoided else [])
    waiting = again(before, decision, pods=(pod(schedulingGates=body["schedulingGates"]),))
    assert created(waiting) == deleted(waiting) == []
    assert condition(waiting, of, "Placed").reason == "Queued"


def test_job_suspended_from_the_start_is_predicted_but_has_no_pods() -> None:
    of = job(runPolicy={"suspend": True})
    decision = reconcile(snapshot(of, prediction=prediction()))
    assert created(decision) == []
    assert condition(decision, of, "Predicted").status == "True"
    assert status_of(decision, of).state == "Suspended"


def bound(worker: int, before_s: float, waiting: dict[str, str] | None = None, **status: Any) -> Pod:
    """A pod that was bound so many seconds before NOW; it runs unless its container waits."""
    at = rfc3339(NOW - timedelta(seconds=before_s))
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}]
    if waiting is None:
        return pod(worker, phase="Running", nodeName="n1", status={"conditions": conditions})
    status = {"containerStatuses": [{"name": "train", "state": {"waiting": waiting}}]} | status
    return pod(worker, nodeName="n1", status={"conditions": conditions, **status})


IMAGE = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "train:typo"'}
SECRET = {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}
CREATING = {"reason": "ContainerCreating"}
INIT_IMAGE = {"initContainerStatuses": [{"name": "fetch", "state": {"waiting": IMAGE}}]}
INIT_RUNS = {"initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}]}


@pytest.mark.parametrize(
    ("second", "reason", "words"),
    [
        pytest.param(bound(1, 600, IMAGE), "ImagePullBackOff", 'pulling image "train:typo"', id="wrong image"),
        pytest.param(bound(1, 600, SECRET), "CreateContainerConfigError", 'secret "token" not found', id="no secret"),
        pytest.param(bound(1, 600, CREATING), "FailedMount", 'secret "data" not found', id="no volume"),
        pytest.param(
            bound(1, 600, {"reason": "PodInitializing"}, **INIT_IMAGE), "ImagePullBackOff", "fetch", id="init image"
        ),
        pytest.param(bound(1, 599, IMAGE), None, "", id="in time"),
        pytest.param(bound(1, 600), None, "", id="started"),
        pytest.param(bound(1, 9999, {"reason": "PodInitializing"}, **INIT_RUNS), None, "", id="init container runs"),
        pytest.param(pod(1), None, "", id="not bound"),
    ],
)
def test_job_fails_if_a_container_does_not_start_in_time(second: Pod, reason: str | None, words: str) -> None:
    """Regression: a wrong image held an H100 past every deadline."""
    of = predicted_job(workers=2)
    held = node(reservation("pod-0-1"), reservation("pod-1-1"))
    warnings = {"pod-1-1": PodWarning("FailedMount", 'MountVolume.SetUp failed: secret "data" not found')}
    decision = reconcile(snapshot(of, pods=(bound(0, 610), second), nodes=(held,), warnings=warnings))
    status = status_of(decision, of)
    assert (status.state == "Failed") is (reason is not None)
    if reason is not None:
        failed = condition(decision, of, "Failed")
        assert failed.reason == reason
        assert words in failed.message
        assert "startDeadlineSeconds" in failed.message
        assert deleted(decision) == ["x-worker-0-1", "x-worker-1-1"]


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param(IMAGE, ["ImagePullBackOff"], id="wrong image"),
        pytest.param(SECRET, ["CreateContainerConfigError"], id="no secret"),
        pytest.param(CREATING, [], id="ordinary"),
    ],
)
def test_start_failure_is_an_event_of_the_job_once(waiting: dict[str, str], expected: list[str]) -> None:
    before = snapshot(predicted_job(), pods=(bound(0, 5, waiting),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    assert [reason for reason in events(decision) if reason != "Placed"] == expected
    assert events(again(before, decision)) == []


def test_job_restarts_if_the_kubelet_gives_no_reason() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(bound(0, 600, CREATING),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    bound_at = before.pods[0].bound_at
    assert bound_at is not None
    assert [action for action in decision.actions if not isinstance(action, WriteStatus)] == [
        ReadWarnings("pod-0-1", bound_at)
    ]
    decision = reconcile(replace(before, warnings={"pod-0-1": None}))
    status = status_of(decision, of)
    assert (status.restarts, status.attempts[0].outcome) == (1, "StartDeadlineExceeded")
    assert "node n1 gives no reason" in condition(decision, of, "Placed").message
    assert deleted(decision) == ["x-worker-0-1"]


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"podFailurePolicy": {"rules": list(rules)}, "backoffLimit": 1}


def on_exit(action: str, operator: str, *values: int, **container: str) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(values), **container}}


def on_condition(action: str, **wanted: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "Other"}, wanted]}


PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


@pytest.mark.parametrize(
    ("rules", "status", "expected"),
    [
        pytest.param([on_exit("FailJob", "In", 3, 42)], terminated(42), (True, 0), id="the job fails"),
        pytest.param([on_exit("FailJob", "In", 3)], terminated(42), (False, 1), id="no match"),
        pytest.param([on_exit("FailJob", "NotIn", 3)], terminated(42), (True, 0), id="NotIn"),
        pytest.param([on_exit("FailJob", "NotIn", 42)], terminated(42), (False, 1), id="NotIn without match"),
        pytest.param([on_exit("Ignore", "In", 42)], terminated(42), (False, 0), id="ignored"),
        pytest.param(
            [on_exit("Ignore", "In", 42), on_exit("FailJob", "In", 42)], terminated(42), (False, 0), id="order"
        ),
        pytest.param([on_exit("FailJob", "In", 42, containerName="train")], terminated(42), (True, 0), id="container"),
        pytest.param(
            [on_exit("FailJob", "NotIn", 1)],
            {"containerStatuses": [{"name": "side", "state": {"terminated": {"exitCode": 0}}}]},
            (False, 1),
            id="a container that ended with 0",
        ),
        pytest.param(
            [on_condition("Count", type="DisruptionTarget")], {"conditions": [PREEMPTED]}, (False, 1), id="count"
        ),
        pytest.param(
            [on_condition("FailJob", type="DisruptionTarget", status="False")],
            {"conditions": [PREEMPTED]},
            (False, 0),
            id="another status of the condition",
        ),
    ],
)
def test_pod_failure_policy_decides_as_in_a_job(rules: list[Any], status: dict[str, Any], expected) -> None:
    of = predicted_job(runPolicy=policy(*rules))
    decision = reconcile(snapshot(of, pods=(pod(phase="Failed", status=status),)))
    after = status_of(decision, of)
    assert (after.state == "Failed", after.restarts) == expected
    if after.state == "Failed":
        found = condition(decision, of, "Failed")
        assert found.reason == "PodFailurePolicy"
        assert "exit code 42 of container train matches rule 0 of runPolicy.podFailurePolicy" in found.message
        assert after.attempts[0].outcome == "ContainerFailed"


def test_rule_about_an_unknown_container_fails_the_job_before_its_first_pod() -> None:
    of = job(runPolicy=policy(on_exit("FailJob", "In", 42, containerName="trian")))
    found = condition(reconcile(snapshot(of)), of, "Failed")
    assert found.reason == "InvalidSpec"
    assert "rules[0].onExitCodes.containerName: the template has no container trian" in found.message


WAITING = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]}
QUOTA = Refusal("PodForbidden", "exceeded quota", is_final=False, retry_in_s=15)


@pytest.mark.parametrize(
    ("pods", "refusal", "message"),
    [
        pytest.param((bound(0, 120), pod(1, status=WAITING)), None, "1 of 2 workers were bound within 120 s", id="GPU"),
        pytest.param((bound(0, 119), pod(1, status=WAITING)), None, "", id="in time"),
        pytest.param((bound(0, 999), bound(1, 1)), None, "", id="all bound"),
        pytest.param((pod(0), pod(1)), None, "", id="none bound: the gang waits in the queue"),
        pytest.param((pod(0),), QUOTA, "so all release their GPUs: exceeded quota", id="quota"),
        pytest.param((), QUOTA, "", id="none created"),
    ],
)
def test_gang_that_is_not_wholly_bound_releases_everything(
    pods: tuple[Pod, ...], refusal: Refusal | None, message: str
) -> None:
    began = {"number": 1, "outcome": "Creating", "startedAt": rfc3339(NOW - timedelta(seconds=200))}
    of = predicted_job(workers=2, attempts=[began])
    held = node(reservation("pod-0-1"), reservation("pod-1-1"))
    decision = reconcile(snapshot(of, pods=pods, refusal=refusal, nodes=(held,)))
    attempt = status_of(decision, of).attempts[0]
    assert (attempt.outcome == "GangTimeout") is bool(message)
    if message:
        assert message in attempt.message
        assert deleted(decision) == [one.metadata.name for one in pods]
        assert status_of(decision, of).restarts == 0
        assert condition(decision, of, "Placed").reason == "BackingOff"
        assert decision.requeue_after_s is not None
        assert 10 <= decision.requeue_after_s <= 20


def test_active_deadline_counts_from_the_first_binding() -> None:
    """Regression: a wrong image held a GPU past an activeDeadlineSeconds of five seconds."""
    of = predicted_job(runPolicy={"activeDeadlineSeconds": 60})
    decision = reconcile(snapshot(of, pods=(bound(0, 20, IMAGE),), nodes=(node(reservation("pod-0-1")),)))
    assert status_of(decision, of).start_time == rfc3339(NOW - timedelta(seconds=20))
    assert decision.requeue_after_s == 40
    decision = reconcile(snapshot(of, pods=(bound(0, 60, IMAGE),), nodes=(node(reservation("pod-0-1")),)))
    assert condition(decision, of, "Failed").reason == "DeadlineExceeded"
    assert deleted(decision) == ["x-worker-0-1"]


FINISHED = {
    "completionTime": rfc3339(NOW),
    "state": "Complete",
    "observedGeneration": 2,
    "conditions": [{"type": "Complete", "status": "True", "reason": "Complete"}],
}


def test_finished_job_is_deleted_after_its_time_to_live() -> None:
    of = job(FINISHED, runPolicy={"ttlSecondsAfterFinished": 30})
    assert reconcile(snapshot(of)) == Decision((), 30)
    assert reconcile(snapshot(of, after_s=30)).actions == (DeleteJob(),)


def test_finished_job_keeps_nothing_running() -> None:
    attempts = [{"number": 1, "outcome": "Complete", "podUids": ["pod-0-1", "pod-1-1"]}]
    forged = pod(2, phase="Running", metadata={"uid": "forged"})
    pods = (pod(phase="Running"), pod(1, phase="Succeeded"), forged)
    decision = reconcile(snapshot(job(FINISHED | {"attempts": attempts}), pods=pods))
    assert deleted(decision) == ["x-worker-2-1", "x-worker-0-1"]


def test_job_being_deleted_is_left_to_the_garbage_collector() -> None:
    of = job()
    going = msgspec.structs.replace(of.metadata, deletion_timestamp=rfc3339(NOW))
    assert reconcile(snapshot(msgspec.structs.replace(of, metadata=going))) == Decision()


def test_job_deleted_without_its_pods_holds_no_gpu() -> None:
    """Regression: after `kubectl delete --cascade=orphan` pods held GPUs that no deadline of the job ended."""
    attempt = {"number": 1, "outcome": "Running", "podUids": ["pod-0-1", "pod-1-1"]}
    of = predicted_job([attempt], workers=2)
    going = msgspec.structs.replace(of.metadata, deletion_timestamp=rfc3339(NOW), finalizers=["orphan"])
    of = msgspec.structs.replace(of, metadata=going)
    orphan = pod(1, phase="Running", metadata={"ownerReferences": []})  # the garbage collector removes controllers
    decision = reconcile(snapshot(of, pods=(pod(0, phase="Running"), orphan), created={}))
    assert deleted(decision) == ["x-worker-0-1", "x-worker-1-1"]
    assert events(decision) == ["OrphansDeleted"]


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        ({"template": template() | {"sepc": {}}}, "InvalidTemplate", "spec.template.sepc: a template has no such"),
        ({"memory": {"limit": "12Q"}}, "InvalidSpec", "such as 12Gi"),
    ],
)
def test_invalid_spec_fails_the_job(spec: dict[str, Any], reason: str, message: str) -> None:
    of = job(**spec)
    found = condition(reconcile(snapshot(of, prediction=prediction())), of, "Failed")
    assert found.reason == reason
    assert message in found.message
    assert found.message.endswith("delete it, and apply the corrected one")


def places(*workers: int) -> list[dict[str, Any]]:
    """Placements of these workers in a status."""
    held = {"node": "n1", "gpuUuids": ["GPU-0"], "product": A100, "mode": "MPS", "expectedSlowdown": 1.12}
    return [{"worker": n, "pod": f"x-worker-{n}-1", "podUid": f"pod-{n}-1", **held} for n in workers]


def test_deleted_pod_ends_the_attempt_without_charge() -> None:
    of = predicted_job(workers=2, status={"placement": places(0, 1)})
    before = snapshot(of, pods=(pod(1, phase="Running"),))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert (status.attempts[0].outcome, status.restarts) == ("PodDeleted", 0)
    assert deleted(decision) == ["x-worker-1-1"]
    assert created(again(before, decision)) == [], "the other worker still runs"
    assert created(again(before, decision, pods=())) == ["x-worker-0-2", "x-worker-1-2"]
    deleting = {"deletionTimestamp": "2026-01-31T11:59:30Z"}
    ending = pod(phase="Failed", metadata=deleting, status=terminated(143))
    assert status_of(reconcile(snapshot(of, pods=(ending,))), of).restarts == 0


def test_gang_timeout_decides_about_a_worker_that_was_never_placed() -> None:
    """Regression: after 30 s the scheduler deleted the unbound worker, which ended a gang of which another ran.

    The attempt ended as `PodDeleted`, without the pause that keeps two gangs from blocking each other.
    """
    of = predicted_job(workers=2, status={"placement": places(0)})
    started, held = bound(0, 119), node(reservation("pod-0-1"))
    before = snapshot(of, pods=(started,), nodes=(held,))
    decision = reconcile(before)
    assert (status_of(decision, of).attempts[0].outcome, created(decision)) == ("Creating", ["x-worker-1-1"])
    again_gated = pod(1, metadata={"uid": "pod-1-1-b"}, status=WAITING)
    decision = again(before, decision, pods=(started, again_gated), now=NOW + timedelta(seconds=1))
    assert status_of(decision, of).attempts[0].outcome == "GangTimeout"
    assert deleted(decision) == ["x-worker-0-1", "x-worker-1-1"]


def test_deleted_worker_whose_placement_is_omitted_ends_the_attempt() -> None:
    placed = [{"type": "Placed", "status": "True", "reason": "Placed"}]
    status = {"placement": places(0, 1), "omittedPlacements": 1, "conditions": placed}
    of = predicted_job(workers=3, status=status)
    decision = reconcile(snapshot(of, pods=(pod(0, phase="Running"), pod(1, phase="Running"))))
    assert status_of(decision, of).attempts[0].outcome == "PodDeleted"


def test_repeated_disruptions_back_off() -> None:
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


@pytest.mark.parametrize(("second", "complete"), [("Succeeded", True), ("Running", False)])
def test_job_is_complete_once_all_workers_succeeded(second: str, complete: bool) -> None:
    of = predicted_job(workers=2)
    decision = reconcile(snapshot(of, pods=(pod(0, phase="Succeeded"), pod(1, phase=second))))
    assert (status_of(decision, of).state == "Complete") is complete


def test_final_refusal_ends_the_attempt() -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}])
    decision = reconcile(snapshot(of, refusal=Refusal("InvalidTemplate", "image: Required", is_final=True)))
    status = status_of(decision, of)
    assert (status.state, status.attempts[0].ended_at) == ("Failed", rfc3339(NOW))


def edited(of: GpuTrainingJob, **spec: Any) -> GpuTrainingJob:
    """A job after its user has changed its spec; the active attempt holds the digest of the former spec."""
    digest = spec_digest(of.spec)
    tried = [msgspec.structs.replace(a, spec_digest=digest) for a in of.status.attempts]
    after = predicted_job(**spec)
    metadata = msgspec.structs.replace(after.metadata, generation=3)
    return msgspec.structs.replace(after, metadata=metadata, status=msgspec.structs.replace(of.status, attempts=tried))


@pytest.mark.parametrize(
    "spec",
    [{"runPolicy": {"backoffLimit": 9, "activeDeadlineSeconds": 3600}}, {"training": {"steps": 200}}],
    ids=["run policy", "steps"],
)
def test_change_that_pods_do_not_depend_on_keeps_a_queued_attempt(spec: dict[str, Any]) -> None:
    """Regression: raising backoffLimit of a job that had waited for a GPU sent it back to the end of the queue."""
    changed = edited(predicted_job(), **spec)
    decision = reconcile(snapshot(changed, pods=(pod(),)))
    assert deleted(decision) == []
    status = status_of(decision, changed)
    assert (status.attempts[0].outcome, status.observed_generation) == ("Running", 3)
    assert "Predicted" not in events(decision)


@pytest.mark.parametrize("phase", ["Pending", "Running"])
@pytest.mark.parametrize("node_name", ["", "n1"], ids=["waiting", "bound"])
def test_spec_changed_before_placement_begins_again_with_new_pods(phase: str, node_name: str) -> None:
    """Regression: a bound pod of the old spec went on, because the spec is locked only by the placement."""
    changed = edited(predicted_job(workers=2), memory={"limit": "8Gi"})
    pods = (pod(0, phase=phase, nodeName=node_name), pod(1))
    before = snapshot(changed, pods=pods, nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    status = status_of(decision, changed)
    assert (status.attempts[0].outcome, status.restarts, status.placement) == ("SpecChanged", 0, [])
    assert sorted(deleted(decision)) == ["x-worker-0-1", "x-worker-1-1"]
    after = again(before, decision, pods=())
    assert created(after) == ["x-worker-0-2"]
    assert status_of(after, changed).attempts[-1].spec_digest == spec_digest(changed.spec)


def test_digest_of_another_version_changes_nothing() -> None:
    of = predicted_job(attempts=[{"number": 1, "outcome": "Running", "specDigest": "of another version"}])
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),)))
    assert deleted(decision) == []


def test_suspended_job_loses_its_pods_and_resumes_in_a_new_attempt() -> None:
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


def test_stray_and_old_pods_are_deleted() -> None:
    of = predicted_job(attempts=[{"number": 4, "outcome": "Running"}])
    strays = (pod(0, 3, phase="Running"), pod(0, 2, phase="Failed"), pod(0, 3, phase="Failed"))
    odd = pod(metadata={"name": "odd", "labels": {}}, phase="Running")
    decision = reconcile(snapshot(of, pods=(pod(0, 4, phase="Running"), *strays, odd)))
    assert deleted(decision) == ["odd", "x-worker-0-3", "x-worker-0-2"]


def test_only_the_latest_attempt_keeps_its_pods() -> None:
    ended = {"number": 1, "outcome": "PodDeleted", "endedAt": rfc3339(NOW), "podUids": ["pod-0-1"]}
    of = predicted_job(attempts=[ended])
    assert [a.pod_uids for a in status_of(reconcile(snapshot(of)), of).attempts] == [[], []]


@pytest.mark.parametrize(
    ("spec", "would_fit"),
    [
        pytest.param({}, True, id="bound"),
        pytest.param({"memory": {"limit": "88Gi"}}, False, id="limit"),
        pytest.param({"gpu": {"product": "H200"}}, False, id="product"),
        pytest.param({"gpusPerWorker": 4}, False, id="GPUs"),
    ],
)
def test_the_refusal_names_the_batch_that_would_fit(spec: dict[str, Any], would_fit: bool) -> None:
    """Regression: a limit of 88Gi, which a smaller batch does not change, was answered with a batch."""
    (product,) = prediction().products
    product = msgspec.structs.replace(product, memory=msgspec.structs.replace(product.memory, upper_mib=88_000))
    of, found = job(**spec), msgspec.structs.replace(prediction(), products=[product], fitting_batch=12)
    decision = reconcile(snapshot(of, prediction=found, nodes=(node(),)))
    placed = condition(decision, of, "Placed")
    assert (placed.status, created(decision)) == ("False", [])
    assert ("a batch of 12 would fit" in placed.message) is would_fit
