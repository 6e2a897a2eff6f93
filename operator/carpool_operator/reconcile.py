"""Decides what to do about a job. Pure: a crash between any two actions only causes another reconciliation.

State that has to survive a crash is written into the status before it is acted upon: the prediction and the attempt
before the attempt's pods, the restart before the pods of the failed attempt are deleted. Each status is written on the
condition that the job has not changed since it was read.
"""

from datetime import datetime, timedelta

import msgspec
from carpool_core import keys
from carpool_core.clock import parse_rfc3339
from carpool_core.demand import Demand, demand_of
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt

from carpool_operator import attempts, conditions, learning, outcomes, placement, pods, status
from carpool_operator.actions import CheckTemplate, CreatePod, CreateService, Decision, DeleteJob
from carpool_operator.hidden_pods import STILL_THERE, end_unseen
from carpool_operator.inventory import never_fits, reason_of_never
from carpool_operator.outcomes import Outcome, pod_deleted, unreserved
from carpool_operator.ownership import without_impostors
from carpool_operator.pods import attempt_of, build_pod, owner_reference, pod_name, template_error, worker_of
from carpool_operator.prediction import predict
from carpool_operator.snapshot import Snapshot
from carpool_operator.status import Draft


def suspend(draft: Draft, active: Attempt | None) -> None:
    """Take the job's pods away until it is resumed."""
    message = "runPolicy.suspend is true: the job has no pods until it is false"
    if active is not None:
        draft.status = attempts.with_attempt(
            draft.status, attempts.ended(active, attempts.SUSPENDED, "runPolicy.suspend is true", draft.snapshot.now)
        )
        draft.say("Normal", "Suspended", f"attempt {active.number} was ended by runPolicy.suspend")
    draft.set(start_time=None, placement=[])
    draft.condition(keys.CONDITION_SUSPENDED, "True", "SuspendRequested", message)
    draft.condition(keys.CONDITION_PLACED, "False", "Suspended", message)
    draft.unset_running("Suspended", message)
    draft.end_pods()


def resume(draft: Draft) -> None:
    """Say that the job is no longer suspended, where it was."""
    if conditions.holds(draft.status, keys.CONDITION_SUSPENDED):
        draft.condition(keys.CONDITION_SUSPENDED, "False", "Resumed", "runPolicy.suspend is false")


def deadline(draft: Draft) -> datetime | None:
    """When the job must be complete; None where it has no deadline or has not started."""
    limit_s = draft.job.spec.run_policy.active_deadline_seconds
    if limit_s is None or draft.status.start_time is None:
        return None
    return parse_rfc3339(draft.status.start_time) + timedelta(seconds=limit_s)


def is_over_deadline(draft: Draft) -> bool:
    """Whether the deadline has passed; where it has not, the job is looked at again when it does."""
    until = deadline(draft)
    if until is None:
        return False
    draft.requeue_at(until)
    return until <= draft.snapshot.now


CREATED_AGAIN_AFTER_S = 5.0
"""How long a created pod may stay unheard of before it is created again (which its name makes harmless)."""

REFUSED_AGAIN_AFTER_S = 15.0
"""When a pod is tried again that was refused for a reason outside of the job (a quota, a name that is taken)."""

_ONCE_MORE = "the job has ended by this: delete it, and apply the corrected one"


def reconcile(snapshot: Snapshot) -> Decision:
    """Decide what to do about a job."""
    if snapshot.job.metadata.deletion_timestamp is not None:
        return Decision()
    draft = without_impostors(snapshot)
    attempt = attempts.present(draft.status)
    if conditions.is_finished(draft.status):
        learning.tell(draft, attempt, [])
        return _after_end(draft)
    if _is_hopeless(draft, attempt):
        return draft.decision()
    is_predicted = predict(draft)
    pods = _of_attempt(draft.snapshot, attempt)
    _clean(draft, attempt)
    if attempt is not None and attempt.ended_at is None:
        places = placement.placements(snapshot.job, pods, snapshot.nodes)
        draft.set(placement=places, observed=placement.observed(draft.job, pods, snapshot.nodes, places))
        attempt = attempts.measured(attempt, learning.peak_of(pods, snapshot.nodes))
        draft.status = attempts.with_attempt(draft.status, attempt)
    _continue(draft, attempt, pods, is_predicted=is_predicted)
    learning.tell(draft, attempt, pods)
    return draft.decision(is_current=is_predicted)


