"""The job's status: the draft of a decision, the conditions Placed and Running, the columns of `kubectl get`. Pure."""

import re
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.demand import Demand
from carpool_core.kube.pods import Pod, scheduler_message
from carpool_core.products import hardware_name
from carpool_core.resources.job import Attempt, JobStatus, JobSummary, WorkerPlacement
from carpool_core.resources.meta import Condition
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import RequestedMode, SharingMode
from msgspec.structs import replace

from carpool_operator import attempts, conditions, outcomes, placement
from carpool_operator.actions import (
    Action,
    CreateCompanion,
    CreatePod,
    Decision,
    DeletePod,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.conditions import ConditionStatus
from carpool_operator.snapshot import Refusal, Snapshot

_MAX_MESSAGE_CHARS = 4096


class Draft:
    """Collects the new status and the actions of one reconciliation."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.job = snapshot.job
        self.status: JobStatus = snapshot.job.status
        self._before_write: list[Action] = []
        self._pod_actions: list[Action] = []
        self._after_write: list[Action] = []
        self._requeue_after_s: float | None = None

    def update(self, **fields: Any) -> None:
        """Change fields of the status."""
        self.status = replace(self.status, **fields)

    def put_attempt(self, attempt: Attempt) -> None:
        """Insert or replace an attempt in the status."""
        self.status = attempts.with_attempt(self.status, attempt)

    def set_condition(self, type_: str, status: ConditionStatus, reason: str, message: str = "") -> None:
        """Set a condition. The anomalies end with Running."""
        condition = Condition(
            type=type_,
            status=status,
            reason=reason,
            message=message[:_MAX_MESSAGE_CHARS],
            observed_generation=self.job.metadata.generation,
        )
        self.status = conditions.with_condition(self.status, condition, self.snapshot.now)
        if type_ == keys.CONDITION_RUNNING and status == "False":
            for anomaly in keys.ANOMALIES:
                if conditions.is_true(self.status, anomaly):
                    self.set_condition(anomaly, "False", reason, message)

    def set_not_running(self, reason: str, message: str) -> None:
        """Set Running to False if it was ever set."""
        if conditions.find(self.status, keys.CONDITION_RUNNING) is not None:
            self.set_condition(keys.CONDITION_RUNNING, "False", reason, message)

    def before_write(self, action: Action) -> None:
        """Add an action before all others; if it fails, the others are skipped."""
        self._before_write.append(action)

    def after_write(self, action: Action) -> None:
        """Add an action after the status is written."""
        self._after_write.append(action)

    def event(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event after the status is written."""
        self._after_write.append(RecordEvent(type_, reason, message))

    def create(self, action: CreatePod | CreateCompanion) -> None:
        """Create an object after the status is written."""
        self._pod_actions.append(action)

    def delete_pod(self, pod: Pod) -> None:
        """Delete a pod after the status is written, unless it is being deleted already."""
        action = DeletePod(pod.metadata.name, pod.metadata.uid)
        if pod.metadata.deletion_timestamp is None and action not in self._pod_actions:
            self._pod_actions.append(action)

    def delete_pods(self) -> None:
        """Delete every pod of the job that has not finished; finished pods keep their logs."""
        for pod in self.snapshot.pods:
            if not pod.is_finished:
                self.delete_pod(pod)

    def requeue_after(self, seconds: float) -> None:
        """Reconcile again after so many seconds at the latest."""
        known = self._requeue_after_s
        self._requeue_after_s = seconds if known is None else min(known, seconds)

    def requeue_at(self, moment: datetime) -> None:
        """Reconcile again at that time at the latest."""
        self.requeue_after(max(0.0, (moment - self.snapshot.now).total_seconds()))

    def finish(self, type_: str, reason: str, message: str, attempt: Attempt | None) -> None:
        """End the job with the condition Complete or Failed."""
        now = self.snapshot.now
        if attempt is not None and attempt.ended_at is None:
            self.put_attempt(attempts.ended(attempt, reason, message, now))
        self.set_condition(type_, "True", reason, message)
        self.set_not_running(reason, message)
        placed = conditions.find(self.status, keys.CONDITION_PLACED)
        if placed is not None and placed.status != "True":
            message_placed = "the job ended before every worker was placed"
            self.set_condition(keys.CONDITION_PLACED, "False", reason, message_placed)
        self.update(completion_time=rfc3339(now))
        self.delete_pods()
        self.event("Normal" if type_ == keys.CONDITION_COMPLETE else "Warning", type_, message)

    def fail(self, reason: str, message: str, attempt: Attempt | None = None) -> None:
        """End the job with the condition Failed."""
        self.finish(keys.CONDITION_FAILED, reason, message, attempt)

    def decision(self, *, is_current: bool = True) -> Decision:
        """Return the decision; it writes no status that has not changed.

        Args:
            is_current: Whether the status describes the present generation. It does not while the prediction is being
                computed, which mostly takes a millisecond and is not worth a write.
        """
        if is_current:
            self.update(observed_generation=self.job.metadata.generation)
        self.update(summary=summarize(self.status, self.job.spec.training.steps))
        failed = {pod.metadata.uid for pod in self.snapshot.pods if pod.status.phase == "Failed"}
        status = bounded(conditions.with_state(self.status), failed)
        pod = next((action.name for action in self._before_write if isinstance(action, CreatePod)), "")
        write = [WriteStatus(status, pod)] if pod or status != self.job.status else []
        return Decision((*self._before_write, *write, *self._pod_actions, *self._after_write), self._requeue_after_s)


# Size

_MAX_BYTES = 196 * 1024
"""Size of an encoded status. etcd accepts 1.5 MiB for an object, but each watch sends all of it."""
_MAX_PLACEMENTS = 64
_SHORTER = ((512, 8), (128, 2), (0, 0))
"""Characters of a placement's reason and number of its co-tenants, for statuses that are too large."""
_SHORT_MESSAGE_CHARS = 256


def bounded(status: JobStatus, failed: Container[str] = ()) -> JobStatus:
    """Return a status of at most 200 KiB for any number of workers: with less detail on each placement and attempt.

    Placements of failed pods are kept first.
    """
    places = status.placement
    if len(places) > _MAX_PLACEMENTS:
        # Released placements still count, so the number does not fall during an attempt.
        omitted = max(status.omitted_placements, len(places) - _MAX_PLACEMENTS)
        # The outcome of a failed worker depends on its placement, also after its reservation is released.
        listed = sorted(places, key=lambda place: place.pod_uid not in failed)[:_MAX_PLACEMENTS]
        listed.sort(key=lambda place: place.worker)
        status = replace(status, placement=listed, omitted_placements=omitted)
    elif not places:
        status = replace(status, omitted_placements=0)
    for chars, neighbours in _SHORTER:
        if len(msgspec.json.encode(status)) <= _MAX_BYTES:
            return status
        short = [replace(p, reason=p.reason[:chars], neighbours=p.neighbours[:neighbours]) for p in status.placement]
        status = replace(status, placement=short)
    if len(msgspec.json.encode(status)) > _MAX_BYTES:
        tried = [replace(attempt, message=attempt.message[:_SHORT_MESSAGE_CHARS]) for attempt in status.attempts]
        status = replace(status, attempts=tried)
    return status


# The condition Placed

_FIGURES = re.compile(r"[0-9]+(\.[0-9]+)?([numkKMGTPE]i?)?\b")
_NO_GPU_FITS = "NoGpuFits"
QUEUED = "Queued"
"""Reason of Placed: the scheduler has not yet said why the job waits."""
_DESCRIBED = 16
"""Workers whose placement the condition describes."""
_WAIT_REASONS = (_NO_GPU_FITS, "WouldDelay")
"""Reasons that may alternate while a job waits in the queue; the first one has an event."""
_EVENT_REASONS = (*_WAIT_REASONS, "Unschedulable")

RESERVATION_TIMEOUT_S = 60.0
"""Seconds that a bound pod may have no reservation. Watches of GpuNodes lag behind those of pods, but never so long."""

_REASON_SEPARATOR = re.compile(r", (?=\d+ (?!products? with less))")
"""Separator of kube-scheduler's reasons, each of which begins with a number of nodes. The extender's own message has a
number after a comma in one place only."""


def unschedulable(message: str) -> tuple[str, str]:
    """Return (reason, message) from kube-scheduler's message about a pod that fits on no node.

    It puts the extender's message between the reasons of its own plugins, each with a number of nodes:
    `0/23 nodes are available: 1 Insufficient cpu, 22 NoGpuFits: needs … . preemption: …`. Both are kept.
    """
    message = scheduler_message(message)
    before, marker, after = message.partition(f"{_NO_GPU_FITS}: ")
    if not marker:
        return "Unschedulable", message
    sentence, *others = _REASON_SEPARATOR.split(after)
    # The last word before the marker is the number of nodes that the extender rejected.
    first = before.partition(": ")[2].rpartition(" ")[0].rpartition(", ")[0]
    others = [*([first] if first else []), *others]
    return _NO_GPU_FITS, f"{sentence}; other nodes: {', '.join(others)}" if others else sentence


def queued_message(pod: str) -> str:
    """Return the message of Placed for a pod of which the scheduler has not yet said why it waits."""
    return f"pod {pod} waits in the queue of {keys.SCHEDULER_NAME}"


def why_unplaced(draft: Draft, pod: Pod) -> tuple[str, str] | None:
    """Return (reason, message) for a pod without placement; None if it has one."""
    if pod.status.phase == "Succeeded":
        return None  # its reservation is released, and only the first placements are in the status
    is_known = any(place.pod_uid == pod.metadata.uid for place in draft.status.placement)
    if is_known and draft.snapshot.unreserved_s.get(pod.metadata.uid, 0.0) < RESERVATION_TIMEOUT_S:
        return None
    if pod.spec.node_name:
        lacks = f"on node {pod.spec.node_name}, but its GpuNode holds no reservation for it"
        if pod.has_started:
            message = f"pod {pod.metadata.name} runs {lacks}: it keeps running, but others may be placed on its GPU"
        else:
            message = f"pod {pod.metadata.name} is bound {lacks} (yet); without one the node does not start it"
        return outcomes.NO_RESERVATION, message
    # The API server leaves the reason SchedulingGated until kube-scheduler has tried the pod.
    type_ = keys.CONDITION_ADMITTED if pod.is_gated else "PodScheduled"
    found = (c for c in pod.status.conditions if c.type == type_ and c.status == "False")
    waits = next((condition for condition in found if condition.reason != "SchedulingGated"), None)
    if waits is None:
        return QUEUED, queued_message(pod.metadata.name)
    return unschedulable(waits.message) if waits.reason in ("", "Unschedulable") else (waits.reason, waits.message)


def report_placed(draft: Draft, demand: Demand, pods: Sequence[Pod]) -> None:
    """Set Placed from the pods and reservations of the active attempt."""
    places = draft.status.placement
    workers = draft.job.spec.workers
    waiting = [why for pod in pods if (why := why_unplaced(draft, pod)) is not None]
    placed = len(pods) - len(waiting)
    if placed >= workers:
        was_placed = conditions.is_true(draft.status, keys.CONDITION_PLACED)
        count = [f"{workers:,} workers are placed"] if workers > _DESCRIBED else []
        message = "; ".join([*count, *map(placement.describe, places[:_DESCRIBED])])
        alone = why_alone(demand, places, attempts.latest_before(draft.status))
        detail = message if alone is None else f"{message}; {alone}"
        draft.set_condition(keys.CONDITION_PLACED, "True", "Placed", detail)
        if not was_placed:
            draft.event("Normal", "Placed", message)
        return
    known = conditions.find(draft.status, keys.CONDITION_PLACED)
    if len(pods) < workers and known is not None and known.reason in keys.REASONS_PODS_REFUSED:
        return  # the refusal stays until every pod exists, so that the condition does not alternate
    explained = [why for why in waiting if why[0] != QUEUED]  # the queue explains a job on one of its pods
    reason, message = next(iter([*explained, *waiting]), ("CreatingPods", f"{len(pods)} of {workers} pods exist"))
    message = f"{placed} of {workers} workers placed; {message}" if workers > 1 else message
    before = "" if known is None else known.reason
    if reason in _EVENT_REASONS and reason != before and not {reason, before}.issubset(_WAIT_REASONS):
        draft.event("Warning", reason, message)
    draft.set_condition(keys.CONDITION_PLACED, "False", reason, message)


def report_refused(draft: Draft, refusal: Refusal) -> None:
    """Set Placed to the refusal of a pod, with an event if the refusal is new.

    Refusals that differ only in numbers are the same: a quota's message contains the present use of others.
    """
    before = conditions.find(draft.status, keys.CONDITION_PLACED)
    draft.set_condition(keys.CONDITION_PLACED, "False", refusal.reason, refusal.message)
    after = conditions.find(draft.status, keys.CONDITION_PLACED)
    known, new = [None if one is None else (one.reason, _FIGURES.sub("", one.message)) for one in (before, after)]
    if known != new:
        draft.event("Warning", refusal.reason, refusal.message)


def why_alone(demand: Demand, places: Sequence[WorkerPlacement], before: Attempt | None) -> str | None:
    """Return why a job gets a GPU of its own although it did not ask for one; None if it does not.

    `before` is the attempt before this one.
    """
    if demand.prediction is None or demand.memory_limit_mib is not None:
        return None
    how = _how_alone(places)
    if demand.is_unknown:
        return f"{how}, because its memory is unknown: {demand.prediction.message}"
    if demand.mode is RequestedMode.EXCLUSIVE:
        return None
    alone = {
        hardware_name(place.product)
        for place in places
        if demand.mode is RequestedMode.AUTO or place.mode is SharingMode.EXCLUSIVE
    }
    unpredicted = sorted(name for name in alone if demand.prediction_on(name) is None)
    if unpredicted:
        return (
            f"{how}, because nothing was predicted for GPU product {', '.join(unpredicted)}: "
            "give spec.memory.limit to let it share such a GPU, or spec.gpu.product to choose another"
        )
    untrusted = sorted(name for name in alone if demand.profile_on(name).memory_mib is None)
    if untrusted and before is not None and before.doubted:
        return (
            f"{how}, because log and measurements of attempt {before.number} do not both show that GPU memory ran "
            "out; give spec.memory.limit to let it share"
        )
    return _why_untrusted(demand, untrusted, how) if untrusted else None


def _how_alone(places: Sequence[WorkerPlacement]) -> str:
    if not places or any(place.mode is SharingMode.EXCLUSIVE for place in places):
        return "runs alone on its GPU (Exclusive)"
    may_share = all(place.provisional or place.measured_mib is not None for place in places)
    return f"has its GPU to itself until {'its own peak was measured' if may_share else 'it ends'}"


def _why_untrusted(demand: Demand, products: Sequence[str], how: str) -> str:
    lost = [name for name in products if (found := demand.prediction_on(name)) is not None and found.memory.is_refuted]
    if lost:
        return (
            f"{how}, because earlier runs of this model (also of other jobs) ran out of memory on {', '.join(lost)}, "
            "or took nearly all of it: once one has completed with less, the next may share; "
            "give spec.memory.limit to let it share now"
        )
    return (
        f"{how}, because too few jobs like it were measured on {', '.join(products)}: jobs "
        "that run there calibrate the next ones; give spec.memory.limit to let it share now"
    )


# The condition Running


def report_running(draft: Draft, pods: Sequence[Pod]) -> None:
    """Set Running from the phases of the active attempt's pods."""
    workers = draft.job.spec.workers
    idle = [pod for pod in pods if pod.status.phase not in ("Running", "Succeeded")]
    running = len(pods) - len(idle)
    if running >= workers:
        number = draft.status.attempts[-1].number
        ended = [message for pod in pods for message in _training_ended(pod)]
        message = "; ".join([f"{running} of {workers} workers run, attempt {number}", *ended[:1]])
        draft.set_condition(keys.CONDITION_RUNNING, "True", "Running", message)
    elif conditions.is_true(draft.status, keys.CONDITION_PLACED) and idle:
        reason, message = why_not_started(idle[0])
        before = conditions.find(draft.status, keys.CONDITION_RUNNING)
        if reason not in _ORDINARY_WAITS and (before is None or before.reason != reason):
            draft.event("Warning", reason, message)
        draft.set_condition(keys.CONDITION_RUNNING, "False", reason, message)
    else:
        draft.set_not_running("NotPlaced", "not every worker has a GPU")


_STARTING = "Starting"
_ORDINARY_WAITS = frozenset({"", _STARTING, "ContainerCreating", "PodInitializing"})
"""The kubelet's reasons for a container that waits without an error of its own."""


def why_not_started(pod: Pod) -> tuple[str, str]:
    """Return (reason, message) for a pod that does not run yet, in the kubelet's words."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    waiting = [(s.name, s.state.waiting) for s in statuses if s.state.waiting is not None]
    if not waiting:
        return _STARTING, f"pod {pod.metadata.name} is starting on node {pod.spec.node_name or '(none yet)'}"
    name, wait = min(waiting, key=lambda one: one[1].reason in _ORDINARY_WAITS)
    detail = f": {wait.message}" if wait.message else ""
    return wait.reason or _STARTING, f"container {name} of pod {pod.metadata.name} waits{detail}"


def start_failure(pod: Pod) -> tuple[str, str] | None:
    """Return (reason, message) of the kubelet for a pod that does not start; None without one."""
    reason, message = why_not_started(pod)
    return None if reason in _ORDINARY_WAITS else (reason, message)


def _training_ended(pod: Pod) -> list[str]:
    """Return a message for a container with GPUs that has ended while others keep the pod and its GPUs."""
    training = {
        c.name for c in pod.spec.containers if keys.RESOURCE_GPU in {**c.resources.limits, **c.resources.requests}
    }
    ended = [s for s in pod.status.container_statuses if s.name in training and s.state.terminated is not None]
    others = [s.name for s in pod.status.container_statuses if s.name not in training and s.state.running is not None]
    if pod.is_finished or not others:
        return []
    return [
        f"container {one.name} of pod {pod.metadata.name} has ended with exit code {one.state.terminated.exit_code}, "
        f"but {', '.join(others)} still runs and keeps the GPU: make it a sidecar, which is an init container with "
        "restartPolicy Always"
        for one in ended
        if one.state.terminated is not None
    ]


# The columns of `kubectl get gtj`

_MAX_COLUMN_CHARS = 256


def summarize(status: JobStatus, steps: int | None) -> JobSummary | None:
    """Return the columns; None if all are empty. `steps` are those of the whole training.

    A status holds only the first placements, and those of other workers are gone once their reservations are released.
    The columns that depend on all placements then keep their values.
    """
    observed = {
        "observed_memory": _memory([status.observed.peak_memory_mib]) if status.observed else "",
        "observed_utilization": _observed_utilization(status),
        "step_time": _step_time(status),
        **_progress(status, steps),
    }
    omitted = status.omitted_placements
    if status.summary is not None and omitted and 0 < len(status.placement) < _MAX_PLACEMENTS + omitted:
        return replace(status.summary, **observed)
    predictions = _predictions(status)
    summary = JobSummary(
        node=_distinct(place.node for place in status.placement),
        gpu=_gpu(status.placement),
        mode=_distinct(place.mode.value for place in status.placement),
        predicted_memory=_memory([p.memory.median_mib for p in predictions]),
        memory_bound=_memory_bound(status),
        predicted_utilization=_range([p.activity.gpu_util_percent.median for p in predictions], ".0f", "%"),
        slowdown=format(max(p.expected_slowdown for p in status.placement), ".2f") if status.placement else "",
        **observed,
    )
    return None if summary == JobSummary() else summary


def _distinct(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names)))[:_MAX_COLUMN_CHARS]


def _gpu(places: list[WorkerPlacement]) -> str:
    counts: dict[str, int] = {}
    for place in places:
        counts[place.product] = counts.get(place.product, 0) + len(place.gpu_uuids)
    names = ",".join(f"{count}x {name}" if count > 1 else name for name, count in sorted(counts.items()))
    return names[:_MAX_COLUMN_CHARS]


def _predictions(status: JobStatus) -> list[ProductPrediction]:
    """Return the predictions for the products of the placement; for all products before there is one."""
    known = status.prediction.products if status.prediction else []
    placed = {hardware_name(place.product) for place in status.placement}
    return [p for p in known if not placed or p.product in placed]


def _memory_bound(status: JobStatus) -> str:
    """Return the memory that placement counts: measured, else the user's limit or the prediction's upper bound."""
    if not status.placement:
        return _memory([p.memory.upper_mib for p in _predictions(status)])
    predicted = {p.product: p.memory for p in _predictions(status)}
    bounds = (place.counted_mib(predicted.get(hardware_name(place.product))) for place in status.placement)
    return _memory([bound for bound in bounds if bound is not None])


def _memory(mib: Sequence[int]) -> str:
    """Format amounts of memory in GiB, or in TiB if one of them reaches that."""
    unit, size = (" TiB", 1024**2) if max(mib, default=0) >= 1024**2 else (" GiB", 1024)
    return _range([amount / size for amount in mib], ".1f", unit)


def _range(values: Sequence[float], form: str, unit: str) -> str:
    if not values:
        return ""
    low, high = format(min(values), form), format(max(values), form)
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _observed_utilization(status: JobStatus) -> str:
    seen = status.observed.gpu_util_percent if status.observed else None
    return "" if seen is None else f"{seen:.0f}%"


def _progress(status: JobStatus, steps: int | None) -> dict[str, str]:
    seen, is_complete = status.observed, conditions.is_true(status, keys.CONDITION_COMPLETE)
    if seen is None or seen.steps is None:
        return {}
    ends = () if is_complete else (seen.expected_end, seen.latest_end)
    return {
        # A job that has succeeded went on after the last reading of its counters.
        "progress": "" if is_complete else f"{seen.steps:,}" + ("" if steps is None else f" of {steps:,}"),
        "measured_slowdown": "" if seen.slowdown is None else format(seen.slowdown, ".2f"),
        "expected_end": ", at most ".join(f"{end[:19]}Z" for end in ends if end),
    }


def _step_time(status: JobStatus) -> str:
    seen = status.observed
    if seen is None or seen.step_time_seconds is None:
        return ""
    took = f"{seen.step_time_seconds * 1000:,.0f} ms"
    took += f", at most {seen.step_time_interval.upper * 1000:,.0f} ms" if seen.step_time_interval else ""
    return took if seen.step_time_ratio is None else f"{took} ({seen.step_time_ratio:.2f}x)"
