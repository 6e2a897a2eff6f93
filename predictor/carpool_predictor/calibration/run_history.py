"""Earlier runs of the same job: the same model and size on the same GPU product.

A measured peak replaces the prediction, with a margin for the difference between runs. The peak of a run that has just
begun may still grow, so that it only raises the bound. Measured activity replaces the estimate. A run that died of
memory raises the bound; after `MAX_OOM_DEATHS` deaths the next run gets a GPU alone. Pure.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.job import ModelSource
from carpool_core.resources.prediction import ActivityPrediction, Interval, MemoryPrediction, ProductPrediction
from carpool_core.values import Precision, pluralize

from carpool_predictor.calibration.document import Calibration, RunRecord

RUN_TOLERANCE = 0.1
"""Two runs of a job agree if they differ by less than this share; the bound lies this share above the largest peak."""
SIZE_TOLERANCE = 0.001
"""Two jobs of one model have the same size if their simulated memory differs by less than this share."""
OOM_FACTOR = 1.5
"""Factor to the memory that a run had when it died of memory, once for each death (exponential growth)."""
MAX_OOM_DEATHS = 2
"""Deaths after which the job's memory counts as unknown, so that the next run gets a GPU alone."""

FIRST_RUN_FACTOR = 1.09
"""Factor to the bound of a job without observed runs, under strict trust: model families differ more than models do.

It holds 95% of the rows in nine of ten families; see the memory model's card."""
FIRST_RUN_FACTOR_UNENFORCED = 1.31
"""The same factor under time-slicing, where nothing enforces the bound and an excess takes memory from co-tenants.

It holds 95% of the rows in nineteen of twenty families."""
RETRY_AFTER_S = 86_400.0
"""Age in seconds from which a death with a whole GPU no longer keeps the job from the largest product: it may be tried
alone there once more."""
UNMEASURED_FACTOR = 2.0
"""Factor to a GPU's memory up to which the shipped model's median is tried where no job was measured (decision 87)."""
USABLE_SHARE = 0.95
"""Least share of a GPU's memory that drivers leave to jobs; a bound beyond it leaves no room for a co-tenant."""


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of earlier runs of a job; memory is divided by the correction of the model's trees."""

    observed: int
    """Observed runs, however they ended."""
    runs: int
    """Runs with measured memory, including those that have just begun."""
    deaths: int
    """Runs that died of memory and needed more than the largest steady peak."""
    peak_mib: float
    """Largest steady peak; 0 if there is none."""
    so_far_mib: float
    """Largest peak so far of runs that have just begun; 0 if there are none."""
    least_mib: float
    """Largest memory at which a run died of memory; 0 if none did."""
    util: float | None = None
    """Mean share of time in which a kernel runs alone, 0..1."""
    sm_active: float | None = None
    """Mean share of SMs with work alone, 0..1."""
    is_doubted: bool = False
    """Whether a death with a whole GPU excludes the product no longer; see `find_history`."""

    @property
    def is_lost(self) -> bool:
        """Whether too many runs died to trust any bound."""
        return self.deaths >= MAX_OOM_DEATHS


def find_history(
    calibration: Calibration,
    product: str,
    precision: Precision,
    model: str,
    reserved_mib: float,
    *,
    retry_before: float = -1.0,
) -> RunHistory | None:
    """Return the observations of a job's earlier runs, or None if there are none.

    A death is doubted if a run on another product took less memory than the dead run had, or if it is older than
    `retry_before`, in seconds since 1970; negative: never. `model` is the key of the model, and `reserved_mib` what the
    simulated allocator holds.
    """
    state = calibration.best(product, precision)
    rows = [] if state is None else [row for row in state.rows if is_of(row, model, reserved_mib)]
    if not rows:
        return None
    measured = [row for row in rows if not row.censored]
    peak = max((row.value_mib for row in measured if row.steady), default=0.0)
    dead = [row for row in rows if row.censored and row.value_mib >= peak]
    deaths = [row.value_mib for row in dead]
    elsewhere = [
        row.value_mib
        for state in calibration.stacks
        if state.stack.precision is precision
        for row in state.rows
        if is_of(row, model, reserved_mib) and row.steady and not row.censored
    ]
    is_old = max((row.ended_at for row in dead), default=0) <= retry_before
    return RunHistory(
        observed=len(rows),
        runs=len(measured),
        deaths=len(deaths),
        peak_mib=peak,
        so_far_mib=max((row.value_mib for row in measured if not row.steady), default=0.0),
        least_mib=max(deaths, default=0.0),
        util=_mean([row.util for row in rows]),
        sm_active=_mean([row.sm_active for row in rows]),
        is_doubted=bool(dead) and (is_old or min(elsewhere, default=math.inf) < max(deaths)),
    )


def retry_before(product: GpuProduct, products: Iterable[GpuProduct], now: float | None) -> float:
    """Return the time before which deaths on a product are doubted: a day ago on the largest one, else never.

    `products` are those that the job is predicted for. `now` is in seconds since 1970; if it is None, deaths never
    become old.
    """
    is_largest = all(other.memory_mib <= product.memory_mib for other in products)
    return now - RETRY_AFTER_S if now is not None and is_largest else -1.0


def memory_step(mib: float) -> int:
    """Return memory on a logarithmic scale in units of half `RUN_TOLERANCE`; a growing peak is reported per unit."""
    return math.ceil(math.log(mib) / math.log1p(RUN_TOLERANCE / 2)) if mib >= 1 else 0


