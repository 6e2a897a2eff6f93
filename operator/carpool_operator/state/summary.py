"""The columns of `kubectl get gtj`, computed from the rest of the status."""

from collections.abc import Iterable, Sequence

from carpool_core.products import hardware_name
from carpool_core.resources.job import JobStatus, JobSummary, WorkerPlacement
from carpool_core.resources.prediction import ProductPrediction

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
