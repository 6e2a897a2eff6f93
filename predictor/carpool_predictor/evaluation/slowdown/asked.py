"""What was asked for of the slowdown model on Lucid's pairs, and whether its scores keep it, as far as can be told."""

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.slowdown.lucid import Pairs, deviation, score, shipped_median

MAX_ERROR, MIN_FOUND = 0.055, 75.0
AIM_ERROR, AIM_FOUND = 0.045, 85.0
BEYOND = 2.0
"""Standard errors within which a difference may be chance."""

Numbers = NDArray[np.float64]


def table(pairs: Pairs, held_out: Numbers) -> list[str]:
    """Hold scores against what was asked for, by either error.

    Args:
        pairs: What was measured.
        held_out: The slowdowns as they are foretold with b learned without the architectures of each pair, (n,).
    """
    ways = [(score(told, pairs), deviation(told, pairs)) for told in (shipped_median(pairs), held_out)]
    of_slowdown = [_error(one.error, by.error) for one, by in ways]
    of_speed = [_error(one.speed_error, by.speed_error) for one, by in ways]
    found = [
        f"{one.found_percent:.1f} ± {by.found_percent:.1f}% | {met(one.found_percent - MIN_FOUND, by.found_percent)}"
        for one, by in ways
    ]
    return [
        f"Asked for: error ≤ {MAX_ERROR}, at least {MIN_FOUND:g}% found; aimed at ≤ {AIM_ERROR} and {AIM_FOUND:g}%. ±",
        f"is the standard error had other jobs been measured: the {_jobs(pairs)} are drawn anew, and a pair counts as",
        "often as both of its jobs (the pigeonhole bootstrap). What differs from what was asked for by less than",
        f"{BEYOND:g} of these is within noise; how far b itself may be off (above) is not in them. Held out: for pairs",
        "with ResNet-18, which Gavel measured, too, b is learned without Gavel's jobs of it.",
        "",
        "| | must | as shipped | | held out | |",
        "|---|---|---|---|---|---|",
        f"| error of slowdown | ≤ {MAX_ERROR} | {' | '.join(of_slowdown)} |",
        f"| error of speed | ≤ {MAX_ERROR} | {' | '.join(of_speed)} |",
        f"| slowdowns > 15% found | ≥ {MIN_FOUND:g}% | {' | '.join(found)} |",
    ]


def _error(error: float, by: float) -> str:
    return f"{error:.4f} ± {by:.4f} | {met(MAX_ERROR - error, by)}"


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
