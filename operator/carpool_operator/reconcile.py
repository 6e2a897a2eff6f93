"""Decides what to do about a job. Pure: a crash between any two actions only causes another reconciliation.

State that has to survive a crash is written into the status before it is acted upon: the attempt before the pods of a
gang, the restart before the pods of the failed attempt are deleted. A single pod is created first, so that one write
records the prediction, the attempt and its UID; until then it has a scheduling gate and counts as a foreign pod. Each
status is written on the condition that the job has not changed since it was read.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec
from carpool_core import keys
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.demand import Demand, demand_of
from carpool_core.kube.pods import Pod
from carpool_core.pod_template import template_error
from carpool_core.resources.job import Attempt
from carpool_core.values import WhenSlowed, pluralize

from carpool_operator import anomalies, attempts, conditions, moves, outcomes, placement, status
from carpool_operator.actions import (
    Action,
    CheckTemplate,
    CreateCompanion,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    Learn,
    ReadWarnings,
    RecordEvent,
)
from carpool_operator.inventory import (
    exceeds_by_bound,
    infeasible_reason,
    infeasible_when_empty,
    unsuitable_products,
)
from carpool_operator.observations import doubt_oom, measured_steps, observe, peak_of, sample_of
from carpool_operator.outcomes import GPU_OUT_OF_MEMORY, Outcome
from carpool_operator.pods import (
    attempt_of,
    build_disruption_budget,
    build_pod,
    build_service,
    is_gang,
    pod_name,
    worker_of,
)
from carpool_operator.prediction import distrust, predict
from carpool_operator.snapshot import Snapshot, foreign_message, split_pods
from carpool_operator.status import Draft

EXPECTATION_TIMEOUT_S = 5.0
"""Seconds after which a created pod that the cache does not show is created again; its name makes that harmless."""

_CALIBRATION_TIMEOUT_S = 30.0
"""Seconds that the next attempt waits until the calibration holds the last one's GPU out-of-memory failure."""
_CALIBRATION_POLL_S = 1.0
_EXCLUSION_POLL_S = 600.0
"""Seconds between reconciliations of a job that no GPU can hold because of earlier runs, which lose force in a day."""

_ORPHAN = "orphan"
"""Finalizer with which the API server marks a job that is deleted without its dependents."""

_FINAL = "this ended the job: delete it, and apply the corrected one"


def reconcile(snapshot: Snapshot) -> Decision:
    """Return what to do about a job."""
    if snapshot.job.metadata.deletion_timestamp is not None:
        return _delete_orphans(snapshot) if _ORPHAN in snapshot.job.metadata.finalizers else Decision()
    # 1. Keep the job's own pods and delete those that only claim to belong to it.
    own, foreign = split_pods(snapshot)
    draft = Draft(own)
    _delete_foreign(draft, foreign)
    attempt = attempts.latest(draft.status)
    # 2. A finished job only cleans up.
    if conditions.is_finished(draft.status):
        _learn(draft, attempt, [])
        return _after_end(draft)
    # 3. Fail a job whose pods the API server will never accept.
    if _has_invalid_template(draft, attempt):
        return draft.decision()
    # 4. Predict, or renew the prediction.
    is_predicted = predict(draft)
    # 5. Delete pods that belong to no active attempt; read placement and measurements of the active one.
    pods = _pods_of(own, attempt)
    _delete_strays(draft, attempt)
    if attempt is not None and attempt.ended_at is None:
        attempt = _measure(draft, attempt, pods)
    # 6. End, suspend, follow or begin an attempt.
    _advance(draft, attempt, pods, is_predicted=is_predicted)
    # 7. Add the attempt's measurements to the calibration.
    _learn(draft, attempt, pods)
    return draft.decision(is_current=is_predicted)