def _is_hopeless(draft: Draft, attempt: Attempt | None) -> bool:
    """Fail a job whose pods will never be accepted; have those of a new job checked, before a trace takes minutes."""
    error, refusal = template_error(draft.job), draft.snapshot.refusal
    if error is not None:
        draft.fail("InvalidTemplate", f"{error}; {_ONCE_MORE}")
    elif refusal is not None and refusal.is_final:
        draft.fail(refusal.reason, f"{refusal.message}; {_ONCE_MORE}", attempt)
    elif attempt is None and not draft.snapshot.is_template_checked:
        draft.first(CheckTemplate(build_pod(draft.job, 0, 1)))
        return False
    else:
        return False
    return True


def _of_attempt(snapshot: Snapshot, attempt: Attempt | None) -> list[Pod]:
    """The pods of an attempt, by worker."""
    if attempt is None:
        return []
    found = {
        worker: pod
        for pod in snapshot.pods
        if attempt_of(pod) == attempt.number and (worker := worker_of(pod)) is not None
    }
    return [found[worker] for worker in sorted(found) if worker < snapshot.job.spec.workers]


def _clean(draft: Draft, attempt: Attempt | None) -> None:
    """Delete what runs without belonging to an attempt under way, and finished pods but for the last attempt's."""
    number = 0 if attempt is None else attempt.number
    active = None if attempt is None or attempt.ended_at is not None else number
    for pod in draft.snapshot.pods:
        of, worker = attempt_of(pod), worker_of(pod)
        is_stray = active is None or of != active or worker is None or worker >= draft.job.spec.workers
        if (not pod.is_finished and is_stray) or (pod.is_finished and (of or 0) < number - 1):
            draft.delete_pod(pod)


def _continue(draft: Draft, attempt: Attempt | None, pods: list[Pod], *, is_predicted: bool) -> None:
    """Carry an unfinished job on from where it stands."""
    active = attempt if attempt is not None and attempt.ended_at is None else None
    if active is not None and _all_succeeded(draft, pods):
        _complete(draft, active, pods)
    elif draft.job.spec.run_policy.suspend:
        suspend(draft, active)
    elif is_over_deadline(draft):
        limit_s = draft.job.spec.run_policy.active_deadline_seconds
        message = f"not complete {limit_s:,} s after its start (runPolicy.activeDeadlineSeconds)"
        draft.fail("DeadlineExceeded", message, active)
    elif active is not None and _is_outdated(draft, active):
        draft.set(placement=[])  # it would keep the spec from being changed further
        changed = f"the spec changed, to generation {draft.job.metadata.generation}, after its pods were built"
        _end(draft, active, Outcome(attempts.SPEC_CHANGED, changed, charged=False))
    else:
        resume(draft)
        _try_with_demand(draft, active, pods, is_predicted=is_predicted)


def _try_with_demand(draft: Draft, active: Attempt | None, pods: list[Pod], *, is_predicted: bool) -> None:
    try:
        demand = demand_of(msgspec.structs.replace(draft.job, status=draft.status))
    except ValueError as error:
        draft.fail("InvalidSpec", f"spec.memory or spec.gpu: {error}; {_ONCE_MORE}", active)
        return
    if active is not None:
        _follow(draft, active, pods, demand)
    elif is_predicted:
        _begin(draft, demand)


def _is_outdated(draft: Draft, attempt: Attempt) -> bool:
    """Whether an attempt's pods come from an older spec.

    The API server keeps the spec from changing only once the placement is in the status, and pods are bound before
    that. An attempt without a digest, of a lost status or an older version, is left alone; so is one whose digest
    differs although the spec never changed, which a new version's encoding may cause.
    """
    has_changed = draft.status.observed_generation < draft.job.metadata.generation
    return has_changed and attempt.spec_digest not in ("", attempts.spec_digest(draft.job.spec))


