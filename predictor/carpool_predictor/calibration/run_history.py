"""What earlier runs of the very same job showed: the same model at the same size, on the same kind of GPU.

Clusters run most models again and again, and nothing tells as much of a job as its last run. A peak that was measured
replaces the prediction, with a margin for what runs differ by; what a run shows that has just begun may still grow, so
that it raises the bound and never lowers it. Activity that was measured replaces the estimate. A run that died of
memory raises the bound; after two that died the next one runs alone.

Of a job that never ran there `busier` says how busy others were. Pure.
"""

import hashlib
import math
from collections.abc import Sequence
from statistics import fmean

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.job import ModelSource
from carpool_core.resources.prediction import ActivityPrediction, Interval, MemoryPrediction, ProductPrediction
from carpool_core.values import Precision

from carpool_predictor.calibration.document import Calibration, RunRecord

RUN_TOLERANCE = 0.1
"""Two runs of a job agree when they differ by less than this share; the bound lies as far above the largest of them."""
SIZE_TOLERANCE = 0.001
"""Two jobs of one model are of the same size when their simulated memory differs by less than this share."""
OOM_FACTOR = 1.5
"""For each run that died of memory the bound lies so far above what that run had, as tables that grow do."""
MAX_OOM_DEATHS = 2
"""After so many the next run has a GPU of its own: its memory counts as unknown."""

FIRST_RUN_FACTOR = 1.02
"""Factor to the bound of a job of which no run was seen, where shipped bounds are not to be risked: families of models
differ more than models do. It holds 95% of the rows of nine families in ten, as `evaluation.memory.first_runs` reckons
and the memory model's card says."""
FIRST_RUN_FACTOR_UNENFORCED = 1.3
"""The same where nothing enforces a bound, as by turns: there whoever takes more than its bound takes it from others.
It holds 95% of the rows of nineteen families in twenty."""
USABLE_SHARE = 0.95
"""Share of a GPU's memory that drivers leave at least; a bound beyond it leaves no room for anybody else anyway."""


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier runs of a job showed; memory is over the correction that the model's trees answer."""

    known: int
    """Runs that are known of, of whatever end."""
    runs: int
    """Runs whose memory was measured, those that have just begun among them."""
    deaths: int
    """Runs that died of memory and needed more than any other was measured to take."""
    peak_mib: float
    """Largest peak that was steady; 0 where none was."""
    so_far_mib: float
    """Largest that a run which has just begun has taken so far; 0 where none was seen."""
    least_mib: float
    """Largest that was not enough; 0 where that never happened."""
    util: float | None = None
    """Mean share of time in which a kernel runs alone, 0..1."""
    sm_active: float | None = None
    """Mean share of SMs with work alone, 0..1."""

    @property
    def is_lost(self) -> bool:
        """Whether so many runs died that no bound is believed any more."""
        return self.deaths >= MAX_OOM_DEATHS


def find_history(
    calibration: Calibration, product: str, precision: Precision, model: str, reserved_mib: float
) -> RunHistory | None:
    """Look for earlier runs of a job; None where there were none.

    Args:
        calibration: What is known.
        product: Name of the GPU product.
        precision: The job's precision.
        model: Its model, by the name under which it was observed.
        reserved_mib: What the simulated allocator holds.
    """
    rows = _rows(calibration, product, precision, model, reserved_mib)
    if not rows:
        return None
    measured = [row for row in rows if not row.censored]
    peak = max((row.value_mib for row in measured if row.steady), default=0.0)
    deaths = [row.value_mib for row in rows if row.censored and row.value_mib >= peak]
    return RunHistory(
        known=len(rows),
        runs=len(measured),
        deaths=len(deaths),
        peak_mib=peak,
        so_far_mib=max((row.value_mib for row in measured if not row.steady), default=0.0),
        least_mib=max(deaths, default=0.0),
        util=_mean([row.util for row in rows]),
        sm_active=_mean([row.sm_active for row in rows]),
    )


def _rows(
    calibration: Calibration, product: str, precision: Precision, model: str, reserved_mib: float
) -> list[RunRecord]:
    state = calibration.best(product, precision)
    return [] if state is None else [row for row in state.rows if is_of(row, model, reserved_mib)]


def memory_step(mib: float) -> int:
    """Return memory in steps of half the margin that bounds keep: what grows is told of at each."""
    return math.ceil(math.log(mib) / math.log1p(RUN_TOLERANCE / 2)) if mib >= 1 else 0


def fingerprint(recalled: RunHistory | None) -> str:
    """Sum up what earlier runs took; empty of none.

    How many there were, how many died, whether a peak stood still, the most, and what was not enough, in MiB.
    """
    if recalled is None:
        return ""
    most_mib = max(recalled.peak_mib, recalled.so_far_mib)
    numbers = recalled.known, recalled.deaths, recalled.peak_mib > 0, most_mib, recalled.least_mib
    return "/".join(f"{number:.0f}" for number in numbers)


def is_equivalent(one: str, other: str) -> bool:
    """Whether two gists say so nearly the same that it is not worth predicting anew.

    Memory may differ by half the margin that bounds keep, from what was predicted by: so runs of one job, which differ
    by less, change nothing, wherever they lie.
    """
    if not one or not other:
        return one == other
    (*counts, most, least), (*other_counts, other_most, other_least) = (text.split("/") for text in (one, other))
    return counts == other_counts and _is_near(most, other_most) and _is_near(least, other_least)


def _is_near(one: str, other: str) -> bool:
    return math.isclose(float(one), float(other), rel_tol=RUN_TOLERANCE / 2)


