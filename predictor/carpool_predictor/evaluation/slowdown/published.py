"""How the errors that others report of Lucid's pairs were counted, which they do not say: every way is tried here."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.slowdown.lucid import FOUND, SEED, Pairs, shipped_median

TREES = 100
OF_PAIRS = {"first jobs": slice(0, None, 2), "second jobs": slice(1, None, 2), "both": slice(None)}
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
    """Of that forest."""
    found_percent: float
    """Share of the slowdowns above 15% that it finds."""

    def distance(self, published: "Told") -> float:
        """Return by which share of what is published the five differ from it in the mean."""
        return float(np.abs(np.array(self) / np.array(published) - 1).mean())


PUBLISHED = Told(none=0.097, rule=0.081, forest=0.061, r2=0.47, found_percent=60.0)


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
        return f"{'speed' if self.speed else 'slowdown'} of {self.of}, {limit}"

    def of_slowdown(self, slowdown: Numbers) -> Numbers:
        """Return what errs."""
        return 1 / slowdown if self.speed else slowdown

    def truth(self, pairs: Pairs) -> Numbers:
        """Return what was measured of it, shape (rows,)."""
        return self.of_slowdown((pairs.slowdown if self.cut else pairs.raw)[OF_PAIRS[self.of]])


WAYS = tuple(Way(*each) for each in product(OF_PAIRS, (True, False), (False, True)))


class Reading(NamedTuple):
    """What comes out of one way to count."""

    way: Way
    profiles: str
    """How the jobs' profiles were looked up."""
    told: Told
    shipped: float
    """Mean absolute error of what is shipped, which knows each job's precision."""

    @property
    def off(self) -> float:
        """Return how far it is from what is published."""
        return self.told.distance(PUBLISHED)


def readings(pairs: Pairs, either: Pairs) -> list[Reading]:
    """Count in every way; the closest to what is published comes first.

    Args:
        pairs: With each job's own profile.
        either: The same pairs with the profile of either precision.
    """
    profiles = {"model, batch, precision": pairs, "model, batch": either}
    found = (
        Reading(way, name, _count(of, way), _error(way, pairs, shipped_median(pairs)))
        for name, of in profiles.items()
        for way in WAYS
    )
    return sorted(found, key=lambda one: one.off)


def section(found: Sequence[Reading]) -> list[str]:
    """Write the card's section."""
    closest = found[0]
    return [
        "## How the published errors were counted",
        "",
        "That is not published. So they were counted in every way that suggests itself: of which jobs of a pair, of",
        "speed or of slowdown, with or without those that ran faster than alone, with profiles that were looked up",
        "by model and batch size, or by precision, too. The forest has utilization, memory utilization and memory of",
        f"both jobs; a model is foretold by pairs without it. The {SHOWN} of {len(found)} ways that come closest, by",
        "the mean deviation of the five figures:",
        "",
        "| error of | profiles by | no slowdown | min(1, 100/Σutil) | forest | its R² | it finds | off | shipped |",
        "|---|---|---|---|---|---|---|---|---|",
        _row(("published", ""), PUBLISHED, ("", "")),
        *(
            _row((str(one.way), one.profiles), one.told, (f"{one.off:.1%}", f"{one.shipped:.4f}"))
            for one in found[:SHOWN]
        ),
        "",
        f"So they are taken for errors of {'speed' if closest.way.speed else 'slowdown'}. What is shipped knows the",
        "precision in any case (last column: its errors, counted in the same ways).",
        "",
    ]


def _row(before: Iterable[str], told: Told, after: Iterable[str]) -> str:
    errors = (f"{error:.3f}" for error in (told.none, told.rule, told.forest))
    return f"| {' | '.join((*before, *errors, f'{told.r2:.2f}', f'{told.found_percent:.0f}%', *after))} |"


def _count(pairs: Pairs, way: Way) -> Told:
    rows, truth = OF_PAIRS[way.of], way.truth(pairs)
    foretold = _forest(np.hstack([pairs.busy, pairs.memory, pairs.mib])[rows], truth, pairs.models[rows])
    bad, told = pairs.raw[rows] > FOUND, way.of_slowdown(foretold) > FOUND  # of a speed it is the slowdown
    return Told(
        none=_error(way, pairs, np.ones(len(pairs.raw))),
        rule=_error(way, pairs, np.maximum(1.0, pairs.busy.sum(axis=1))),
        forest=float(np.abs(foretold - truth).mean()),
        r2=float(1 - ((foretold - truth) ** 2).mean() / truth.var()),
        found_percent=100 * float((bad & told).sum() / max(1, bad.sum())),
    )


def _error(way: Way, pairs: Pairs, slowdown: Numbers) -> float:
    return float(np.abs(way.of_slowdown(slowdown[OF_PAIRS[way.of]]) - way.truth(pairs)).mean())


def _forest(features: Numbers, truth: Numbers, models: Sequence[tuple[str, str]]) -> Numbers:
    """Foretell each slowed job's architecture by a forest of the pairs in which it has no part."""
    from sklearn.ensemble import RandomForestRegressor

    names = np.array(models)
    foretold = np.ones(len(truth))
    for model in np.unique(names[:, 0]).tolist():
        test, train = names[:, 0] == model, (names != model).all(axis=1)
        trees = RandomForestRegressor(TREES, random_state=SEED, n_jobs=1)
        foretold[test] = trees.fit(features[train], truth[train]).predict(features[test])
    return foretold
