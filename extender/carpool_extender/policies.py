"""Which of the places that fit is taken: a table of policies and the one loop that all of them go through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_extender import costs
from carpool_extender.checks import Verdict
from carpool_extender.costs import Rows
from carpool_extender.view import MODES


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
    decreasing: bool = False
    """Whether a queue that it may sort starts with the largest job. The queue of kube-scheduler is not its to sort."""


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("least-slowdown", "least progress lost by all tenants together", costs.added_slowdown, tolerance=0.02),
        Policy("most-available-memory", "most memory that nobody was promised (MAGM)", costs.taken_memory),
        Policy("exclusive", "one job on a GPU, as the stock scheduler does", costs.nothing, alone=True),
        Policy("round-robin", "the GPU after the one taken last", costs.turn),
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


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The best set of GPUs of each node that has enough, in no particular order; every array has shape (nodes, …)."""

    node: NDArray[np.int64]
    """(nodes,) Index of the node."""
    rows: Rows
    """(nodes, GPUs of a worker) Rows of the view."""
    cost: NDArray[np.float64]
    """(nodes,) Mean cost of these GPUs."""
    in_use: NDArray[np.float64]
    """(nodes,) Share of these GPUs that have tenants, 0..1."""
    left_mib: NDArray[np.float64]
    """(nodes,) Memory that would be left on all of them, in MiB."""


def select(verdict: Verdict, policy: Policy, among: NDArray[np.bool_]) -> Choices:
    """Choose the GPUs for one worker on each node. All GPUs of a worker are shared in the same mode.

    Args:
        verdict: What the checks found.
        policy: What makes a good place.
        among: GPUs in question, shape (gpus,).
    """
    wanted = verdict.applicant.demand.gpus
    columns = verdict.view.columns
    rows = np.flatnonzero(verdict.ok & among)
    team = columns.node[rows].astype(np.int64) * len(MODES) + (verdict.mode[rows] if wanted > 1 else 0)
    cost = policy.cost(verdict, rows)
    in_use = columns.count[rows] > 0
    left = (verdict.free_mib - verdict.need_mib)[rows].astype(np.float64)

    teams, position = np.unique(team, return_inverse=True)
    position = np.asarray(position, np.intp)
    best = np.full(len(teams), np.inf)
    np.minimum.at(best, position, cost)
    order = _order(team, cost, cost <= best[position] + policy.tolerance, in_use, left)
    starts: Rows = np.atleast_1d(np.searchsorted(team[order], teams))
    enough = np.bincount(position, minlength=len(teams)) >= wanted
    chosen = order[starts[enough][:, None] + np.arange(wanted)] if enough.any() else np.zeros((0, wanted), np.intp)

    found = Choices(
        node=columns.node[rows][chosen[:, 0]].astype(np.int64),
        rows=rows[chosen],
        cost=cost[chosen].mean(axis=1),
        in_use=in_use[chosen].mean(axis=1),
        left_mib=left[chosen].sum(axis=1),
    )
    return found if wanted == 1 else _best_of_each_node(found)


def _order(
    team: NDArray[np.int64],
    cost: NDArray[np.float64],
    tie: NDArray[np.bool_],
    in_use: NDArray[np.bool_],
    left: NDArray[np.float64],
) -> Rows:
    """Sort by team; inside, ties with the best first, those in use with the least left over ahead, then by cost."""
    second = np.where(tie, ~in_use, cost)
    third = np.where(tie, left, 0.0)
    return np.lexsort((third, second, ~tie, team))


def _best_of_each_node(found: Choices) -> Choices:
    """Keep one choice where a node has several, in different modes."""
    order = np.lexsort((found.left_mib, -found.in_use, found.cost, found.node))
    _, first = np.unique(found.node[order], return_index=True)
    keep = order[first]
    return Choices(found.node[keep], found.rows[keep], found.cost[keep], found.in_use[keep], found.left_mib[keep])


MAX_SCORE = 10
TIE_FLOOR = 6


def scores(choices: Choices, policy: Policy) -> NDArray[np.int64]:
    """Score nodes from 0 to 10, the integers that kube-scheduler takes.

    The best place gets 10. Other ties with it get 6 to 9: 8 or 9 in use, 6 or 7 idle, the more the less memory is left.
    The rest gets 0 to 5, the more the closer its cost is to the best.

    Returns:
        Scores, shape (nodes,).
    """
    if not len(choices.node):
        return np.zeros(0, np.int64)
    lowest, highest = choices.cost.min(), choices.cost.max()
    tie = choices.cost <= lowest + policy.tolerance
    most_left = max(1.0, choices.left_mib.max())
    tight = choices.left_mib <= most_left / 2
    tied = TIE_FLOOR + 2 * (choices.in_use > 0).astype(np.int64) + tight
    spread = max(highest - lowest, np.finfo(np.float64).tiny)
    behind = np.floor((TIE_FLOOR - 1) * (highest - choices.cost) / spread)
    result: NDArray[np.int64] = np.where(tie, tied, behind).astype(np.int64)
    result[np.lexsort((choices.node, choices.left_mib, -choices.in_use, ~tie))[0]] = MAX_SCORE
    return result
