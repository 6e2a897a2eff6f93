"""Learns from a job that ran: the affine of its stack at once, and whether the bound held.

    measured / correction ≈ slope · reserved + intercept       for each (product, driver, PyTorch, precision)

The line is fitted anew with every observation by least absolute relative error, over the last observations of the stack
and a few imagined ones on the shipped line, so that the first job does not overturn it. Bad observations do not poison
it: what is impossible is refused (less than one step's live tensors: the run was cut short; more than the GPU has), a
model counts at most `PER_MODEL` times, absolute errors give every row the same pull however far it lies, and half of
all rows would have to agree on something else. Of few rows each moves the line a little. How far above the line the
bound reaches is for `reach` to say, where a job has one voice. Out of memory is censored: "at least what was there"
(Powell 1984).

Coverage is tracked by adaptive conformal inference (Gibbs and Candès, NeurIPS '21): a miss widens the bound, each hit
narrows it by a nineteenth of that, so that in the long run 95% are covered. A neighbour's memory is no miss: an outlier
counts only when another run of the same model agrees with it.

Each run counts once, by the name of its sample: what a running job shows makes a row, which its end replaces.

Everything here is pure: a document in, a document out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Literal

import msgspec
from carpool_core.products import find_product

from carpool_predictor.calibration.document import (
    COUNTED,
    KEPT,
    MAX_STACKS,
    MISSES,
    WIDEST,
    WINDOW,
    Calibration,
    Expected,
    Measured,
    Observed,
    Stack,
    StackState,
)
from carpool_predictor.calibration.run_history import AGREEMENT, is_of
from carpool_predictor.models.memory import MemoryModel, Pair, context_mib, fit_line

OUTLIER = math.log(1.5)
"""Smallest distance from the line, in logarithms, at which an observation can be an outlier."""
ALONE = math.log(1 + AGREEMENT)
"""How far a single model raises the bound above what another one shows, in logarithms."""


def reaches(state: StackState, strata: int) -> list[float]:
    """Return how far above the line the bound has to lie, in logarithms, for each stratum of steps.

    Of n jobs' distances the ⌈(n + 1)(1 - `MISSES`)⌉-th, the largest where n is too small for that: the rank is that of
    split conformal prediction (Lei et al., JASA 2018). Its guarantee is not, because the line was fitted on the same
    rows, and outliers are held back; what the bound misses after all widens it (`observe`). A row speaks for its own
    stratum and for likelier ones: that a step exceeded its median which is known to do so says nothing of calm ones.

    Args:
        state: The stack.
        strata: How many there are.
    """
    far = _far(state)
    rows = [row for row in state.rows if not row.censored]
    believed = [row for row in rows if distance(state, row) <= far or is_confirmed(state, row)]
    found = (_reach(_voices(state, [row for row in believed if row.stratum == s])) for s in range(strata))
    return list(accumulate(found, max))  # a likelier step never has a smaller bound


def _voices(state: StackState, rows: Sequence[Observed]) -> Mapping[str, list[float]]:
    """Return the distances of a model's jobs, one of each size, in the middle of those of its runs."""
    runs = defaultdict[tuple[str, int], list[float]](list)
    for row in rows:
        runs[row.model, round(row.reserved_mib)].append(distance(state, row))
    voices = defaultdict[str, list[float]](list)
    for (model, _), distances in runs.items():
        voices[model].append(median(distances))
    return voices


def _reach(voices: Mapping[str, Sequence[float]]) -> float:
    reached = sorted(voice for of_model in voices.values() for voice in of_model)
    if not reached:
        return 0.0
    rank = min(len(reached), math.ceil((len(reached) + 1) * (1 - MISSES)))
    farthest = sorted(max(of_model) for of_model in voices.values())
    second = max(farthest[-2], 0.0) if len(farthest) > 1 else 0.0
    return min(max(reached[rank - 1], 0.0), second + ALONE)


def distance(state: StackState, row: Observed) -> float:
    """Return how far a row lies above the line of its stack, in logarithms."""
    return math.log(row.value_mib / max(state.at(row.reserved_mib), 1.0)) if row.value_mib > 0 else -math.inf


def is_outlier(state: StackState, row: Observed) -> bool:
    """Whether a row lies far above what is usual for the stack."""
    return distance(state, row) > _far(state)


