"""What was asked for of the slowdown model on Lucid's pairs, and whether its scores keep it, as far as can be told."""

from carpool_predictor.evaluation.slowdown.lucid import Pairs, deviation, score, shipped_median

MAX_ERROR, MIN_FOUND = 0.055, 75.0
AIM_ERROR, AIM_FOUND = 0.045, 85.0
BEYOND = 2.0
"""Standard errors within which a difference may be chance."""


def table(pairs: Pairs) -> list[str]:
    """Hold the shipped median's scores against what was asked for, by either error."""
    predicted = shipped_median(pairs)
    one, by = score(predicted, pairs), deviation(predicted, pairs)
    rows = (
        ("error of slowdown", f"≤ {MAX_ERROR}", f"{one.error:.4f} ± {by.error:.4f}", MAX_ERROR - one.error, by.error),
        (
            "error of speed",
            f"≤ {MAX_ERROR}",
            f"{one.speed_error:.4f} ± {by.speed_error:.4f}",
            MAX_ERROR - one.speed_error,
            by.speed_error,
        ),
        (
            "slowdowns > 15% found",
            f"≥ {MIN_FOUND:g}%",
            f"{one.found_percent:.1f} ± {by.found_percent:.1f}%",
            one.found_percent - MIN_FOUND,
            by.found_percent,
        ),
    )
    return [
        f"Asked for: error ≤ {MAX_ERROR}, at least {MIN_FOUND:g}% found; aimed at ≤ {AIM_ERROR} and {AIM_FOUND:g}%. ±",
        f"is the standard error had other jobs been measured: the {_jobs(pairs)} are drawn anew, and a pair counts as",
        "often as both of its jobs (the pigeonhole bootstrap). What differs from what was asked for by less than",
        f"{BEYOND:g} of these is within noise. Which error was asked for nobody told: likely that of speed (below).",
        "",
        "| the shipped median | must | | |",
        "|---|---|---|---|",
        *(f"| {name} | {must} | {told} | {met(room, noise)} |" for name, must, told, room, noise in rows),
    ]


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