def _delete_orphans(snapshot: Snapshot) -> Decision:
    """Delete the pods of a job that is deleted with `--cascade=orphan`, which would hold GPUs without any deadline."""
    own, _ = split_pods(snapshot)
    living = [pod for pod in own.pods if not pod.is_finished and pod.metadata.deletion_timestamp is None]
    actions: list[Action] = [DeletePod(pod.metadata.name, pod.metadata.uid) for pod in living]
    if living:
        message = "a deleted job holds no GPU, so its pods are deleted with it"
        actions.append(RecordEvent("Warning", "OrphansDeleted", message))
    return Decision(tuple(actions))


def _delete_foreign(draft: Draft, foreign: Sequence[Pod]) -> None:
    for pod in foreign:
        draft.delete_pod(pod)
    names = sorted(pod.metadata.name for pod in foreign if pod.metadata.deletion_timestamp is None)
    if names:
        text = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        draft.event("Warning", "ForeignPod", foreign_message(text))


def _after_end(draft: Draft) -> Decision:
    """Delete what still runs of a finished job, and the job itself after its time to live."""
    draft.delete_pods()
    keep_s = draft.job.spec.run_policy.ttl_seconds_after_finished
    if keep_s is not None and draft.status.completion_time is not None:
        until = parse_rfc3339(draft.status.completion_time) + timedelta(seconds=keep_s)
        if until <= draft.snapshot.now:
            draft.after_write(DeleteJob())
        else:
            draft.requeue_at(until)
    return draft.decision()


def _has_invalid_template(draft: Draft, attempt: Attempt | None) -> bool:
    """Fail a job with an invalid template; have a new job's template checked before a trace takes minutes."""
    error, refusal = template_error(draft.job), draft.snapshot.refusal
    if error is not None:
        draft.fail("InvalidTemplate", f"{error}; {_FINAL}")
        return True
    unknown = outcomes.unknown_container(draft.job) if attempt is None else None
    if unknown is not None:
        draft.fail("InvalidSpec", f"{unknown}; {_FINAL}")
        return True
    if refusal is not None and refusal.is_final:
        draft.fail(refusal.reason, f"{refusal.message}; {_FINAL}", attempt)
        return True
    if attempt is None and not draft.snapshot.is_template_checked:
        draft.before_write(CheckTemplate(build_pod(draft.job, 0, 1)))
    return False


def _pods_of(snapshot: Snapshot, attempt: Attempt | None) -> list[Pod]:
    """Return the pods of an attempt, by worker."""
    if attempt is None:
        return []
    found = {
        worker: pod
        for pod in snapshot.pods
        if attempt_of(pod) == attempt.number and (worker := worker_of(pod)) is not None
    }
    return [found[worker] for worker in sorted(found) if worker < snapshot.job.spec.workers]


def _delete_strays(draft: Draft, attempt: Attempt | None) -> None:
    """Delete pods outside of the active attempt, and finished pods older than the previous attempt."""
    number = 0 if attempt is None else attempt.number
    active = None if attempt is None or attempt.ended_at is not None else number
    for pod in draft.snapshot.pods:
        of, worker = attempt_of(pod), worker_of(pod)
        is_stray = active is None or of != active or worker is None or worker >= draft.job.spec.workers
        if (not pod.is_finished and is_stray) or (pod.is_finished and (of or 0) < number - 1):
            draft.delete_pod(pod)


def _measure(draft: Draft, attempt: Attempt, pods: list[Pod]) -> Attempt:
    """Read placement and measurements of the active attempt into the status; return the attempt with its peak."""
    nodes, now, solo_s = draft.snapshot.nodes, draft.snapshot.now, draft.snapshot.calibration.solo_step_s
    places = placement.placements(draft.job, pods, nodes)
    draft.update(placement=places, observed=placement.observed(draft.job, pods, nodes, places, now, solo_s))
    anomalies.report_anomalies(draft, pods)
    attempt = attempts.with_peak(attempt, peak_of(pods, nodes))
    draft.put_attempt(attempt)
    bound_at = min((at for pod in pods if (at := pod.bound_at) is not None), default=None)
    if draft.status.start_time is None and bound_at is not None:
        draft.update(start_time=bound_at)
    return attempt


