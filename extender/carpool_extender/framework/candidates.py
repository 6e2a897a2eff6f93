"""The one loop that every policy goes through: the best GPUs of each node, and a score for each node."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, NO_MODE, NOWHERE, Bools, NodeGrid, Rows, places, some
from carpool_extender.framework.filters import PASSED, Evaluation
from carpool_extender.framework.scores import Policy

MOST_ISLANDS = 1 << 15
"""More than a node has GPUs."""
MAX_SCORE = 10
TIE_FLOOR = 6
MOST_EFFORT = 3
"""More than any effort is."""
HALF = 0.5
"""How ready idle GPUs are; GPUs of which some are in use are readier."""


@dataclass(slots=True, eq=False)
class Candidates:
    """The best set of GPUs of each node that has enough, in no particular order; every array has shape (nodes, …)."""

    node: NDArray[np.intp]
    """(nodes,) Index of the node."""
    rows: Rows
    """(nodes, GPUs of a worker) Rows of the snapshot."""
    cost: NDArray[np.float64]
    """(nodes,) Mean cost of these GPUs."""
    ready: NDArray[np.float64]
    """(nodes,) How little has to be done first, mean of these GPUs: 1 where others are already, 0.5 for an idle GPU,
    0 where its mode has to change, too."""
    left_mib: NDArray[np.float64]
    """(nodes,) Memory that would be left on all of them, in MiB."""
    is_linked: Bools
    """(nodes,) Whether these GPUs reach each other by NVLink; so does a single one."""

    def only(self, which: Rows) -> "Candidates":
        """Return some of the choices."""
        return Candidates(*[getattr(self, name).take(which, axis=0) for name in _NAMES])

    def put(self, places: Rows, others: "Candidates") -> None:
        """Write others over some of them."""
        for name in _NAMES:
            getattr(self, name)[places] = getattr(others, name)


_NAMES = tuple(column.name for column in fields(Candidates))


class Best:
    """The choice of each node, by the node's index, so that the choices of single nodes can be replaced.

    Args:
        wanted: GPUs of a worker.
    """

    def __init__(self, wanted: int) -> None:
        self._choices = _nothing(0, wanted)
        self.fits: Bools = np.zeros(0, np.bool_)
        """(nodes,) Whether a node has a place."""

    def make_room(self, nodes: int) -> None:
        """Make room for more nodes, which have no place yet."""
        known = len(self.fits)
        if nodes > known:
            larger = _nothing(nodes, self._choices.rows.shape[1])
            larger.put(np.arange(known), self._choices)
            self.fits, self._choices = np.append(self.fits, np.zeros(nodes - known, np.bool_)), larger

    def put_all(self, choices: Candidates) -> None:
        """Replace the choices of all nodes; these are kept as they are."""
        if choices.node.size == len(self.fits) and (choices.node == np.arange(choices.node.size)).all():
            self.fits[:], self._choices = True, choices
        else:
            self.put(np.ones(len(self.fits), np.bool_), choices)

    def put(self, nodes: Bools, choices: Candidates) -> None:
        """Replace the choices of some nodes; those for which there is none have no place any more."""
        self.fits[nodes] = False
        self.fits[choices.node] = True
        self._choices.put(choices.node, choices)

    def of(self, nodes: NDArray[np.intp]) -> Candidates:
        """Return the choices of nodes that have a place."""
        return self._choices.only(nodes)

    def top_k(self, policy: Policy) -> int | None:
        """Return the node that comes first of all that have a place, as `foremost` does; None where none has one."""
        if not self.fits.any():
            return None
        choices, linked = self._choices, self.fits & self._choices.is_linked
        cost = np.where(linked if linked.any() else self.fits, choices.cost, np.inf)
        return best_of(choices, places(cost <= cost.min() + policy.tolerance))


def _nothing(nodes: int, wanted: int) -> Candidates:
    return Candidates(
        node=np.zeros(nodes, np.intp),
        rows=np.zeros((nodes, wanted), np.intp),
        cost=np.zeros(nodes),
        ready=np.zeros(nodes),
        left_mib=np.zeros(nodes),
        is_linked=np.zeros(nodes, np.bool_),
    )


def select(
    evaluation: Evaluation, policy: Policy, grid: NodeGrid | None = None, among: Bools | None = None
) -> Candidates:
    """Choose the GPUs for one worker on each node. All GPUs of a worker are shared in the same mode.

    Args:
        evaluation: What the checks found.
        policy: What makes a good place.
        grid: The nodes in question; all when None.
        among: GPUs in question, shape (gpus,); all when None.
    """
    grid = evaluation.snapshot.grid if grid is None else grid
    wanted = evaluation.pod_request.demand.gpus
    if not grid.node.size:
        return _nothing(0, wanted)
    rows = grid.rows.ravel()
    ok: Bools = evaluation.found.failed.take(rows) == PASSED
    if grid.has_gaps:
        ok &= rows != NOWHERE
    if among is not None:
        ok &= among.take(rows)
    return _single(evaluation, policy, grid, ok) if wanted == 1 else _several(evaluation, policy, np.sort(rows[ok]))


def _effort(evaluation: Evaluation, rows: Rows | None) -> NDArray[np.int8]:
    """What has to be done first: 0 where others are already, 1 for an idle GPU, 2 where its mode has to change, too."""
    columns = evaluation.snapshot.columns
    prepared, mode, count = (some(of, rows) for of in (columns.prepared, evaluation.found.mode, columns.count))
    changes: Bools = (prepared != NO_MODE) & (prepared != mode)
    effort: NDArray[np.int8] = (count == 0) * (1 + changes.view(np.int8))
    return effort


def _single(evaluation: Evaluation, policy: Policy, grid: NodeGrid, ok: Bools) -> Candidates:
    """Choose one GPU of each node: among ties one in use, then the one with the least left over, then the first.

    Args:
        evaluation: What the checks found.
        policy: What makes a good place.
        grid: The nodes.
        ok: Whether each of their GPUs fits, one place after the other.
    """
    rows, (each, nodes) = grid.rows.ravel(), grid.rows.shape
    # Of the whole cluster it is quicker to reckon row by row and gather what comes of it than to gather each column.
    is_many = rows.size >= len(evaluation.found.failed)
    among = None if is_many else rows
    effort, left = _effort(evaluation, among), evaluation.left_mib(among)
    spread = np.int64(left.max() - left.min() + 1)
    order = effort * spread
    order += left
    cost = np.where(ok, policy.cost(evaluation, rows), np.inf).reshape(each, nodes)
    least = np.minimum.reduce(cost, axis=0)
    rank = (order.take(rows) if is_many else order).reshape(each, nodes)
    rank += (cost > least + policy.tolerance) * (MOST_EFFORT * spread)
    rank *= each  # so that the place follows from the least, and is the first of equals
    rank += np.arange(each)[:, None]
    able = places(np.isfinite(least))
    place = np.minimum.reduce(rank, axis=0).take(able) % each
    chosen = place * nodes + able
    found = rows.take(chosen)
    at = found if is_many else chosen
    return Candidates(
        node=grid.node.take(able),
        rows=found[:, None],
        cost=cost.take(chosen),
        ready=1.0 - effort.take(at) / 2,
        left_mib=left.take(at).astype(np.float64),
        is_linked=np.ones(able.size, np.bool_),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """The GPUs that fit, shape (candidates,) each; those of one node stand together."""

    rows: Rows
    node: NDArray[np.intp]
    cost: NDArray[np.float64]
    effort: NDArray[np.float64]
    left: NDArray[np.float64]


def _several(evaluation: Evaluation, policy: Policy, rows: Rows) -> Candidates:
    """Choose several GPUs in one mode on each node: on one NVLink island where there is room, anywhere otherwise.

    Args:
        evaluation: What the checks found.
        policy: What makes a good place.
        rows: The GPUs that fit, in rising order.
    """
    columns, wanted = evaluation.snapshot.columns, evaluation.pod_request.demand.gpus
    node = columns.node[rows].astype(np.intp)
    enough = np.bincount(node, minlength=1)[node] >= wanted
    rows, node = rows[enough], node[enough]
    if not rows.size:
        return _nothing(0, wanted)
    field = _Field(
        rows=rows,
        node=node,
        cost=policy.cost(evaluation, rows),
        effort=_effort(evaluation, rows).astype(np.float64),
        left=evaluation.left_mib(rows).astype(np.float64),
    )
    anywhere, want = field.node * len(MODES) + evaluation.found.mode[rows], (wanted, policy.tolerance)
    apart = _teams(field, anywhere * MOST_ISLANDS + columns.island[rows], want)
    apart.is_linked[:] = True
    mixed = _teams(field, anywhere, want)
    together = Candidates(*[np.concatenate((getattr(apart, name), getattr(mixed, name))) for name in _NAMES])
    least = np.full(2 * (int(together.node.max(initial=0)) + 1), np.inf)
    among = 2 * together.node + together.is_linked
    np.minimum.at(least, among, together.cost)
    cost = np.where(together.cost <= least[among] + policy.tolerance, least[among], together.cost)
    order = np.lexsort((together.left_mib, -together.ready, cost, ~together.is_linked, together.node))
    _, first = np.unique(together.node[order], return_index=True)
    return together.only(order[first])


def _teams(field: _Field, team: NDArray[np.intp], want: tuple[int, float]) -> Candidates:
    """Choose the best GPUs of each team that has enough.

    Args:
        field: The GPUs that fit.
        team: To which team each belongs, shape (candidates,).
        want: How many GPUs, and by how much costs of ties differ at most.
    """
    wanted, tolerance = want
    teams, position, size = np.unique(team, return_inverse=True, return_counts=True)
    position = np.asarray(position, np.intp)
    best = np.full(len(teams), np.inf)
    np.minimum.at(best, position, field.cost)
    tie = field.cost <= best[position] + tolerance
    # By team; inside, ties with the best first, those in use with the least left over ahead, then by cost.
    second, third = np.where(tie, field.effort, field.cost), np.where(tie, field.left, 0.0)
    order = np.lexsort((third, second, ~tie, team))
    starts = np.cumsum(size) - size
    chosen = order[starts[size >= wanted][:, None] + np.arange(wanted)]
    return Candidates(
        node=field.node[chosen[:, 0]],
        rows=field.rows[chosen],
        cost=field.cost[chosen].mean(axis=1),
        ready=1.0 - field.effort[chosen].mean(axis=1) / 2,
        left_mib=field.left[chosen].sum(axis=1),
        is_linked=np.zeros(len(chosen), np.bool_),
    )


def scores(choices: Candidates, policy: Policy) -> NDArray[np.int64]:
    """Score nodes from 0 to 10, the integers that kube-scheduler takes.

    The best place gets 10. Other ties with it get 6 to 9: 8 or 9 in use, 6 or 7 idle, the more the less memory is left.
    The rest gets 0 to 5, the more the closer its cost is to the best.

    Returns:
        Scores, shape (nodes,).
    """
    if not len(choices.node):
        return np.zeros(0, np.int64)
    tie = ties(choices, policy)
    lowest, highest = choices.cost.min(), choices.cost.max()
    most_left = max(1.0, choices.left_mib.max())
    tight = choices.left_mib <= most_left / 2
    tied = TIE_FLOOR + 2 * (choices.ready > HALF) + tight
    spread = max(highest - lowest, np.finfo(np.float64).tiny)
    behind = np.floor((TIE_FLOOR - 1) * (highest - choices.cost) / spread)
    result: NDArray[np.int64] = np.where(tie, tied, behind).astype(np.int64)
    result[best_of(choices, np.flatnonzero(tie))] = MAX_SCORE
    return result


def top_k(choices: Candidates, policy: Policy, most: int) -> Rows:
    """Return the best choices, at most so many, the best first: by score, then by what is left over."""
    rank = choices.left_mib / (1.0 + choices.left_mib.max(initial=0.0)) - scores(choices, policy)
    first = np.argpartition(rank, most - 1)[:most] if rank.size > most else np.arange(rank.size)
    order: Rows = first[np.argsort(rank[first], kind="stable")]
    return order


def ties(choices: Candidates, policy: Policy) -> Bools:
    """Return the best choices: linked ones where there are any, and of these the ones that cost the least."""
    able = choices.is_linked if choices.is_linked.any() else ~choices.is_linked
    tied: Bools = able & (choices.cost <= choices.cost[able].min() + policy.tolerance)
    return tied


def best_of(choices: Candidates, among: Rows) -> int:
    """Return the choice that comes first among ties: the readiest, then least left over, then the first node."""
    for by in (-choices.ready, choices.left_mib, choices.node):
        found = by.take(among)
        among = among.take(places(found == found.min()))
    return int(among[0])
