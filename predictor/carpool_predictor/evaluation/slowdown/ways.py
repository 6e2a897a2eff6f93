"""How the errors were counted that came with the goals for Lucid's pairs: nobody told, so ways are tried."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.slowdown.lucid import FOUND, SEED, Pairs, shipped_median

TREES = 100
OF_PAIRS = {"first jobs": slice(0, None, 2), "second jobs": slice(1, None, 2), "both": slice(None)}
"""Rows of `Pairs` by which jobs of the pairs they are of, as a pair stands in Lucid's table."""
SHOWN = 6
"""Ways in the card's table, the closest first."""

Numbers = NDArray[np.float64]


class Told(NamedTuple):
    """What is told of three models of Lucid's pairs."""

    none: float
    """Mean absolute error of "no slowdown"."""
    rule: float
    """The same of `min(1, 100/Σutil)`."""
    forest: float
    """The same of a random forest that is fitted to Lucid, models held out."""
    r2: float
    """Share of the variance that this forest explains."""
    found_percent: float
    """Share of the slowdowns above 15% that it finds."""

    def distance(self, given: "Told") -> float:
        """Return by which share of what is given the five differ from it in the mean."""
        return float(np.abs(np.array(self) / np.array(given) - 1).mean())


GIVEN = Told(none=0.097, rule=0.081, forest=0.061, r2=0.47, found_percent=60.0)
"""What the goals for Lucid's pairs came with: figures of others' models, of which neither source nor count was told."""


class Way(NamedTuple):
    """One way to count."""

    of: str
    """Which jobs of the pairs, a key of OF_PAIRS."""
    speed: bool
    """Whether speed is foretold, and errs, rather than slowdown."""
    cut: bool
    """Whether nobody runs faster than alone, or that is measured too."""

    def __str__(self) -> str:
        """Name it."""
        limit = ("at most 1" if self.speed else "at least 1") if self.cut else "as measured"
        return f"{self.measure} of {self.of}, {limit}"

    @property
    def measure(self) -> str:
        """Name what errs."""
        return "speed" if self.speed else "slowdown"

    def of_slowdown(self, slowdown: Numbers) -> Numbers:
        """Return what errs; of a speed it is the slowdown again."""
        return 1 / slowdown if self.speed else slowdown

    def truth(self, pairs: Pairs) -> Numbers:
        """Return what was measured of it, shape (rows,)."""
        return self.of_slowdown((pairs.slowdown if self.cut else pairs.raw)[OF_PAIRS[self.of]])

    def error(self, slowdown: Numbers, pairs: Pairs) -> float:
        """Return the mean absolute error of slowdowns of all rows."""
        return float(np.abs(self.of_slowdown(slowdown[OF_PAIRS[self.of]]) - self.truth(pairs)).mean())


WAYS = tuple(Way(*each) for each in product(OF_PAIRS, (True, False), (False, True)))


class Reading(NamedTuple):
    """What comes out of one way to count."""

    way: Way
    profiles: str
    """How the jobs' profiles were looked up."""
    told: Told
    off: float
    """How far that is from what was given."""
    shipped: float
    """Mean absolute error of what is shipped, which knows each job's precision."""


def readings(own: Pairs, either: Pairs, *, given: Told = GIVEN, trees: int = TREES) -> list[Reading]:
    """Count in every way; the closest to what was given comes first.

    Args:
        own: The pairs, each job with its own profile.
        either: The same pairs, each job with the profile of either precision.
        given: What is looked for.
        trees: Of each forest.
    """
    shipped, found = shipped_median(own), []
    for profiles, pairs in {"model, batch, precision": own, "model, batch": either}.items():
        for way in WAYS:
            told = _count(pairs, way, trees)
            found.append(Reading(way, profiles, told, told.distance(given), way.error(shipped, own)))
    return sorted(found, key=lambda one: one.off)


def section(found: Sequence[Reading]) -> list[str]:
    """Write the card's section."""
    best = found[0]
    other = next(one for one in found if one.way.speed != best.way.speed)
    return [
        "## How the errors were counted that came with the goals",
        "",
        f"Nobody told. {len(found)} ways were tried: of which jobs of a pair, of speed or of slowdown, with or without",
        "those that ran faster than alone, with profiles that were looked up by model and batch size, or by precision,",
        "too. The forest has utilization, memory utilization and memory of both jobs; a model is foretold by pairs",
        f"without it. No way gives all five figures. The {SHOWN} that come closest, by the mean of how far the five",
        "are off:",
        "",
        "| error of | profiles by | no slowdown | min(1, 100/Σutil) | forest | its R² | it finds | off | shipped |",
        "|---|---|---|---|---|---|---|---|---|",
        _row(("given", ""), GIVEN, ("", "")),
        *(
            _row((str(one.way), one.profiles), one.told, (f"{one.off:.1%}", f"{one.shipped:.4f}"))
            for one in found[:SHOWN]
        ),
        "",
        f"Closest is the {best.way} ({best.off:.1%} off), closest of {other.way.measure} the",
        f"{other.way} ({other.off:.1%}). So errors of {best.way.measure} are the likelier reading, no more: another",
        "forest moves each by a point or two, and what is shipped had missed the goal by the other reading when this",
        "one was looked for",
        "([decisions](../decisions.md#what-was-asked-for-of-slowdowns-is-taken-for-an-error-of-speed)).",
        f"Counted as the closest of {other.way.measure}, what is shipped errs by {other.shipped:.4f} (last column; it",
        "knows the precision in any case).",
        "",
    ]


def _row(before: Iterable[str], told: Told, after: Iterable[str]) -> str:
    errors = (f"{error:.3f}" for error in (told.none, told.rule, told.forest))
    return f"| {' | '.join((*before, *errors, f'{told.r2:.2f}', f'{told.found_percent:.0f}%', *after))} |"


def _count(pairs: Pairs, way: Way, trees: int) -> Told:
    rows, truth = OF_PAIRS[way.of], way.truth(pairs)
    features = np.hstack([pairs.busy, pairs.memory, pairs.mib])
    foretold = forest(features[rows], truth, pairs.models[rows], trees)
    bad, told = pairs.raw[rows] > FOUND, way.of_slowdown(foretold) > FOUND
    return Told(
        none=way.error(np.ones(len(pairs.raw)), pairs),
        rule=way.error(np.maximum(1.0, pairs.busy.sum(axis=1)), pairs),
        forest=float(np.abs(foretold - truth).mean()),
        r2=float(1 - ((foretold - truth) ** 2).mean() / truth.var()),
        found_percent=100 * float((bad & told).sum() / max(1, bad.sum())),
    )


def forest(features: Numbers, truth: Numbers, models: Sequence[tuple[str, str]], trees: int) -> Numbers:
    """Foretell each slowed job's architecture by a forest of the pairs in which it has no part.

    A plain one, as others may have fitted it; `lucid.forest`, which the card's table has, holds out both architectures
    of a pair.
    """
    from sklearn.ensemble import RandomForestRegressor

    names = np.array(models)
    foretold = np.ones(len(truth))
    for model in np.unique(names[:, 0]).tolist():
        test, train = names[:, 0] == model, (names != model).all(axis=1)
        fitted = RandomForestRegressor(trees, random_state=SEED, n_jobs=1).fit(features[train], truth[train])
        foretold[test] = fitted.predict(features[test])
    return foretold
