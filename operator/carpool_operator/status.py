"""The decision while it is being made: a status and the actions that follow its writing."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.demand import Demand
from carpool_core.kube.pods import Pod
from carpool_core.products import hardware_name
from carpool_core.resources.job import Attempt, JobStatus, JobSummary, WorkerPlacement
from carpool_core.resources.meta import Condition
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import RequestedMode, SharingMode

from carpool_operator import attempts, conditions, outcomes, placement
from carpool_operator.actions import (
    Action,
    CreatePod,
    CreateService,
    Decision,
    DeletePod,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.conditions import Truth
from carpool_operator.hidden_pods import end_unseen
from carpool_operator.snapshot import Refusal, Snapshot

_CHARS = 256


def summarize(status: JobStatus) -> JobSummary | None:
    """Return the columns; None while there is nothing to show."""
    summary = JobSummary(
        node=_several(place.node for place in status.placement),
        gpu=_gpu(status.placement),
        mode=_several(place.mode.value for place in status.placement),
        predicted_memory=_memory([p.memory.median_mib for p in _predictions(status)]),
        memory_bound=_memory_bound(status),
        predicted_utilization=_range([p.activity.gpu_util_percent.median for p in _predictions(status)], ".0f", "%"),
        observed_memory=_memory([status.observed.peak_memory_mib]) if status.observed else "",
        observed_utilization=_observed_utilization(status),
        slowdown=format(max(p.expected_slowdown for p in status.placement), ".2f") if status.placement else "",
        step_time=_step_time(status),
    )
    return None if summary == JobSummary() else summary


def _several(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names)))[:_CHARS]


def _gpu(places: list[WorkerPlacement]) -> str:
    counts: dict[str, int] = {}
    for place in places:
        counts[place.product] = counts.get(place.product, 0) + len(place.gpu_uuids)
    return ",".join(f"{count}x {name}" if count > 1 else name for name, count in sorted(counts.items()))[:_CHARS]


def _predictions(status: JobStatus) -> list[ProductPrediction]:
    """Predictions for the products of the placement; for all products while there is none."""
    known = status.prediction.products if status.prediction else []
    placed = {hardware_name(place.product) for place in status.placement}
    return [p for p in known if not placed or p.product in placed]


def _memory_bound(status: JobStatus) -> str:
    """What placement counts with: the user's own limit, else the prediction's bound."""
    if not status.placement:
        return _memory([p.memory.upper_mib for p in _predictions(status)])
    predicted = {p.product: p.memory for p in _predictions(status)}
    bounds = (place.bound_mib(predicted.get(hardware_name(place.product))) for place in status.placement)
    return _memory([bound for bound in bounds if bound is not None])


def _memory(mib: Sequence[int]) -> str:
    """Amounts of memory in GiB, in TiB where one of them reaches that."""
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


def _step_time(status: JobStatus) -> str:
    seen = status.observed
    if seen is None or seen.step_time_seconds is None:
        return ""
    took = f"{seen.step_time_seconds * 1000:,.0f} ms"
    return took if seen.step_time_ratio is None else f"{took} ({seen.step_time_ratio:.2f}x)"


_MESSAGE_CHARS = 4096


class Draft:
    """Collects what a reconciliation decides. Lives as long as one call of `reconcile`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.job = snapshot.job
        self.status: JobStatus = snapshot.job.status
        self._first: list[Action] = []
        self._pod_actions: list[Action] = []
        self._after: list[Action] = []
        self._requeue_after_s: float | None = None

    def set(self, **fields: Any) -> None:
        """Change fields of the status."""
        self.status = msgspec.structs.replace(self.status, **fields)

    def condition(self, type_: str, status: Truth, reason: str, message: str = "") -> None:
        """Set a condition."""
        condition = Condition(
            type=type_,
            status=status,
            reason=reason,
            message=message[:_MESSAGE_CHARS],
            observed_generation=self.job.metadata.generation,
        )
        self.status = conditions.with_condition(self.status, condition, self.snapshot.now)

    def unset_running(self, reason: str, message: str) -> None:
        """Set Running to False, where it was ever set."""
        if conditions.find(self.status, keys.CONDITION_RUNNING) is not None:
            self.condition(keys.CONDITION_RUNNING, "False", reason, message)

    def say(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event once the status is written."""
        self._after.append(RecordEvent(type_, reason, message))

    def first(self, action: Action) -> None:
        """Do something before anything else; where it fails, nothing else happens."""
        self._first.append(action)

    def then(self, action: Action) -> None:
        """Do something after the status is written."""
        self._after.append(action)

    def create(self, action: CreatePod | CreateService) -> None:
        """Create a pod, or what it needs, once the status is written."""
        self._pod_actions.append(action)

    def delete_pod(self, pod: Pod) -> None:
        """Delete a pod once the status is written; nothing to do where it is being deleted already."""
        action = DeletePod(pod.metadata.name, pod.metadata.uid)
        if pod.metadata.deletion_timestamp is None and action not in self._pod_actions:
            self._pod_actions.append(action)

    def delete_unfinished(self) -> None:
        """Delete every pod of the job that has not finished; finished ones keep their logs."""
        for pod in self.snapshot.pods:
            if not pod.is_finished:
                self.delete_pod(pod)

    def end_pods(self) -> None:
        """Delete every pod of the job that has not finished, and what of the attempt the cache does not show."""
        self.delete_unfinished()
        unseen = end_unseen(self.job, attempts.present(self.status), self.snapshot.pods, is_awaited=False)
        if unseen is not None:
            self._pod_actions.append(unseen)

    def requeue_after(self, seconds: float) -> None:
        """Look again after so many seconds at the latest."""
        known = self._requeue_after_s
        self._requeue_after_s = seconds if known is None else min(known, seconds)

    def requeue_at(self, moment: datetime) -> None:
        """Look again at that time at the latest."""
        self.requeue_after(max(0.0, (moment - self.snapshot.now).total_seconds()))

    def finish(self, type_: str, reason: str, message: str, attempt: Attempt | None) -> None:
        """Bring the job to its end, Complete or Failed."""
        now = self.snapshot.now
        if attempt is not None and attempt.ended_at is None:
            self.status = attempts.with_attempt(self.status, attempts.ended(attempt, reason, message, now))
        self.condition(type_, "True", reason, message)
        self.unset_running(reason, message)
        if conditions.find(self.status, keys.CONDITION_PLACED) and not conditions.holds(
            self.status, keys.CONDITION_PLACED
        ):
            self.condition(keys.CONDITION_PLACED, "False", reason, "the job ended without every worker being placed")
        self.set(completion_time=rfc3339(now))
        self.end_pods()
        self.say("Normal" if type_ == keys.CONDITION_COMPLETE else "Warning", type_, message)

    def fail(self, reason: str, message: str, attempt: Attempt | None = None) -> None:
        """Bring the job to its end without success."""
        self.finish(keys.CONDITION_FAILED, reason, message, attempt)

    def decision(self, *, is_current: bool = True) -> Decision:
        """Return what was decided; nothing is written where nothing changed.

        Args:
            is_current: Whether the status speaks of the present generation; not while its prediction is computed, which
                for most jobs takes a millisecond that is not worth a write.
        """
        if is_current:
            self.set(observed_generation=self.job.metadata.generation)
        self.set(summary=summarize(self.status))
        status = conditions.with_state(self.status)
        write = [WriteStatus(status)] if status != self.job.status else []
        return Decision((*self._first, *write, *self._pod_actions, *self._after), self._requeue_after_s)


_FIGURES = re.compile(r"[0-9]+(\.[0-9]+)?([numkKMGTPE]i?)?\b")
_NO_GPU_FITS = "NoGpuFits"
_WORTH_AN_EVENT = (_NO_GPU_FITS, "Unschedulable")

RESERVED_WITHIN_S = 60.0
"""How long a bound pod may be without a reservation: GpuNodes may be heard of after pods, but never that much later."""

_SCHEDULER_ENDINGS = re.compile(r"\.? (no new claims|preemption:|Preemption)")
"""Where kube-scheduler's own words begin after all reasons."""

_OTHER_REASONS = re.compile(r", (?=\d+ (?!products? with less))")
"""Between two of kube-scheduler's reasons, each of which begins with how many nodes it is about. The extender's own
sentence has a number after a comma in one place only."""


def _alone_until(places: Sequence[WorkerPlacement]) -> str:
    if not places or any(place.mode is SharingMode.EXCLUSIVE for place in places):
        return "runs alone on its GPU (Exclusive)"
    settles = all(place.provisional or place.measured_mib is not None for place in places)
    return f"has its GPU to itself until {'its own peak was measured' if settles else 'it ends'}"


def why_alone(demand: Demand, places: Sequence[WorkerPlacement]) -> str | None:
    """Say why a job gets a GPU of its own although it did not ask for one; None where that is not so."""
    if demand.prediction is None or demand.memory_limit_mib is not None:
        return None
    how = _alone_until(places)
    if demand.is_unknown:
        return f"{how}, because its memory is unknown: {demand.prediction.message}"
    is_left_open = demand.mode is RequestedMode.AUTO
    of = [place.product for place in places if is_left_open or place.mode is SharingMode.EXCLUSIVE]
    alone = set(map(hardware_name, of))
    unknown = sorted(name for name in alone if demand.prediction_on(name) is None)
    if demand.mode is not RequestedMode.EXCLUSIVE and not unknown:
        untrusted = sorted(name for name in alone if demand.profile_on(name).memory_mib is None)
        return _why_untrusted(demand, untrusted, how) if untrusted else None
    if demand.mode is RequestedMode.EXCLUSIVE:
        return None
    return (
        f"{how}, because nothing was predicted for GPU product {', '.join(unknown)}: "
        "give spec.memory.limit to let it share such a GPU, or spec.gpu.product to choose another"
    )


def _why_untrusted(demand: Demand, products: Sequence[str], how: str) -> str:
    lost = [name for name in products if (found := demand.prediction_on(name)) is not None and found.memory.is_lost]
    if lost:
        return (
            f"{how}, because earlier runs of this model (other jobs' too) died of memory on {', '.join(lost)}, or took "
            "nearly all of it: once one has ended well with less, the next may share; give spec.memory.limit to let it "
            "share all the same"
        )
    return (
        f"{how}, because too little like it was measured on {', '.join(products)}: jobs "
        "that run there calibrate the next ones; give spec.memory.limit to let it share all the same"
    )


def unschedulable(message: str) -> tuple[str, str]:
    """Take (reason, message) out of what kube-scheduler says of a pod that fits nowhere.

    It wraps the extender's one sentence between the reasons of its own plugins, each with its number of nodes:
    `0/23 nodes are available: 1 Insufficient cpu, 22 NoGpuFits: needs … . preemption: …`. Both are kept.
    """
    before, marker, after = message.partition(f"{_NO_GPU_FITS}: ")
    if not marker:
        return "Unschedulable", message
    ending = _SCHEDULER_ENDINGS.search(after)
    sentence, *others = _OTHER_REASONS.split(after[: ending.start()] if ending else after)
    # The last word before the marker is the number of nodes that the extender refused.
    first = before.partition(": ")[2].rpartition(" ")[0].rpartition(", ")[0]
    others = [*([first] if first else []), *others]
    return _NO_GPU_FITS, f"{sentence}; other nodes: {', '.join(others).rstrip('.')}" if others else sentence


def _why_unplaced(draft: Draft, pod: Pod) -> tuple[str, str] | None:
    """Why a pod counts as not placed; None where it is."""
    is_known = any(place.pod_uid == pod.metadata.uid for place in draft.status.placement)
    if is_known and draft.snapshot.unreserved_s.get(pod.metadata.uid, 0.0) < RESERVED_WITHIN_S:
        return None
    if pod.spec.node_name:
        lacks = f"on node {pod.spec.node_name}, but its GpuNode holds no reservation for it"
        if pod.has_started:
            told = f"pod {pod.metadata.name} runs {lacks}: it is left alone, but others may be placed on its GPU"
        else:
            told = f"pod {pod.metadata.name} is bound {lacks} (yet); without one the node does not start it"
        return outcomes.NO_RESERVATION, told
    scheduled = next((c for c in pod.status.conditions if c.type == "PodScheduled"), None)
    if scheduled is None or scheduled.status != "False":
        return "Scheduling", f"pod {pod.metadata.name} waits for {keys.SCHEDULER_NAME}"
    if scheduled.reason != "Unschedulable":
        return scheduled.reason or "Unschedulable", scheduled.message
    return unschedulable(scheduled.message)


def report_placed(draft: Draft, demand: Demand, pods: Sequence[Pod]) -> None:
    """Set Placed from pods and reservations of the present attempt."""
    places = draft.status.placement
    workers = draft.job.spec.workers
    waiting = [why for pod in pods if (why := _why_unplaced(draft, pod)) is not None]
    placed = len(pods) - len(waiting)
    if placed >= workers:
        was_placed = conditions.holds(draft.status, keys.CONDITION_PLACED)
        message = "; ".join([placement.describe(place) for place in places])
        alone = why_alone(demand, places)
        draft.condition(keys.CONDITION_PLACED, "True", "Placed", message if alone is None else f"{message}; {alone}")
        if not was_placed:
            draft.say("Normal", "Placed", message)
        return
    known = conditions.find(draft.status, keys.CONDITION_PLACED)
    if len(pods) < workers and known is not None and known.reason in keys.REASONS_PODS_REFUSED:
        return  # said until every pod exists, so that the condition does not change with each try
    reason, message = waiting[0] if waiting else ("CreatingPods", f"{len(pods)} of {workers} pods exist")
    told = f"{placed} of {workers} workers placed; {message}" if workers > 1 else message
    if reason in _WORTH_AN_EVENT and (known is None or known.reason != reason):
        draft.say("Warning", reason, told)
    draft.condition(keys.CONDITION_PLACED, "False", reason, told)


def report_refused(draft: Draft, refusal: Refusal) -> None:
    """Set Placed to why a pod cannot be created; an event tells it once, not with each try that is refused alike.

    Refusals that differ by figures alone are alike: a quota's tell what others use at the time.
    """
    before = conditions.find(draft.status, keys.CONDITION_PLACED)
    draft.condition(keys.CONDITION_PLACED, "False", refusal.reason, refusal.message)
    after = conditions.find(draft.status, keys.CONDITION_PLACED)
    told = [None if of is None else (of.reason, _FIGURES.sub("", of.message)) for of in (before, after)]
    if told[0] != told[1]:
        draft.say("Warning", refusal.reason, refusal.message)


def _waiting(pod: Pod) -> tuple[str, str]:
    for status in pod.status.container_statuses:
        if status.state.waiting is not None:
            said = f": {status.state.waiting.message}" if status.state.waiting.message else ""
            reason = status.state.waiting.reason or "Starting"
            return reason, f"container {status.name} of pod {pod.metadata.name} waits{said}"
    return "Starting", f"pod {pod.metadata.name} is starting on node {pod.spec.node_name or '(none yet)'}"


def started_at(pods: Sequence[Pod]) -> str | None:
    """When the first container of some pods ran, RFC 3339; None where none runs."""
    times = [
        status.state.running.started_at
        for pod in pods
        for status in pod.status.container_statuses
        if status.state.running is not None and status.state.running.started_at
    ]
    return min(times, default=None)


def _outlived(pod: Pod) -> list[str]:
    """Say which container with GPUs has ended while others keep the pod, and with it the GPUs."""
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


def report_running(draft: Draft, pods: Sequence[Pod]) -> None:
    """Set Running from the phases of the present attempt's pods."""
    workers = draft.job.spec.workers
    idle = [pod for pod in pods if pod.status.phase not in ("Running", "Succeeded")]
    running = len(pods) - len(idle)
    if running >= workers:
        number = draft.status.attempts[-1].number
        outlived = [told for pod in pods for told in _outlived(pod)]
        message = "; ".join([f"{running} of {workers} workers run, attempt {number}", *outlived[:1]])
        draft.condition(keys.CONDITION_RUNNING, "True", "Running", message)
    elif conditions.holds(draft.status, keys.CONDITION_PLACED) and idle:
        draft.condition(keys.CONDITION_RUNNING, "False", *_waiting(idle[0]))
    else:
        draft.unset_running("NotPlaced", "not every worker has a GPU")