def fingerprint(history: RunHistory | None) -> str:
    """Return a summary of a run history; empty without runs.

    It joins runs, deaths, whether a peak was steady, whether the deaths are doubted, the largest peak, and the largest
    memory of a death, in MiB.
    """
    if history is None:
        return ""
    largest_mib = max(history.peak_mib, history.so_far_mib)
    flags = history.peak_mib > 0, history.is_doubted
    numbers = history.observed, history.deaths, *flags, largest_mib, history.least_mib
    return "/".join(f"{number:.0f}" for number in numbers)


def is_equivalent(one: str, other: str) -> bool:
    """Whether two fingerprints are so close that a new prediction is not worth it.

    Memory may differ by half of `RUN_TOLERANCE`, so that runs of one job, which differ by less, change nothing.
    """
    if not one or not other:
        return one == other
    (*counts, most, least), (*other_counts, other_most, other_least) = (text.split("/") for text in (one, other))
    return counts == other_counts and _is_near(most, other_most) and _is_near(least, other_least)


def _is_near(one: str, other: str) -> bool:
    return math.isclose(float(one), float(other), rel_tol=RUN_TOLERANCE / 2)


def is_of(row: RunRecord, model: str, reserved_mib: float) -> bool:
    """Whether a row is a run of the job with this model and size."""
    return row.model == model and abs(row.reserved_mib - reserved_mib) <= SIZE_TOLERANCE * reserved_mib


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def apply_peak(memory: MemoryPrediction, history: RunHistory, correction: float) -> MemoryPrediction:
    """Return the prediction with measured peaks in place of the model's; the class keeps its width.

    The history is divided by `correction`, that of the model's trees.
    """
    median, upper = memory.median_mib, memory.upper_mib
    if history.peak_mib:
        median = math.ceil(history.peak_mib * correction)
        upper = math.ceil(history.peak_mib * correction * (1 + RUN_TOLERANCE))
    if history.so_far_mib:
        median = max(median, math.ceil(history.so_far_mib * correction))
        upper = max(upper, math.ceil(history.so_far_mib * correction * (1 + RUN_TOLERANCE)))
    if history.deaths:
        upper = max(upper, math.ceil(history.least_mib * correction * OOM_FACTOR**history.deaths))
    lower, width = _class_of(median, memory)
    return msgspec.structs.replace(
        memory, median_mib=median, upper_mib=upper, class_lower_mib=lower, class_upper_mib=lower + width
    )


def _class_of(value_mib: int, memory: MemoryPrediction) -> tuple[int, int]:
    """Return lower edge and width of the memory class that holds a value; classes are as wide as the predicted one."""
    width = memory.class_upper_mib - memory.class_lower_mib
    return ((value_mib - 1) // width * width if width > 0 else memory.class_lower_mib), width


def first_run_bound(memory: MemoryPrediction, product: GpuProduct) -> MemoryPrediction:
    """Return the prediction with extra room for a first run, or untrusted if the room exceeds the GPU.

    The class and the coverage stay.
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
    """Whether a bound leaves no room for a co-tenant."""
    return memory.upper_mib > USABLE_SHARE * product.memory_mib


def runs_alone(memory: MemoryPrediction, product: GpuProduct, history: RunHistory | None) -> bool:
    """Whether a job runs alone on a GPU because its bound exceeds it.

    The GPU is refused instead if the median exceeds it as well and no run of the job was observed there. Placement and
    the simulator have no other rule for this.
    """
    return exceeds_gpu(memory, product) and (
        history is not None or memory.median_mib <= USABLE_SHARE * product.memory_mib
    )


def exceeded_whole_gpu(history: RunHistory | None, product: GpuProduct, correction: float) -> bool:
    """Whether a run died of memory with a whole GPU of the product, and no other run speaks against that.

    A steady peak on the product does, and so does whatever makes the death doubted. The history is divided by
    `correction`, that of the model's trees.
    """
    if history is None or history.peak_mib or history.is_doubted:
        return False
    return history.least_mib * correction >= USABLE_SHARE * product.memory_mib


def is_refused(memory: MemoryPrediction, product: GpuProduct) -> bool:
    """Whether a job is refused the product because of its own runs; see `exceeded_whole_gpu`."""
    return memory.trusted and memory.learned_runs > 0 and exceeds_gpu(memory, product)


def exceeds_despite_error(memory: MemoryPrediction, product: GpuProduct) -> bool:
    """Whether a job does not fit a product even if the shipped model's median is `UNMEASURED_FACTOR` times its peak."""
    return memory.median_mib > UNMEASURED_FACTOR * product.memory_mib


def calibration_source(prediction: ProductPrediction) -> str | None:
    """Return a clause about the runs that a bound is calibrated from; None for the shipped model."""
    memory, sources = prediction.memory, []
    if memory.learned_jobs:
        sources.append(f"{pluralize(memory.learned_jobs, 'job')} measured there")
    if memory.learned_runs:
        sources.append(f"{pluralize(memory.learned_runs, 'run')} of the same training")
    return f"memory on {prediction.product} is calibrated from {' and '.join(sources)}" if sources else None


def apply_activity(activity: ActivityPrediction, history: RunHistory) -> ActivityPrediction:
    """Return the activity with measured values in place of estimates."""
    return msgspec.structs.replace(
        activity,
        gpu_util_percent=_around(activity.gpu_util_percent, None if history.util is None else 100 * history.util),
        sm_active_ratio=_around(activity.sm_active_ratio, history.sm_active),
    )


def _around(estimate: Interval, measured: float | None) -> Interval:
    return estimate if measured is None else Interval(median=measured, lower=measured, upper=measured)


def model_key(model: ModelSource | None) -> str:
    """Return the key of a model in the calibration, a digest of its source without the training."""
    return hashlib.sha256(msgspec.json.encode(model, order="sorted")).hexdigest()[:16]
