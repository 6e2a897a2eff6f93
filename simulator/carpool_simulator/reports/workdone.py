"""Says what utilization would be if the work that is done were counted, and not the time in which some kernel runs."""

from collections.abc import Sequence
from statistics import fmean

from carpool_simulator.sweep import DEFAULT, Line


def of_hotcloud(known: Sequence[Line]) -> list[str]:
    """Tell the default's utilization by the work that is done.

    Args:
        known: The lines of HotCloud; of the first every job has a GPU alone and none dies, so that it is busy as long
            as its work takes.
    """
    ours = next((line for line in known if line.strategy.name == DEFAULT), None)
    if ours is None:
        return []
    pairs = zip(known[0].runs, ours.runs, strict=True)
    by_work = fmean(alone.utilization_percent * alone.makespan_min / run.makespan_min for alone, run in pairs)
    change = 100 * (by_work / known[0].mean("utilization_percent") - 1)
    return [
        "Utilization is the share of time in which some kernel runs; where those of several jobs overlap, the time "
        f"counts once. Counted by the work that is done, Carpool's would be {by_work:.1f}% ({change:+.1f}%) instead of "
        f"{ours.mean('utilization_percent'):.1f}%.",
        "",
    ]