def _advance(draft: Draft, attempt: Attempt | None, pods: list[Pod], *, is_predicted: bool) -> None:
    """Move an unfinished job to its next step."""
    active = attempt if attempt is not None and attempt.ended_at is None else None
    workers, policy = draft.job.spec.workers, draft.job.spec.run_policy
    if active is not None and len(pods) == workers and all(pod.status.phase == "Succeeded" for pod in pods):
        _complete(draft, active)
        return
    if policy.suspend:
        _suspend(draft, active)
        return
    if _is_over_deadline(draft):
        limit_s = policy.active_deadline_seconds
        message = f"not complete {limit_s:,} s after its first worker was bound (runPolicy.activeDeadlineSeconds)"
        draft.fail("DeadlineExceeded", message, active)
        return
    if active is not None and _is_outdated(draft, active):
        draft.update(placement=[])  # with a placement the API server would refuse further changes of the spec
        changed = f"the spec changed, to generation {draft.job.metadata.generation}, after its pods were built"
        _end_attempt(draft, active, Outcome(attempts.SPEC_CHANGED, changed, charged=False))
        return
    if conditions.is_true(draft.status, keys.CONDITION_SUSPENDED):
        draft.set_condition(keys.CONDITION_SUSPENDED, "False", "Resumed", "runPolicy.suspend is false")
    try:
        demand = demand_of(msgspec.structs.replace(draft.job, status=draft.status))
    except ValueError as error:
        draft.fail("InvalidSpec", f"spec.memory or spec.gpu: {error}; {_FINAL}", active)
        return
    if active is not None:
        _follow(draft, active, pods, demand)
    elif is_predicted:
        _begin_attempt(draft, demand)


# Run policy


def _complete(draft: Draft, attempt: Attempt) -> None:
    workers, seen = draft.job.spec.workers, draft.status.observed
    peak = "" if seen is None else f", peak memory {seen.peak_memory_mib:,} MiB"
    restarts = pluralize(draft.status.restarts, "restart")
    message = f"{workers} of {workers} workers succeeded in attempt {attempt.number}, {restarts}{peak}"
    draft.finish(keys.CONDITION_COMPLETE, attempts.COMPLETE, message, attempt)


def _suspend(draft: Draft, active: Attempt | None) -> None:
    message = "runPolicy.suspend is true: the job has no pods until it is false"
    if active is not None:
        reason = "runPolicy.suspend is true"
        draft.put_attempt(attempts.ended(active, attempts.SUSPENDED, reason, draft.snapshot.now))
        draft.event("Normal", "Suspended", f"attempt {active.number} was ended by runPolicy.suspend")
    draft.update(start_time=None, placement=[])
    draft.set_condition(keys.CONDITION_SUSPENDED, "True", "SuspendRequested", message)
    draft.set_condition(keys.CONDITION_PLACED, "False", "Suspended", message)
    draft.set_not_running("Suspended", message)
    draft.delete_pods()


def _deadline(draft: Draft) -> datetime | None:
    """Return when the job must be complete; None without a deadline and before its start."""
    limit_s = draft.job.spec.run_policy.active_deadline_seconds
    if limit_s is None or draft.status.start_time is None:
        return None
    return parse_rfc3339(draft.status.start_time) + timedelta(seconds=limit_s)


def _is_over_deadline(draft: Draft) -> bool:
    until = _deadline(draft)
    if until is None:
        return False
    draft.requeue_at(until)
    return until <= draft.snapshot.now


# Attempts


def _is_outdated(draft: Draft, attempt: Attempt) -> bool:
    """Return whether an attempt's pods come from an older spec.

    Pods are bound before the placement is in the status, and until then the API server accepts changes of the spec. An
    attempt continues whose digest differs although the generation is the same: a new version may encode otherwise.
    """
    has_changed = draft.status.observed_generation < draft.job.metadata.generation
    return has_changed and attempt.spec_digest != attempts.spec_digest(draft.job.spec)


