"""When a job's prediction is computed or renewed, and the message of the condition Predicted. Pure."""

from collections.abc import Iterable, Mapping
from statistics import fmean

import msgspec
from carpool_core import keys
from carpool_core.demand import Demand, demand_of, prediction_message, unsuitable_reason
from carpool_core.durations import durations_s, format_duration
from carpool_core.products import PRODUCTS, GpuProduct, hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.prediction import Prediction
from carpool_core.values import JobState, pluralize

from carpool_operator import attempts, conditions
from carpool_operator.actions import Predict
from carpool_operator.inventory import Inventory
from carpool_operator.outcomes import GPU_OUT_OF_MEMORY
from carpool_operator.snapshot import Snapshot
from carpool_operator.status import Draft

TRACE_WAIT_S = 60.0
"""Seconds after which a job no longer waits for its trace to begin, and starts unpredicted."""
_TRACE_QUEUE_FULL = "TraceQueueFull"

TRANSIENT = frozenset({"TraceTimedOut", "TraceOutOfMemory", "TorchMissing", "PredictorFailed", _TRACE_QUEUE_FULL})
"""Reasons to abstain that come from the moment or this installation, not from the job. They are tried again."""

MAX_REPORTED_POSITION = 10
"""Positions in the trace queue that a status reports exactly. Farther back it reports "more than", so that a burst of
jobs does not rewrite every status after every trace."""

_MAX_PRODUCTS = 64
"""The CRD's limit of products in a status."""

_SAME_DURATION = 1.1
"""Durations on several products within this factor are reported as one; step times are predicted no more exactly."""


def products_of(job: GpuTrainingJob, present: Iterable[str]) -> tuple[str, ...]:
    """Return the products that the job's prediction has to cover: those of the cluster and those it covered before."""
    known = job.status.prediction
    before = () if known is None else tuple(product.product for product in known.products)
    wanted = list(dict.fromkeys((*present, *before)))[:_MAX_PRODUCTS]
    return tuple(sorted(wanted))


def known_products(names: Iterable[str], described: Iterable[GpuProduct] = ()) -> list[GpuProduct]:
    """Return the products of the table, or described ones; for others the scheduler assumes the worst case."""
    known = {product.name: product for product in (*PRODUCTS, *described)}
    return [known[name] for name in names if name in known]


def predict(draft: Draft) -> bool:
    """Put the prediction into the status or have it computed.

    Returns:
        Whether the status holds a prediction of the present spec, so that an attempt may begin.
    """
    snapshot = draft.snapshot
    known, fresh = draft.status.prediction, snapshot.prediction
    if known is not None and is_current(known, snapshot) and not _is_retryable(draft, known):
        _update_message(draft, known)
        return not _is_outdated(known, snapshot) or _renew(draft)
    if fresh is not None and fresh != known:
        _store(draft, fresh)
        known = fresh
    is_known = fresh is not None or is_current(known, snapshot)
    if is_known and not _is_retryable(draft, known):
        return True
    if is_known and snapshot.retry_in_s > 0:
        draft.requeue_after(snapshot.retry_in_s)
        return True
    model = draft.job.spec.model
    is_traced = model is not None and model.features is None
    has_older = not is_known and known is not None and known.input_digest == snapshot.digest
    if snapshot.trace_waited_s >= TRACE_WAIT_S and not has_older:
        if not is_known:
            _store(draft, _unpredicted(snapshot))
        return True
    draft.after_write(Predict(snapshot.digest, snapshot.products))
    if is_traced and snapshot.trace_waited_s < TRACE_WAIT_S:
        draft.requeue_after(TRACE_WAIT_S - snapshot.trace_waited_s)
    if is_known:
        return False  # the result decides whether the first pod may share a GPU
    if known is None and model is not None and is_traced:
        name = model.catalog.name if model.catalog is not None else "the model's layers"
        draft.set_condition(keys.CONDITION_PREDICTED, "Unknown", *_tracing(name, snapshot.traces_ahead))
    return has_older


def is_current(prediction: Prediction | None, snapshot: Snapshot) -> bool:
    """Return whether a prediction comes from this input and model version, and covers these products or abstains."""
    if prediction is None or prediction.input_digest != snapshot.digest:
        return False
    if prediction.model_version != snapshot.model_version:
        return False
    return prediction.outcome == "Abstained" or set(snapshot.products) <= {p.product for p in prediction.products}


def _is_outdated(prediction: Prediction | None, snapshot: Snapshot) -> bool:
    """Return whether the calibration has changed much since a prediction; a placed attempt keeps its prediction."""
    status, calibration = snapshot.job.status, snapshot.calibration
    if prediction is None or prediction.outcome == "Abstained":
        return False
    if snapshot.prediction is not None and prediction in (snapshot.prediction, distrust(snapshot.prediction)):
        return False
    last = attempts.latest(status)
    if last is not None and last.ended_at is None and status.placement:
        return False
    if calibration.is_on and not calibration.keys:
        # After a restart the job's calibration keys are unknown until it is predicted. That is worth it if its last
        # attempt ran out of memory, if no GPU was large enough, or if it may share by now.
        ran_out = last is not None and last.outcome == GPU_OUT_OF_MEMORY
        is_excluded = status.state is JobState.UNPLACEABLE
        return ran_out or is_excluded or any(not product.memory.trusted for product in prediction.products)
    found = ((calibration.keys.get(product.product), product) for product in prediction.products)
    return any(key is not None and not key.is_reflected_in(product) for key, product in found)


