"""The model card of slowdowns: b, what it was learned as, in which other ways, and what these would have come to."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import shipped
from carpool_predictor.evaluation.slowdown import steps
from carpool_predictor.evaluation.slowdown.asked import MAX_ERROR, MIN_FOUND
from carpool_predictor.evaluation.slowdown.gavel import Gavel
from carpool_predictor.evaluation.slowdown.lucid import Pairs, score, turns
from carpool_predictor.evaluation.slowdown.queueing import Fitted, Weighted, upper_by_mps
from carpool_predictor.evaluation.slowdown.steps import Missed

GPUS = ("k80", "p100", "v100")
JOBS = ("LM", "ResNet-18", "ResNet-50", "Transformer")
"""Gavel's whose busy shares are known."""
TRIED = tuple((800 + step) / 1000 for step in range(301))
"""Values of b, of which is told which keep what was asked for."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ByShares:
    """What pairs say with the busy shares of one exponent p."""

    pairs: Weighted
    given: Fitted
    corrected: Fitted
    """Where each job's share may be corrected by its pairs."""

    @property
    def within_upper_percent(self) -> float:
        """Share of the slowdowns within the upper quantile that ships for MPS, if these were the busy shares."""
        upper = upper_by_mps(self.pairs.side_by_side(), self.pairs.busy()[:, ::-1])
        return 100 * float((self.pairs.measured <= upper).mean())


@dataclass(frozen=True, slots=True)
class Demands:
    """b in every way that the card tells of."""

    by_exponent: Mapping[float, ByShares]
    by_gpu: Mapping[str, float]
    """By the pairs on one kind of GPU."""
    without: Mapping[str, float]
    """By the pairs without one of the jobs."""

    @property
    def error(self) -> float:
        """Standard error of b had other jobs been measured: the jackknife over the four."""
        left = np.array(list(self.without.values()))
        return float(np.sqrt((left.size - 1) * left.var()))


def demands(gavel: Gavel, by_exponent: Mapping[float, Missed]) -> Demands:
    """Fit b in each way."""
    found = {}
    for p in by_exponent:
        pairs = Weighted.of(gavel, p, shipped().holding)
        found[p] = ByShares(pairs, pairs.fit(), pairs.fit(corrects=True))
    pairs = found[steps.best_exponent(by_exponent)].pairs
    return Demands(
        found,
        {gpu: pairs.on(gpu).fit().demand for gpu in GPUS},
        {job: pairs.without([job]).fit().demand for job in JOBS},
    )


def section(found: Demands, by_exponent: Mapping[float, Missed], pairs: Pairs, engine_share: float) -> list[str]:
    """Say how b was learned, what else it could be, and what that would come to on Lucid's pairs.

    Args:
        found: b in each way.
        by_exponent: How well each p foretells steps.
        pairs: Lucid's.
        engine_share: How much of its utilization the engine of a GPU was active where both were measured.
    """
    best = by_exponent[steps.best_exponent(by_exponent)]

    def row(p: float, of: ByShares) -> str:
        more, error = by_exponent[p].beyond(best)
        one = score(turns(pairs, of.given.demand, shipped().holding), pairs)
        mean, corrected = (of.pairs.busy(shares).mean() for shares in (of.given.shares, of.corrected.shares))
        cells = (
            f"{p:g}",
            "yes" if more <= error else "no",
            f"{of.given.demand:.3f}",
            f"{one.error:.4f}",
            f"{one.speed_error:.4f}",
            f"{one.found_percent:.1f}%",
            f"{of.corrected.demand:.3f}",
            f"{mean:.2f} → {corrected:.2f}",
            f"{of.within_upper_percent:.0f}%",
        )
        return f"| {' | '.join(cells)} |"

    fits = [(of.pairs, fit) for of in found.by_exponent.values() for fit in (of.given, of.corrected)]
    needed = [fit.demand * float(pairs.busy(fit.shares).mean()) for pairs, fit in fits]
    kept = [b for b in TRIED if _keeps(turns(pairs, b, shipped().holding), pairs)]
    window = f"between {min(kept):.3f} and {max(kept):.3f}" if kept else "nowhere"
    return [
        "## b, learned on Gavel's pairs",
        "",
        "For how much of the time in which it keeps the GPU busy a job needs it. Each job has a weight besides,",
        "because behind MPS, where the pairs ran, a job of short kernels loses to one of long kernels; the weights are",
        "not shipped. By the p of the busy shares, with what that b would come to on Lucid's pairs (below); beside it",
        "b where the pairs may correct each job's busy share, too, and the mean share then; and how many of the",
        "slowdowns the 90% quantile that ships for MPS would hold, were these the shares:",
        "",
        "| p | within a standard error of the best | b | error of slowdown | error of speed | found "
        "| b, shares corrected | mean share | MPS within upper |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(p, of) for p, of in found.by_exponent.items()),
        "",
        f"Shipped is {shipped().demand:g}, by the p that foretells steps best and shares as steps give them, as of a",
        f"tenant nothing else is known. Its standard error is {found.error:.3f} (the jackknife over four jobs: without",
        f"{_listed(found.without)}). The pairs of each GPU alone give",
        f"{_listed({gpu.upper(): b for gpu, b in found.by_gpu.items()})}. Above 1, which no need is,",
        "b says that behind MPS some lose more than turns would cost them.",
        "",
        f"b times the mean share is {min(needed):.2f} to {max(needed):.2f} by every p, corrected or not: how much of",
        "the time these jobs need the GPU is known. Which p's shares are like utilization, that b is applied to, is",
        "not: nobody measured it there. Shares that the pairs correct come out alike by each p, as those of p = 1.5.",
        f"Of GPUMemNet's trainings, on an A100, the engine is active for {engine_share:.2f} of utilization (above).",
        "",
        f"On Lucid's pairs errors of at most {MAX_ERROR} and {MIN_FOUND:g}% found go together for b {window},",
        "much less than what is known of b.",
        "",
    ]


def _keeps(predicted: Numbers, pairs: Pairs) -> bool:
    one = score(predicted, pairs)
    return max(one.error, one.speed_error) <= MAX_ERROR and one.found_percent >= MIN_FOUND


def _listed(named: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in named.items())