def _begin_attempt(draft: Draft, demand: Demand) -> None:
    """Begin the next attempt if a GPU could hold it, the backoff is over, and the last attempt's pods are gone."""
    snapshot = draft.snapshot
    last = attempts.latest(draft.status)
    due = attempts.due(draft.status, snapshot.backoff)
    if due is not None and due > snapshot.now:
        draft.requeue_at(due)
        return
    lost = _lost(draft, snapshot.pods)
    living = [pod.metadata.name for pod in snapshot.pods if not pod.is_finished and pod not in lost]
    if living or snapshot.expected:
        message = f"waits for pod {min([*living, *snapshot.expected])} of an earlier attempt to end"
        draft.set_condition(keys.CONDITION_PLACED, "False", "WaitingForPods", message)
        draft.requeue_after(EXPECTATION_TIMEOUT_S)
        return
    if _is_calibration_pending(draft, last):
        draft.requeue_after(_CALIBRATION_POLL_S)
        return
    infeasible = infeasible_when_empty(demand, snapshot.inventory)
    if infeasible is not None and not snapshot.autoscaling:
        reason = infeasible_reason(demand, snapshot.inventory)
        batch = None if draft.status.prediction is None else draft.status.prediction.fitting_batch
        if batch and exceeds_by_bound(demand, snapshot.inventory):
            infeasible += f"; a batch of {batch:,} would fit, and `carpool what-if` names what other changes save"
        known = conditions.find(draft.status, keys.CONDITION_PLACED)
        draft.set_condition(keys.CONDITION_PLACED, "False", reason, infeasible)
        if known is None or known.reason != reason:
            draft.event("Warning", reason, infeasible)
        if any(key.history is not None and key.history.deaths for key in snapshot.calibration.keys.values()):
            draft.requeue_after(_EXCLUSION_POLL_S)
        return
    attempt = attempts.begun(last, draft.job.spec, snapshot.now)
    draft.put_attempt(attempt)
    draft.update(placement=[], observed=placement.without_progress(draft.status.observed))
    _follow(draft, attempt, [], demand)


def _follow(draft: Draft, attempt: Attempt, pods: list[Pod], demand: Demand) -> None:
    """Follow the active attempt: end it if a pod failed or is missing, report where its pods are, create the rest."""
    failed = [pod for pod in pods if pod.status.phase == "Failed"]
    if failed:
        outcome = outcomes.attempt_outcome(failed, draft.status, draft.snapshot.nodes, draft.snapshot.now)
        if outcome is not None:
            _end_failed(draft, attempt, outcome, outcomes.first_to_end(failed))
        else:
            draft.set_condition(keys.CONDITION_RUNNING, "False", "WorkerFailed", outcomes.pending_message(failed))
            draft.requeue_after(outcomes.AGENT_POLL_S)
        return
    lost = _lost(draft, pods)
    if lost:
        _end_attempt(draft, attempt, outcomes.node_lost(lost[0]))
        return
    unreserved = _unreserved(draft, pods)
    if unreserved is not None:
        _end_attempt(draft, attempt, outcomes.without_reservation(unreserved, status.RESERVATION_TIMEOUT_S))
        return
    timeout = _gang_timeout(draft, attempt, pods)
    if timeout is not None:
        _end_attempt(draft, attempt, timeout)
        return
    moved = moves.move(draft.snapshot, draft.status)
    if moved is not None:
        _end_attempt(draft, attempt, moved)
        return
    if draft.job.spec.sharing.when_slowed is not WhenSlowed.STAY:
        draft.requeue_after(moves.POLL_S)
    late = _not_started_in_time(draft, pods)
    if late is not None:
        _end_late(draft, attempt, late)
        return
    present = {worker_of(pod) for pod in pods}
    missing = [worker for worker in range(draft.job.spec.workers) if worker not in present]
    expected = {worker for worker in missing if _name_of(draft, worker, attempt) in draft.snapshot.expected}
    is_created = len(expected) == len(missing)
    deleted = None if attempt.outcome == attempts.CREATING or is_created else _deleted(draft, missing)
    if deleted is not None:
        _end_attempt(draft, attempt, outcomes.pod_deleted(_name_of(draft, deleted, attempt)))
        return
    draft.put_attempt(attempts.with_pods(attempt, _uids_of(draft, attempt, pods), is_complete=is_created))
    if expected and is_created:
        draft.requeue_after(EXPECTATION_TIMEOUT_S)
        return
    status.report_placed(draft, demand, pods)
    status.report_running(draft, pods)
    until = _deadline(draft)
    if until is not None:
        draft.requeue_at(until)
    if missing:
        _create_pods(draft, attempt, missing, demand)


