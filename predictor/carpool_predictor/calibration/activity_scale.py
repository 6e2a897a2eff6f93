"""How much busier than predicted jobs keep the GPUs of a stack: what others showed, for a job that never ran there.

What the same model did at other sizes says how far its activity lies from what is predicted (its data may come slowly,
its kernels be launched late), and failing that what other jobs did. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor.calibration.document import MIN_JOBS, Calibration, RunRecord

LEAST_BUSY, MOST_BUSY = 0.125, 8.0
"""What a run says of how busy a job is, over what was predicted, is believed between these: one that slept or waited
for somebody is not to make a whole model idle. They were put around what runs show in the experiments on HotCloud's and
RAD-RM's jobs with default settings: 0.152 (of a job whose neighbours had to be reckoned out) to 4.31."""


class ActivityScale(msgspec.Struct, frozen=True, kw_only=True):
    """How much busier than predicted jobs keep the GPUs of a stack; below 1 where they are less busy."""

    util: float = 1.0
    sm_active: float = 1.0


def activity_scale(calibration: Calibration, product: str, precision: Precision, model: str) -> ActivityScale:
    """Compare activity that was measured with what had been predicted of it.

    The median over the sizes of the same model that ran there; over all jobs where it never did, once there are as many
    different ones as memory needs for a line of its own. A run beyond `LEAST_BUSY` and `MOST_BUSY` counts only where
    there is no other of its job, and as the nearer of the two: the first run of a model speaks for all its sizes, and
    may be a bad one.

    Args:
        calibration: What is known.
        product: Name of the GPU product.
        precision: The job's precision.
        model: Its model, by the name under which it was observed.
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
    """Return the median of a factor over different jobs; None where there are too few."""
    by_job = defaultdict[tuple[str, int], list[float]](list)
    for row in rows:
        if (value := getattr(row, name)) is not None:
            by_job[row.model, round(row.reserved_mib)].append(value)
    return median(map(_believed, by_job.values())) if len(by_job) >= fewest else None


def _believed(factors: Sequence[float]) -> float:
    """Return the mean of the factors of a job's runs that can be believed; where there is none, the nearer bound."""
    inside = [factor for factor in factors if LEAST_BUSY <= factor <= MOST_BUSY]
    return fmean(inside) if inside else min(max(fmean(factors), LEAST_BUSY), MOST_BUSY)


def scale_activity(activity: ActivityPrediction, by: ActivityScale) -> ActivityPrediction:
    """Return predicted activity as it turned out to be for others."""
    return msgspec.structs.replace(
        activity,
        gpu_util_percent=_times(activity.gpu_util_percent, by.util, 100.0),
        sm_active_ratio=_times(activity.sm_active_ratio, by.sm_active, 1.0),
    )


def _times(interval: Interval, factor: float, most: float) -> Interval:
    lower, middle, upper = (min(most, factor * x) for x in (interval.lower, interval.median, interval.upper))
    return Interval(median=middle, lower=lower, upper=upper)
