"""State in, state out: each case is a job with what stands around it, and what is decided."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import Condition
from carpool_operator.actions import CreatePod, Decision, DeleteJob, DeletePod, Predict, RecordEvent, WriteStatus
from carpool_operator.attempts import spec_digest
from carpool_operator.conditions import find
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import Refusal, Snapshot
from operator_fixtures import (
    A100,
    DIGEST,
    NOW,
    abstention,
    device,
    job,
    node,
    pod,
    prediction,
    reservation,
    snapshot,
    template,
    terminated,
)


def status_of(decision: Decision, of: GpuTrainingJob) -> JobStatus:
    """The status that stands after a decision."""
    return next((a.status for a in decision.actions if isinstance(a, WriteStatus)), of.status)


def condition(decision: Decision, of: GpuTrainingJob, type_: str) -> Condition:
    found = find(status_of(decision, of), type_)
    assert found is not None, f"no condition {type_}"
    return found


def created(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, CreatePod)]


def deleted(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, DeletePod)]


def events(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, RecordEvent)]


def predicted_job(attempts: list[dict[str, Any]] | None = None, status: dict[str, Any] | None = None, **spec: Any):
    """A job with a prediction and, by default, its first attempt under way."""
    if attempts is None:
        attempts = [{"number": 1, "startedAt": "2026-01-31T11:58:00Z", "outcome": "Running"}]
    of = job({"attempts": attempts, "prediction": msgspec.to_builtins(prediction()), **(status or {})}, **spec)
    return settled(of)


def settled(of: GpuTrainingJob) -> GpuTrainingJob:
    return msgspec.structs.replace(of, status=msgspec.structs.replace(of.status, observed_generation=2))


def again(before: Snapshot, decision: Decision, **changes: Any) -> Decision:
    """Reconcile once more with the written status."""
    of = msgspec.structs.replace(before.job, status=status_of(decision, before.job))
    return reconcile(replace(before, job=of, **changes))


def test_new_job_asks_for_its_prediction_and_creates_nothing() -> None:
    of = job()
    decision = reconcile(snapshot(of))
    assert decision.actions == (Predict(DIGEST, (A100,)),), "not even a status, for a millisecond's sake"
    assert of.status.state == "Predicting"


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
    second = again(before, first, created=frozenset({"x-worker-0-1"}))
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


def placed_message(product: str, reserved: dict[str, Any], **spec: Any) -> str:
    of = predicted_job(**spec)
    home = node(reservation("pod-0-1", **reserved))
    devices = [device(product=product)]
    home = msgspec.structs.replace(home, status=msgspec.structs.replace(home.status, devices=devices))
    return condition(reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(home,))), of, "Placed").message


ALONE = {"mode": "Exclusive", "memoryLimitMib": None}


@pytest.mark.parametrize(
    ("product", "reserved", "spec", "is_told"),
    [
        pytest.param("NVIDIA B300", ALONE, {}, True, id="a product that nothing was predicted for"),
        pytest.param(A100, ALONE, {}, False, id="a product that was predicted for"),
        pytest.param("NVIDIA B300", ALONE, {"sharing": {"mode": "Exclusive"}}, False, id="asked for"),
        pytest.param("NVIDIA B300", ALONE, {"memory": {"limit": "8Gi"}}, False, id="memory is given"),
    ],
)
def test_job_alone_on_an_unknown_product_says_why(
    product: str, reserved: dict[str, Any], spec: dict[str, Any], is_told: bool
) -> None:
    """Regression: on a GPU product outside of the table a predicted job ran alone and nobody said why."""
    told = "because nothing was predicted for GPU product NVIDIA B300"
    assert (told in placed_message(product, reserved, **spec)) == is_told


def test_memory_limit_lifts_the_exclusive_clause_of_an_unknown_model() -> None:
    of = job(model=None, memory={"limit": "8Gi"})
    one = snapshot(of, prediction=abstention(), pods=(pod(nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    assert "runs alone" not in condition(reconcile(one), of, "Placed").message


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


def test_gang_that_needs_more_gpus_than_any_node_has() -> None:
    of = job(gpusPerWorker=2)
    found = condition(reconcile(snapshot(of, prediction=prediction())), of, "Placed")
    assert found.message == "needs 2 suitable GPUs on one node, the best node has 1"


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
    of = predicted_job(workers=2)
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


def test_placed_and_running_from_the_reservation() -> None:
    of = predicted_job()
    nodes = (node(reservation("pod-0-1"), reservation("other", job_uid="other", name="y")),)
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes))
    status = status_of(decision, of)
    place = status.placement[0]
    assert (place.node, place.gpu_uuids, place.mode, place.product) == ("n1", ["GPU-0"], "MPS", f"Simulated {A100}")
    assert [neighbour.job for neighbour in place.neighbours] == ["y"]
    expected = "worker 0: n1/GPU-0, MPS, 3,000 MiB, expected slowdown 1.12: least slowdown of 4 GPUs"
    assert condition(decision, of, "Placed").message == expected
    assert status.state == "Running"
    assert status.start_time == "2026-01-31T11:59:00Z"


SCHEDULER_S_REASON = (
    "least-slowdown: MPS on GPU 0 of n1 beside default/y; 30,221 of 40,536 MiB left; expected slowdown 1.12 of 1.50"
)


def test_each_fact_of_a_place_is_told_once() -> None:
    """Regression: the event said node, mode and slowdown, and then the scheduler's reason, which says them too."""
    of = predicted_job()
    reserved = reservation("pod-0-1", reason=SCHEDULER_S_REASON, threadPercentage=100)
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(reserved),)))
    expected = f"worker 0: GPU-0, 100% of threads, 3,000 MiB: {SCHEDULER_S_REASON}"
    assert [a.message for a in decision.actions if isinstance(a, RecordEvent)] == [expected]


