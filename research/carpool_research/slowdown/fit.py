"""Fits and writes the slowdown model, for `python -m carpool_research train`. Needs the extra `train`."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import MeanValueAnalysis, SlowdownModel, fair_share, shipped, slowdowns
from numpy.typing import NDArray

from carpool_research.slowdown import gavel, lucid, profiled
from carpool_research.slowdown.candidates import Speeds
from carpool_research.slowdown.lucid import Pairs, deviation, score, shipped_median
from carpool_research.tables import KINDS, DataError, ended_well, file_of, number, read_table

COLUMNS = ("Avg GPUTL", "Avg SMACT", "Avg GRACT")
EXPONENTS = tuple((100 + step) / 100 for step in range(201))
"""Candidates for k: 1 to 3 in hundredths."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Completed trainings of one kind with measured activity."""

    busy: Numbers
    """(n,) GPU utilization, 0..1."""
    sm: Numbers
    """(n,) SM activity, 0..1."""
    engine: Numbers
    """(n,) Share of time in which the engine was active, 0..1: time that is unavailable to other jobs."""


Activity = Callable[[Runs], Numbers]


def sm_active(runs: Runs) -> Numbers:
    """Return SM activity, which k is fitted to."""
    return runs.sm


def engine_active(runs: Runs) -> Numbers:
    """Return engine activity, an alternative to fit k to."""
    return runs.engine


def read(data: Path) -> dict[str, Runs]:
    """Read the trainings by kind.

    Raises:
        DataError: A file or a column is missing, a row cannot be read, or no row has all columns measured.
    """
    return {kind: _read_kind(data / file_of(kind)) for kind in KINDS}


def _read_kind(path: Path) -> Runs:
    rows = [row for row in read_table(path, COLUMNS, _read) if row is not None]
    if not rows:
        raise DataError(f"expected completed trainings with {', '.join(COLUMNS)} in {path}, found none")
    busy, sm, engine = np.array(rows).T
    return Runs(busy, sm, engine)


def _read(row: dict[str, str]) -> tuple[float, float, float] | None:
    busy, sm, engine = number(row, "Avg GPUTL") / 100, number(row, "Avg SMACT"), number(row, "Avg GRACT")
    is_measured = 0 <= busy <= 1 and sm >= 0 and engine >= 0  # -1 marks missing values
    return (busy, sm, engine) if ended_well(row) and is_measured else None


def error(runs: Sequence[Runs], exponent: float, activity: Activity = sm_active) -> float:
    """Return the mean absolute error of activity predicted from utilization; kinds have equal weight."""
    return float(np.mean([np.abs(activity(of) - of.busy**exponent).mean() for of in runs]))


def best_exponent(runs: Sequence[Runs], activity: Activity = sm_active) -> float:
    """Return the best k; kinds have equal weight."""
    return min(EXPONENTS, key=lambda exponent: error(runs, exponent, activity))


VERSION = "2026.11.7"
LEAST_BUSY = 0.05
"""Least utilization of a neighbour to which an error is related."""
LEVEL = 0.9


