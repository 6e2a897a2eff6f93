"""Calibrates a stack's memory line and bound with each finished job. Pure: a document in, a document out.

    measured / correction ≈ slope · reserved + intercept       for each (product, driver, PyTorch, precision)

- The line is fitted again with each observation, by least absolute relative error, over the last observations and a few
  synthetic points on the shipped line, so that the first job does not overturn it.
- Impossible observations are refused: a peak below the live tensors of one step, or above the GPU's memory. A model
  counts at most `PER_MODEL` times.
- An out-of-memory death is a censored observation, "at least that much" (Powell 1984, Censored LAD).
- `bound_reaches` returns how far the bound must lie above the line, with one vote for each job.
- Adaptive conformal inference keeps the coverage (Gibbs and Candès, NeurIPS '21): a miss widens the bound by
  `STEP · (1 - MISS_RATE)`, a hit narrows it by `STEP · MISS_RATE`. An outlier counts as a miss only when another run of
  the same model confirms it.
- Each run counts once, by the name of its sample; its end replaces the row that it had while it ran.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Literal

import msgspec

from carpool_predictor.calibration.document import (
    MAX_RUNS,
    MAX_SAMPLES,
    MAX_STACKS,
    MAX_WIDENING,
    MISS_RATE,
    WINDOW,
    Calibration,
    RunMeasurement,
    RunPrediction,
    RunRecord,
    Stack,
    StackState,
)
from carpool_predictor.calibration.run_history import RUN_TOLERANCE, is_of
from carpool_predictor.models.memory import MemoryModel, Pair, fit_line

OUTLIER = math.log(1.5)
"""Smallest logarithmic distance from the line at which an observation can be an outlier."""
SINGLE_MODEL_REACH = math.log(1 + RUN_TOLERANCE)
"""How far one model alone may raise the bound above the next model's reach, in logarithms."""


def bound_reaches(state: StackState, strata: int) -> list[float]:
    """Return how far above the line the bound must lie, in logarithms, for each stratum of steps.

    It is the ⌈(n + 1)(1 - `MISS_RATE`)⌉-th of n jobs' distances, or the largest: the rank of split conformal prediction
    (Lei et al., JASA 2018). Its guarantee does not hold, because the line is fitted on the same rows; misses widen the
    bound further. A row counts for its own stratum and for riskier ones.
    """
    limit = _outlier_distance(state)
    rows = [row for row in state.rows if not row.censored]
    accepted = [row for row in rows if distance(state, row) <= limit or is_confirmed(state, row)]
    found = (_reach(_job_distances(state, [row for row in accepted if row.stratum == s])) for s in range(strata))
    return list(accumulate(found, max))  # a riskier step never has a smaller bound


def _job_distances(state: StackState, rows: Sequence[RunRecord]) -> Mapping[str, list[float]]:
    """Return the distances of each model's jobs: the median over the runs of each size."""
    runs = defaultdict[tuple[str, int], list[float]](list)
    for row in rows:
        runs[row.model, round(row.reserved_mib)].append(distance(state, row))
    distances_of = defaultdict[str, list[float]](list)
    for (model, _), distances in runs.items():
        distances_of[model].append(median(distances))
    return distances_of


def _reach(distances_of: Mapping[str, Sequence[float]]) -> float:
    reached = sorted(distance for of_model in distances_of.values() for distance in of_model)
    if not reached:
        return 0.0
    rank = min(len(reached), math.ceil((len(reached) + 1) * (1 - MISS_RATE)))
    farthest = sorted(max(of_model) for of_model in distances_of.values())
    second = max(farthest[-2], 0.0) if len(farthest) > 1 else 0.0
    return min(max(reached[rank - 1], 0.0), second + SINGLE_MODEL_REACH)


def distance(state: StackState, row: RunRecord) -> float:
    """Return the logarithmic distance of a row above the line of its stack."""
    return math.log(row.value_mib / max(state.at(row.reserved_mib), 1.0)) if row.value_mib > 0 else -math.inf


def is_outlier(state: StackState, row: RunRecord) -> bool:
    """Whether a row lies far above the usual distances of the stack."""
    return distance(state, row) > _outlier_distance(state)


