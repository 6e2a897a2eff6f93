"""How far above its stack's line the bound has to lie to hold what was seen there, and which rows may say so.

What lies far out may be a neighbour's memory: it counts once another run of its model agrees. What lies less far out
cannot be told from a model that takes more than others. So the runs of a job have one voice together, however many they
are, and all sizes of a model raise the bound to at most `ALONE` above what another model shows. The job itself loses
nothing by that, because its own peak is recalled.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from carpool_predictor.calibration.document import MISSES, Observed, StackState
from carpool_predictor.calibration.recalling import AGREEMENT

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