def _deleted(draft: Draft, missing: Sequence[int]) -> int | None:
    """Return the first missing worker that was placed; None if there is none.

    The scheduler deletes an admitted pod that got no node in time, because its gate cannot be added again. Such a
    worker was never placed, so it is created again, and `_gang_timeout` decides how long the others wait for it.
    """
    if conditions.is_true(draft.job.status, keys.CONDITION_PLACED):  # the placement in the status may lack workers
        return next(iter(missing), None)
    placed = {place.worker for place in draft.job.status.placement}
    return next((worker for worker in missing if worker in placed), None)


def _name_of(draft: Draft, worker: int, attempt: Attempt) -> str:
    return pod_name(draft.job.metadata.name, worker, attempt.number)


def _uids_of(draft: Draft, attempt: Attempt, pods: list[Pod]) -> list[str]:
    """Return the UIDs of an attempt's pods, also of those that the cache does not show yet."""
    shown = {pod.metadata.name: pod.metadata.uid for pod in pods}
    names = (_name_of(draft, worker, attempt) for worker in range(draft.job.spec.workers))
    known = {**draft.snapshot.created, **shown}
    return [known[name] for name in names if name in known]


def _lost(draft: Draft, pods: Sequence[Pod]) -> list[Pod]:
    """Return the deleted pods whose node does not confirm their end, such as those on a dead node."""
    deleted = [(pod, at) for pod in pods if (at := outcomes.lost_at(pod)) is not None]
    for _, at in deleted:
        if at > draft.snapshot.now:
            draft.requeue_at(at)
    return [pod for pod, at in deleted if at <= draft.snapshot.now]


def _unreserved(draft: Draft, pods: list[Pod]) -> Pod | None:
    """Return the first pod that has been bound without a reservation for too long and never started."""
    for pod in pods:
        for_s = draft.snapshot.unreserved_s.get(pod.metadata.uid)
        if for_s is None:
            continue
        if for_s < status.RESERVATION_TIMEOUT_S:
            draft.requeue_after(status.RESERVATION_TIMEOUT_S - for_s)
        elif not pod.has_started:
            return pod
    return None


def _gang_timeout(draft: Draft, attempt: Attempt, pods: list[Pod]) -> Outcome | None:
    """Return the outcome if some workers hold GPUs or quota for too long while others cannot be bound or created."""
    workers, refusal = draft.job.spec.workers, draft.snapshot.refusal
    bound_at = [at for pod in pods if (at := pod.bound_at) is not None]
    is_refused = refusal is not None and 0 < len(pods) < workers
    if workers == 1 or len(bound_at) == workers or not (bound_at or is_refused):
        return None
    limit_s = draft.job.spec.run_policy.gang_timeout_seconds
    since = min(bound_at, default=attempt.started_at or rfc3339(draft.snapshot.now))
    until = parse_rfc3339(since) + timedelta(seconds=limit_s)
    if until > draft.snapshot.now:
        draft.requeue_at(until)
        return None
    unbound = (status.why_unplaced(draft, pod) for pod in pods if pod.bound_at is None)
    why = refusal.message if refusal is not None else next((found[1] for found in unbound if found), "pods are missing")
    return outcomes.gang_timeout(len(bound_at), workers, limit_s, why)


