"""When a job's prediction has to be computed (again), and what its status says of it."""

from collections.abc import Iterable, Mapping
from statistics import fmean

import msgspec
from carpool_core import keys
from carpool_core.demand import Demand, demand_of, prediction_message, unsuitable_reason
from carpool_core.durations import durations_s
from carpool_core.durations import format_duration as duration
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.prediction import Prediction

from carpool_operator.actions import Predict
from carpool_operator.conditions import find
from carpool_operator.inventory import Inventory
from carpool_operator.outcomes import GPU_OUT_OF_MEMORY
from carpool_operator.snapshot import Snapshot
from carpool_operator.status import Draft

_ALIKE = 1.1
"""By which factor lengths on several products may differ and still be told as one: a step time is predicted no better.
"""


def lengths_of(job: GpuTrainingJob, demand: Demand, inventory: Inventory) -> dict[str, float]:
    """Return how long a job takes alone on each product that it may have here, in seconds; empty if unknown."""
    return durations_s(job.spec.training.steps, demand.prediction, _suitable(demand, inventory).__contains__)


def _suitable(demand: Demand, inventory: Inventory) -> set[str]:
    kinds = {kind for node in inventory for kind, _ in node}
    return {hardware_name(kind.product) for kind in kinds if unsuitable_reason(demand, kind) is None}


def told(steps: int, lengths: Mapping[str, float]) -> str:
    """Say how long a job takes, and on which products least and most where they differ.

    Args:
        steps: Of its training.
        lengths: Seconds that it takes alone, by product; at least one.
    """
    fast, slow = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    least, most = lengths[fast], lengths[slow]
    about = f"{duration(least)} ({fast}) to {duration(most)} ({slow})"
    if most <= _ALIKE * least:
        about = duration(fmean(lengths.values()))
    return f"{steps:,} {'step takes' if steps == 1 else 'steps take'} about {about} alone"


TRANSIENT = frozenset({"TraceTimedOut", "TraceOutOfMemory", "TorchMissing", "PredictorFailed"})
"""Reasons to abstain that lie in the moment or in this installation, not in the job: worth another try."""

MOST_TOLD = 10
"""Places in the queue of traces that are told one by one: whoever stands farther back hears only that it is more, so
that a burst of jobs does not rewrite every status after every trace."""

_MOST_PRODUCTS = 64
"""Products that a status holds; the CRD's limit."""


def products_of(job: GpuTrainingJob, present: Iterable[str]) -> tuple[str, ...]:
    """Products that the job's prediction speaks of: those of the cluster, and those it spoke of already."""
    known = job.status.prediction
    before = () if known is None else tuple(product.product for product in known.products)
    wanted = list(dict.fromkeys((*present, *before)))[:_MOST_PRODUCTS]
    return tuple(sorted(wanted))


def is_current(prediction: Prediction | None, snapshot: Snapshot) -> bool:
    """Whether a prediction was computed from this input by this model and speaks of these products, or abstains."""
    if prediction is None or prediction.input_digest != snapshot.digest:
        return False
    if prediction.model_version != snapshot.model_version:
        return False
    return prediction.outcome == "Abstained" or set(snapshot.products) <= {p.product for p in prediction.products}


def _is_outdated(prediction: Prediction | None, snapshot: Snapshot) -> bool:
    """Whether much was learned since a prediction; that of an attempt that has its place stays what it was."""
    status, known = snapshot.job.status, snapshot.knowledge
    if prediction is None or prediction.outcome == "Abstained" or prediction == snapshot.prediction:
        return False
    last = status.attempts[-1] if status.attempts else None
    if last is not None and last.ended_at is None and status.placement:
        return False
    if known.is_on and not known.marks:
        # This process does not know the job's size yet. What the last attempt died of is worth finding out, and whether
        # enough was measured by now for it to share.
        died = last is not None and last.outcome == GPU_OUT_OF_MEMORY
        return died or any(not product.memory.trusted for product in prediction.products)
    marks = ((known.marks.get(product.product), product.memory) for product in prediction.products)
    return any(mark is not None and not mark.is_reflected_in(memory) for mark, memory in marks)


def _may_improve(draft: Draft, prediction: Prediction | None) -> bool:
    """Whether an abstention is of the moment, and the job has no pods yet, which would keep their place anyway."""
    snapshot = draft.snapshot
    has_pods = bool(snapshot.created) or not all(pod.is_finished for pod in snapshot.pods)
    is_waiting = not has_pods and not draft.job.spec.run_policy.suspend
    return is_waiting and prediction is not None and prediction.reason in TRANSIENT