def _all_succeeded(draft: Draft, pods: list[Pod]) -> bool:
    return len(pods) == draft.job.spec.workers and all(pod.status.phase == "Succeeded" for pod in pods)


def _complete(draft: Draft, attempt: Attempt, pods: list[Pod]) -> None:
    restarts = draft.status.restarts
    seen = draft.status.observed
    peak = "" if seen is None else f", peak memory {seen.peak_memory_mib:,} MiB"
    took = f"{len(pods)} of {len(pods)} workers succeeded in attempt {attempt.number}, {restarts} restarts{peak}"
    draft.finish(keys.CONDITION_COMPLETE, attempts.COMPLETE, took, attempt)


def _begin(draft: Draft, demand: Demand) -> None:
    """Begin the next attempt, if a GPU could ever hold it, the backoff is over and the last one's pods are gone."""
    snapshot = draft.snapshot
    last = draft.status.attempts[-1] if draft.status.attempts else None
    at = attempts.due(draft.status, snapshot.backoff)
    if at is not None and at > snapshot.now:
        draft.requeue_at(at)
        return
    living = [pod.metadata.name for pod in snapshot.pods if not pod.is_finished]
    if living or snapshot.created:
        waits = f"waits for pod {min([*living, *snapshot.created])} of an earlier attempt to end"
        draft.condition(keys.CONDITION_PLACED, "False", "WaitingForPods", waits)
        draft.requeue_after(CREATED_AGAIN_AFTER_S)
        return
    if snapshot.refusal is not None and snapshot.refusal.reason == STILL_THERE:
        draft.condition(keys.CONDITION_PLACED, "False", "WaitingForPods", snapshot.refusal.message)
        draft.requeue_after(REFUSED_AGAIN_AFTER_S)
        return
    if learning.is_awaited(draft, last):
        draft.requeue_after(learning.LOOK_AGAIN_S)
        return
    never = never_fits(demand, snapshot.inventory)
    if never is not None:
        _report_never(draft, demand, never)
        return
    unseen = end_unseen(draft.job, last, snapshot.pods, is_awaited=True)
    if unseen is not None:
        draft.first(unseen)
    attempt = attempts.begun(last, draft.job.spec, snapshot.now)
    draft.status = attempts.with_attempt(draft.status, attempt)
    draft.set(placement=[])
    _follow(draft, attempt, [], demand)


def _report_never(draft: Draft, demand: Demand, why: str) -> None:
    reason = reason_of_never(demand, draft.snapshot.inventory)
    known = conditions.find(draft.status, keys.CONDITION_PLACED)
    draft.condition(keys.CONDITION_PLACED, "False", reason, why)
    if known is None or known.reason != reason:
        draft.say("Warning", reason, why)


def _follow(draft: Draft, attempt: Attempt, pods: list[Pod], demand: Demand) -> None:
    """Follow an attempt: create its pods, notice what became of them, tell where they are."""
    failed = [pod for pod in pods if pod.status.phase == "Failed"]
    if failed:
        outcome = outcomes.attempt_outcome(failed, draft.status, draft.snapshot.nodes, draft.snapshot.now)
        if outcome is not None:
            _end(draft, attempt, outcome)
        else:
            draft.condition(keys.CONDITION_RUNNING, "False", "WorkerFailed", outcomes.told_meanwhile(failed))
            draft.requeue_after(outcomes.LOOK_AGAIN_S)
        return
    stuck = _unreserved(draft, pods)
    if stuck is not None:
        _end(draft, attempt, unreserved(stuck, status.RESERVED_WITHIN_S))
        return
    present = {worker_of(pod) for pod in pods}
    missing = [worker for worker in range(draft.job.spec.workers) if worker not in present]
    if missing and attempt.outcome != attempts.CREATING:
        _end(draft, attempt, pod_deleted(pod_name(draft.job.metadata.name, missing[0], attempt.number)))
        return
    draft.status = attempts.with_attempt(draft.status, attempt if missing else attempts.with_pods(attempt, pods))
    if draft.status.start_time is None:
        draft.set(start_time=status.started_at(pods))
    status.report_placed(draft, demand, pods)
    status.report_running(draft, pods)
    until = deadline(draft)
    if until is not None:
        draft.requeue_at(until)
    _create(draft, attempt, missing)