def _not_started_in_time(draft: Draft, pods: list[Pod]) -> Pod | None:
    """Return the first pod that has not started within the start deadline; it counts from the last binding."""
    idle = [pod for pod in pods if not pod.has_started and not pod.is_initializing]
    bound_at = [at for pod in pods if (at := pod.bound_at) is not None]
    if not idle or len(bound_at) < draft.job.spec.workers:
        return None
    limit_s = draft.job.spec.run_policy.start_deadline_seconds
    until = max(map(parse_rfc3339, bound_at)) + timedelta(seconds=limit_s)
    draft.requeue_at(until)
    return idle[0] if until <= draft.snapshot.now else None


def _end_late(draft: Draft, attempt: Attempt, pod: Pod) -> None:
    """Fail the job if its container or volume cannot start, or restart it without such a reason."""
    failure = status.start_failure(pod)
    if failure is None and pod.bound_at is not None and pod.metadata.uid not in draft.snapshot.warnings:
        # Kubernetes reports a missing volume in events only.
        draft.after_write(ReadWarnings(pod.metadata.uid, pod.bound_at))
        return
    limit_s = draft.job.spec.run_policy.start_deadline_seconds
    limit = f"not started {limit_s:,} s after every worker was bound (runPolicy.startDeadlineSeconds)"
    warning = draft.snapshot.warnings.get(pod.metadata.uid)
    if failure is None and warning is not None:
        failure = warning.reason, f"pod {pod.metadata.name}: {warning.message}"
    if failure is not None:
        reason, message = failure
        draft.fail(reason, f"{message}; {limit}", attempt)
        return
    message = f"{status.why_not_started(pod)[1]}; {limit}, and node {pod.spec.node_name} gives no reason"
    _end_attempt(draft, attempt, Outcome("StartDeadlineExceeded", message, charged=True))


def _create_pods(draft: Draft, attempt: Attempt, missing: list[int], demand: Demand) -> None:
    """Create the missing pods of an attempt, unless a creation was refused a moment ago."""
    refusal = draft.snapshot.refusal
    if refusal is not None:
        status.report_refused(draft, refusal)
        draft.requeue_after(refusal.retry_in_s)
        return
    draft.requeue_after(EXPECTATION_TIMEOUT_S)
    workers = draft.job.spec.workers
    avoided = unsuitable_products(demand, draft.snapshot.inventory) if draft.snapshot.autoscaling else ()
    wanted = [w for w in missing if _name_of(draft, w, attempt) not in draft.snapshot.expected]
    first = _name_of(draft, wanted[0], attempt)
    if is_gang(draft.job):
        draft.create(CreateCompanion(build_service(draft.job)))
        draft.create(CreateCompanion(build_disruption_budget(draft.job)))
    if workers == 1:
        draft.before_write(CreatePod(build_pod(draft.job, 0, attempt.number, avoided)))
        draft.set_condition(keys.CONDITION_PLACED, "False", status.QUEUED, status.queued_message(first))
    else:
        for worker in wanted:
            draft.create(CreatePod(build_pod(draft.job, worker, attempt.number, avoided)))
    names = first if len(wanted) == 1 else f"{first} and {len(wanted) - 1} more"
    draft.event("Normal", "PodCreated", f"{names}: attempt {attempt.number}, {len(wanted)} of {workers} workers")


def _end_failed(draft: Draft, attempt: Attempt, outcome: Outcome, first: Pod) -> None:
    """End an attempt with a failed pod, as `runPolicy.podFailurePolicy` decides."""
    if outcome.reason == GPU_OUT_OF_MEMORY:
        attempt, outcome = _verified(draft, attempt, outcome)
    match = outcomes.policy_match(draft.job.spec.run_policy.pod_failure_policy, first)
    if match is None or outcome.is_of_others:
        _end_attempt(draft, attempt, outcome)
        return
    message = f"{outcome.message}; {match.message}"
    if match.action == outcomes.FAIL_JOB:
        draft.put_attempt(attempts.ended(attempt, outcome.reason, message, draft.snapshot.now))
        draft.fail("PodFailurePolicy", f"attempt {attempt.number}: {message}")
        return
    _end_attempt(draft, attempt, replace(outcome, message=message, charged=match.action == outcomes.COUNT))


