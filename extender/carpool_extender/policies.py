"""The policies by which one of the places that fit is taken: a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_extender import costs
from carpool_extender.checks import Verdict
from carpool_extender.view import Rows


@dataclass(frozen=True, slots=True)
class Policy:
    """What makes a GPU a good place."""

    name: str
    meaning: str
    """What it does, in a few words for people."""
    cost: Callable[[Verdict, Rows], NDArray[np.float64]]
    """Cost of each of the given GPUs, shape (rows,); the least is the best."""
    tolerance: float = 0.0
    """Costs that differ from the least by at most this are ties; a tie goes to the GPU in use with the least memory
    left over, so that whole GPUs stay free for large jobs."""
    alone: bool = False
    """Whether it gives every job a GPU of its own."""
    is_local: bool = True
    """Whether the cost of a GPU depends on nothing but that GPU."""
    decreasing: bool = False
    """Whether a queue that it may sort starts with the largest job. The queue of kube-scheduler is not its to sort."""


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("least-slowdown", "least progress lost by all tenants together", costs.added_slowdown, tolerance=0.02),
        Policy("most-available-memory", "most memory that nobody was promised (MAGM)", costs.taken_memory),
        Policy("exclusive", "one job on a GPU, as the stock scheduler does", costs.nothing, alone=True),
        Policy(
            "round-robin",
            "the GPU after the one with the newest reservation; the first where nothing is reserved",
            costs.turn,
            is_local=False,
        ),
        Policy("first-fit", "the first GPU with room", costs.position),
        Policy("first-fit-decreasing", "the first GPU with room, largest job first", costs.position, decreasing=True),
        Policy("best-fit", "least memory left over", costs.left_memory),
        Policy("worst-fit", "most memory left over", costs.left_memory_negated),
        Policy("least-utilized", "least SM activity (LUG)", costs.activity),
        Policy("most-utilized", "most SM activity (MUG)", costs.activity_negated),
        Policy("energy", "fewest watts for the work, sleeping GPUs left asleep", costs.energy, tolerance=1.0),
    )
}


class UnknownPolicyError(ValueError):
    """No policy goes by that name."""


def find_policy(name: str) -> Policy:
    """Find a policy by its name.

    Raises:
        UnknownPolicyError: There is none; the message lists the choices.
    """
    if name not in POLICIES:
        raise UnknownPolicyError(f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
