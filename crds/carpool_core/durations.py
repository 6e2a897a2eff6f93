"""How long jobs take alone, and the rungs of a ladder of lengths by which a queue may sort them.

Each rung is half as long again as the one below: predicted step times are hardly better than that, so that whoever came
first of two jobs on one rung is not passed over for a difference that nobody knows.
"""

from bisect import bisect_right
from collections.abc import Callable
from statistics import fmean

from carpool_core.resources.prediction import Prediction

FIRST_BOUND_S = 60.0
"""Length from which the second rung begins."""
BUCKET_FACTOR = 1.5
"""Factor from rung to rung."""
DURATION_BUCKETS = 24
"""The last holds everything from 5.2 days on."""
ASSUMED_DURATION_S = 3600.0
"""What a job counts as that does not say how many steps it has: an assumption, in the middle of the ladder."""
_BUCKET_BOUNDS_S = [FIRST_BOUND_S * BUCKET_FACTOR**number for number in range(DURATION_BUCKETS - 1)]
"""Where each rung but the first begins. Floating point holds them exactly; their logarithms it does not."""

_UNITS = ((86_400.0, "d", 36 * 3600.0), (3600.0, "h", 90 * 60.0), (60.0, "min", 90.0), (1.0, "s", 1.0))
"""Seconds of a unit, its name, and from how many seconds on it is used; milliseconds below."""


def durations_s(
    steps: int | None, prediction: Prediction | None, may_run_on: Callable[[str], bool]
) -> dict[str, float]:
    """Return how long a job takes alone on each GPU product, in seconds: its steps by the predicted time of one.

    Args:
        steps: How many steps its training has; None where nobody said.
        prediction: What is predicted of it.
        may_run_on: Whether it may run on a GPU product; of others nothing is returned.

    Returns:
        Seconds by product; empty where steps or step time are unknown.
    """
    if steps is None or prediction is None:
        return {}
    return {p.product: steps * p.step_time_seconds.median for p in prediction.products if may_run_on(p.product)}


def duration_s(steps: int | None, prediction: Prediction | None, may_run_on: Callable[[str], bool]) -> float | None:
    """Return the one length by which a job is sorted, in seconds: the mean over the products that it may run on.

    Args:
        steps: How many steps its training has; None where nobody said.
        prediction: What is predicted of it.
        may_run_on: Whether it may run on a GPU product.

    Returns:
        None where steps or step time are unknown.
    """
    known = durations_s(steps, prediction, may_run_on)
    return fmean(known.values()) if known else None


def format_duration(seconds: float) -> str:
    """Write a length of time in the unit that people use: `41 ms`, `24 min`, `6.8 h`."""
    size, unit, _ = next((one for one in _UNITS if seconds >= one[2]), (1e-3, "ms", 0.0))
    amount = seconds / size
    return f"{f'{amount:,.0f}' if amount >= 10 else f'{amount:.2g}'} {unit}"


def duration_bucket(seconds: float | None) -> int:
    """Return the rung of a length in seconds, 0 to RUNGS - 1; the longer, the higher. None: nobody knows it."""
    return bisect_right(_BUCKET_BOUNDS_S, ASSUMED_DURATION_S if seconds is None else seconds)