def learn(data: Path) -> SlowdownModel:
    """Fit the shipped model; the same data gives the same numbers.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = read(data), gavel.read(data)
    k = best_exponent(list(runs.values()))
    hiding = gavel.most_cautious(gavel.errors_by_exponent(measured))
    behind_mps = gavel.behind_mps(measured, hiding, k)
    turns = list(log_errors(profiled.read(profiled.MEASUREMENTS), k).values())
    return SlowdownModel(
        version=VERSION,
        holding=k,
        level=LEVEL,
        models=len(np.unique(behind_mps.models)),
        time_slicing_factor=math.ceil(1e3 * max(upper_quantile(one) for one in turns)) / 1e3,
        mps_factor=gavel.factor(behind_mps.log_errors, behind_mps.models, LEVEL),
        provenance={
            "holding": "itu-rad/GPUMemNet, MLPs and CNNs (A100)",
            "holding_runs": sum(len(of.busy) for of in runs.values()),
            "time_slicing_factors": "research/measurements (H100, H200)",
            "slowdowns": sum(one.size for one in turns),
            "mps_factors": "stanford-futuredata/gavel, oracle throughputs (K80, P100, V100), single-GPU jobs",
            "jobs": len(measured.step_s),
            "step_curves": len(gavel.families(measured)),
            "step_exponent": hiding,
            "pairs": len(behind_mps.measured),
        },
    )


def log_errors(runs: Mapping[str, Speeds], holding: float) -> dict[str, Numbers]:
    """Return, by product, logarithms of slowdowns under time-slicing over the larger of median and fair share."""
    found: dict[str, list[Numbers]] = {}
    for name, rows in runs.items():
        if not rows.is_mps.any():
            median = MeanValueAnalysis(rows.busy, holding).slowdowns()[:, 0]
            most = np.maximum(median, fair_share(rows.busy)[:, 0])
            found.setdefault(name.split(", ")[0], []).append(-np.log(most * rows.speed))
    return {product: np.hstack(of) for product, of in found.items()}


def upper_quantile(log_errors: Numbers) -> float:
    """Return the least error that at least `LEVEL` of them do not exceed."""
    return float(np.quantile(log_errors, LEVEL, method="higher"))


@cache
def without_gavel(data: Path) -> SlowdownModel:
    """Return the shipped model with the interval behind MPS fitted to Lucid's pairs instead of Gavel's.

    Its median behind MPS has no number of Gavel's.

    Raises:
        DataError: A file or a column is missing.
    """
    pairs = lucid.read(data)
    mps = slowdowns(SharingMode.MPS, pairs.busy, pairs.busy ** shipped().holding, np.zeros(pairs.busy.shape))[:, 0]
    errors = np.log(pairs.slowdown / mps) / np.maximum(LEAST_BUSY, pairs.busy[:, 1])
    models = np.array([slowed for slowed, _ in pairs.models])
    return msgspec.structs.replace(shipped(), mps_factor=gavel.factor(errors, models, LEVEL))


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
"""Differences below this many standard errors count as noise."""


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
    """Return whether a goal is met.

    Args:
        room: Margin to the goal; negative if it is missed.
        by: Standard error of the margin.
    """
    verdict = "kept" if room >= 0 else "**missed**"
    return f"{verdict}, within noise" if abs(room) <= BEYOND * by else verdict


TENANTS = (2, 3, 4, 5, 6)
DRAWS = 200
GROUPS_SEED = 0


def groups_table() -> list[dict[str, str]]:
    """Compare groups with k = 1 to the exact solution, and return the joint GPU time with the shipped k."""
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
        for tenant in range(tenants):
            to = place[(*state[:tenant], 1 - state[tenant], *state[tenant + 1 :])]
            rates[row, to] = 1 / (busy[tenant] * at_gpu) if state[tenant] else 1 / max(1e-9, 1 - busy[tenant])
        rates[row, row] = -rates[row].sum()
    system = np.vstack([rates.T, np.ones(len(states))])
    shares = np.linalg.lstsq(system, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
    served = [
        sum(shares[row] / sum(state) for state, row in place.items() if state[tenant]) / busy[tenant]
        for tenant in range(tenants)
    ]
    return 1 / np.array(served)


LIMITS = (1.1, 1.2, 1.5)
"""Slowdown limits in the tables; 1.5 is the default of a job."""
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Result of a rule that admits some pairs; both jobs have the same slowdown limit."""

    admitted_percent: float
    """Share of pairs that the rule admits."""
    beyond_percent: float
    """Share of these in which one job exceeds the limit."""
    missed_percent: float
    """Share of pairs within the limit that the rule refuses."""


def within(slowdowns: Numbers, limit: float) -> Bools:
    """Return which pairs stay within a limit, shape (pairs,).

    Args:
        slowdowns: Slowdown of each job of each pair, shape (2 * pairs,).
        limit: Slowdown limit of all jobs.
    """
    found: Bools = slowdowns.reshape(-1, 2).max(axis=1) <= limit
    return found


def admitted(admits: Bools, measured: Numbers, limit: float) -> Admitted:
    """Score a rule against measured slowdowns.

    Args:
        admits: Whether the rule admits each pair, shape (pairs,).
        measured: Slowdown of each job of each pair, shape (2 * pairs,).
        limit: Slowdown limit of all jobs.
    """
    fine = within(measured, limit)
    return Admitted(
        admitted_percent=100 * float(admits.mean()),
        beyond_percent=100 * float((admits & ~fine).sum() / max(1, admits.sum())),
        missed_percent=100 * float((fine & ~admits).sum() / max(1, fine.sum())),
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
"""Published rules by which two jobs share; they ignore the limits of jobs."""


def limits_table(
    measured: Numbers, predicted: Mapping[str, Numbers], rules: Mapping[str, Bools]
) -> list[dict[str, str]]:
    """Return which pairs share under limits and rules, and how many of them exceed the limit.

    Args:
        measured: Slowdown of each job of each pair, shape (2 * pairs,).
        predicted: Predicted slowdowns in the same order, by name.
        rules: Pairs that share under each rule, shape (pairs,) each.
    """
    table = []
    for limit in LIMITS:
        all_rules = {name: within(one, limit) for name, one in predicted.items()} | dict(rules)
        for name, admits in all_rules.items():
            found = admitted(admits, measured, limit)
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
