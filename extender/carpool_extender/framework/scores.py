"""The policies by which one of the places that fit is taken: a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from carpool_core.products import UnknownProductError, find_product
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import Rows
from carpool_extender.framework.filters import Evaluation

Cost = NDArray[np.float64]

UNKNOWN_POWER_W = (300.0, 40.0)
"""Limit and idle power counted for a product that is not in the table."""
AWAKE_SHARE, FULL_SHARE = 0.21, 0.83
"""What a GPU with a job draws in parts of its power limit: with no SM active, because its clocks rise with the first
context, and with all of them. Means of what Zeus (You et al., NSDI '23) measured of a P100, an RTX 6000 and a V100; its
A40 is kept from decisions, because simulated GPUs draw by it."""


def nothing(evaluation: Evaluation, rows: Rows) -> Cost:
    """No GPU costs more than another."""
    return np.zeros(rows.size)


def added_slowdown(evaluation: Evaluation, rows: Rows) -> Cost:
    """Progress that is lost, in slowdowns: the newcomer's, and what its neighbours have on top.

    A tenant slowed by s loses 1 - 1/s of its progress, for s near 1 about s - 1; counted so, those who lose most weigh
    more. With 1 - 1/s in its place, which was tried once, makespans in the simulator differed by less than 1%.
    """
    return evaluation.found.added.take(rows)


def taken_memory(evaluation: Evaluation, rows: Rows) -> Cost:
    """Free memory before the newcomer comes, in MiB, negated."""
    return -evaluation.snapshot.columns.free_mib[rows].astype(np.float64)


def left_memory(evaluation: Evaluation, rows: Rows) -> Cost:
    """Memory that would be left over, in MiB."""
    return evaluation.left_mib(rows).astype(np.float64)


def left_memory_negated(evaluation: Evaluation, rows: Rows) -> Cost:
    """Memory that would be left over, in MiB, negated."""
    return -left_memory(evaluation, rows)


def position(evaluation: Evaluation, rows: Rows) -> Cost:
    """The order in which nodes became known; on a node, the GPUs' indices."""
    return rows.astype(np.float64)


def turn(evaluation: Evaluation, rows: Rows) -> Cost:
    """How many GPUs come between the one with the newest reservation and each.

    The turn is read from the reservations, so that nothing has to be remembered and every replica agrees.
    """
    columns = evaluation.snapshot.columns
    newest = np.where(columns.alive, columns.reserved_at, 0.0)  # a node that is gone has left its rows as they were
    total = max(1, newest.size)
    last = int(np.argmax(newest)) if newest.size and newest.max() > 0 else -1
    return ((rows - last - 1) % total).astype(np.float64)


def activity(evaluation: Evaluation, rows: Rows) -> Cost:
    """SM activity of the tenants that are there, all together."""
    return evaluation.snapshot.columns.sm_active[rows]


def activity_negated(evaluation: Evaluation, rows: Rows) -> Cost:
    """SM activity of the tenants that are there, all together, negated."""
    return -activity(evaluation, rows)


def energy(evaluation: Evaluation, rows: Rows) -> Cost:
    """Watts on top for as long as the newcomer runs, weighted by how much longer everybody runs.

    A GPU with a job draws awake + (full - awake) · SM activity, and less while it sleeps, which waking it costs; a
    slowdown makes the newcomer, and whoever it slows, draw their part for longer.
    """
    classes = evaluation.snapshot.classes
    table = np.array([_powers(kind.product) for kind in classes]).reshape(-1, 2)
    of = evaluation.snapshot.columns.device_class[rows]
    limit, idle = table[of, 0], table[of, 1]
    awake, full = AWAKE_SHARE * limit, FULL_SHARE * limit
    facts = evaluation.pod_request.columns(classes)
    is_awake = evaluation.snapshot.columns.count[rows] > 0
    own = (full - awake) * facts.sm[of] * evaluation.found.newcomer[rows]
    others = evaluation.found.added[rows] - (evaluation.found.newcomer[rows] - 1.0)
    result: Cost = own + others * (awake + full) / 2 + np.where(is_awake, 0.0, np.maximum(0.0, awake - idle))
    return result


def _powers(product: str) -> tuple[float, float]:
    try:
        found = find_product(product)
    except UnknownProductError:
        return UNKNOWN_POWER_W
    return found.power_limit_w, found.idle_power_w


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
    cost: Callable[[Evaluation, Rows], NDArray[np.float64]]
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
            added_slowdown,
            Score("{:.2f}".format, "of slowdown added"),
            tolerance=0.02,
        ),
        Policy(
            "most-available-memory",
            "most memory that nobody was promised",
            taken_memory,
            Score(_mib, "promised to nobody", -1),
            short="MAGM",
        ),
        Policy("exclusive", "one job on a GPU, as the stock scheduler does", nothing, alone=True),
        Policy(
            "round-robin",
            "the GPU after the one with the newest reservation; the first where nothing is reserved",
            turn,
            Score("{:,.0f}".format, "behind the next in turn"),
            is_local=False,
        ),
        Policy("first-fit", "the first GPU with room", position, _PLACE),
        Policy(
            "first-fit-decreasing",
            "the first GPU with room; in simulations the largest job first, which kube-scheduler does not know",
            position,
            _PLACE,
            decreasing=True,
        ),
        Policy("best-fit", "least memory left over", left_memory, Score(_mib, "left over")),
        Policy("worst-fit", "most memory left over", left_memory_negated, Score(_mib, "left over", -1)),
        Policy("least-utilized", "least SM activity", activity, Score(_percent, "SM activity"), short="LUG"),
        Policy(
            "most-utilized",
            "most SM activity",
            activity_negated,
            Score(_percent, "SM activity", -1),
            short="MUG",
        ),
        Policy(
            "energy",
            "fewest watts for the work, sleeping GPUs left asleep",
            energy,
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