def test_node_whose_name_is_a_part_of_another_word_is_told() -> None:
    of = predicted_job()
    reserved = reservation("pod-0-1", reason=SCHEDULER_S_REASON.replace("of n1 ", "of n1-a.example "))
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(reserved),)))
    assert condition(decision, of, "Placed").message.startswith("worker 0: n1/GPU-0, 3,000 MiB: least-slowdown: MPS")


def test_placement_survives_the_release_of_the_reservation() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    later = again(before, decision, nodes=(node(),), pods=(pod(phase="Succeeded", nodeName="n1"),))
    assert status_of(later, of).placement == status_of(decision, of).placement


def test_reservation_of_another_job_is_not_ours() -> None:
    of = predicted_job()
    forged = reservation("pod-0-1", job_uid="somebody-else")
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(forged),)))
    assert condition(decision, of, "Placed").reason == "NoReservation"


def test_bound_pod_that_waits_says_what_for() -> None:
    of = predicted_job()
    why = {"reason": "CreateContainerConfigError", "message": "PreStartContainer refused: no reservation"}
    bound = pod(nodeName="n1", status={"containerStatuses": [{"name": "train", "state": {"waiting": why}}]})
    decision = reconcile(snapshot(of, pods=(bound,), nodes=(node(reservation("pod-0-1")),)))
    found = condition(decision, of, "Running")
    assert (found.status, found.reason) == ("False", "CreateContainerConfigError")
    assert "PreStartContainer refused" in found.message
    assert status_of(decision, of).state == "Starting"


NO_FIT = "needs 14,300 MiB; freest NVIDIA A100-SXM4-40GB has 9,120 MiB free"


@pytest.mark.parametrize(
    ("said", "reason", "message"),
    [
        pytest.param(
            f"0/22 nodes are available: 22 NoGpuFits: {NO_FIT}. no new claims to deallocate, preemption: 0/22 nodes",
            "NoGpuFits",
            NO_FIT,
            id="the extender's sentence",
        ),
        pytest.param(f"0/2 nodes are available: 2 NoGpuFits: {NO_FIT}.", "NoGpuFits", f"{NO_FIT}.", id="nothing after"),
        pytest.param("0/2 nodes are available: 2 node(s) had taints", "Unschedulable", "had taints", id="other words"),
    ],
)
def test_scheduler_s_words_become_the_condition(said: str, reason: str, message: str) -> None:
    of = predicted_job()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = condition(reconcile(snapshot(of, pods=(pod(status={"conditions": [unscheduled]}),))), of, "Placed")
    assert found.reason == reason
    assert found.message.endswith(message)


def test_observed_peak_never_falls_and_slowdown_is_told() -> None:
    of = predicted_job(status={"observed": {"peakMemoryMib": 2500}})
    used = {"podUid": "pod-0-1", "gpuUuid": "GPU-0", "memoryMib": 2000, "peakMemoryMib": 2100}
    tenants = [{**used, "gpuUtilPercent": 61.0, "smActiveRatio": 0.5, "stepTimeSeconds": 0.13}]
    nodes = (node(reservation("pod-0-1"), tenants=tenants),)
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes)
    decision = reconcile(before)
    seen = status_of(decision, of).observed
    assert seen is not None
    assert (seen.peak_memory_mib, seen.gpu_util_percent, seen.slowdown) == (2500, 61.0, 1.3)
    after = again(before, decision, nodes=(node(),))
    assert status_of(after, msgspec.structs.replace(of, status=status_of(decision, of))).observed == seen


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
    assert (found.status, found.reason, found.message) == (status, refusal.reason, refusal.message)
    assert created(decision) == [], "not at once"
    if not refusal.is_final:
        assert decision.requeue_after_s == 15
        assert created(again(snapshot(of), decision)) == ["x-worker-0-1"]


def test_lost_status_is_taken_up_from_the_pods() -> None:
    of = job(workers=2)
    decision = reconcile(snapshot(of, prediction=prediction(), pods=(pod(1, 4), pod(0, 3, phase="Failed"))))
    assert created(decision) == ["x-worker-0-4"]
    assert status_of(decision, of).attempts[-1].number == 4


def test_stray_pods_are_deleted_and_old_failures_too() -> None:
    of = predicted_job(attempts=[{"number": 4, "outcome": "Running"}])
    strays = (pod(0, 3, phase="Running"), pod(0, 2, phase="Failed"), pod(0, 3, phase="Failed"))
    odd = pod(metadata={"name": "odd", "labels": {}}, phase="Running")
    decision = reconcile(snapshot(of, pods=(pod(0, 4, phase="Running"), *strays, odd)))
    assert deleted(decision) == ["odd", "x-worker-0-3", "x-worker-0-2"]


def test_condition_keeps_its_transition_time() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    moved = (node(reservation("pod-0-1", expectedSlowdown=1.4)),)
    later = again(before, decision, now=snapshot(of, after_s=50).now, nodes=moved)
    found = condition(later, of, "Placed")
    assert "1.40" in found.message
    assert found.last_transition_time == rfc3339(NOW)


def test_unreadable_quantity_fails_with_what_was_expected() -> None:
    of = predicted_job(memory={"limit": "12Q"}, attempts=[])
    found = condition(reconcile(snapshot(of)), of, "Failed")
    assert found.reason == "InvalidSpec"
    assert "such as 12Gi" in found.message


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
