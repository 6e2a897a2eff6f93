"""Learns the slowdown model and writes it, for `python -m carpool_research train`. Needs the extra `train`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from carpool_predictor.models.slowdown import MeanValueAnalysis, SlowdownModel, shipped
from numpy.typing import NDArray

from carpool_research.slowdown import gavel
from carpool_research.slowdown.lucid import FOUND, SEED, Pairs, deviation, score, shipped_median
from carpool_research.tables import KINDS, DataError, ended_well, file_of, number, read_table

COLUMNS = ("Avg GPUTL", "Avg SMACT", "Avg GRACT")
EXPONENTS = tuple((100 + step) / 100 for step in range(201))
"""1 to 3, in hundredths."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Trainings of one kind that ended well and whose activity was measured."""

    busy: Numbers
    """(n,) GPU utilization, 0..1."""
    sm: Numbers
    """(n,) SM activity, 0..1."""
    engine: Numbers
    """(n,) Share of time in which the engine was active, 0..1: all of the time that others could not have."""


Pick = Callable[[Runs], Numbers]


def sm_active(runs: Runs) -> Numbers:
    """Return what k is learned from."""
    return runs.sm


def engine_active(runs: Runs) -> Numbers:
    """Return what it could be learned from instead."""
    return runs.engine


def read(data: Path) -> dict[str, Runs]:
    """Read the trainings, by kind.

    Raises:
        DataError: A file or a column is missing, a row cannot be read, or none tells of all that is needed.
    """
    return {kind: _read_kind(data / file_of(kind)) for kind in KINDS}


def _read_kind(path: Path) -> Runs:
    rows = [row for row in read_table(path, COLUMNS, _read) if row is not None]
    if not rows:
        raise DataError(f"expected trainings that ended well with {', '.join(COLUMNS)} in {path}, found none")
    busy, sm, engine = np.array(rows).T
    return Runs(busy, sm, engine)


def _read(row: dict[str, str]) -> tuple[float, float, float] | None:
    busy, sm, engine = number(row, "Avg GPUTL") / 100, number(row, "Avg SMACT"), number(row, "Avg GRACT")
    is_measured = 0 <= busy <= 1 and sm >= 0 and engine >= 0  # -1: it was not
    return (busy, sm, engine) if ended_well(row) and is_measured else None


def error(runs: Sequence[Runs], exponent: float, pick: Pick = sm_active) -> float:
    """Return the mean absolute error of what follows from utilization, every kind counting alike."""
    return float(np.mean([np.abs(pick(of) - of.busy**exponent).mean() for of in runs]))


def best_exponent(runs: Sequence[Runs], pick: Pick = sm_active) -> float:
    """Return k, every kind counting alike."""
    return min(EXPONENTS, key=lambda exponent: error(runs, exponent, pick))


VERSION = "2026.11.3"
LEVEL = 0.9


def learn(data: Path) -> SlowdownModel:
    """Learn all that is shipped; the same data gives the same numbers.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = read(data), gavel.read(data)
    k = best_exponent(list(runs.values()))
    hiding = gavel.most_cautious(gavel.errors_by_exponent(measured))
    held_out = gavel.queueing(measured, hiding, k)
    in_turns, side_by_side = gavel.factors(held_out, LEVEL)
    return SlowdownModel(
        version=VERSION,
        holding=k,
        level=LEVEL,
        turns_factor=in_turns,
        side_by_side_factor=side_by_side,
        provenance={
            "holding": "itu-rad/GPUMemNet, MLPs and CNNs (A100)",
            "holding_runs": sum(len(of.busy) for of in runs.values()),
            "factors": "stanford-futuredata/gavel, oracle throughputs (K80, P100, V100), single-GPU jobs",
            "jobs": len(measured.step_s),
            "step_curves": len(gavel.families(measured)),
            "step_exponent": hiding,
            "pairs": len(held_out.measured),
        },
    )


def train_slowdown(data: Path, out: Path) -> Path:
    """Write `slowdown.json` below `out`; the same data gives the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    path = out / "slowdown.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(learn(data)) + b"\n")
    return path


