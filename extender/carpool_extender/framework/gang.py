"""Gang placement: places for all workers of a job at once, as a pure function of a snapshot."""

from typing import NamedTuple

import numpy as np
from carpool_core.values import pluralize
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import NO_MODE, Bools, places
from carpool_extender.framework.diagnosis import PREFIX, placement_reason
from carpool_extender.framework.filters import Evaluation
from carpool_extender.framework.scores import BestPerNode, select
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
    """Place workers of one job one after the other, each on GPUs of its own, as filter, score and bind would.

    NCCL refuses two ranks on one GPU. `among` are the permitted GPUs, shape (gpus,); all if None. If not so many fit,
    the places are fewer.
    """
    if wanted == 1:
        only = best_place(cached, among, with_reason=with_reason)
        return [] if only is None else [WorkerPlace(*only)]
    evaluation, policy = cached.evaluation, cached.policy
    names, grid = evaluation.snapshot.node_names, evaluation.snapshot.grid
    permitted = evaluation.ok if among is None else evaluation.ok & among
    best = BestPerNode(evaluation.pod_request.demand.gpus)
    best.resize(len(names))
    best.put_all(select(evaluation, policy, among=permitted))
    found: list[WorkerPlace] = []
    while len(found) < wanted and (node := best.first(policy)) is not None:
        chosen = best.of(np.array([node])).rows[0]
        reason = placement_reason(evaluation, chosen.tolist(), policy) if with_reason else ""
        found.append(WorkerPlace(names[node], placement_on(evaluation, chosen.tolist(), policy, reason)))
        permitted[chosen] = False
        nodes = np.zeros(len(names), np.bool_)
        nodes[node] = True
        best.put(nodes, select(evaluation, policy, grid.only(nodes), permitted))
    return found


def place_gang(cached: CachedEvaluation, workers: int, among: Bools | None = None) -> list[WorkerPlace] | None:
    """Return the place of each worker; None if not all of them fit. Arguments as in `place_workers`."""
    if workers == 1 and not cached.best.fits.any():
        return None
    found = place_workers(cached, workers, among)
    return found if len(found) == workers else None


def max_workers(cached: CachedEvaluation) -> int:
    """Return how many workers fit at once, each on GPUs of its own of one node in one mode."""
    evaluation = cached.evaluation
    rows, gpus = places(evaluation.ok), evaluation.pod_request.demand.gpus
    if gpus == 1:
        return int(rows.size)
    return int((np.unique(evaluation.node_and_mode(rows), return_counts=True)[1] // gpus).sum())


def gang_refusal(cached: CachedEvaluation, workers: int, name: str) -> str:
    """Return why the workers of a job wait for each other, as one sentence with numbers.

    More workers have no GPU than fit at present. `name` is `namespace/name` of the job.
    """
    found, most = max_workers(cached), max_workers_when_empty(cached.evaluation)
    ever = f", and for {most:,} at most if all GPUs were empty" if most < workers else ""
    return (
        f"{PREFIX}job {name} needs places for {pluralize(workers, 'worker')} of "
        f"{pluralize(cached.evaluation.pod_request.demand.gpus, 'GPU')} at once, there is room for {found:,}{ever}; "
        "none starts before all can"
    )


def infeasible_when_empty(evaluation: Evaluation, workers: int) -> str | None:
    """Return why so many workers would not fit even on empty GPUs; None if they might."""
    wanted = evaluation.pod_request.demand.gpus
    on_node = _able_when_empty(evaluation)
    most = int(on_node.max(initial=0))
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if most < wanted:
        return f"needs {wanted} suitable GPUs on one node, the best node has {most}"
    if (fits := max_workers_when_empty(evaluation)) < workers:
        return f"needs places for {pluralize(workers, 'worker')} at once, and empty GPUs would have {fits:,} at most"
    return None


def max_workers_when_empty(evaluation: Evaluation) -> int:
    """Return an upper bound of the workers that fit on empty and healthy GPUs; it ignores slowdowns."""
    return int((_able_when_empty(evaluation) // evaluation.pod_request.demand.gpus).sum())


def _able_when_empty(evaluation: Evaluation) -> NDArray[np.intp]:
    """Return the number of GPUs of each node that would do if they were empty and healthy, shape (nodes,)."""
    gpus = evaluation.snapshot.gpus
    has_mode = (evaluation.mode_table.mode != NO_MODE).any(axis=1)
    return np.bincount(gpus.node[evaluation.could_ever() & has_mode.take(gpus.device_class)])