def describe(prediction: Prediction) -> str:
    """Say a prediction in numbers: the first few products."""
    told = [
        f"{p.product}: memory {p.memory.median_mib:,} MiB, at most {p.memory.upper_mib:,} MiB, "
        f"utilization {p.activity.gpu_util_percent.median:.0f}%, step {p.step_time_seconds.median:.3g} s"
        for p in prediction.products[:2]
    ]
    more = len(prediction.products) - len(told)
    return "; ".join([*told, *([f"and {more} more product{'' if more == 1 else 's'}"] if more > 0 else [])])


def _length(draft: Draft) -> str:
    """Say behind what else was predicted how long the job takes; nothing where that is unknown."""
    steps = draft.job.spec.training.steps
    if steps is None:
        return ""
    try:
        demand = demand_of(msgspec.structs.replace(draft.job, status=draft.status))
    except ValueError:
        return ""  # by which the job fails in a moment, and says so
    lengths = lengths_of(draft.job, demand, draft.snapshot.inventory)
    return f"; {told(steps, lengths)}" if lengths else ""


def _tell(draft: Draft, prediction: Prediction) -> str:
    """Set the condition to what was predicted; return what it says."""
    told = prediction_message(prediction, draft.job.spec.sharing.mode, draft.job.spec.memory.limit) + _length(draft)
    is_known = prediction.outcome == "Predicted"
    draft.condition(keys.CONDITION_PREDICTED, "True" if is_known else "False", prediction.reason, told)
    return told


def _tell_anew(draft: Draft, prediction: Prediction) -> None:
    """Say of a changed spec what was said of the one before, where the same prediction holds."""
    before = find(draft.status, keys.CONDITION_PREDICTED)
    if before is not None and before.observed_generation < draft.job.metadata.generation:
        _tell(draft, prediction)


def _keep(draft: Draft, prediction: Prediction) -> None:
    draft.set(prediction=prediction)
    told = _tell(draft, prediction)
    if prediction.outcome == "Predicted":
        draft.say("Normal", "Predicted", describe(prediction) + _length(draft))
    else:
        # Nobody has to act where the job would not share, or may share all the same.
        draft.say("Warning" if told == prediction.message else "Normal", prediction.reason, told)


def _tracing(what: str, ahead: int) -> tuple[str, str]:
    """Reason and message of a job whose prediction waits for a trace."""
    if not ahead:
        return "Tracing", f"tracing one training step of {what} on fake tensors"
    number = f"more than {MOST_TOLD}" if ahead > MOST_TOLD else str(ahead)
    models = "other model" if ahead == 1 else "other models"
    return "TraceQueued", f"{what} waits to be traced, after {number} {models}"


def _renew(draft: Draft) -> bool:
    """Predict again with what was learned; return whether that is done, for which the next attempt waits."""
    snapshot = draft.snapshot
    if snapshot.prediction is None:
        draft.then(Predict(snapshot.digest, snapshot.products))
        return False
    _keep(draft, snapshot.prediction)
    return True


def predict(draft: Draft) -> bool:
    """Bring the prediction into the status or have it computed.

    Returns:
        Whether the status holds a prediction of what the job's spec says now.
    """
    snapshot = draft.snapshot
    known, fresh = draft.status.prediction, snapshot.prediction
    if known is not None and is_current(known, snapshot) and not _may_improve(draft, known):
        _tell_anew(draft, known)
        return not _is_outdated(known, snapshot) or _renew(draft)
    if fresh is not None and fresh != known:
        _keep(draft, fresh)
        known = fresh
    is_told = fresh is not None or is_current(known, snapshot)
    if is_told and not _may_improve(draft, known):
        return True
    if is_told and snapshot.retry_in_s > 0:
        draft.requeue_after(snapshot.retry_in_s)
        return True
    draft.then(Predict(snapshot.digest, snapshot.products))
    if is_told:
        return False  # the first pod waits for the answer, which decides whether it shares a GPU
    model = draft.job.spec.model
    if known is None and model is not None and model.features is None:
        what = model.catalog.name if model.catalog is not None else "the model's layers"
        draft.condition(keys.CONDITION_PREDICTED, "Unknown", *_tracing(what, snapshot.traces_ahead))
    return known is not None and known.input_digest == snapshot.digest
