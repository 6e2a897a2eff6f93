"""The policies by which one of the places that fit is taken: a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_extender.placement import costs
from carpool_extender.placement.checks import Verdict
from carpool_extender.state.view import Rows


def _mib(amount: float) -> str:
    return f"{amount:,.0f} MiB"


def _percent(amount: float) -> str:
    return f"{amount:.0%}"


@dataclass(frozen=True, slots=True)
class Score:
    """A cost as people read it: an amount in its own unit, and of what."""

    amount: Callable[[float], str]
    """Writes an amount, or how far two of them are apart."""
    of: str
    sign: int = 1
    """-1 where the policy wants as much as possible, so that the cost is the amount negated."""

    def told(self, cost: float) -> str:
        """Write a cost."""
        return f"{self.amount(self.sign * cost + 0.0)} {self.of}"

    def behind(self, cost: float, best: float) -> str:
        """Write by how much a cost misses the best."""
        return f"{self.amount(cost - best)} {'more' if self.sign > 0 else 'less'}"


@dataclass(frozen=True, slots=True)
class Policy:
    """What makes a GPU a good place."""

    name: str
    meaning: str
    """What it does, in a few words for people."""
    cost: Callable[[Verdict, Rows], NDArray[np.float64]]
    """Cost of each of the given GPUs, shape (rows,); the least is the best."""
    score: Score | None = None
    """How the cost is told; None where it says nothing."""
    tolerance: float = 0.0
    """Costs that differ from the least by at most this are ties; a tie goes to the GPU in use with the least memory
    left over, so that whole GPUs stay free for large jobs."""
    alone: bool = False
    """Whether it gives every job a GPU of its own."""
    is_local: bool = True
    """Whether the cost of a GPU depends on nothing but that GPU."""
    decreasing: bool = False
    """Whether a queue that it may sort starts with the largest job. The queue of kube-scheduler is not its to sort."""
    short: str = ""
    """What papers call it, where that is something else."""

    @property
    def title(self) -> str:
        """Its name, and what papers call it."""
        return f"{self.name} ({self.short})" if self.short else self.name


_PLACE = Score("{:,.0f}".format, "before it in the order of the cluster")


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            "least-slowdown",
            "least progress lost by all tenants together",
            costs.added_slowdown,
            Score("{:.2f}".format, "of slowdown added"),
            tolerance=0.02,
        ),
        Policy(
            "most-available-memory",
            "most memory that nobody was promised",
            costs.taken_memory,
            Score(_mib, "promised to nobody", -1),
            short="MAGM",
        ),
        Policy("exclusive", "one job on a GPU, as the stock scheduler does", costs.nothing, alone=True),
        Policy(
            "round-robin",
            "the GPU after the one with the newest reservation; the first where nothing is reserved",
            costs.turn,
            Score("{:,.0f}".format, "behind the next in turn"),
            is_local=False,
        ),
        Policy("first-fit", "the first GPU with room", costs.position, _PLACE),
        Policy(
            "first-fit-decreasing",
            "the first GPU with room; in simulations the largest job first, which kube-scheduler does not know",
            costs.position,
            _PLACE,
            decreasing=True,
        ),
        Policy("best-fit", "least memory left over", costs.left_memory, Score(_mib, "left over")),
        Policy("worst-fit", "most memory left over", costs.left_memory_negated, Score(_mib, "left over", -1)),
        Policy("least-utilized", "least SM activity", costs.activity, Score(_percent, "SM activity"), short="LUG"),
        Policy(
            "most-utilized",
            "most SM activity",
            costs.activity_negated,
            Score(_percent, "SM activity", -1),
            short="MUG",
        ),
        Policy(
            "energy",
            "fewest watts for the work, sleeping GPUs left asleep",
            costs.energy,
            Score("{:,.0f} W".format, "on top"),
            tolerance=1.0,
        ),
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
        choices = ", ".join(policy.title for policy in POLICIES.values())
        raise UnknownPolicyError(f"policy {name!r} is unknown; choose one of {choices}")
    return POLICIES[name]