def is_of(row: RunRecord, model: str, reserved_mib: float) -> bool:
    """Whether a row is of a job of this model that holds as much: of the very job."""
    return row.model == model and abs(row.reserved_mib - reserved_mib) <= SIZE_TOLERANCE * reserved_mib


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def apply_peak(memory: MemoryPrediction, recalled: RunHistory, correction: float) -> MemoryPrediction:
    """Put what was measured in the place of what was predicted; the class stays that of the bound's own width.

    Args:
        memory: What is predicted without it.
        recalled: What earlier runs showed.
        correction: Of the model's trees, over which measures are kept.
    """
    median, upper = memory.median_mib, memory.upper_mib
    if recalled.peak_mib:
        median = math.ceil(recalled.peak_mib * correction)
        upper = math.ceil(recalled.peak_mib * correction * (1 + RUN_TOLERANCE))
    if recalled.so_far_mib:
        median = max(median, math.ceil(recalled.so_far_mib * correction))
        upper = max(upper, math.ceil(recalled.so_far_mib * correction * (1 + RUN_TOLERANCE)))
    if recalled.deaths:
        upper = max(upper, math.ceil(recalled.least_mib * correction * OOM_FACTOR**recalled.deaths))
    lower, width = _class_of(median, memory)
    return msgspec.structs.replace(
        memory, median_mib=median, upper_mib=upper, class_lower_mib=lower, class_upper_mib=lower + width
    )


def _class_of(value_mib: int, memory: MemoryPrediction) -> tuple[int, int]:
    """Return the lower edge and the width of the class that holds a value; classes are as wide as the predicted one."""
    width = memory.class_upper_mib - memory.class_lower_mib
    return ((value_mib - 1) // width * width if width > 0 else memory.class_lower_mib), width


def first_run_bound(memory: MemoryPrediction, product: GpuProduct) -> MemoryPrediction:
    """Return what the first run of a job counts with: more than the bound, or the whole GPU where that is too much.

    The class tells where the peak lies, and stays; so does coverage, which is at least that.

    Args:
        memory: What is predicted, trusted or not.
        product: The GPU product.
    """
    raised = msgspec.structs.replace(
        memory,
        upper_mib=math.ceil(FIRST_RUN_FACTOR * memory.upper_mib),
        upper_unenforced_mib=math.ceil(FIRST_RUN_FACTOR_UNENFORCED * memory.upper_mib),
    )
    if not exceeds_gpu(raised, product):
        return raised
    return memory if exceeds_gpu(memory, product) else msgspec.structs.replace(memory, trusted=False)


def exceeds_gpu(memory: MemoryPrediction, product: GpuProduct) -> bool:
    """Whether a bound takes so much of a GPU that the job may as well run alone."""
    return memory.upper_mib > USABLE_SHARE * product.memory_mib


def runs_alone(memory: MemoryPrediction, product: GpuProduct, recalled: RunHistory | None) -> bool:
    """Whether a job runs alone on a GPU because of its bound: nobody is refused for a peak that may not come.

    A bound that is too much for the GPU refuses a job only where its median is too much as well, and no run of it is
    known there: whoever fitted is not told that it does not fit, and nobody knows how much more one needs that died
    (unless all of the GPU was too little for it: `is_in_vain`).
    Placement asks nothing else about this, and neither does the simulator.

    Args:
        memory: What is predicted.
        product: The GPU product.
        recalled: What earlier runs showed there, where there were any.
    """
    return exceeds_gpu(memory, product) and (
        recalled is not None or memory.median_mib <= USABLE_SHARE * product.memory_mib
    )


def exceeded_whole_gpu(recalled: RunHistory | None, product: GpuProduct, correction: float) -> bool:
    """Whether a job needs more than such a GPU has: a run of it died of memory with all of one.

    Not where another run's peak stood still there: that one fitted, and something else was in the way of the other.

    Args:
        recalled: What earlier runs showed there, where there were any.
        product: The GPU product.
        correction: Of the model's trees, over which measures are kept.
    """
    if recalled is None or recalled.peak_mib:
        return False
    return recalled.least_mib * correction >= USABLE_SHARE * product.memory_mib


def is_refused(memory: MemoryPrediction, product: GpuProduct) -> bool:
    """Whether a job is refused such a GPU for what its own runs showed; see `is_in_vain`."""
    return memory.trusted and memory.learned_runs > 0 and exceeds_gpu(memory, product)


def calibration_source(found: ProductPrediction) -> str | None:
    """Say what a bound was learned from; None where it is as shipped."""
    memory = found.memory
    parts = []
    if memory.learned_jobs:
        parts.append(f"{memory.learned_jobs} jobs measured there")
    if memory.learned_runs:
        parts.append(f"{memory.learned_runs} run{'' if memory.learned_runs == 1 else 's'} of this very one")
    return f"memory on {found.product} is calibrated from {' and '.join(parts)}" if parts else None


def apply_activity(activity: ActivityPrediction, recalled: RunHistory) -> ActivityPrediction:
    """Put activity that was measured in the place of the estimate."""
    return msgspec.structs.replace(
        activity,
        gpu_util_percent=_around(activity.gpu_util_percent, None if recalled.util is None else 100 * recalled.util),
        sm_active_ratio=_around(activity.sm_active_ratio, recalled.sm_active),
    )


def _around(estimate: Interval, measured: float | None) -> Interval:
    return estimate if measured is None else Interval(median=measured, lower=measured, upper=measured)


def model_key(model: ModelSource | None) -> str:
    """Name a model for the calibration: equal sources have equal names, whatever they are trained with."""
    return hashlib.sha256(msgspec.json.encode(model, order="sorted")).hexdigest()[:16]
