"""The suite `slowdown`: learned on GPUMemNet and Gavel, judged on Lucid; writes `slowdown.md`. Needs `train`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from carpool_predictor.models.slowdown import shipped
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carpool_research.report import Metric, Progress, Report, counted, save, silent
from carpool_research.slowdown import fit, gavel, lucid
from carpool_research.slowdown.fit import GIVEN, MAX_ERROR, MIN_FOUND, Runs
from carpool_research.slowdown.gavel import Missed, Queueing
from carpool_research.slowdown.lucid import BASELINES, EXACT, FOUND, Pairs, Score, forest, score
from carpool_research.tables import KINDS, file_of

OURS = "shipped: median"
UPPER = "shipped: upper quantile"
HIDING = "a host hides with p ="
BUSY = 0.8
NEIGHBOURS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.97, 1.01)
"""Utilizations that part the neighbours of busy jobs."""

Numbers = NDArray[np.float64]


def head() -> list[str]:
    """Say what is shipped."""
    model = shipped()
    return [
        "# Model card: slowdown",
        "",
        "Written by `python -m carpool_research evaluate --suite slowdown`; do not edit.",
        "",
        "How much longer a step takes beside others on the same GPU. What is learned is one exponent and two",
        "factors: how much less a neighbour is in the way than it is busy (k), and how far beyond the median a",
        "slowdown may lie. The rest is queueing theory; the formulas stand in",
        "`carpool_predictor.models.slowdown`.",
        "",
        f"Shipped: k = {model.holding:g}; the {model.level:.0%} quantile adds {model.turns_factor:g} (time slicing)",
        f"or {model.side_by_side_factor:g} (MPS) times the neighbours' busy shares.",
        "",
        "What to trust: the median of two jobs that take turns, about as much as a forest that was fitted to the",
        "pairs that it is judged by. What not to trust: MPS, whose median is a rule (nobody is slowed while joint",
        "SM and DRAM activity stay below 80%, the second an assumption) that was held against older GPUs alone,",
        "with activity that was worked out, and errs much there; three jobs and more, of which nothing was",
        "measured; and any single figure as a promise, since utilizations are predicted, too, and err by",
        "themselves.",
        "",
    ]


def held_by_who_is_busy(runs: Mapping[str, Runs]) -> list[str]:
    """Say how k was learned, and what else it could be."""

    def row(name: str, of: Sequence[Runs]) -> str:
        best = fit.best_exponent(of)
        errors = [f"{fit.error(of, k):.3f}" for k in (best, shipped().holding, 1.0)]
        engine = fit.best_exponent(of, fit.engine_active)
        return f"| {name} | {sum(len(one.busy) for one in of)} | {best:.2f} | {' | '.join(errors)} | {engine:.2f} |"

    return [
        "## k, learned on GPUMemNet (A100; with attribution)",
        "",
        "Who keeps the GPU busy for a share u of the time is in the way for less of it, Lucid's pairs say. How much",
        "less is taken from its SM activity, which follows from utilization as about u^k. Both were measured of",
        "GPUMemNet's synthetic trainings. Mean absolute error of SM activity:",
        "",
        "| | runs | best k | error with it | with the shipped k | with k = 1 | k of the active engine |",
        "|---|---|---|---|---|---|---|",
        *(row(f"{kind.upper()}s", [of]) for kind, of in runs.items()),
        row("both alike", list(runs.values())),
        "",
        "It is a proxy. While turns are taken nobody else can have the SMs that a kernel leaves idle, and the time for",
        "which the engine is active is hardly less than utilization (last column): with that for k too much is",
        "foretold (below). Why half-busy neighbours are less in the way than for that time is not known.",
        "",
    ]


def hidden_by_hosts(by_exponent: Mapping[float, Missed]) -> list[str]:
    """Say what is known of hosts that work ahead, and why nothing is counted on it."""
    best = gavel.best(by_exponent)
    beyond = [one.beyond(best) for one in by_exponent.values()]
    return [
        "## What a host hides: nothing is counted on it",
        "",
        "A step of batch b takes (a^p + (c + d·b)^p)^(1/p): its host's part a hides behind its GPU's, p = 1 not at",
        "all. For each p Gavel's step at a batch size that was left out was foretold from the other batch sizes of",
        "the same job and GPU (K80, P100, V100; MIT).",
        "",
        f"| p | {' | '.join(f'{p:g}' for p in by_exponent)} |",
        f"|---|{'---|' * len(by_exponent)}",
        f"| error of the left-out step | {' | '.join(f'{100 * e.error:.1f}%' for e in by_exponent.values())} |",
        *(
            f"| of {job} | {' | '.join(f'{100 * one.of_jobs[job]:.1f}%' for one in by_exponent.values())} |"
            for job in best.of_jobs
        ),
        f"| beyond the best one's | {' | '.join(f'{100 * one:.2f}' for one, _ in beyond)} |",
        f"| standard error, by {len(best.of_jobs)} jobs | {' | '.join(f'{100 * one:.2f}' for _, one in beyond)} |",
        "",
        "The smallest p that is not worse than the best by more than a standard error is",
        f"{gavel.most_cautious(by_exponent):g}. By that the busy shares of Gavel's jobs are worked out, for what",
        "follows. What is shipped counts on no hiding: to hide too much is to foretell too little of what",
        "neighbours lose, and that breaks a promise; the opposite costs a place. What that costs on Lucid stands",
        "below.",
        "",
    ]


def queued_behind_mps(held_out: Queueing) -> list[str]:
    """Say how the upper quantile was learned."""

    def error(foretold: Numbers) -> str:
        return f"{np.abs(foretold - held_out.measured).mean():.3f}"

    return [
        "## The upper quantile, learned on Gavel's pairs",
        "",
        f"Gavel's {len(held_out.measured)} pairs ran behind MPS, where kernels queue in the order of their launch: a",
        "job of short kernels loses to one of long kernels, up to "
        f"{held_out.measured.max():.1f} times its step. Mean absolute error of it:",
        "",
        "| | error |",
        "|---|---|",
        f"| no slowdown | {error(np.ones(held_out.measured.shape))} |",
        f"| as tenants that take turns, with weights of the jobs' kernels fitted to other pairs | "
        f"{error(held_out.weighted)} |",
        f"| as shipped for MPS, SM activity from busy shares, DRAM left out | {error(held_out.side_by_side)} |",
        "",
        "What the second leaves says how far beyond the median tenants may lie that take turns (who have no such",
        "weights, so that this may be too little), what the third leaves how far those under MPS. Of the slowdowns",
        f"{100 * float((held_out.measured > held_out.side_by_side).mean()):.0f}% lie above the median for MPS. What a",
        "limit that both jobs of a pair accept would come to there:",
        "",
        *fit.HEAD,
        *fit.rows(
            held_out.measured.ravel(),
            {"median": held_out.side_by_side.ravel(), "upper": _upper_by_mps(held_out).ravel()},
            {},
        ),
        "",
    ]


def _upper_by_mps(held_out: Queueing) -> Numbers:
    upper: Numbers = held_out.side_by_side + shipped().side_by_side_factor * held_out.beside
    return upper


def judged(pairs: Pairs, scores: Mapping[str, Score]) -> list[str]:
    """Hold what is shipped, and others, against Lucid's pairs."""
    upper, median = lucid.shipped_upper(pairs), lucid.shipped_median(pairs)
    bad = pairs.slowdown > FOUND
    missed = lucid.missed(median, pairs)
    of = ", ".join(f"{name} {count}" for name, count in missed.most_common())
    return [
        "## Judged on Lucid (RTX 3090, time slicing; evaluate only)",
        "",
        f"{len(pairs.slowdown)} slowdowns of {len(pairs.slowdown) // 2} pairs. No number in the median was fitted to",
        "any of their jobs or architectures: in that all models are held out. Its form was chosen looking at them",
        f"(see what to doubt). Slowdown is 1 over the relative speed, and at least 1; {100 * float(bad.mean()):.0f}%",
        "are above 15%. Speed is as measured, also where a job ran faster than alone.",
        "",
        "| model | error of slowdown | error of speed | slowdowns > 15% found | right when told |",
        "|---|---|---|---|---|",
        *(_row(name, one) for name, one in scores.items()),
        f"| given: no slowdown | | {GIVEN.none} | | |",
        f"| given: min(1, 100/Σutil) | | {GIVEN.rule} | | |",
        f"| given: forest on Lucid, models held out | | {GIVEN.forest} | {GIVEN.found_percent:.0f}% | |",
        "",
        "What is given came with the goals. How it was counted nobody told; not as the rows above, likely as errors",
        "of the speed of each pair's first job alone (next section).",
        "",
        *_by_neighbour(pairs),
        *fit.table(pairs),
        "",
        f"Not found are {missed.total()} of {int(bad.sum())}: {of}. The upper quantile (`slowdownQuantile`) finds",
        f"{scores[UPPER].found_percent:.0f}%, with more false alarms. Two equal jobs on one GPU, which should be",
        f"slowed alike, differ by {lucid.repeated_difference(pairs):.3f} on average;",
        f"{100 * float((pairs.raw < 1).mean()):.0f}% of the jobs ran faster beside another than alone.",
        "",
        f"Of the slowdowns above 15% the median errs by {np.abs(median - pairs.slowdown)[bad].mean():.3f}, of the",
        f"others by {np.abs(median - pairs.slowdown)[~bad].mean():.3f};",
        f"{100 * float((pairs.slowdown > median).mean()):.0f}% lie above it. The upper quantile holds",
        f"{100 * float((pairs.slowdown <= upper).mean()):.1f}% of the slowdowns (meant: {100 * shipped().level:g}%),",
        f"at {float((upper / median).mean()):.2f} times the median.",
        "",
        "![predicted over measured](figures/slowdown-predicted.svg)",
        "",
        "What a limit that both jobs of a pair accept comes to, by which prediction it is held against (the",
        "scheduler's setting `slowdownQuantile`), and what published rules come to, which hold nothing against it.",
        "Utilization stands for RAD-RM's SM activity. Lucid's scores are labels that its authors gave these very jobs:",
        "",
        *fit.HEAD,
        *fit.rows(
            pairs.slowdown,
            {"median": median, "upper": upper},
            {name: rule(pairs) for name, rule in fit.RULES.items()},
        ),
        "",
    ]


