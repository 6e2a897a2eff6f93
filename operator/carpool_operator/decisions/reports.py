"""What the conditions Placed and Running say of a job whose pods exist."""

import re
from collections.abc import Sequence

from carpool_core import keys
from carpool_core.demand import Demand
from carpool_core.kube.pods import Pod

from carpool_operator.decisions.draft import Draft
from carpool_operator.decisions.predicting import why_alone
from carpool_operator.state import conditions
from carpool_operator.state.snapshot import Refusal
from carpool_operator.workers import outcomes, placement

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
