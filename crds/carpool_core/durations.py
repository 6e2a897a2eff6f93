"""Predicted and measured durations of jobs, and the buckets by which the queue compares them.

Each bucket is half as long again as the one before. Predicted step times are hardly more precise than that, so a
smaller difference must not change the order of two jobs.
"""

from bisect import bisect_right
from collections.abc import Callable
from statistics import fmean

from carpool_core.resources.prediction import Interval, Prediction

FIRST_BOUND_S = 60.0
"""Duration from which the second bucket begins."""
BUCKET_FACTOR = 1.5
"""Ratio of a bucket's bounds."""
DURATION_BUCKETS = 24
"""Number of buckets; the last holds everything from 5.2 days on."""
ASSUMED_DURATION_S = 3600.0
"""Duration of a job without known steps or step time: an assumption, in the middle of the buckets."""
MEASURED_STEPS = 20
"""Steps after which a job's measured step time replaces the predicted one, and its measured peak its memory bound."""
_DEVIATIONS = 1.77
"""Half the width of the central 90% prediction interval for one more reading after twenty, in standard deviations.

It is the 95% quantile of Student's t with 19 degrees of freedom, times sqrt(1 + 1/20). Source: Hahn and Meeker,
Statistical Intervals, 1991, section 4.7."""
_BUCKET_BOUNDS_S = [FIRST_BOUND_S * BUCKET_FACTOR**number for number in range(DURATION_BUCKETS - 1)]
"""Lower bound of each bucket but the first: a table, because logarithms would round a duration off its bound."""

_UNITS = ((86_400.0, "d", 36 * 3600.0), (3600.0, "h", 90 * 60.0), (60.0, "min", 90.0), (1.0, "s", 1.0))
"""Seconds of a unit, its name, and the duration in seconds from which it is used; milliseconds below."""


def durations_s(
    steps: int | None, prediction: Prediction | None, may_run_on: Callable[[str], bool]
) -> dict[str, float]:
    """Return the predicted duration of a job alone on each GPU product: its steps times the predicted step time.

    Products on which it may not run are left out. The result is empty if steps or prediction are unknown.
    """
    if steps is None or prediction is None:
        return {}
    return {p.product: steps * p.step_time_seconds.median for p in prediction.products if may_run_on(p.product)}


def duration_s(steps: int | None, prediction: Prediction | None, may_run_on: Callable[[str], bool]) -> float | None:
    """Return the mean of `durations_s` over products, in seconds; None if it is empty. The arguments are the same."""
    known = durations_s(steps, prediction, may_run_on)
    return fmean(known.values()) if known else None


def measured_step_time(
    predicted: Interval | None, steps: int | None, mean_s: float | None, deviation_s: float | None
) -> Interval | None:
    """Return the step time that replaces a predicted one, in seconds; None before twenty steps or without an interval.

    All steps that are left may take as long as those of one reading, so that slow changes stay in the interval. Without
    the standard deviation of readings, which is known after twenty, it is relatively as wide as the predicted one.
    """
    if mean_s is None or steps is None or steps < MEASURED_STEPS:
        return None
    if deviation_s is not None:
        lower_s, upper_s = max(0.0, mean_s - _DEVIATIONS * deviation_s), mean_s + _DEVIATIONS * deviation_s
    elif predicted is not None and predicted.median > 0:
        lower_s, upper_s = (mean_s / predicted.median * end for end in (predicted.lower, predicted.upper))
    else:
        return None
    return Interval(median=mean_s, lower=round(min(mean_s, lower_s), 6), upper=round(max(mean_s, upper_s), 6))


def remaining_s(step_s: Interval, steps: int, checkpoint_ratio: float | None = None) -> Interval:
    """Return the time of the steps that are left, in seconds; step times leave the share for checkpoints out."""
    by = max(0, steps) / (1 - min(0.9, checkpoint_ratio or 0.0))
    return Interval(median=by * step_s.median, lower=by * step_s.lower, upper=by * step_s.upper)


def duration_bucket(seconds: float | None) -> int:
    """Return the bucket of a duration in seconds, 0 to DURATION_BUCKETS - 1. None counts as ASSUMED_DURATION_S."""
    return bisect_right(_BUCKET_BOUNDS_S, ASSUMED_DURATION_S if seconds is None else seconds)


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that people use: `41 ms`, `24 min`, `6.8 h`."""
    size, unit, _ = next((one for one in _UNITS if seconds >= one[2]), (1e-3, "ms", 0.0))
    amount = seconds / size
    return f"{f'{amount:,.0f}' if amount >= 10 else f'{amount:.2g}'} {unit}"
