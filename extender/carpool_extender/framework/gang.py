"""Gang placement: places for all workers of a job at once, as a pure function of a snapshot."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from carpool_core.values import PodUid
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import (
    NO_MODE,
    NO_TENANT,
    Bools,
    Rows,
    TenantName,
    empty_table,
    grid_of,
    places,
    update_aggregates,
)
from carpool_extender.cache.pod_request import EXCLUSIVE, MIG, MPS
from carpool_extender.framework.diagnosis import PREFIX, placement_reason
from carpool_extender.framework.filters import Evaluation, pluralize, run_filters
from carpool_extender.framework.scores import BestPerNode, Policy, select
from carpool_extender.framework.selection import CachedEvaluation, Placement, best_place, placement_on


class WorkerPlace(NamedTuple):
    """Place of one worker."""

    node: str
    placement: Placement


def place_workers(
    cached: CachedEvaluation,
    wanted: int,
    among: Bools | None = None,
    *,
    with_reason: bool = False,
) -> list[WorkerPlace]:
    """Place workers of one job one after the other, each beside those before it, as filter, score and bind would.

    The snapshot stays as it is: workers join a copy of the GPUs. Measured activity of present tenants counts as it was
    measured before the first worker joined.

    Args:
        cached: Evaluation of one worker.
        wanted: Number of workers.
        among: Permitted GPUs, shape (gpus,); all if None.
        with_reason: Whether each placement carries its reason.

    Returns:
        The places, fewer than wanted if no more fit.
    """
    evaluation, config = cached.evaluation, cached.config
    if wanted == 1:
        only = best_place(cached, among, with_reason=with_reason)
        return [] if only is None else [WorkerPlace(*only)]
    fitting = evaluation.ok if among is None else evaluation.ok & among
    if with_reason:  # a reason names the GPUs that were passed over, too
        rows = places(evaluation.snapshot.gpus.alive)
    else:
        rows = _rows_of_best_nodes(evaluation, cached.policy, wanted, fitting)
    paper = _copy(evaluation, rows)
    return _place(paper, cached.policy, wanted, fitting[rows], spread=config.spread_workers, with_reason=with_reason)


def _place(
    paper: Evaluation, policy: Policy, wanted: int, permitted: Bools, *, spread: bool, with_reason: bool = False
) -> list[WorkerPlace]:
    names = paper.snapshot.node_names
    best = BestPerNode(paper.pod_request.demand.gpus)
    best.resize(len(names))
    best.put_all(select(paper, policy, among=permitted))
    found: list[WorkerPlace] = []
    while len(found) < wanted and (node := best.first(policy)) is not None:
        chosen = best.of(np.array([node])).rows[0]
        reason = placement_reason(paper, chosen.tolist(), policy) if with_reason else ""
        found.append(WorkerPlace(names[node], placement_on(paper, chosen.tolist(), policy, reason)))
        if len(found) < wanted:
            if spread:
                permitted[chosen] = False
            else:
                _join(paper, chosen, number=len(found))
            nodes = np.zeros(len(names), np.bool_)
            nodes[node] = True
            if policy.is_local:
                best.put(nodes, select(paper, policy, paper.snapshot.grid.only(nodes), permitted))
            else:
                best.put_all(select(paper, policy, among=permitted))
    return found


def place_gang(cached: CachedEvaluation, workers: int, among: Bools | None = None) -> list[WorkerPlace] | None:
    """Return the place of each worker; None if not all of them fit. Arguments as in `place_workers`."""
    if workers == 1 and not cached.best.fits.any():
        return None
    found = place_workers(cached, workers, among)
    return found if len(found) == workers else None


def max_workers(cached: CachedEvaluation, wanted: int, among: Bools | None = None) -> int:
    """Return how many workers fit at once, at most as many as wanted; arguments as in `place_workers`."""
    evaluation, gpus = cached.evaluation, cached.evaluation.pod_request.demand.gpus
    rows = places(evaluation.ok if among is None else evaluation.ok & among)
    if gpus == 1:
        disjoint = int(rows.size)
    else:
        disjoint = int((np.unique(evaluation.node_and_mode(rows), return_counts=True)[1] // gpus).sum())
    return wanted if disjoint >= wanted else len(place_workers(cached, wanted, among))


def gang_refusal(cached: CachedEvaluation, workers: int, name: str) -> str:
    """Return why the workers of a job wait for each other, as one sentence with numbers.

    Args:
        cached: Evaluation of one worker.
        workers: Workers without a GPU, more than fit at present.
        name: `namespace/name` of the job.
    """
    found, most = max_workers(cached, workers), max_workers_when_empty(cached.evaluation, cached.config.slots)
    ever = f", and for {most:,} at most if all GPUs were empty" if most < workers else ""
    return (
        f"{PREFIX}job {name} needs places for {pluralize(workers, 'worker')} of "
        f"{pluralize(cached.evaluation.pod_request.demand.gpus, 'GPU')} at once, there is room for {found:,}{ever}; "
        "none starts before all can"
    )


def fits_when_empty(cached: CachedEvaluation, workers: int, among: Bools) -> bool:
    """Return whether a gang would fit on some GPUs if they were empty.

    Args:
        cached: Evaluation of one worker.
        workers: Number of workers.
        among: These GPUs, shape (gpus,).
    """
    paper = _copy(cached.evaluation, places(among))
    gpus, size = paper.snapshot.gpus, places(among).size
    empty = empty_table(size, gpus.memory_mib.shape[1])
    for name in _OF_DEVICES:
        getattr(empty, name)[:] = getattr(gpus, name)
    update_aggregates(empty, np.arange(size))
    paper = replace(paper, snapshot=replace(paper.snapshot, gpus=empty), results=run_filters(paper, empty))
    return len(_place(paper, cached.policy, workers, paper.ok, spread=cached.config.spread_workers)) == workers


_OF_DEVICES = (
    "alive", "node", "gpu_index", "nvlink_domain", "device_class", "usable_mib", "unavailable", "prepared", "uuid",
)  # fmt: skip
"""Columns that do not depend on tenants."""


def _rows_of_best_nodes(evaluation: Evaluation, policy: Policy, wanted: int, fitting: Bools) -> Rows:
    """Return the GPUs that fit on the best nodes, as many nodes as the workers can use at most."""
    if not policy.is_local:
        return places(fitting)
    found = select(evaluation, policy, among=fitting)
    cost = np.maximum(found.cost, found.cost.min(initial=np.inf) + policy.tolerance)
    order = np.lexsort((found.node, found.left_mib, -found.ready, cost, ~found.is_linked))
    nodes = np.zeros(len(evaluation.snapshot.node_names) + 1, np.bool_)
    nodes[found.node[order[:wanted]]] = True
    return places(fitting & nodes[evaluation.snapshot.gpus.node])


def _copy(evaluation: Evaluation, rows: Rows) -> Evaluation:
    """Return the evaluation on a copy of some GPUs, with room for one tenant more on each."""
    gpus = evaluation.snapshot.gpus.take(rows)
    gpus = gpus.resized(rows.size, max(evaluation.slots, gpus.memory_mib.shape[1]))
    snapshot = replace(evaluation.snapshot, gpus=gpus, grid=grid_of(gpus.alive, gpus.node))
    return replace(evaluation, snapshot=snapshot, results=evaluation.results.of(rows))


def _join(paper: Evaluation, rows: Rows, number: int) -> None:
    """Add a worker to the tenants of some GPUs, and evaluate these GPUs for the next one."""
    gpus, demand, table = paper.snapshot.gpus, paper.pod_request.demand, paper.class_table
    of, mode, slot = gpus.device_class[rows], paper.results.mode[rows], gpus.count[rows]
    gpus.memory_mib[rows, slot] = np.minimum(paper.need_mib(rows), gpus.usable_mib[rows])
    gpus.util[rows, slot], gpus.sm[rows, slot], gpus.dram[rows, slot] = table.util[of], table.sm[of], table.dram[of]
    gpus.max_slowdown[rows, slot] = demand.max_slowdown
    gpus.namespace[rows, slot] = paper.snapshot.namespaces.get(demand.namespace, NO_TENANT)
    gpus.mig_memory_slices[rows] += np.where(mode == MIG, table.mig[of, 0], 0).astype(np.int16)
    gpus.mig_compute_slices[rows] += np.where(mode == MIG, table.mig[of, 1], 0).astype(np.int16)
    gpus.mode[rows] = mode
    gpus.count[rows] += 1
    gpus.reserved_at[rows] = gpus.reserved_at.max() + 1
    if paper.pod_request.user is not None:
        gpus.user[rows] = np.where(mode == MPS, paper.pod_request.user, gpus.user[rows])
    name = TenantName(demand.namespace, demand.job_name, PodUid(f"worker-{number}"))
    for row in rows.tolist():
        gpus.tenants[row] = (*(gpus.tenants[row] or ()), name)
    update_aggregates(gpus, rows)
    paper.results.put(rows, run_filters(paper, gpus.take(rows)))


def infeasible_when_empty(evaluation: Evaluation, slots: int, workers: int) -> str | None:
    """Return why so many workers would not fit even on empty GPUs; None if they might.

    Args:
        evaluation: Evaluation of one of them.
        slots: Most tenants of one GPU.
        workers: Number of workers.
    """
    wanted, gpus = evaluation.pod_request.demand.gpus, evaluation.snapshot.gpus
    able = np.flatnonzero(evaluation.could_ever())
    able = able[_max_per_class(evaluation, slots).take(gpus.device_class.take(able)) > 0]
    most = int(np.bincount(gpus.node[able], minlength=1).max())
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if most < wanted:
        return f"needs {wanted} suitable GPUs on one node, the best node has {most}"
    if (fits := max_workers_when_empty(evaluation, slots)) < workers:
        return f"needs places for {pluralize(workers, 'worker')} at once, and empty GPUs would have {fits:,} at most"
    return None


def max_workers_when_empty(evaluation: Evaluation, slots: int) -> int:
    """Return an upper bound of the workers that fit on empty and healthy GPUs; it ignores slowdowns."""
    gpus, wanted = evaluation.snapshot.gpus, evaluation.pod_request.demand.gpus
    able = np.flatnonzero(evaluation.could_ever())
    each = _max_per_class(evaluation, slots).take(gpus.device_class.take(able))
    if wanted == 1:
        return int(each.sum())
    nodes, has_room = gpus.node.take(able), each > 0
    on_node = np.where(np.bincount(nodes, has_room) >= wanted, np.bincount(nodes, each) // wanted, 0)
    return int(on_node.sum())


def _max_per_class(evaluation: Evaluation, slots: int) -> NDArray[np.int64]:
    """Return how many workers a GPU of each class holds in the mode that holds most, shape (classes,)."""
    table, modes = evaluation.class_table, evaluation.mode_table
    usable = np.array([kind.usable_mib for kind in evaluation.snapshot.classes], np.int64)[:, None]
    mig = table.mig.astype(np.int64)
    instances = (mig[:, 2:] // np.maximum(mig[:, :2], 1)).min(axis=1)[:, None]
    most = np.where(modes.mode == MIG, instances, usable // np.maximum(modes.need_mib, 1))
    most = np.clip(most, 1, min(slots, evaluation.limits.max_jobs or slots))  # a suitable GPU holds at least one
    most = np.where(modes.mode == EXCLUSIVE, 1, most)
    result: NDArray[np.int64] = np.where(modes.mode == NO_MODE, 0, most).max(axis=1, initial=0)
    return result
