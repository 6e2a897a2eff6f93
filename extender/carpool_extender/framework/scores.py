"""Scores: the policies, the best GPUs of each node by a policy, and the score of each node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from carpool_core.products import DeviceClass, product_of
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import NO_MODE, NOWHERE, Bools, NodeGrid, Rows, places, some
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import NO_LIMITS, PASSED, AdmissionLimits, Evaluation

Cost = NDArray[np.float64]

UNKNOWN_POWER_W = (300.0, 40.0)
"""Power limit and idle power of a product without an entry, in watts."""
AWAKE_SHARE, FULL_SHARE = 0.21, 0.83
"""Power of a GPU in use as a share of its limit, with no SM active and with all. Means of what Zeus
(You et al., NSDI '23) measured of a P100, an RTX 6000 and a V100; its A40 is held out."""


LOST_RUN = 1.0
"""Cost of a GPU whose memory a job may exceed: a run that dies there is lost, as in twice the time."""


def nothing(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return equal costs."""
    return np.zeros(rows.size)


def added_slowdown(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the progress lost, in slowdowns: the incoming pod's, and what its co-tenants lose in addition.

    A tenant slowed by s loses 1 - 1/s of its progress, which is about s - 1 near 1. s - 1 weighs large losses more.
    """
    may_not_fit = evaluation.class_table.may_not_fit
    found = evaluation.results.added_slowdown.take(rows)
    if may_not_fit.any():
        found += LOST_RUN * may_not_fit[evaluation.snapshot.gpus.device_class.take(rows)]
    return found


def taken_memory(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the unreserved memory before the pod joins, in MiB, negated."""
    return -evaluation.snapshot.gpus.free_mib[rows].astype(np.float64)


def left_memory(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the memory left over, in MiB."""
    return evaluation.left_mib(rows).astype(np.float64)


def left_memory_negated(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the memory left over, in MiB, negated."""
    return -left_memory(evaluation, rows)


def position(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the position: nodes in the order of discovery, GPUs by index."""
    return rows.astype(np.float64)


def turn(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the distance to the GPU with the newest reservation.

    The state of the round-robin is in the reservations, so it survives restarts.
    """
    columns = evaluation.snapshot.gpus
    newest = np.where(columns.alive, columns.reserved_at, 0.0)  # rows of deleted nodes keep their values
    total = max(1, newest.size)
    last = int(np.argmax(newest)) if newest.size and newest.max() > 0 else -1
    return ((rows - last - 1) % total).astype(np.float64)


def activity(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the SM activity of the present tenants together."""
    return evaluation.snapshot.gpus.sm_active[rows]


def activity_negated(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the SM activity of the present tenants together, negated."""
    return -activity(evaluation, rows)


def energy(evaluation: Evaluation, rows: Rows) -> Cost:
    """Return the additional power in watts while the incoming pod runs, weighted by the slowdowns.

    A GPU in use draws awake + (full - awake) · SM activity, an idle one its idle power. A slowdown prolongs the draw of
    the incoming pod and of the tenants that it slows.
    """
    classes = evaluation.snapshot.classes
    table = np.array([_powers(kind) for kind in classes]).reshape(-1, 2)
    of = evaluation.snapshot.gpus.device_class[rows]
    limit, idle = table[of, 0], table[of, 1]
    awake, full = AWAKE_SHARE * limit, FULL_SHARE * limit
    facts = evaluation.pod_request.class_table(classes)
    is_awake = evaluation.snapshot.gpus.count[rows] > 0
    own = (full - awake) * facts.sm[of] * evaluation.results.slowdown[rows]
    others = evaluation.results.added_slowdown[rows] - (evaluation.results.slowdown[rows] - 1.0)
    result: Cost = own + others * (awake + full) / 2 + np.where(is_awake, 0.0, np.maximum(0.0, awake - idle))
    return result


def _powers(kind: DeviceClass) -> tuple[float, float]:
    found = product_of(kind)
    return UNKNOWN_POWER_W if found is None else (found.power_limit_w, found.idle_power_w)


def _mib(amount: float) -> str:
    return f"{amount:,.0f} MiB"


def _percent(amount: float) -> str:
    return f"{amount:.0%}"


@dataclass(frozen=True, slots=True)
class Score:
    """How a cost is printed."""

    amount: Callable[[float], str]
    """Formats an amount or a difference."""
    of: str
    sign: int = 1
    """-1 if the cost is the negated amount, because the policy maximises it."""

    def text(self, cost: float) -> str:
        """Return a cost with its unit."""
        return f"{self.amount(self.sign * cost + 0.0)} {self.of}"

    def behind(self, cost: float, best: float) -> str:
        """Return by how much a cost exceeds the best."""
        return f"{self.amount(cost - best)} {'more' if self.sign > 0 else 'less'}"


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to choose among the GPUs that fit: a row of `POLICIES`."""

    name: str
    meaning: str
    """Its aim in a few words."""
    cost: Callable[[Evaluation, Rows], NDArray[np.float64]]
    """Returns the cost of some GPUs, shape (rows,); the least is the best."""
    score: Score | None = None
    """How the cost is printed; None if all costs are equal."""
    tolerance: float = 0.0
    """Difference to the least cost up to which GPUs tie. A tie goes to the GPU in use with the least memory left
    over, so that whole GPUs stay free for large jobs."""
    exclusive: bool = False
    """Whether it gives every job a GPU of its own."""
    is_local: bool = True
    """Whether the cost of a GPU depends on that GPU only."""
    decreasing: bool = False
    """Whether simulations sort the queue by falling size. In production the queue has its own order."""
    short: str = ""
    """Its name in papers, if different."""

    @property
    def title(self) -> str:
        """Its name, with its name in papers."""
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
            "most unreserved memory",
            taken_memory,
            Score(_mib, "unreserved", -1),
            short="MAGM",
        ),
        Policy("exclusive", "one job on a GPU, as the stock scheduler does", nothing, exclusive=True),
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
    """No policy has this name."""


def find_policy(name: str) -> Policy:
    """Return a policy by its name.

    Raises:
        UnknownPolicyError: The name is unknown; the message lists the choices.
    """
    if name not in POLICIES:
        choices = ", ".join(policy.title for policy in POLICIES.values())
        raise UnknownPolicyError(f"policy {name!r} is unknown; choose one of {choices}")
    return POLICIES[name]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Configuration of the site."""

    policy: Policy
    slots: int
    """Most tenants of one GPU."""
    limits: AdmissionLimits = NO_LIMITS

    def policy_for(self, pod_request: PodRequest) -> Policy:
        """Return the job's own policy, or the site's if it has none."""
        return self.policy if pod_request.policy is None else find_policy(pod_request.policy)

    def limits_for(self, pod_request: PodRequest) -> AdmissionLimits:
        """Return the admission limits for a job."""
        return self.limits.with_exclusive_gpus() if self.policy_for(pod_request).exclusive else self.limits


MAX_DOMAINS = 1 << 15
"""Above the number of NVLink domains of a node."""
MAX_SCORE = 10
TIE_FLOOR = 6
MAX_EFFORT = 3
"""Above every effort."""
IDLE_READINESS = 0.5
"""Readiness of idle GPUs; a set with tenants is above."""


@dataclass(slots=True, eq=False)
class Candidates:
    """The best set of GPUs of each node that has enough; every array has shape (nodes, …), in no order."""

    node: NDArray[np.intp]
    """(nodes,) Index of the node."""
    rows: Rows
    """(nodes, GPUs of a worker) Rows of the snapshot."""
    cost: NDArray[np.float64]
    """(nodes,) Mean cost of these GPUs."""
    ready: NDArray[np.float64]
    """(nodes,) Mean readiness: 1 for a GPU in use, 0.5 for an idle one, 0 if its mode has to change."""
    left_mib: NDArray[np.float64]
    """(nodes,) Memory left over on all of them, in MiB."""
    is_linked: Bools
    """(nodes,) Whether NVLink connects these GPUs; true for a single GPU."""

    def only(self, which: Rows) -> "Candidates":
        """Return some of the candidates."""
        return Candidates(*[getattr(self, name).take(which, axis=0) for name in _NAMES])

    def put(self, places: Rows, others: "Candidates") -> None:
        """Overwrite some of the candidates."""
        for name in _NAMES:
            getattr(self, name)[places] = getattr(others, name)


_NAMES = tuple(column.name for column in fields(Candidates))


class BestPerNode:
    """The candidate of each node by the node's index, so that single nodes can be replaced."""

    def __init__(self, wanted: int) -> None:
        self._candidates = _no_candidates(0, wanted)
        self.fits: Bools = np.zeros(0, np.bool_)
        """(nodes,) Whether a node has a candidate."""

    def resize(self, nodes: int) -> None:
        """Add nodes without candidates up to this number."""
        known = len(self.fits)
        if nodes > known:
            larger = _no_candidates(nodes, self._candidates.rows.shape[1])
            larger.put(np.arange(known), self._candidates)
            self.fits, self._candidates = np.append(self.fits, np.zeros(nodes - known, np.bool_)), larger

    def put_all(self, candidates: Candidates) -> None:
        """Replace the candidates of all nodes."""
        self.put(np.ones(len(self.fits), np.bool_), candidates)

    def put(self, nodes: Bools, candidates: Candidates) -> None:
        """Replace the candidates of some nodes; nodes without a new candidate have none."""
        self.fits[nodes] = False
        self.fits[candidates.node] = True
        self._candidates.put(candidates.node, candidates)

    def of(self, nodes: NDArray[np.intp]) -> Candidates:
        """Return the candidates of nodes that have one."""
        return self._candidates.only(nodes)

    def first(self, policy: Policy) -> int | None:
        """Return the index of the best node, as `best_of` among `ties`; None if no node fits."""
        if not self.fits.any():
            return None
        candidates, linked = self._candidates, self.fits & self._candidates.is_linked
        cost = np.where(linked if linked.any() else self.fits, candidates.cost, np.inf)
        return best_of(candidates, places(cost <= cost.min() + policy.tolerance))


def _no_candidates(nodes: int, wanted: int) -> Candidates:
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
    """Select the best GPUs of each node for one worker, all in the same mode.

    `grid` has the permitted nodes, and `among`, of shape (gpus,), the permitted GPUs; all if None.
    """
    grid = evaluation.snapshot.grid if grid is None else grid
    wanted = evaluation.pod_request.demand.gpus
    if not grid.node.size:
        return _no_candidates(0, wanted)
    rows = grid.rows.ravel()
    ok: Bools = evaluation.results.failed.take(rows) == PASSED
    if grid.has_gaps:
        ok &= rows != NOWHERE
    if among is not None:
        ok &= among.take(rows)
    return (
        _one_gpu(evaluation, policy, grid, ok) if wanted == 1 else _several_gpus(evaluation, policy, np.sort(rows[ok]))
    )


def _effort(evaluation: Evaluation, rows: Rows | None) -> NDArray[np.int8]:
    """Return 0 for GPUs in use, 1 for idle GPUs, and 2 for idle GPUs whose mode has to change."""
    gpus = evaluation.snapshot.gpus
    prepared, mode, count = (some(of, rows) for of in (gpus.prepared, evaluation.results.mode, gpus.count))
    changes: Bools = (prepared != NO_MODE) & (prepared != mode)
    effort: NDArray[np.int8] = (count == 0) * (1 + changes.view(np.int8))
    return effort


def _one_gpu(evaluation: Evaluation, policy: Policy, grid: NodeGrid, ok: Bools) -> Candidates:
    """Select one GPU of each node: the cheapest; among ties the least effort, then the least left over, then the first.

    `ok` is whether each GPU of the nodes fits, in the order of `grid.rows`.
    """
    rows, (each, nodes) = grid.rows.ravel(), grid.rows.shape
    effort, left = _effort(evaluation, rows), evaluation.left_mib(rows)
    spread = np.int64(left.max() - left.min() + 1)
    cost = np.where(ok, policy.cost(evaluation, rows), np.inf).reshape(each, nodes)
    least = np.minimum.reduce(cost, axis=0)
    rank = (effort * spread + left).reshape(each, nodes)
    rank += (cost > least + policy.tolerance) * (MAX_EFFORT * spread)
    rank *= each  # the remainder by `each` is the place on the node, which breaks ties
    rank += np.arange(each)[:, None]
    able = places(np.isfinite(least))
    chosen = np.minimum.reduce(rank, axis=0).take(able) % each * nodes + able
    return Candidates(
        node=grid.node.take(able),
        rows=rows.take(chosen)[:, None],
        cost=cost.take(chosen),
        ready=1.0 - effort.take(chosen) / 2,
        left_mib=left.take(chosen).astype(np.float64),
        is_linked=np.ones(able.size, np.bool_),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fitting:
    """The GPUs that fit, shape (gpus,) each, grouped by node."""

    rows: Rows
    node: NDArray[np.intp]
    cost: NDArray[np.float64]
    effort: NDArray[np.float64]
    left: NDArray[np.float64]


def _several_gpus(evaluation: Evaluation, policy: Policy, rows: Rows) -> Candidates:
    """Select several GPUs in one mode on each node: in one NVLink domain if possible, otherwise anywhere.

    `rows` are the GPUs that fit, in rising order.
    """
    gpus, wanted = evaluation.snapshot.gpus, evaluation.pod_request.demand.gpus
    node = gpus.node[rows].astype(np.intp)
    enough = np.bincount(node, minlength=1)[node] >= wanted
    rows, node = rows[enough], node[enough]
    if not rows.size:
        return _no_candidates(0, wanted)
    fitting = _Fitting(
        rows=rows,
        node=node,
        cost=policy.cost(evaluation, rows),
        effort=_effort(evaluation, rows).astype(np.float64),
        left=evaluation.left_mib(rows).astype(np.float64),
    )
    by_mode = evaluation.node_and_mode(rows)
    linked = _best_of_groups(fitting, by_mode * MAX_DOMAINS + gpus.nvlink_domain[rows], wanted, policy.tolerance)
    linked.is_linked[:] = True
    mixed = _best_of_groups(fitting, by_mode, wanted, policy.tolerance)
    both = Candidates(*[np.concatenate((getattr(linked, name), getattr(mixed, name))) for name in _NAMES])
    least = np.full(2 * (int(both.node.max(initial=0)) + 1), np.inf)
    group = 2 * both.node + both.is_linked
    np.minimum.at(least, group, both.cost)
    cost = np.where(both.cost <= least[group] + policy.tolerance, least[group], both.cost)
    order = np.lexsort((both.left_mib, -both.ready, cost, ~both.is_linked, both.node))
    _, first = np.unique(both.node[order], return_index=True)
    return both.only(order[first])


def _best_of_groups(fitting: _Fitting, group: NDArray[np.intp], wanted: int, tolerance: float) -> Candidates:
    """Select the best GPUs of each group that has enough.

    `group` is the number of the group of each GPU, shape (gpus,).
    """
    groups, position, size = np.unique(group, return_inverse=True, return_counts=True)
    position = np.asarray(position, np.intp)
    best = np.full(len(groups), np.inf)
    np.minimum.at(best, position, fitting.cost)
    tie = fitting.cost <= best[position] + tolerance
    # By group; ties first, those by effort and memory left over, the others by cost.
    second, third = np.where(tie, fitting.effort, fitting.cost), np.where(tie, fitting.left, 0.0)
    order = np.lexsort((third, second, ~tie, group))
    starts = np.cumsum(size) - size
    chosen = order[starts[size >= wanted][:, None] + np.arange(wanted)]
    return Candidates(
        node=fitting.node[chosen[:, 0]],
        rows=fitting.rows[chosen],
        cost=fitting.cost[chosen].mean(axis=1),
        ready=1.0 - fitting.effort[chosen].mean(axis=1) / 2,
        left_mib=fitting.left[chosen].sum(axis=1),
        is_linked=np.zeros(len(chosen), np.bool_),
    )


def scores(candidates: Candidates, policy: Policy) -> NDArray[np.int64]:
    """Score nodes with the integers from 0 to 10 that kube-scheduler accepts.

    The best node gets 10. Ties with it get 8 or 9 if in use and 6 or 7 if idle, more if less memory is left over.
    The others get 0 to 5 by their cost.

    Returns:
        Scores, shape (nodes,).
    """
    if not len(candidates.node):
        return np.zeros(0, np.int64)
    tie = ties(candidates, policy)
    lowest, highest = candidates.cost.min(), candidates.cost.max()
    tight = candidates.left_mib <= max(1.0, candidates.left_mib.max()) / 2
    tied = TIE_FLOOR + 2 * (candidates.ready > IDLE_READINESS) + tight
    spread = max(highest - lowest, np.finfo(np.float64).tiny)
    behind = np.floor((TIE_FLOOR - 1) * (highest - candidates.cost) / spread)
    result: NDArray[np.int64] = np.where(tie, tied, behind).astype(np.int64)
    result[best_of(candidates, np.flatnonzero(tie))] = MAX_SCORE
    return result


def top_k(candidates: Candidates, policy: Policy, most: int) -> Rows:
    """Return at most so many of the best candidates, best first: by score, then by memory left over."""
    rank = candidates.left_mib / (1.0 + candidates.left_mib.max(initial=0.0)) - scores(candidates, policy)
    first = np.argpartition(rank, most - 1)[:most] if rank.size > most else np.arange(rank.size)
    order: Rows = first[np.argsort(rank[first], kind="stable")]
    return order


def ties(candidates: Candidates, policy: Policy) -> Bools:
    """Return where a candidate ties with the cheapest; linked candidates only, if there are any."""
    able = candidates.is_linked if candidates.is_linked.any() else ~candidates.is_linked
    tied: Bools = able & (candidates.cost <= candidates.cost[able].min() + policy.tolerance)
    return tied


def best_of(candidates: Candidates, among: Rows) -> int:
    """Return the first of tied candidates: by readiness, then least memory left over, then the node's index."""
    for key in (-candidates.ready, candidates.left_mib, candidates.node):
        values = key.take(among)
        among = among.take(places(values == values.min()))
    return int(among[0])
