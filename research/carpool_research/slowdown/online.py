"""Prequential replay of measured pairs: each is predicted from those before it, then learned. Time runs by chance.

Slowdowns are corrected by `carpool_predictor.calibration.colocation`. Its constants were chosen on Gavel's pairs with
other seeds. Its form was compared on both sources; see decision 81.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from carpool_core.resources.prediction import OF_JOB, family_of
from carpool_core.values import SharingMode
from carpool_predictor.calibration.colocation import Corrections, PairRecord, correction_factor
from carpool_predictor.models.slowdown import shipped, slowdowns, upper_end, upper_factor

from carpool_research.slowdown import gavel, lucid
from carpool_research.slowdown.candidates import HIDING

SEEDS = range(5)
BINS = ((0, 0), (1, 2), (3, 9), (10, 10**6))
"""Least and largest number of earlier measured pairs of the same two families."""


class Occasion(NamedTuple):
    """One measured pair; the first entry of each tuple is one job's, the second the other's."""

    product: str
    mode: SharingMode
    jobs: tuple[str, str]
    """Family and job."""
    busy: tuple[float, float]
    speeds: tuple[float, float]


class Outcome(NamedTuple):
    """One prediction before its pair was learned."""

    earlier: int
    """Earlier measured pairs of the same two families."""
    prior_error: float
    """Absolute error of the speed by the shipped model."""
    error: float
    """The same with corrections."""
    is_below_upper: bool
    """Whether the slowdown is below the interval's upper end."""


def occasions(data: Path) -> dict[str, list[Occasion]]:
    """Return the pairs of each source: Lucid's under time-slicing, Gavel's behind MPS."""
    pairs, measured = lucid.read(data), gavel.read(data)
    # The file has each pair in both directions, one after the other.
    of_lucid = [
        Occasion(
            "RTX 3090",
            SharingMode.TIME_SLICING,
            _names(pairs.models[row], pairs.jobs[row]),
            (float(pairs.busy[row, 0]), float(pairs.busy[row, 1])),
            (1 / float(pairs.raw[row]), 1 / float(pairs.raw[row + 1])),
        )
        for row in range(0, len(pairs.raw), 2)
    ]
    busy = gavel.busy_shares(measured, HIDING)
    of_gavel = [
        Occasion(
            one.one[0],
            SharingMode.MPS,
            _names((one.one[1], one.other[1]), (one.one[2], one.other[2])),
            (busy[one.one], busy[one.other]),
            (1 / one.slowdowns[0], 1 / one.slowdowns[1]),
        )
        for one in measured.pairs
        if one.one in busy and one.other in busy
    ]
    return {"Lucid": of_lucid, "Gavel": of_gavel}


def _names(families: tuple[str, str], jobs: tuple[str, str]) -> tuple[str, str]:
    (one, other), (job, its) = families, jobs
    return f"{one}{OF_JOB}{job}", f"{other}{OF_JOB}{its}"


def replay(seen: Sequence[Occasion], seed: int) -> Iterator[Outcome]:
    """Predict and learn the pairs in a random order; yield the outcome of each job of each pair."""
    records: dict[tuple[str, SharingMode], list[PairRecord]] = {}
    earlier = Counter[tuple[str, SharingMode, frozenset[str]]]()
    for number in np.random.default_rng(seed).permutation(len(seen)).tolist():
        one = seen[number]
        known = records.setdefault((one.product, one.mode), [])
        pair = (one.product, one.mode, frozenset(map(family_of, one.jobs)))
        busy = np.array([one.busy])
        activity = busy, busy ** shipped().holding, np.zeros((1, 2))
        prior, factor = slowdowns(one.mode, *activity)[0], upper_factor(one.mode, activity[0])[0]
        learned, corrections = [], Corrections(known)
        for mine, its in ((0, 1), (1, 0)):
            job, other = one.jobs[mine], one.jobs[its]
            coefficients, width = corrections.beside(job, other)
            expected = max(1.0, prior[mine] * correction_factor(coefficients, one.busy[mine], one.busy[its]))
            highest = expected * factor[mine] ** width
            if width == 1:
                highest = upper_end(one.mode, np.full((1, 2), expected), activity[0])[0, mine]
            speed, by_prior = one.speeds[mine], 1 / prior[mine]
            yield Outcome(earlier[pair], abs(speed - by_prior), abs(speed - 1 / expected), 1 / speed <= highest)
            ratio = float(np.log(max(1.0, 1 / speed) / prior[mine]))
            utils = one.busy[mine], one.busy[its]
            learned.append(PairRecord("", "", "", one.product, False, one.mode, job, other, *utils, ratio))
        known += learned
        earlier[pair] += 1


def table(data: Path) -> list[dict[str, str]]:
    """Return the errors by source and number of earlier pairs, over all seeds."""
    rows = []
    for source, seen in occasions(data).items():
        found = [outcome for seed in SEEDS for outcome in replay(seen, seed)]
        for least, most in BINS:
            here = [one for one in found if least <= one.earlier <= most]
            if here:
                rows.append(
                    {
                        "pairs": source,
                        "earlier pairs of the families": f"{least}"
                        if most == least
                        else f"{least}+"
                        if most > 99
                        else f"{least}-{most}",
                        "predictions": f"{len(here):,}",
                        "shipped model": f"{fmean(one.prior_error for one in here):.3f}",
                        "learned online": f"{fmean(one.error for one in here):.3f}",
                        "below the upper end": f"{fmean(one.is_below_upper for one in here):.0%}",
                    }
                )
    return rows