def _unreserved(draft: Draft, pods: list[Pod]) -> Pod | None:
    """The first pod that has been bound without a reservation for too long and never started."""
    for pod in pods:
        for_s = draft.snapshot.unreserved_s.get(pod.metadata.uid)
        if for_s is None:
            continue
        if for_s < status.RESERVED_WITHIN_S:
            draft.requeue_after(status.RESERVED_WITHIN_S - for_s)
        elif not pod.has_started:
            return pod
    return None


def _create(draft: Draft, attempt: Attempt, missing: list[int]) -> None:
    """Create the pods that an attempt still lacks."""
    if not missing:
        return
    refusal = draft.snapshot.refusal
    if refusal is not None:
        status.report_refused(draft, refusal)
        draft.requeue_after(REFUSED_AGAIN_AFTER_S)
        return
    draft.requeue_after(CREATED_AGAIN_AFTER_S)
    name, workers = draft.job.metadata.name, draft.job.spec.workers
    wanted = [w for w in missing if pod_name(name, w, attempt.number) not in draft.snapshot.created]
    if wanted and pods.needs_service(draft.job):
        draft.create(CreateService(pods.build_service(draft.job, owner_reference(draft.job))))
    for worker in wanted:
        draft.create(CreatePod(build_pod(draft.job, worker, attempt.number)))
    if wanted:
        first = pod_name(name, wanted[0], attempt.number)
        told = first if len(wanted) == 1 else f"{first} and {len(wanted) - 1} more"
        draft.say("Normal", "PodCreated", f"{told}: attempt {attempt.number}, {len(wanted)} of {workers} workers")


def _end(draft: Draft, attempt: Attempt, outcome: Outcome) -> None:
    """End a failed attempt: the next begins after the backoff, unless the limit is reached."""
    limit = draft.job.spec.run_policy.backoff_limit
    charged = attempts.charge(draft.status, outcome, limit)
    if charged is None:
        used = f"all {limit} restarts of runPolicy.backoffLimit are used"
        draft.fail(outcome.reason, f"attempt {attempt.number}: {outcome.message}; {used}", attempt)
        return
    draft.status = attempts.with_attempt(
        charged, attempts.ended(attempt, outcome.reason, outcome.message, draft.snapshot.now)
    )
    at = attempts.due(draft.status, draft.snapshot.backoff) or draft.snapshot.now
    wait_s = (at - draft.snapshot.now).total_seconds()
    count = f"{'' if outcome.charged else 'not counted, '}{draft.status.restarts} of {limit} restarts used"
    message = f"attempt {attempt.number}: {outcome.message}; next attempt in {wait_s:.0f} s, {count}"
    draft.condition(keys.CONDITION_PLACED, "False", keys.REASON_BACKING_OFF, message)
    draft.unset_running(outcome.reason, message)
    draft.end_pods()
    draft.say("Warning", "Restarting", message)
    draft.requeue_at(at)


def _after_end(draft: Draft) -> Decision:
    """See that nothing of a finished job still runs, and delete it once its time is over."""
    draft.delete_unfinished()
    keep_s = draft.job.spec.run_policy.ttl_seconds_after_finished
    if keep_s is not None and draft.status.completion_time is not None:
        until = parse_rfc3339(draft.status.completion_time) + timedelta(seconds=keep_s)
        if until <= draft.snapshot.now:
            draft.then(DeleteJob())
        else:
            draft.requeue_at(until)
    return draft.decision()