def _is_retryable(draft: Draft, prediction: Prediction | None) -> bool:
    """Return whether an abstention is transient and the job has no pods, whose placement would not change anyway."""
    snapshot = draft.snapshot
    has_pods = bool(snapshot.expected) or not all(pod.is_finished for pod in snapshot.pods)
    is_waiting = not has_pods and not draft.job.spec.run_policy.suspend
    return is_waiting and prediction is not None and prediction.reason in TRANSIENT


def _renew(draft: Draft) -> bool:
    """Predict again from the present calibration; return whether that is done, which the next attempt waits for."""
    snapshot = draft.snapshot
    if snapshot.prediction is None:
        draft.after_write(Predict(snapshot.digest, snapshot.products))
        return False
    _store(draft, snapshot.prediction)
    return True


def distrust(prediction: Prediction) -> Prediction:
    """Return a prediction with which the job runs alone, although its numbers stay."""
    products = [
        msgspec.structs.replace(product, memory=msgspec.structs.replace(product.memory, trusted=False))
        for product in prediction.products
    ]
    return msgspec.structs.replace(prediction, products=products)


def _store(draft: Draft, prediction: Prediction) -> None:
    last = attempts.latest_ended(draft.status)
    if last is not None and last.doubted:
        prediction = distrust(prediction)
    draft.update(prediction=prediction)
    message = _set_predicted(draft, prediction)
    if prediction.outcome == "Predicted":
        draft.event("Normal", "Predicted", describe(prediction) + _duration(draft))
    else:
        # No warning if the job would not share anyway, or may share nevertheless.
        draft.event("Warning" if message == prediction.message else "Normal", prediction.reason, message)


def _set_predicted(draft: Draft, prediction: Prediction) -> str:
    """Set the condition Predicted; return its message."""
    message = prediction_message(prediction, draft.job.spec.sharing.mode, draft.job.spec.memory.limit) + _duration(
        draft
    )
    is_known = prediction.outcome == "Predicted"
    draft.set_condition(keys.CONDITION_PREDICTED, "True" if is_known else "False", prediction.reason, message)
    return message


def _update_message(draft: Draft, prediction: Prediction) -> None:
    """Update the message after a change of the spec that leaves the prediction valid."""
    before = conditions.find(draft.status, keys.CONDITION_PREDICTED)
    if before is not None and before.observed_generation < draft.job.metadata.generation:
        _set_predicted(draft, prediction)


def _unpredicted(snapshot: Snapshot) -> Prediction:
    """Return the abstention of a job whose trace has waited too long."""
    message = (
        f"the model was not traced, because its trace has waited for {TRACE_WAIT_S:.0f} s behind others: give "
        "spec.model.features (`carpool graph` prints them) to need no trace"
    )
    return Prediction(
        outcome="Abstained",
        reason=_TRACE_QUEUE_FULL,
        message=message,
        input_digest=snapshot.digest,
        model_version=snapshot.model_version,
    )


def _tracing(name: str, ahead: int) -> tuple[str, str]:
    """Return (reason, message) for a job whose prediction waits for a trace."""
    if not ahead:
        return "Tracing", f"tracing one training step of {name} on fake tensors"
    number = f"more than {MAX_REPORTED_POSITION}" if ahead > MAX_REPORTED_POSITION else str(ahead)
    models = "other model" if ahead == 1 else "other models"
    return "TraceQueued", f"{name} waits to be traced, after {number} {models}"


def describe(prediction: Prediction) -> str:
    """Describe the numbers of a prediction for the first two products."""
    shown = [
        f"{p.product}: memory {p.memory.median_mib:,} MiB, at most {p.memory.upper_mib:,} MiB, "
        f"utilization {p.activity.gpu_util_percent.median:.0f}%, step {p.step_time_seconds.median:.3g} s"
        for p in prediction.products[:2]
    ]
    more = len(prediction.products) - len(shown)
    return "; ".join([*shown, *([f"and {pluralize(more, 'more product')}"] if more > 0 else [])])


def suitable_durations_s(job: GpuTrainingJob, demand: Demand, inventory: Inventory) -> dict[str, float]:
    """Return the job's duration without co-tenants on each suitable product, in seconds; empty if unknown."""
    kinds = {kind for node in inventory for kind, _ in node}
    suitable = {hardware_name(kind.product) for kind in kinds if unsuitable_reason(demand, kind) is None}
    return durations_s(job.spec.training.steps, demand.prediction, suitable.__contains__)


def describe_duration(steps: int, durations: Mapping[str, float]) -> str:
    """Describe how long a job takes, with the fastest and slowest product if they differ.

    `durations` are seconds without co-tenants by product, at least one.
    """
    fast, slow = min(durations, key=durations.__getitem__), max(durations, key=durations.__getitem__)
    least_s, most_s = durations[fast], durations[slow]
    about = f"{format_duration(least_s)} ({fast}) to {format_duration(most_s)} ({slow})"
    if most_s <= _SAME_DURATION * least_s:
        about = format_duration(fmean(durations.values()))
    return f"{steps:,} {'step takes' if steps == 1 else 'steps take'} about {about} alone"


def _duration(draft: Draft) -> str:
    """Return the part of the message about the job's duration; empty if that is unknown."""
    steps = draft.job.spec.training.steps
    if steps is None:
        return ""
    try:
        demand = demand_of(msgspec.structs.replace(draft.job, status=draft.status))
    except ValueError:
        return ""  # the job fails with this error in the same reconciliation
    durations = suitable_durations_s(draft.job, demand, draft.snapshot.inventory)
    return f"; {describe_duration(steps, durations)}" if durations else ""
