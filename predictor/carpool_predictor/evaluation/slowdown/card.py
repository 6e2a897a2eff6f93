"""The model card of slowdowns: what was learned, how it did on Lucid's pairs, what to doubt."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import shipped
from carpool_predictor.evaluation.slowdown import asked, limits, lucid
from carpool_predictor.evaluation.slowdown.lucid import BASELINES, EXACT, FOUND, Pairs, Score

OURS = "shipped: median"
UPPER = "shipped: upper quantile"
PUBLISHED = (
    ("no slowdown", "0.097", ""),
    ("min(1, 100/Σutil)", "0.081", ""),
    ("random forest on Lucid, models held out", "0.061", "60%"),
)
"""What others report of these pairs: the error, of speed it seems, and how many slowdowns are found."""
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
        "Written by `carpool evaluate --suite slowdown`; do not edit.",
        "",
        "How much longer a step takes beside others on the same GPU. What is learned is how much less a neighbour is",
        "in the way than it is busy (an exponent k), for how much of the time that it is busy a job needs the GPU (a",
        "factor b), and how far beyond the median a slowdown may lie. The rest is queueing theory; the formulas stand",
        "in `carpool_predictor.cost_models.slowdown`. Of two jobs that take turns, busy for u and v of the time, the",
        "first slows down to 1 + b·u·(b·v)^k.",
        "",
        f"Shipped: k = {model.holding:g}, b = {model.demand:g}; the {model.level:.0%} quantile adds",
        f"{model.turns_factor:g} (time slicing) or {model.side_by_side_factor:g} (MPS) times the busy shares beside.",
        "",
        "What to trust: the median of two jobs that take turns, about as much as a forest that was fitted to the",
        "pairs that it is judged by. What not to trust: MPS, whose median is a rule (nobody is slowed while joint",
        "SM and DRAM activity stay below 80%, the second an assumption) that was held against older GPUs alone,",
        "with activity that was worked out, and errs much there; three jobs and more, of which nothing was",
        "measured; and any single figure as a promise, since utilizations are predicted, too, and err by",
        "themselves.",
        "",
    ]


def judged(pairs: Pairs, scores: Mapping[str, Score], held_out: Numbers) -> list[str]:
    """Hold what is shipped, and others, against Lucid's pairs; `held_out` as `asked.table` takes it."""
    upper, median = lucid.shipped_upper(pairs), lucid.shipped_median(pairs)
    bad = pairs.slowdown > FOUND
    missed = lucid.missed(median, pairs)
    of = ", ".join(f"{name} {count}" for name, count in missed.most_common())
    return [
        "## Judged on Lucid (RTX 3090, time slicing; evaluate only)",
        "",
        f"{len(pairs.slowdown)} slowdowns of {len(pairs.slowdown) // 2} pairs. No number in the median was fitted to",
        "any of them: in that all models are held out. Its form was chosen looking at them (see what to doubt).",
        f"Slowdown is 1 over the relative speed, and at least 1; {100 * float(bad.mean()):.0f}%",
        "are above 15%. Speed is as measured, also where a job ran faster than alone.",
        "",
        "| model | error of slowdown | error of speed | slowdowns > 15% found | right when told |",
        "|---|---|---|---|---|",
        *(_row(name, one) for name, one in scores.items()),
        *(f"| published: {name} | | {error} | {found} | |" for name, error, found in PUBLISHED),
        "",
        "How the published errors count is not published; they are not computed here. That they are of speed is",
        "likely, not certain. `min(1, 100/Σutil)` is a speed. Of the pairs' first jobs the errors of speed are",
        f"{_of_first(pairs, 'no slowdown'):.4f} without a slowdown, as published, and",
        f"{_of_first(pairs, 'min(1, 100/Σutil)'):.3f} by that rule, which is not.",
        "",
        *_by_neighbour(pairs),
        *asked.table(pairs, held_out),
        "",
        f"Not found are {missed.total()} of {int(bad.sum())}: {of}.",
        f"The upper quantile (`slowdownQuantile`) finds {scores[UPPER].found_percent:.0f}%,",
        "with more false alarms. Two equal jobs on one GPU, which should be",
        f"slowed alike, differ by {lucid.repeated_difference(pairs):.3f} on average;",
        f"{100 * float((pairs.raw < 1).mean()):.0f}% of the jobs ran faster beside another than alone.",
        "",
        f"Of the slowdowns above 15% the median errs by {np.abs(median - pairs.slowdown)[bad].mean():.3f}, of the",
        f"others by {np.abs(median - pairs.slowdown)[~bad].mean():.3f};",
        f"{_above(pairs, median, bad):.0f}% of the former and {_above(pairs, median, ~bad):.0f}% of the others lie",
        "above it. The upper quantile holds",
        f"{100 * float((pairs.slowdown <= upper).mean()):.1f}% of the slowdowns (meant: {100 * shipped().level:g}%),",
        f"at {float((upper / median).mean()):.2f} times the median.",
        "",
        "![predicted over measured](figures/slowdown-predicted.svg)",
        "",
        "What a limit that both jobs of a pair accept comes to, by which prediction it is held against "
        "(the scheduler's setting `slowdownQuantile`):",
        "",
        *limits.table(median, upper, pairs.slowdown),
        "",
    ]


