"""What was asked for of the slowdown model on Lucid's pairs, and whether its scores keep it, as far as can be told."""

from carpool_predictor.evaluation.slowdown.lucid import Pairs, Score, deviation, shipped_median

MAX_ERROR, MIN_FOUND = 0.055, 75.0
AIM_ERROR, AIM_FOUND = 0.045, 85.0
BEYOND = 2.0
"""Standard errors within which a difference may be chance."""


def table(new: Pairs, unseen: Score, pairs: Pairs, scored: Score) -> list[str]:
    """Hold the shipped median's scores against what was asked for.

    Args:
        new: Pairs of whose architectures none was learned from.
        unseen: The score on these.
        pairs: All of them.
        scored: The score on these.
    """
    return [
        f"Asked for: error ≤ {MAX_ERROR}, at least {MIN_FOUND:g}% found; aimed at ≤ {AIM_ERROR} and {AIM_FOUND:g}%. ±",
        f"is the standard error had other jobs been measured: they ({_jobs(new)} and {_jobs(pairs)}) are drawn anew,",
        "and a pair counts as often as both of its jobs (the pigeonhole bootstrap). What differs from what was asked",
        f"for by less than {BEYOND:g} of these is within noise.",
        "",
        "| the shipped median | error | | slowdowns > 15% found | |",
        "|---|---|---|---|---|",
        _row("neither architecture in Gavel", new, unseen),
        _row("all pairs", pairs, scored),
    ]


def _row(title: str, of: Pairs, one: Score) -> str:
    by = deviation(shipped_median(of), of)
    error, found = met(MAX_ERROR - one.error, by.error), met(one.found_percent - MIN_FOUND, by.found_percent)
    return (
        f"| {title} | {one.error:.4f} ± {by.error:.4f} | {error} | {one.found_percent:.0f} ± {by.found_percent:.0f}% "
        f"| {found} |"
    )


def met(room: float, by: float) -> str:
    """Say whether a goal is met.

    Args:
        room: By how much it is; negative where it is missed.
        by: Standard error of that.
    """
    verdict = "kept" if room >= 0 else "**missed**"
    return f"{verdict}, within noise" if abs(room) <= BEYOND * by else verdict


def _jobs(pairs: Pairs) -> int:
    return len({job for both in pairs.jobs for job in both})