def _far(state: StackState) -> float:
    """Return the distance from which a row is an outlier: four robust standard deviations."""
    distances = sorted(abs(distance(state, other)) for other in state.rows if not other.censored)
    usual = 1.4826 * distances[len(distances) // 2] if distances else 0.0
    return max(OUTLIER, 4 * usual)


def is_confirmed(state: StackState, row: Observed) -> bool:
    """Whether another run of the model, of about the same size, took about the same."""

    def agrees(other: Observed) -> bool:
        mine, its = (r.value_mib / r.reserved_mib for r in (row, other))
        return other is not row and other.model == row.model and abs(its / mine - 1) < AGREEMENT

    return any(agrees(other) for other in state.rows if not other.censored)


PER_MODEL = 3
"""So many rows of one model count for the line, and are kept of one model at one size: nobody's hundred runs outvote
the others."""
SIZES = 12
"""Rows of one model that are kept, so that jobs of several sizes can be recalled."""
PRIOR_MIB = (1024.0, 4096.0, 16384.0)
"""Where imagined observations lie on the shipped line."""
SEEN_S = 90.0
"""Age from which the peak of a running job is told, in seconds: before, it loads. As old as its activity must be to
count for the scheduler."""
STEADY_S = 600.0
"""A peak that has not moved for so long is taken for the job's, in seconds. PyTorch's allocator keeps what it has
reserved, so that a peak is reached in the first steps; ten minutes let an evaluation or a longer sample come, too."""
STEP = 0.04
"""How far one miss widens the bound, in logarithms, before `MISSES` is taken off."""
_ROUNDS = 4

Refusal = Literal["CutShort", "Impossible"]


def refusal_of(expected: Expected, measured: Measured) -> Refusal | None:
    """Say why an observation cannot be right; None where it can."""
    if measured.out_of_memory:
        return None if 1 <= measured.peak_mib <= measured.capacity_mib else "Impossible"
    if not measured.complete or measured.peak_mib < max(expected.live_mib, 1.0):
        return "CutShort"
    return "Impossible" if measured.peak_mib > measured.capacity_mib else None


def observe(
    calibration: Calibration, stack: Stack, expected: Expected, measured: Measured, model: MemoryModel
) -> Calibration:
    """Take one finished job in.

    Args:
        calibration: What is known.
        stack: Where the job ran.
        expected: What was predicted of it.
        measured: What was seen.
        model: The shipped memory model, from whose line a new stack sets out.
    """
    if measured.sample and measured.sample in calibration.counted:
        return calibration
    is_refused = refusal_of(expected, measured) is not None
    if is_refused and not measured.ended:
        return calibration
    known = calibration.state(stack)
    state = known or _fresh(stack, model)
    state = msgspec.structs.replace(state, refused=state.refused + 1) if is_refused else _taken(
        state, expected, measured, model
    )  # fmt: skip
    if state == known:
        return calibration
    others = [other for other in calibration.stacks if other.stack != stack]
    counted = [*calibration.counted, measured.sample] if measured.sample and measured.ended else calibration.counted
    return msgspec.structs.replace(calibration, stacks=[*others, state][-MAX_STACKS:], counted=counted[-COUNTED:])


def _fresh(stack: Stack, model: MemoryModel) -> StackState:
    slope, intercept = _shipped_line(stack, model)
    return StackState(stack=stack, slope=slope, intercept_mib=intercept)


def _shipped_line(stack: Stack, model: MemoryModel) -> tuple[float, float]:
    difference = context_mib(find_product(stack.product)) - context_mib(find_product(model.product))
    return model.slope, max(model.intercept_mib + difference, 0.0)


def _taken(state: StackState, expected: Expected, measured: Measured, model: MemoryModel) -> StackState:
    if measured.at_least:
        measured = _raising(state, expected, measured)
    row = Observed(
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
    )
    before = next((one for one in state.rows if row.sample and one.sample == row.sample), None)
    if before is not None:
        row = _still_steady(before, _with_activity_of(before, row))
    after = state
    if row != before:
        rows = _kept([*(one for one in state.rows if one is not before), row])
        slope, intercept = _fitted(_counting(rows), _shipped_line(state.stack, model))
        after = msgspec.structs.replace(state, rows=rows, slope=slope, intercept_mib=intercept)
        after = msgspec.structs.replace(after, reaches=reaches(after, len(model.factors)))
    return _judged(after, row, expected, measured) if measured.ended else after


def _raising(state: StackState, expected: Expected, measured: Measured) -> Measured:
    """Leave out activity that is no more than what is known of the job, or than what was predicted of an unknown one.

    What a job shows at least tells nothing against more, neither of this run nor of others.
    """
    runs = [one for one in state.rows if is_of(one, expected.model, expected.reserved_mib)]

    def raised(found: float | None, known: list[float], predicted: float | None) -> float | None:
        before = max(known) if known else predicted
        return found if found is not None and (before is None or found > before) else None

    return msgspec.structs.replace(
        measured,
        util=raised(measured.util, [one.util for one in runs if one.util is not None], expected.util),
        sm_active=raised(
            measured.sm_active, [one.sm_active for one in runs if one.sm_active is not None], expected.sm_active
        ),
    )


def _with_activity_of(before: Observed, row: Observed) -> Observed:
    """Keep what a run showed of its activity while it had the GPU alone, or nobody had joined it yet."""
    if row.util is None:
        row = msgspec.structs.replace(row, util=before.util, util_factor=before.util_factor)
    if row.sm_active is None:
        row = msgspec.structs.replace(row, sm_active=before.sm_active, sm_factor=before.sm_factor)
    return row


def _still_steady(before: Observed, row: Observed) -> Observed:
    """Let a peak stay steady that was: who watches it may have begun anew, and has not seen it stand still for long."""
    is_no_more = before.steady and not row.censored and row.value_mib <= before.value_mib
    return msgspec.structs.replace(row, steady=True) if is_no_more else row


def _factor(measured: float | None, predicted: float | None) -> float | None:
    """Return measured over predicted activity; a few digits, because the document is to stay small."""
    return None if measured is None or not predicted else float(f"{min(measured / predicted, 1000):.3g}")


def _judged(state: StackState, row: Observed, expected: Expected, measured: Measured) -> StackState:
    """Count a job that ended, and whether its bound held."""
    held = _held(state, row, expected, measured)
    after = msgspec.structs.replace(state, seen=state.seen + 1)
    if held is None:
        return after
    widening = state.widening + STEP * ((not held) - MISSES)
    return msgspec.structs.replace(
        after,
        widening=min(max(widening, 0.0), WIDEST),
        outcomes=(state.outcomes + str(int(held)))[-WINDOW:],
    )


def _kept(rows: Sequence[Observed]) -> list[Observed]:
    """Keep the newest rows, and of each model, and of each of its sizes, the newest few."""
    kept: list[Observed] = []
    models, sizes = Counter[str](), Counter[tuple[str, int]]()
    for row in reversed(rows):
        size = (row.model, round(row.reserved_mib))
        if models[row.model] < SIZES and sizes[size] < PER_MODEL and len(kept) < KEPT:
            models[row.model] += 1
            sizes[size] += 1
            kept.append(row)
    return kept[::-1]


def _counting(rows: Sequence[Observed]) -> list[Observed]:
    """Return the newest few rows of each model, which the line is fitted on."""
    counts = Counter[str]()
    found = []
    for row in reversed(rows):
        counts[row.model] += 1
        if counts[row.model] <= PER_MODEL:
            found.append(row)
    return found[::-1]


def _fitted(rows: Sequence[Observed], shipped: tuple[float, float]) -> tuple[float, float]:
    """Fit the line; a censored row pulls only where the line lies below it."""
    slope, intercept = shipped
    known = [Pair(x, slope * x + intercept) for x in PRIOR_MIB]
    known += [Pair(row.reserved_mib, row.value_mib) for row in rows if not row.censored]
    pulling: list[Observed] | None = None
    for _ in range(_ROUNDS):
        beneath = [row for row in rows if row.censored and slope * row.reserved_mib + intercept < row.value_mib]
        if beneath == pulling:
            break
        pulling = beneath
        slope, intercept = fit_line([*known, *(Pair(row.reserved_mib, row.value_mib) for row in pulling)])
        if slope <= 0:
            # Memory cannot fall as a job grows: rows that say so contradict each other, and nothing is learned.
            return shipped
    return slope, intercept


def _held(state: StackState, row: Observed, expected: Expected, measured: Measured) -> bool | None:
    """Say whether the bound held; None where the observation says nothing about it."""
    if not expected.upper_mib:
        return None
    if measured.out_of_memory:
        # It held where more was there: then a neighbour took what was not its own, or the GPU was fragmented.
        return False if expected.upper_mib <= measured.peak_mib else None
    if is_outlier(state, row) and not is_confirmed(state, row):
        return None
    return measured.peak_mib <= expected.upper_mib