MAX_ERROR, MIN_FOUND = 0.055, 75.0
AIM_ERROR, AIM_FOUND = 0.045, 85.0
BEYOND = 2.0
"""Standard errors within which a difference may be chance."""


def goals_table(pairs: Pairs) -> list[dict[str, str]]:
    """Return the errors of the shipped median against the goals, with standard errors over jobs."""
    predicted = shipped_median(pairs)
    one, by = score(predicted, pairs), deviation(predicted, pairs)
    rows = [
        (name, f"≤ {MAX_ERROR}", f"{value:.4f}±{error:.4f}", MAX_ERROR - value, error)
        for name, value, error in (
            ("error of slowdown", one.error, by.error),
            ("error of speed", one.speed_error, by.speed_error),
        )
    ]
    found, error = one.found_percent, by.found_percent
    rows.append(("slowdowns > 15% found", f"≥ {MIN_FOUND:g}%", f"{found:.1f}±{error:.1f}%", found - MIN_FOUND, error))
    return [
        {"shipped median": name, "required": must, "found": value, "met": met(room, noise)}
        for name, must, value, room, noise in rows
    ]


def met(room: float, by: float) -> str:
    """Say whether a goal is met.

    Args:
        room: By how much it is; negative where it is missed.
        by: Standard error of that.
    """
    verdict = "kept" if room >= 0 else "**missed**"
    return f"{verdict}, within noise" if abs(room) <= BEYOND * by else verdict


TENANTS = (2, 3, 4, 5, 6)
DRAWS = 200
GROUPS_SEED = 0


def groups_table() -> list[dict[str, str]]:
    """Return how the composition of k = 1 differs from the exact solution, and what groups hold with the shipped k."""
    draw = np.random.default_rng(GROUPS_SEED)
    return [_group(draw.uniform(0.05, 1.0, (DRAWS, tenants))) for tenants in TENANTS]


def _group(busy: Numbers) -> dict[str, str]:
    exact = np.array([exact_slowdowns(row) for row in busy])
    off = np.abs(MeanValueAnalysis(busy, 1.0).slowdowns() - exact)
    k = shipped().holding
    found = MeanValueAnalysis(busy, k).slowdowns()
    most, busiest = ((of / found).sum(axis=1).max() for of in (busy**k, busy))
    return {
        "tenants": str(busy.shape[1]),
        "mean slowdown, k = 1": f"{exact.mean():.2f}",
        "mean error": f"{off.mean():.4f}",
        "largest error": f"{off.max():.4f}",
        "most held, shipped k": f"{most:.2f}",
        "busiest, shipped k": f"{busiest:.2f}",
    }


def busier_than_whole(pairs: Pairs) -> float:
    """Return the share of pairs whose busy shares, over measured slowdowns, add up to more than one."""
    both = (pairs.busy[:, 0] / pairs.slowdown).reshape(-1, 2).sum(axis=1)
    return float((both > 1.0).mean())


