"""The columns of `kubectl get gtj`, computed from the rest of the status."""

from collections.abc import Iterable

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
        predicted_memory=_predicted_memory(status),
        predicted_utilization=_range([p.activity.gpu_util_percent.median for p in _predictions(status)], ".0f", "%"),
        observed_memory=_gib([status.observed.peak_memory_mib]) if status.observed else "",
        observed_utilization=_observed_utilization(status),
        slowdown=_slowdown(status),
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


def _predicted_memory(status: JobStatus) -> str:
    """What placement counted with: the prediction's bound, or the user's own limit."""
    limits = [place.memory_limit_mib for place in status.placement if place.memory_limit_mib is not None]
    return _gib(limits or [p.memory.upper_mib for p in _predictions(status)])


def _gib(mib: Iterable[int]) -> str:
    return _range([m / 1024 for m in mib], ".1f", " GiB")


def _range(values: list[float], form: str, unit: str) -> str:
    if not values:
        return ""
    low, high = format(min(values), form), format(max(values), form)
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _observed_utilization(status: JobStatus) -> str:
    seen = status.observed.gpu_util_percent if status.observed else None
    return "" if seen is None else f"{seen:.0f}%"


def _slowdown(status: JobStatus) -> str:
    seen = status.observed.slowdown if status.observed else None
    if seen is not None:
        return f"{seen:.2f}"
    return f"expected {max(p.expected_slowdown for p in status.placement):.2f}" if status.placement else ""
