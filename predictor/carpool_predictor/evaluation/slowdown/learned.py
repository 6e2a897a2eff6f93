"""The model card of slowdowns: what was learned on which measurements, and what else they could have said."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import shipped
from carpool_predictor.evaluation.slowdown import holding, limits, steps
from carpool_predictor.evaluation.slowdown.holding import Runs
from carpool_predictor.evaluation.slowdown.queueing import Foretold, upper_by_mps
from carpool_predictor.evaluation.slowdown.steps import Missed

Numbers = NDArray[np.float64]


def held_by_who_is_busy(runs: Mapping[str, Runs]) -> list[str]:
    """Say how k was learned, and what else it could be."""

    def row(name: str, of: Sequence[Runs]) -> str:
        best = holding.best_exponent(of)
        errors = [f"{holding.error(of, k):.3f}" for k in (best, shipped().holding, 1.0)]
        engine = f"{holding.best_exponent(of, holding.engine_active):.2f} | {holding.engine_share(of):.2f}"
        return f"| {name} | {sum(len(one.busy) for one in of)} | {best:.2f} | {' | '.join(errors)} | {engine} |"

    return [
        "## k, learned on GPUMemNet (A100; with attribution)",
        "",
        "Who keeps the GPU busy for a share u of the time is in the way for less of it, Lucid's pairs say. How much",
        "less is taken from its SM activity, which follows from utilization as about u^k. Both were measured of",
        "GPUMemNet's synthetic trainings. Mean absolute error of SM activity:",
        "",
        "| | runs | best k | error with it | with the shipped k | with k = 1 | k of the active engine "
        "| its share of utilization |",
        "|---|---|---|---|---|---|---|---|",
        *(row(f"{kind.upper()}s", [of]) for kind, of in runs.items()),
        row("both alike", list(runs.values())),
        "",
        "It is a proxy. While turns are taken nobody else can have the SMs that a kernel leaves idle, and the time for",
        "which the engine is active is hardly less than utilization (last columns): with that for k too much is",
        "foretold (below). Why half-busy neighbours are less in the way than for that time is not known.",
        "",
    ]


def worked_out_from_steps(by_exponent: Mapping[float, Missed]) -> list[str]:
    """Say how Gavel's busy shares were worked out."""
    best = steps.best_exponent(by_exponent)
    beyond = [one.beyond(by_exponent[best]) for one in by_exponent.values()]
    return [
        "## How busy Gavel's jobs are (K80, P100, V100; MIT)",
        "",
        "Gavel measured throughputs alone and in pairs, but no utilization. A step of batch b takes",
        "(a^p + (f + d·b)^p)^(1/p): its host's part a hides behind its GPU's, p = 1 not at all. For each p the step at",
        "a batch size that was left out was foretold from the other batch sizes of the same job and GPU.",
        "",
        f"| p | {' | '.join(f'{p:g}' for p in by_exponent)} |",
        f"|---|{'---|' * len(by_exponent)}",
        f"| error of the left-out step | {' | '.join(f'{100 * e.error:.1f}%' for e in by_exponent.values())} |",
        *(
            f"| of {job} | {' | '.join(f'{100 * one.of_jobs[job]:.1f}%' for one in by_exponent.values())} |"
            for job in by_exponent[best].of_jobs
        ),
        f"| beyond the best one's | {' | '.join(f'{100 * one:.2f}' for one, _ in beyond)} |",
        f"| standard error, by {len(by_exponent[best].of_jobs)} jobs | "
        f"{' | '.join(f'{100 * one:.2f}' for _, one in beyond)} |",
        "",
        f"p = {best:g} foretells best. By that busy shares are worked out, for what follows.",
        "",
    ]


def queued_behind_mps(held_out: Foretold) -> list[str]:
    """Say how the upper quantile was learned."""

    def error(foretold: Numbers) -> str:
        return f"{np.abs(foretold - held_out.measured).mean():.3f}"

    upper = upper_by_mps(held_out.side_by_side, held_out.beside)
    return [
        "## The upper quantile, learned on Gavel's pairs",
        "",
        "Behind MPS a job of short kernels loses to one of long kernels, up to "
        f"{held_out.measured.max():.1f} times its step. Mean absolute error of the slowdowns of Gavel's "
        f"{len(held_out.measured)} pairs:",
        "",
        "| | error |",
        "|---|---|",
        f"| no slowdown | {error(np.ones(held_out.measured.shape))} |",
        f"| as tenants that take turns, with b and weights of the jobs fitted to other pairs | "
        f"{error(held_out.weighted)} |",
        f"| as shipped for MPS, SM activity from busy shares, DRAM left out | {error(held_out.side_by_side)} |",
        "",
        "What the second leaves says how far beyond the median tenants may lie that take turns (who have no such",
        "weights, so that this may be too little), what the third leaves how far those under MPS. Of the slowdowns",
        f"{100 * float((held_out.measured > held_out.side_by_side).mean()):.0f}% lie above the median for MPS. What a",
        "limit that both jobs of a pair accept would come to there:",
        "",
        *limits.table(*(of.ravel() for of in (held_out.side_by_side, upper, held_out.measured))),
        "",
    ]
