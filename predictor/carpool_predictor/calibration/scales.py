"""Measured over predicted activity and step time, for the next run on a product. Pure.

Other sizes of a model show how far its activity deviates from the prediction (slow data loading, late kernel launches);
without them, other jobs do.

The steps of a job that ran alone before will take as long again. For any other job, the logarithm of measured over
predicted step time is that of all jobs plus that of its family; both are means shrunk as in `colocation`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from carpool_core.resources.prediction import ActivityPrediction, Interval, Prediction
from carpool_core.values import Precision

from carpool_predictor.calibration.colocation import MAX_RATIO, SoloRecord, solo_step_s
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


ALL_JOBS, OF_FAMILY = 1.0, 1.0
"""k of the logarithms of all jobs and of a family's.

k is the variance between jobs of one family over that between families: 0.93 and 0.96 in the project's own runs on an
H100 and an H200. For all jobs the same is assumed."""
SAME_JOB = math.exp(1.645 * math.sqrt(2.0) * 0.1)
"""Upper end of the interval of one more run of a job over its measured step time.

Logarithms of equal jobs spread by 0.08 and 0.10 on an H100 and an H200."""
STEP_TIME_STEP = 0.2
"""Difference of two step times' logarithms from which a job is predicted anew: half of a bucket of `durations`."""


class StepTimeScale(NamedTuple):
    """How measured steps scale the predicted step time of a job on a product."""

    factor: float = 1.0
    """Measured over predicted step time of other jobs."""
    width: float = 1.0
    """Share of the predicted interval that remains on the logarithmic scale, 0..1."""
    measured_s: float | None = None
    """Step time alone of an earlier run of the same job, in seconds, which replaces the predicted one; None if none."""

    def differs_from(self, step_time_s: float, factor: float) -> bool:
        """Return whether a new prediction would differ much from one of `step_time_s`, which contains `factor`."""
        new_s = self.measured_s or step_time_s / factor * self.factor
        return abs(math.log(new_s / step_time_s)) > STEP_TIME_STEP


def step_time_scale(records: Sequence[SoloRecord], product: str, family: str, name: str) -> StepTimeScale:
    """Return the scale of the predicted step time of a job on a product.

    Args:
        records: Step times alone that count in the namespace of the job; see `Calibration.for_namespace`.
        product: GPU product.
        family: Family of the job's model; see `colocation.solo_family`.
        name: Name of the job and of its size; see `colocation.solo_name`.
    """
    if (measured_s := solo_step_s(records, name, product)) is not None:
        return StepTimeScale(width=0.0, measured_s=measured_s)
    compared = (one for one in records if one.product == product and one.family and one.predicted_s)
    logs = [(one.family, _log_ratio(one)) for one in compared]
    if not family or not logs:
        return StepTimeScale()
    of_all = sum(log for _, log in logs) / (len(logs) + ALL_JOBS)
    left = [log - of_all for of, log in logs if of == family]
    doubt = 1 + 1 / (len(logs) + ALL_JOBS) + 1 / (len(left) + OF_FAMILY)
    width = math.sqrt(doubt / (1 + 1 / ALL_JOBS + 1 / OF_FAMILY))
    return StepTimeScale(math.exp(of_all + sum(left) / (len(left) + OF_FAMILY)), width)


def _log_ratio(one: SoloRecord) -> float:
    """Return the clipped logarithm of measured over predicted step time: a job that sleeps is not its family's norm."""
    return min(max(math.log(one.step_s / one.predicted_s), -MAX_RATIO), MAX_RATIO)


def scale_step_time(step_time: Interval, by: StepTimeScale) -> Interval:
    """Return the predicted interval of a step time, scaled; it is not narrower than that of one more run of a job."""
    if by == StepTimeScale():
        return step_time
    lower, upper = (math.pow(end / step_time.median, by.width) for end in (step_time.lower, step_time.upper))
    middle = by.measured_s or step_time.median * by.factor
    return Interval(median=middle, lower=middle * min(lower, 1 / SAME_JOB), upper=middle * max(upper, SAME_JOB))


def with_step_times(prediction: Prediction, records: Sequence[SoloRecord], family: str, name: str) -> Prediction:
    """Return a prediction with its step times scaled by measured ones; the other arguments as in `step_time_scale`."""
    products = []
    for one in prediction.products:
        scale = step_time_scale(records, one.product, family, name)
        scaled = scale_step_time(one.step_time_seconds, scale)
        # Six significant digits, so that a small factor is not rounded to 0.
        factor = float(f"{scaled.median / one.step_time_seconds.median:.6g}")
        is_measured = scale.measured_s is not None
        products.append(
            msgspec.structs.replace(one, step_time_seconds=scaled, step_time_factor=factor, comparable=is_measured)
        )
    return msgspec.structs.replace(prediction, products=products)
