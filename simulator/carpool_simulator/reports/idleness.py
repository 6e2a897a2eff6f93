"""Says what cannot be read from the table of a cluster where hardly anybody waits, sharing or not."""

from collections.abc import Sequence

from carpool_simulator.reports.tables import change, deaths, share
from carpool_simulator.sweep import DEFAULT, Line

WAITS = 0.01
"""Hardly anybody waits where the mean of it is less than this share of the time from submission to end."""
ALIKE_PERCENT = 2.0
"""GPUs in use and completion times that differ by less are taken for the same."""


def told(known: Sequence[Line]) -> list[str]:
    """Say it, out of the table's own figures; nothing where jobs wait, or none ended.

    Args:
        known: The lines of an experiment; under the first no GPU is shared.
    """
    first, ours = known[0], next((line for line in known if line.strategy.name == DEFAULT), None)
    completion, waiting = first.mean("completion_min"), first.mean("waiting_min")
    if ours is None or not completion or waiting >= WAITS * completion:
        return []
    in_use, longer = change(ours, first, "gpus_in_use"), change(ours, first, "completion_min")
    shares = "hardly anybody shares" if abs(in_use) < ALIKE_PERCENT else "some share all the same"
    slowed, died = ours.mean("slowed_percent"), ours.mean("oom")
    harm = "costs jobs hardly any time" if longer < ALIKE_PERCENT else "costs jobs time"
    return [
        f'Under "{first.strategy.name}" a job waits {waiting:.1f} of its {completion:.1f} minutes in the mean: nearly '
        "everybody finds an idle GPU, which a job has to itself at no cost to others. "
        f"So {shares} ({ours.mean('gpus_in_use'):.1f} GPUs in use in place of {first.mean('gpus_in_use'):.1f}, "
        f"{in_use:+z.1f}%). What can be read here: that this {harm} ({longer:+z.1f}%), that "
        f"{share(slowed)} of the jobs are slowed more than they accept, and that {deaths(died) if died else 'none'} "
        "die of memory in a run. What cannot: what sharing gains where jobs wait, in time or in energy, and what "
        "predictions are worth there.",
        "",
    ]