def _by_neighbour(pairs: Pairs) -> list[str]:
    """Say of busy jobs how much of the time their neighbours are in the way, as measured and as foretold."""
    exact, ours = BASELINES[EXACT](pairs), lucid.shipped_median(pairs)
    own, other = pairs.busy.T
    rows = []
    for least, most in pairwise(NEIGHBOURS):
        of = (own >= BUSY) & (other >= least) & (other < most)
        means = " | ".join(f"{found[of].mean():.2f}" for found in (pairs.slowdown, exact, ours))
        rows.append(f"| {least:g} to {min(most, 1):g} | {int(of.sum())} | {means} |")
    return [
        f"Mean slowdown of jobs that are busy for {BUSY:.0%} of the time or more, by how busy the neighbour is:",
        "",
        "| neighbour's utilization | slowdowns | measured | in the way when busy (k = 1) | shipped |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _row(name: str, one: Score) -> str:
    errors = f"{one.error:.3f} | {one.speed_error:.3f}"
    return f"| {name} | {errors} | {one.found_percent:.0f}% | {one.right_percent:.0f}% |"


def doubts() -> list[str]:
    """Say what to doubt."""
    return [
        "## What to doubt",
        "",
        "- Lucid was looked at during development. That neighbours are in the way for less than they are busy was seen",
        "  there first, and that a busy share to the power of a k fits. Other forms were scored on it, too: a softened",
        "  maximum with exponents 1.25 and 6; Bard's analysis; hosts that hide, p from 1 to 3, with k from 1 to 3; SM",
        "  activity in the place of utilization on both sides; activity as a line; a GPU that is never more than busy.",
        "  What is within noise above does not tell of that choice.",
        "- Who hides more errs less and finds less: what to ship was a choice between them, for caution.",
        "- Two jobs that always keep the GPU busy lose less than half to each other (above). A factor c on all that",
        "  neighbours cost would say so: with 0.85 the errors on Lucid would be 0.055 of slowdown and 0.049 of",
        "  speed, and 76% found. Gavel's pairs do not tell it: 0.83 with the busy shares that foretell steps best",
        "  (p = 3), 1.05 with those of p = 1.5, 1.1 where shares are corrected by the pairs. So it is 1, for caution.",
        "- That short kernels lose to a neighbour's long ones is not modelled, nor are processors, for which jobs of",
        "  one host compete, too.",
        "- k is the mean of what differs between jobs. Where SM activity of a neighbour is known it is not used: no",
        "  measured pairs come with it, so that nothing could be judged by it.",
        "- MPS is judged by Gavel's pairs alone (above), which its upper quantile was learned on, with busy shares and",
        "  SM activity that were worked out, not measured, on old GPUs.",
        "- No pair of jobs was measured with Carpool's own profiler yet: there are Gavel's and Lucid's alone.",
        "- Utilizations are those that were measured, not those that the activity model predicts.",
        "",
    ]


NOT_SHIPPED = (1.25, 1.5)
"""Exponents p of hosts that hide, that could be shipped instead."""


def inputs(*, is_whole: bool) -> dict[Path, tuple[str, ...]]:
    """Return the columns of each file that the suite reads, below the data folder."""
    learned = {file_of(kind): fit.COLUMNS for kind in KINDS} | {Path(gavel.FILE): gavel.COLUMNS}
    judged = {lucid.ALONE: lucid.ALONE_COLUMNS, lucid.BESIDE: lucid.BESIDE_COLUMNS} if is_whole else {}
    return learned | judged


def run(data: Path, out: Path, progress: Progress = silent) -> Report:
    """Evaluate, and write the card; `progress` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = fit.read(data), gavel.read(data)
    progress("Gavel: steps left out, for each exponent")
    by_exponent = gavel.errors_by_exponent(measured)
    held_out = gavel.queueing(measured, gavel.most_cautious(by_exponent), shipped().holding)
    pairs = lucid.read(data)
    engine = fit.best_exponent(list(runs.values()), fit.engine_active)
    predictions = _predictions(pairs, engine, progress)
    progress("Lucid: ways to count")
    readings = fit.readings(pairs, lucid.read(data, by_precision=False))
    scores = {name: score(predicted, pairs) for name, predicted in predictions.items()}
    page, picture = out / "slowdown.md", out / "figures" / "slowdown-predicted.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(pairs, predictions[OURS]), picture)
    lines = [
        *head(),
        *held_by_who_is_busy(runs),
        *hidden_by_hosts(by_exponent),
        *queued_behind_mps(held_out),
        *judged(pairs, scores),
        *fit.ways_section(readings),
        *fit.section(pairs),
        *doubts(),
    ]
    page.write_text("\n".join(lines), encoding="utf-8")
    return Report("slowdown", _figures(scores), (page, picture))


def _predictions(pairs: Pairs, engine: float, progress: Progress) -> dict[str, Numbers]:
    k = shipped().holding
    others = {f"not shipped: {HIDING} {p:g}": lucid.hiding(pairs, p, k) for p in NOT_SHIPPED}
    forests = {
        "not shipped: random forest on Lucid, models held out": True,
        "not shipped: random forest on Lucid, pairs of jobs held out": False,
    }
    return {
        **{name: model(pairs) for name, model in BASELINES.items()},
        OURS: lucid.shipped_median(pairs),
        UPPER: lucid.shipped_upper(pairs),
        f"not shipped: k = {engine:.2f}, by the active engine": lucid.hiding(pairs, 1.0, engine),
        **others,
        "not shipped: p = 1.5 and k = 1, as it was": lucid.hiding(pairs, 1.5, 1.0),
        **{name: forest(pairs, models_held_out=forests[name]) for name in counted(list(forests), "Lucid", progress)},
    }


def _figures(scores: Mapping[str, Score]) -> tuple[Metric, ...]:
    figures = []
    for name, one in scores.items():
        asked = name == OURS
        limits = (f"≤ {MAX_ERROR}", f"≥ {MIN_FOUND:g}") if asked else ("", "")
        figures += [
            Metric(f"{which}, {name}", round(error, 4), limits[0], error <= MAX_ERROR if asked else None)
            for which, error in (("error of slowdown", one.error), ("error of speed", one.speed_error))
        ]
        met = one.found_percent >= MIN_FOUND if asked else None
        figures.append(Metric(f"slowdowns > 15% found, {name}, %", round(one.found_percent, 1), limits[1], met))
    return tuple(figures)


def _draw(pairs: Pairs, predicted: Numbers) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(predicted, pairs.slowdown, s=4, rasterized=True)
    ends = [1.0, float(pairs.slowdown.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted slowdown", ylabel="measured slowdown (Lucid)")
    return figure