def _above(pairs: Pairs, predicted: Numbers, of: NDArray[np.bool_]) -> float:
    return 100 * float((pairs.slowdown > predicted)[of].mean())


def _of_first(pairs: Pairs, baseline: str) -> float:
    """Return a baseline's error of speed on the job of each pair that stands first."""
    return float(np.abs(1 / BASELINES[baseline](pairs) - 1 / pairs.raw)[::2].mean())


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
        "| neighbour's utilization | slowdowns | measured | in the way when busy (k = b = 1) | shipped |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _row(name: str, one: Score) -> str:
    errors = f"{one.error:.3f} | {one.speed_error:.3f}"
    return f"| {name} | {errors} | {one.found_percent:.0f}% | {one.right_percent:.0f}% |"


def doubts(pairs: Pairs) -> list[str]:
    """Say what to doubt."""
    bad, whole = pairs.slowdown > FOUND, lucid.turns(pairs, 1.0, shipped().holding)
    above = _above(pairs, lucid.shipped_median(pairs), bad)
    beyond = limits.admitted(whole, pairs.slowdown, limits.LIMITS[-1]).beyond_percent
    return [
        "## What to doubt",
        "",
        "- Lucid was looked at during development. That neighbours are in the way for less than they are busy was seen",
        "  there first, and that a busy share to the power of a k fits. Other forms were scored on it, too: a softened",
        "  maximum with exponents 1.25 and 6; Bard's analysis; hosts that hide, p from 1 to 3, with k from 1 to 3; SM",
        "  activity in the place of utilization on both sides; activity as a line; a GPU that is never more than busy.",
        "  What is within noise above does not tell of that choice.",
        "- b hangs on choices that were made in sight of Lucid. Before it was 1, which finds more, errs more and",
        "  misses a goal (above). The p by which Gavel's busy shares are worked out was the most cautious one that",
        "  four jobs cannot tell from the best, 1.5, by which b is more than 1. The p that foretells best, and shares",
        "  that pairs do not correct, were taken when it was known that a b a little below 1 keeps the goals.",
        f"- {above:.0f}% of the large slowdowns are told too small ({_above(pairs, whole, bad):.0f}% with b = 1): what",
        "  errs little on all of them, most of which are small, tells of small ones. Limits are kept worse for it",
        f"  (with b = 1 {beyond:.1f}% of the pairs that would share at {limits.LIMITS[-1]:g} are beyond it). Who must",
        "  keep limits sets `slowdownQuantile: upper`.",
        "- That short kernels lose to a neighbour's long ones is not modelled, nor are processors, for which jobs of",
        "  one host compete, too.",
        "- k and b are means of what differs between jobs. Where SM activity of a neighbour is known it is not used:",
        "  no measured pairs come with it, so that nothing could be judged by it.",
        "- MPS is judged by Gavel's pairs alone (above), which its upper quantile was learned on, with busy shares and",
        "  SM activity that were worked out, not measured, on old GPUs.",
        "- Utilizations are those that were measured, not those that the activity model predicts.",
        "",
    ]