def _end_attempt(draft: Draft, attempt: Attempt, outcome: Outcome) -> None:
    """End a failed attempt. The next begins after the backoff, unless the restarts are used up."""
    limit = draft.job.spec.run_policy.backoff_limit
    charged = attempts.charge(draft.status, outcome, limit)
    if charged is None:
        used = f"all {limit} restarts of runPolicy.backoffLimit are used"
        draft.fail(outcome.reason, f"attempt {attempt.number}: {outcome.message}; {used}", attempt)
        return
    draft.status = charged
    if outcome.reason == outcomes.MOVED:
        draft.update(moves=charged.moves + 1)
    draft.put_attempt(attempts.ended(attempt, outcome.reason, outcome.message, draft.snapshot.now))
    due = attempts.due(draft.status, draft.snapshot.backoff) or draft.snapshot.now
    wait_s = (due - draft.snapshot.now).total_seconds()
    count = f"{'' if outcome.charged else 'not counted, '}{draft.status.restarts} of {limit} restarts used"
    message = f"attempt {attempt.number}: {outcome.message}; next attempt in {wait_s:.0f} s, {count}"
    draft.set_condition(keys.CONDITION_PLACED, "False", keys.REASON_BACKING_OFF, message)
    draft.set_not_running(outcome.reason, message)
    draft.delete_pods()
    draft.event("Warning", "Restarting", message)
    draft.requeue_at(due)


def _verified(draft: Draft, attempt: Attempt, outcome: Outcome) -> tuple[Attempt, Outcome]:
    """Return an attempt that ran out of GPU memory, and its outcome; without proof, the next one runs alone."""
    doubt = doubt_oom(draft.snapshot, draft.status.placement, attempt, outcome)
    if doubt is None:
        return attempt, outcome
    if draft.status.prediction is not None:
        draft.update(prediction=distrust(draft.status.prediction))
    doubted = msgspec.structs.replace(attempt, doubted=True)
    return doubted, replace(outcome, message=f"{outcome.message}; {doubt}")


# Calibration


def _learn(draft: Draft, attempt: Attempt | None, pods: Sequence[Pod]) -> None:
    """Have the latest attempt's observation learned, and record in the attempt once that is done."""
    calibration, latest = draft.snapshot.calibration, attempts.latest(draft.status)
    if attempt is None or not calibration.is_on or attempt.learned:
        return
    if latest is None or latest.number != attempt.number:
        return
    if latest.ended_at is None and (steps := measured_steps(draft.snapshot, draft.status, latest)) is not None:
        draft.after_write(Learn(steps))
    if sample_of(draft.job, attempt) in calibration.learned:
        draft.put_attempt(msgspec.structs.replace(latest, learned=True))
        return
    observation, again_s = observe(draft.snapshot, draft.status, latest, pods)
    if again_s is not None:
        draft.requeue_after(again_s)
    if observation is not None:
        draft.after_write(Learn(observation))


def _is_calibration_pending(draft: Draft, last: Attempt | None) -> bool:
    """Return whether the next attempt waits until the last one's out-of-memory failure is learned."""
    if last is None or not draft.snapshot.calibration.is_on or last.learned:
        return False
    if last.outcome != GPU_OUT_OF_MEMORY or not last.ended_at:
        return False
    since_s = (draft.snapshot.now - parse_rfc3339(last.ended_at)).total_seconds()
    return since_s < _CALIBRATION_TIMEOUT_S and observe(draft.snapshot, draft.status, last, [])[0] is not None
