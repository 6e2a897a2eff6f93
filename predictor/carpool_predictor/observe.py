"""Learns from a finished job: the affine of its stack at once, and whether the bound held.

    measured / correction ≈ slope · reserved + intercept       for each (product, driver, PyTorch, precision)

The line is fitted anew with every observation by least absolute relative error, over the last observations of the stack
and a few imagined ones on the shipped line, so that the first job does not overturn it. Bad observations cannot poison
it: what is impossible is refused (less than one step's live tensors: the run was cut short; more than the GPU has), a
model counts at most `PER_MODEL` times, absolute errors give every row the same pull however far it lies, and half of
all rows would have to agree on something else. Out of memory is censored: "at least what was there" (Powell 1984).

Coverage is tracked by adaptive conformal inference (Gibbs and Candès, NeurIPS '21): a miss widens the bound, each hit
narrows it by a nineteenth of that, so that in the long run 95% are covered. A neighbour's memory is no miss: an outlier
counts only when another run of the same model agrees with it.

Everything here is pure: a document in, a document out.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from carpool_core.products import GpuProduct, find_product
from carpool_core.values import MIB

from carpool_predictor.affine import Pair, fit_line
from carpool_predictor.calibration import (
    KEPT,
    MAX_STACKS,
    WIDEST,
    WINDOW,
    Calibration,
    Expected,
    Measured,
    Observed,
    Stack,
    StackState,
)
from carpool_predictor.estimator import Job
from carpool_predictor.memory import MemoryModel, context_mib

PER_MODEL = 3
"""Of these, at most so many of one model: nobody's hundred runs outvote the others."""
PRIOR_MIB = (1024.0, 4096.0, 16384.0)
"""Where imagined observations lie on the shipped line."""
MISSES = 0.05
"""Share of jobs that may exceed the bound."""
STEP = 0.04
"""How far one miss widens the bound, in logarithms, before `MISSES` is taken off."""
OUTLIER = math.log(1.5)
"""Smallest distance from the line, in logarithms, at which an observation can be an outlier."""
_ROUNDS = 4
AGREEMENT = 0.1
"""Two runs of a model agree when they differ by less than this share."""

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
    state = calibration.state(stack) or _fresh(stack, model)
    others = [kept for kept in calibration.stacks if kept.stack != stack]
    if refusal_of(expected, measured) is not None:
        state = msgspec.structs.replace(state, refused=state.refused + 1)
    else:
        state = _taken(state, expected, measured, model)
    return msgspec.structs.replace(calibration, stacks=[*others, state][-MAX_STACKS:])


def _fresh(stack: Stack, model: MemoryModel) -> StackState:
    slope, intercept = _shipped_line(stack, model)
    return StackState(stack=stack, slope=slope, intercept_mib=intercept)


def _shipped_line(stack: Stack, model: MemoryModel) -> tuple[float, float]:
    difference = context_mib(find_product(stack.product)) - context_mib(find_product(model.product))
    return model.slope, max(model.intercept_mib + difference, 0.0)


def _taken(state: StackState, expected: Expected, measured: Measured, model: MemoryModel) -> StackState:
    row = Observed(
        expected.model, expected.reserved_mib, measured.peak_mib / expected.correction, measured.out_of_memory
    )
    rows = _kept([*state.rows, row])
    slope, intercept = _fitted(rows, _shipped_line(state.stack, model))
    after = msgspec.structs.replace(state, rows=rows, slope=slope, intercept_mib=intercept, seen=state.seen + 1)
    held = _held(after, row, expected, measured)
    if held is None:
        return after
    widening = state.widening + STEP * ((not held) - MISSES)
    return msgspec.structs.replace(
        after,
        widening=min(max(widening, 0.0), WIDEST),
        outcomes=(state.outcomes + str(int(held)))[-WINDOW:],
    )


def _kept(rows: Sequence[Observed]) -> list[Observed]:
    """Keep the newest rows, and of each model the newest few."""
    kept: list[Observed] = []
    counts: dict[str, int] = {}
    for row in reversed(rows):
        counts[row.model] = counts.get(row.model, 0) + 1
        if counts[row.model] <= PER_MODEL and len(kept) < KEPT:
            kept.append(row)
    return kept[::-1]


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
    if measured.out_of_memory:
        return False if expected.upper_mib < measured.peak_mib else None
    if _is_outlier(state, row) and not _is_confirmed(state, row):
        return None
    return measured.peak_mib <= expected.upper_mib


def _distance(state: StackState, row: Observed) -> float:
    return math.log(row.value_mib / max(state.at(row.reserved_mib), 1.0)) if row.value_mib > 0 else -math.inf


def _is_outlier(state: StackState, row: Observed) -> bool:
    """Whether a row lies far above what is usual for the stack: four robust standard deviations."""
    distances = sorted(abs(_distance(state, other)) for other in state.rows if not other.censored)
    usual = 1.4826 * distances[len(distances) // 2] if distances else 0.0
    return _distance(state, row) > max(OUTLIER, 4 * usual)


def _is_confirmed(state: StackState, row: Observed) -> bool:
    """Whether another run of the model, of about the same size, took about the same."""

    def agrees(other: Observed) -> bool:
        mine, its = (r.value_mib / r.reserved_mib for r in (row, other))
        return other is not row and other.model == row.model and abs(its / mine - 1) < AGREEMENT

    return any(agrees(other) for other in state.rows if not other.censored)


def expected_of(job: Job, product: GpuProduct, name: str) -> Expected:
    """Return what must be remembered of a prediction until its job ends."""
    return Expected(
        model=name,
        reserved_mib=max(job.cost.reserved_bytes / MIB, 1.0),
        live_mib=job.cost.peak_bytes / MIB,
        correction=job.corrected.correction,
        upper_mib=job.memory_on(product).upper_mib,
    )
