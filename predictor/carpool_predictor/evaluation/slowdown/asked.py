"""What was asked for of the slowdown model on Lucid's pairs, and whether its scores keep it, as far as can be told."""

from carpool_predictor.evaluation.slowdown.lucid import Pairs, deviation, first_of_each, score, shipped_median

MAX_ERROR, MIN_FOUND = 0.055, 75.0
AIM_ERROR, AIM_FOUND = 0.045, 85.0
BEYOND = 2.0
"""Standard errors within which a difference may be chance."""


def table(pairs: Pairs) -> list[str]:
    """Hold the shipped median's scores against what was asked for, on every job and on the first of each pair."""
    return [
        f"Asked for: error ≤ {MAX_ERROR}, at least {MIN_FOUND:g}% found; aimed at ≤ {AIM_ERROR} and {AIM_FOUND:g}%. ±",
        f"is the standard error had other jobs been measured: the {_jobs(pairs)} are drawn anew, and a pair counts as",
        "often as both of its jobs (the pigeonhole bootstrap). What differs from what was asked for by less than",
        f"{BEYOND:g} of these is within noise. The error is of speed, in which goal and peers are told (see below).",
        "",
        "| the shipped median | error of speed | | slowdowns > 15% found | | error of slowdown |",
        "|---|---|---|---|---|---|",
        _row("every job of every pair", pairs),
        _row("the first job of each pair", pairs.part(first_of_each(pairs))),
    ]


def _row(title: str, of: Pairs) -> str:
    predicted = shipped_median(of)
    one, by = score(predicted, of), deviation(predicted, of)
    error = met(MAX_ERROR - one.speed_error, by.speed_error)
    found = met(one.found_percent - MIN_FOUND, by.found_percent)
    return (
        f"| {title} | {one.speed_error:.4f} ± {by.speed_error:.4f} | {error} "
        f"| {one.found_percent:.0f} ± {by.found_percent:.0f}% | {found} | {one.error:.4f} ± {by.error:.4f} |"
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