def _outlier_distance(state: StackState) -> float:
    """Return the distance beyond which a row is an outlier: four robust standard deviations."""
    distances = sorted(abs(distance(state, other)) for other in state.rows if not other.censored)
    usual = 1.4826 * distances[len(distances) // 2] if distances else 0.0
    return max(OUTLIER, 4 * usual)


def is_confirmed(state: StackState, row: RunRecord) -> bool:
    """Whether another run of the model took nearly the same share of its reserved memory."""

    def agrees(other: RunRecord) -> bool:
        mine, its = (r.value_mib / r.reserved_mib for r in (row, other))
        return other is not row and other.model == row.model and abs(its / mine - 1) < RUN_TOLERANCE

    return any(agrees(other) for other in state.rows if not other.censored)


PER_MODEL = 3
"""Rows of one model that count for the line, and rows that are kept of one model at one size."""
SIZES = 12
"""Rows of one model that are kept, over all sizes."""
PRIOR_MIB = (1024.0, 4096.0, 16384.0)
"""Positions of the synthetic observations on the shipped line."""
STEP = 0.04
"""Step size of adaptive conformal inference, in logarithms."""
_ROUNDS = 4

Refusal = Literal["CutShort", "Impossible"]


def refusal_of(expected: RunPrediction, measured: RunMeasurement) -> Refusal | None:
    """Return why an observation is impossible, or None."""
    if measured.out_of_memory:
        return None if 1 <= measured.peak_mib <= measured.capacity_mib else "Impossible"
    if not measured.complete or measured.peak_mib < max(expected.live_mib, 1.0):
        return "CutShort"
    return "Impossible" if measured.peak_mib > measured.capacity_mib else None


def observe(
    calibration: Calibration, stack: Stack, expected: RunPrediction, measured: RunMeasurement, model: MemoryModel
) -> Calibration:
    """Return the calibration with one more observation; a new stack starts with the line of the shipped model."""
    if measured.sample and measured.sample in calibration.counted:
        return calibration
    is_refused = refusal_of(expected, measured) is not None
    if is_refused and not measured.ended:
        return calibration
    before = calibration.state(stack)
    state = before or _fresh(stack, expected, model)
    if is_refused:
        state = msgspec.structs.replace(state, refused=state.refused + 1)
    else:
        state = _with_row(state, expected, measured, model)
    if state == before:
        return calibration
    others = [other for other in calibration.stacks if other.stack != stack]
    counted = [*calibration.counted, measured.sample] if measured.sample and measured.ended else calibration.counted
    return msgspec.structs.replace(calibration, stacks=[*others, state][-MAX_STACKS:], counted=counted[-MAX_SAMPLES:])


def _fresh(stack: Stack, expected: RunPrediction, model: MemoryModel) -> StackState:
    slope, intercept = _shipped_line(expected, model)
    return StackState(stack=stack, slope=slope, intercept_mib=intercept)


def _shipped_line(expected: RunPrediction, model: MemoryModel) -> tuple[float, float]:
    return model.slope, max(model.intercept_mib + expected.context_difference_mib, 0.0)


def _with_row(state: StackState, expected: RunPrediction, measured: RunMeasurement, model: MemoryModel) -> StackState:
    if measured.at_least:
        measured = _without_lower_activity(state, expected, measured)
    row = RunRecord(
        expected.model,
        expected.reserved_mib,
        measured.peak_mib / expected.correction,
        measured.out_of_memory,
        measured.sample,
        measured.util,
        measured.sm_active,
        measured.steady or measured.ended,
        _factor(measured.util, expected.util),
        _factor(measured.sm_active, expected.sm_active),
        expected.stratum,
        measured.namespace if measured.out_of_memory else "",
        measured.ended_at if measured.out_of_memory else 0,
    )
    before = next((one for one in state.rows if row.sample and one.sample == row.sample), None)
    if before is not None:
        row = _still_steady(before, _with_activity_of(before, row))
    after = state
    if row != before:
        rows = _kept([*(one for one in state.rows if one is not before), row])
        slope, intercept = _fitted(_rows_for_line(rows), _shipped_line(expected, model))
        after = msgspec.structs.replace(state, rows=rows, slope=slope, intercept_mib=intercept)
        after = msgspec.structs.replace(after, reaches=bound_reaches(after, len(model.factors)))
    return _judged(after, row, expected, measured) if measured.ended else after


def _without_lower_activity(state: StackState, expected: RunPrediction, measured: RunMeasurement) -> RunMeasurement:
    """Drop activity that does not exceed the measured activity of the job, or the predicted one of a new job.

    A lower limit is no evidence against more.
    """
    runs = [one for one in state.rows if is_of(one, expected.model, expected.reserved_mib)]

    def raised(found: float | None, measured_before: list[float], predicted: float | None) -> float | None:
        before = max(measured_before, default=predicted)
        return found if found is not None and (before is None or found > before) else None

    return msgspec.structs.replace(
        measured,
        util=raised(measured.util, [one.util for one in runs if one.util is not None], expected.util),
        sm_active=raised(
            measured.sm_active, [one.sm_active for one in runs if one.sm_active is not None], expected.sm_active
        ),
    )


def _with_activity_of(before: RunRecord, row: RunRecord) -> RunRecord:
    """Keep the activity that the run showed while it had the GPU alone."""
    if row.util is None:
        row = msgspec.structs.replace(row, util=before.util, util_factor=before.util_factor)
    if row.sm_active is None:
        row = msgspec.structs.replace(row, sm_active=before.sm_active, sm_factor=before.sm_factor)
    return row


def _still_steady(before: RunRecord, row: RunRecord) -> RunRecord:
    """Keep a peak steady that was steady before: after a restart, its growth is watched from the beginning."""
    is_no_more = before.steady and not row.censored and row.value_mib <= before.value_mib
    return msgspec.structs.replace(row, steady=True) if is_no_more else row


def _factor(measured: float | None, predicted: float | None) -> float | None:
    """Return measured over predicted activity, with three digits to keep the document small."""
    return None if measured is None or not predicted else float(f"{min(measured / predicted, 1000):.3g}")


def _judged(state: StackState, row: RunRecord, expected: RunPrediction, measured: RunMeasurement) -> StackState:
    """Count a job that ended, and adapt the widening by whether its bound held."""
    held = _held(state, row, expected, measured)
    after = msgspec.structs.replace(state, seen=state.seen + 1)
    if held is None:
        return after
    widening = state.widening + STEP * ((not held) - MISS_RATE)
    return msgspec.structs.replace(
        after, widening=min(max(widening, 0.0), MAX_WIDENING), outcomes=(state.outcomes + str(int(held)))[-WINDOW:]
    )


def _kept(rows: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the newest rows, with limits per model and per size of a model.

    Deaths of memory count by namespace, so that those of one tenant displace no measurement of others.
    """
    kept: list[RunRecord] = []
    models, sizes = Counter[tuple[str, str]](), Counter[tuple[str, int, str]]()
    for row in reversed(rows):
        size = (row.model, round(row.reserved_mib), row.namespace)
        model = row.model, row.namespace
        if models[model] < SIZES and sizes[size] < PER_MODEL and len(kept) < MAX_RUNS:
            models[model] += 1
            sizes[size] += 1
            kept.append(row)
    return kept[::-1]


def _rows_for_line(rows: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the newest `PER_MODEL` rows of each model, on which the line of all namespaces is fitted.

    Deaths of memory count for single namespaces, so they are left out.
    """
    counts = Counter[str]()
    found = []
    for row in reversed(rows):
        if row.namespace:
            continue
        counts[row.model] += 1
        if counts[row.model] <= PER_MODEL:
            found.append(row)
    return found[::-1]


def _fitted(rows: Sequence[RunRecord], shipped: tuple[float, float]) -> tuple[float, float]:
    """Return slope and intercept of the line; a censored row counts only where the line lies below it."""
    slope, intercept = shipped
    pairs = [Pair(x, slope * x + intercept) for x in PRIOR_MIB]
    pairs += [Pair(row.reserved_mib, row.value_mib) for row in rows if not row.censored]
    active: list[RunRecord] | None = None
    for _ in range(_ROUNDS):
        beneath = [row for row in rows if row.censored and slope * row.reserved_mib + intercept < row.value_mib]
        if beneath == active:
            break
        active = beneath
        slope, intercept = fit_line([*pairs, *(Pair(row.reserved_mib, row.value_mib) for row in active)])
        if slope <= 0:
            # Memory cannot fall as a job grows: the rows contradict each other.
            return shipped
    return slope, intercept


def _held(state: StackState, row: RunRecord, expected: RunPrediction, measured: RunMeasurement) -> bool | None:
    """Return whether the bound held, or None if the observation does not show it."""
    if not expected.upper_mib:
        return None
    if measured.out_of_memory:
        # With more memory than the bound available, a co-tenant or fragmentation caused the death.
        return False if expected.upper_mib <= measured.peak_mib else None
    if is_outlier(state, row) and not is_confirmed(state, row):
        return None
    return measured.peak_mib <= expected.upper_mib
