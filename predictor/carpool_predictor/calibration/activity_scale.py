"""Measured over predicted activity on a stack, for a job that never ran there. Pure.

Other sizes of the same model show how far its activity deviates from the prediction (slow data loading, late kernel
launches); without them, other jobs do.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor.calibration.document import MIN_JOBS, Calibration, RunRecord

MIN_SCALE, MAX_SCALE = 0.125, 8.0
"""Range of measured over predicted activity that is accepted, so that a run that slept does not make its model idle.

Runs in the HotCloud and RAD-RM experiments with default settings show 0.152 to 4.31."""


class ActivityScale(msgspec.Struct, frozen=True, kw_only=True):
    """Factors from predicted to expected activity."""

    util: float = 1.0
    sm_active: float = 1.0


def activity_scale(calibration: Calibration, product: str, precision: Precision, model: str) -> ActivityScale:
    """Return the median of measured over predicted activity of the model's sizes, or of all jobs from `MIN_JOBS` on.

    A run outside `MIN_SCALE` to `MAX_SCALE` counts, clipped, only if its job has no other run. `model` is its key.
    """
    state = calibration.best(product, precision)
    rows = [] if state is None else state.rows
    of_model = [row for row in rows if row.model == model]
    own = _factor(of_model, "util_factor", 1), _factor(of_model, "sm_factor", 1)
    util, sm_active = (
        _factor(rows, name, MIN_JOBS) if found is None else found
        for name, found in zip(("util_factor", "sm_factor"), own, strict=True)
    )
    return ActivityScale(util=1.0 if util is None else util, sm_active=1.0 if sm_active is None else sm_active)


def _factor(rows: Iterable[RunRecord], name: str, fewest: int) -> float | None:
    """Return the median of a factor over different jobs; None if they are fewer than `fewest`."""
    by_job = defaultdict[tuple[str, int], list[float]](list)
    for row in rows:
        if (value := getattr(row, name)) is not None:
            by_job[row.model, round(row.reserved_mib)].append(value)
    return median(map(_job_factor, by_job.values())) if len(by_job) >= fewest else None


def _job_factor(factors: Sequence[float]) -> float:
    """Return the mean of a job's accepted factors, or the clipped mean if none is accepted."""
    inside = [factor for factor in factors if MIN_SCALE <= factor <= MAX_SCALE]
    return fmean(inside) if inside else min(max(fmean(factors), MIN_SCALE), MAX_SCALE)


def scale_activity(activity: ActivityPrediction, by: ActivityScale) -> ActivityPrediction:
    """Return predicted activity times the factors, clipped to its range."""
    return msgspec.structs.replace(
        activity,
        gpu_util_percent=_times(activity.gpu_util_percent, by.util, 100.0),
        sm_active_ratio=_times(activity.sm_active_ratio, by.sm_active, 1.0),
    )


def _times(interval: Interval, factor: float, most: float) -> Interval:
    lower, middle, upper = (min(most, factor * x) for x in (interval.lower, interval.median, interval.upper))
    return Interval(median=middle, lower=lower, upper=upper)