def exact_slowdowns(busy: Sequence[float] | Numbers) -> Numbers:
    """Solve the Markov chain of tenants that alternate between host and one shared GPU.

    Args:
        busy: Busy shares alone, 0..1, shape (tenants,); a step alone takes 1, both parts exponential times.

    Returns:
        Slowdowns, shape (tenants,).
    """
    tenants = len(busy)
    states = list(itertools.product((0, 1), repeat=tenants))
    place = {state: number for number, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    for state, row in place.items():
        at_gpu = sum(state)
        for who in range(tenants):
            to = place[(*state[:who], 1 - state[who], *state[who + 1 :])]
            rates[row, to] = 1 / (busy[who] * at_gpu) if state[who] else 1 / max(1e-9, 1 - busy[who])
        rates[row, row] = -rates[row].sum()
    system = np.vstack([rates.T, np.ones(len(states))])
    shares = np.linalg.lstsq(system, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
    served = [
        sum(shares[row] / sum(state) for state, row in place.items() if state[who]) / busy[who]
        for who in range(tenants)
    ]
    return 1 / np.array(served)


LIMITS = (1.1, 1.2, 1.5)
"""Of jobs, for the tables of what is held against them; 1.5 is the default."""
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admitted:
    """What came of putting some pairs together, both jobs of which accept the same slowdown."""

    admitted_percent: float
    """Share of the pairs that would have shared."""
    beyond_percent: float
    """Share of these of which one was slowed beyond the limit."""
    missed_percent: float
    """Share of the pairs within the limit that would not have shared."""


def within(slowdowns: Numbers, limit: float) -> Bools:
    """Say of which pairs both jobs stay within a limit.

    Args:
        slowdowns: Of each job of each pair, one after the other, shape (2 * pairs,).
        limit: Slowdown that everybody accepts.
    """
    found: Bools = slowdowns.reshape(-1, 2).max(axis=1) <= limit
    return found


def admitted(would: Bools, measured: Numbers, limit: float) -> Admitted:
    """Say what would have come of letting pairs share.

    Args:
        would: Which would have, shape (pairs,).
        measured: Slowdown of each job of each pair, one after the other, shape (2 * pairs,).
        limit: Slowdown that everybody accepts.
    """
    fine = within(measured, limit)
    return Admitted(
        admitted_percent=100 * float(would.mean()),
        beyond_percent=100 * float((would & ~fine).sum() / max(1, would.sum())),
        missed_percent=100 * float((fine & ~would).sum() / max(1, fine.sum())),
    )


def _joint(most: float) -> Callable[[Pairs], Bools]:
    def rule(pairs: Pairs) -> Bools:
        found: Bools = pairs.busy[::2].sum(axis=1) <= most
        return found

    return rule


def _scored(pairs: Pairs) -> Bools:
    found: Bools = pairs.scores[::2].sum(axis=1) <= MOST_SCORED
    return found


MOST_SCORED = 2
"""Sharing scores of both jobs together that Lucid puts on one GPU (Hu et al., ASPLOS '23)."""
RULES: Mapping[str, Callable[[Pairs], Bools]] = {
    "joint utilization ≤ 100% (HotCloud '20)": _joint(1.0),
    "joint utilization ≤ 80% (RAD-RM, of SM activity)": _joint(0.8),
    "sharing scores ≤ 2 (Lucid)": _scored,
}
"""Published rules by which two jobs share; they know of no limit that jobs accept."""


def limits_table(
    measured: Numbers, predicted: Mapping[str, Numbers], rules: Mapping[str, Bools]
) -> list[dict[str, str]]:
    """Return which pairs share under limits and rules, and how many of them exceed the limit.

    Args:
        measured: Slowdown of each job of each pair, one after the other, shape (2 * pairs,).
        predicted: Predicted slowdowns in the same order, by name.
        rules: Pairs that share under each rule, shape (pairs,) each.
    """
    table = []
    for limit in LIMITS:
        would = {name: within(one, limit) for name, one in predicted.items()} | dict(rules)
        for name, those in would.items():
            found = admitted(those, measured, limit)
            table.append(
                {
                    "limit": f"{limit:g}",
                    "compared with": name,
                    "pairs that share": f"{found.admitted_percent:.1f}%",
                    "of these beyond the limit": f"{found.beyond_percent:.1f}%",
                    "pairs within it that do not share": f"{found.missed_percent:.1f}%",
                }
            )
    return table


TREES = 100
OF_PAIRS = {"first jobs": slice(0, None, 2), "second jobs": slice(1, None, 2), "both": slice(None)}
"""Rows of `Pairs` by which jobs of the pairs they are of, as a pair stands in Lucid's table."""
SHOWN = 6
"""Ways in the card's table, the closest first."""


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


def readings_table(found: Sequence[Reading]) -> list[dict[str, str]]:
    """Return the given errors, and the ways to count that come closest to them."""
    rows = [("given", "", GIVEN, "", "")]
    rows += [(str(one.way), one.profiles, one.told, f"{one.off:.1%}", f"{one.shipped:.4f}") for one in found[:SHOWN]]
    return [
        {
            "error of": way,
            "profiles by": profiles,
            "no slowdown": f"{told.none:.3f}",
            "min(1, 100/Σutil)": f"{told.rule:.3f}",
            "forest": f"{told.forest:.3f}",
            "its R²": f"{told.r2:.2f}",
            "it finds": f"{told.found_percent:.0f}%",
            "off": off,
            "shipped": error,
        }
        for way, profiles, told, off, error in rows
    ]


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
