"""The places that a policy has to choose from, best first, each with its score: why one won, and by how much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from carpool_extender.cache.gpu_table import Bools, NodeGrid
from carpool_extender.framework.diagnosis import pluralize
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import Evaluation
from carpool_extender.framework.scores import Candidates, Policy, best_of, select, ties

MOST_TOLD = 4
"""Lines of a ranking, the winner's among them."""
READY = 1.0
"""How ready GPUs are of which each is in use already."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """GPUs that one worker could have."""

    rows: tuple[int, ...]
    """Of the snapshot."""
    cost: float
    """By the policy, mean of these GPUs."""
    is_tied: bool
    """Whether it costs no more than the best that nodes come with, by the policy's tolerance."""
    ready: float
    """How little has to be done first, as in `Candidates`."""
    left_mib: float
    """Memory that would be left on all of them, in MiB."""
    is_linked: bool
    """Whether they reach each other by NVLink."""


def ranking(cached_evaluation: CachedEvaluation, among: Bools) -> list[Candidate]:
    """Return the places for one worker, best first: single GPUs, or the best set of each node.

    The first is the one that the extender takes.

    Args:
        cached_evaluation: Of the newcomer.
        among: GPUs in question, shape (gpus,).
    """
    evaluation, policy = cached_evaluation.evaluation, cached_evaluation.policy
    of_nodes = select(evaluation, policy, among=among)
    if not of_nodes.node.size:
        return []
    best = np.flatnonzero(ties(of_nodes, policy))
    winner = of_nodes.rows[best_of(of_nodes, best)]
    # Where a node's own choice is dearer than another of its GPUs, that one is as much a tie.
    dearest = of_nodes.cost[best].min() + policy.tolerance
    choices = _of_gpus(evaluation, policy, among) if winner.size == 1 else of_nodes
    found = _candidates(choices, (choices.cost <= dearest) & (choices.is_linked == of_nodes.is_linked[best[0]]))
    return sorted(found, key=lambda one: one.rows != tuple(winner.tolist()))


def _of_gpus(evaluation: Evaluation, policy: Policy, among: Bools) -> Candidates:
    """Return each GPU that fits as if it were its node's only one."""
    rows = np.flatnonzero(evaluation.ok & among)
    return select(
        evaluation, policy, NodeGrid(rows[None, :], evaluation.snapshot.gpus.node[rows].astype(np.intp), False)
    )


def _candidates(choices: Candidates, is_tied: Bools) -> Iterator[Candidate]:
    """Sort as the extender chooses: ties by readiness, then by what is left over; the others by their cost first."""
    cost = np.where(is_tied, -np.inf, choices.cost)
    for place in np.lexsort((choices.node, choices.left_mib, -choices.ready, cost, ~choices.is_linked)).tolist():
        yield Candidate(
            rows=tuple(choices.rows[place].tolist()),
            cost=float(choices.cost[place]),
            is_tied=bool(is_tied[place]),
            ready=float(choices.ready[place]),
            left_mib=float(choices.left_mib[place]),
            is_linked=bool(choices.is_linked[place]),
        )


def ranked(cached_evaluation: CachedEvaluation, among: Bools) -> list[str]:
    """Say what the policy looks for, and what the best places offer of it; nothing where there is no place.

    Args:
        cached_evaluation: Of the newcomer.
        among: GPUs in question, shape (gpus,).
    """
    found, policy = ranking(cached_evaluation, among), cached_evaluation.policy
    if not found:
        return []
    told = [_told(policy, found[0], one) for one in found]
    groups = _groups([one.text for one in told])
    if len(groups) > MOST_TOLD:
        groups = _groups([one.kind for one in told])
    lines = []
    for number, (begin, end) in enumerate(groups[:MOST_TOLD], start=1):
        is_alike = all(one.text == told[begin].text for one in told[begin:end])
        others = _others(found[begin], end - begin - 1, "like it" if is_alike else "more")
        said = told[begin].text if is_alike else told[begin].of_all
        lines.append(f"  {number}. {_named(cached_evaluation.evaluation, found[begin])}{others}: {said}")
    if len(groups) > MOST_TOLD:
        lines.append(f"  and {pluralize(len(found) - groups[MOST_TOLD - 1][1], 'place')} more")
    return [_looked_for(policy, cached_evaluation.evaluation.pod_request.demand.gpus), *lines]


def _groups(keys: Sequence[str]) -> list[tuple[int, int]]:
    """Return begin and end of what has equal keys and stands together."""
    starts = [place for place, (one, next_) in enumerate(pairwise(keys), start=1) if one != next_]
    return [*pairwise([0, *starts, len(keys)])]


def _looked_for(policy: Policy, gpus: int) -> str:
    within = f"; within {policy.score.amount(policy.tolerance)} is a tie" if policy.score and policy.tolerance else ""
    mean = f"; mean of its {gpus} GPUs" if policy.score and gpus > 1 else ""
    return f"places by {policy.name} ({policy.meaning}{within}{mean}):"


def _named(evaluation: Evaluation, one: Candidate) -> str:
    snapshot, (first, *others) = evaluation.snapshot, one.rows
    if not others:
        return snapshot.place(first)
    numbers = ", ".join(str(int(snapshot.gpus.gpu_index[row])) for row in one.rows)
    return f"GPUs {numbers} of {snapshot.node_names[int(snapshot.gpus.node[first])]}"


def _others(one: Candidate, number: int, how: str) -> str:
    return f" and {pluralize(number, 'node' if len(one.rows) > 1 else 'GPU')} {how}" if number else ""


class _Line(NamedTuple):
    """What is said of one place."""

    kind: str
    """Equal for places that lost a tie by the same, whatever the numbers."""
    text: str
    of_all: str
    """For the first of several of a kind."""


def _told(policy: Policy, best: Candidate, one: Candidate) -> _Line:
    """Say what a place scores, and what it lacks against the best."""
    score = f"{policy.score.told(one.cost)}; " if policy.score else ""
    if one is best:
        return _alone(score.removesuffix("; ") or "the best")
    if best.is_linked and not one.is_linked:
        return _alone(f"{score}not all linked by NVLink")
    if not one.is_tied:
        return _alone(score + (policy.score.behind(one.cost, best.cost) if policy.score else ""))
    because, amount = _tie_break(best, one)
    return _Line(
        because, f"{score}a tie, but {because.format(amount)}", f"a tie, but {because.format(f'at least {amount}')}"
    )


def _alone(text: str) -> _Line:
    return _Line(text, text, text)


_OF_ITS_NODE = "its node came with another GPU"
"""A node comes with the readiest of its own ties, which may be dearer than this one, and no tie among nodes."""


def _tie_break(best: Candidate, one: Candidate) -> tuple[str, str]:
    """Return by what the best won a tie, and the amount that belongs in there."""
    if best.ready < one.ready or (best.ready == one.ready and best.left_mib > one.left_mib):
        return _OF_ITS_NODE, ""
    if best.ready > one.ready:
        is_used = best.ready == READY
        return f"the first place is {'in use, and idle GPUs stay free' if is_used else 'readier'}", ""
    if best.left_mib < one.left_mib:
        return "the first place leaves {} less", f"{one.left_mib - best.left_mib:,.0f} MiB"
    return "the first place comes first in order", ""
