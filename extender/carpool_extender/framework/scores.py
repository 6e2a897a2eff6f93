"""The policies by which one of the places that fit is taken: a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from carpool_core.products import UnknownProductError, find_product
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, NO_MODE, NOWHERE, Bools, NodeGrid, Rows, places, some
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.filters import NO_LIMITS, PASSED, Evaluation

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
    return evaluation.results.added_slowdown.take(rows)


def taken_memory(evaluation: Evaluation, rows: Rows) -> Cost:
    """Free memory before the newcomer comes, in MiB, negated."""
    return -evaluation.snapshot.gpus.free_mib[rows].astype(np.float64)


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
    columns = evaluation.snapshot.gpus
    newest = np.where(columns.alive, columns.reserved_at, 0.0)  # a node that is gone has left its rows as they were
    total = max(1, newest.size)
    last = int(np.argmax(newest)) if newest.size and newest.max() > 0 else -1
    return ((rows - last - 1) % total).astype(np.float64)


def activity(evaluation: Evaluation, rows: Rows) -> Cost:
    """SM activity of the tenants that are there, all together."""
    return evaluation.snapshot.gpus.sm_active[rows]


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
    of = evaluation.snapshot.gpus.device_class[rows]
    limit, idle = table[of, 0], table[of, 1]
    awake, full = AWAKE_SHARE * limit, FULL_SHARE * limit
    facts = evaluation.pod_request.class_table(classes)
    is_awake = evaluation.snapshot.gpus.count[rows] > 0
    own = (full - awake) * facts.sm[of] * evaluation.results.slowdown[rows]
    others = evaluation.results.added_slowdown[rows] - (evaluation.results.slowdown[rows] - 1.0)
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
    ok: Bools = evaluation.results.failed.take(rows) == PASSED
    if grid.has_gaps:
        ok &= rows != NOWHERE
    if among is not None:
        ok &= among.take(rows)
    return _single(evaluation, policy, grid, ok) if wanted == 1 else _several(evaluation, policy, np.sort(rows[ok]))


def _effort(evaluation: Evaluation, rows: Rows | None) -> NDArray[np.int8]:
    """What has to be done first: 0 where others are already, 1 for an idle GPU, 2 where its mode has to change, too."""
    columns = evaluation.snapshot.gpus
    prepared, mode, count = (some(of, rows) for of in (columns.prepared, evaluation.results.mode, columns.count))
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
    is_many = rows.size >= len(evaluation.results.failed)
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
    columns, wanted = evaluation.snapshot.gpus, evaluation.pod_request.demand.gpus
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
    anywhere, want = field.node * len(MODES) + evaluation.results.mode[rows], (wanted, policy.tolerance)
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


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the site has chosen."""

    policy: Policy
    slots: int
    """Most tenants of one GPU."""
    limits: AdmissionLimits = NO_LIMITS
    """What a GPU must be like before the policy looks at it."""

    def policy_for(self, pod_request: PodRequest) -> Policy:
        """Return the job's own policy, or the site's where it has none."""
        return self.policy if pod_request.policy is None else find_policy(pod_request.policy)

    def limits_for(self, pod_request: PodRequest) -> AdmissionLimits:
        """Return what a GPU must be like for a job."""
        alone = self.policy_for(pod_request).alone
        return self.limits.with_exclusive_gpus() if alone else self.limits
