"""Which GPUs would have to become free for a job to have a place."""

from collections.abc import Iterator, Set
from itertools import groupby

import numpy as np
from carpool_core.values import GpuUuid

from carpool_extender.explain.paperwork import Case, Change, complete_sets, looked_at, team_of
from carpool_extender.placement.refusal import counted
from carpool_extender.state.aggregates import work_out
from carpool_extender.state.view import NOBODY, Columns

MOST_FREED = 32
"""GPUs that are freed on paper for the workers of one job."""


def freed(case: Case) -> Iterator[Change]:
    """Let GPUs be free that would be enough then, those with the fewest tenants; for one worker on one node."""
    if case.wanted > 1 and case.room_once_free is None:
        return
    columns = case.view.columns
    empty = looked_at(case, _emptied(columns))
    rows = np.flatnonzero(empty.ok & case.offered)
    able = {columns.uuid[row] for row in rows.tolist()}
    rows = rows[[not is_there(case, row) for row in rows.tolist()]]
    tenants = columns.count[rows].astype(np.float64)
    if not tenants.any():
        return
    if case.room_once_free is not None:
        taken = rows[np.argsort(tenants, kind="stable")]
        yield Change("GPUs that are free", _for_all(case, able, taken[columns.count[taken] > 0].tolist()[:MOST_FREED]))
        return
    sets, _ = complete_sets(case, empty, rows, tenants)
    how = None
    if sets.size:
        team = team_of(empty, rows)
        mine = rows[team == team[sets[0]]]
        mine = mine[np.argsort(columns.count[mine], kind="stable")][: case.demand.gpus]
        how = _once_free(case, sorted(mine[columns.count[mine] > 0].tolist()))
    yield Change("a GPU that is free" if case.demand.gpus == 1 else "GPUs that are free", how)


def _for_all(case: Case, able: Set[GpuUuid], taken: list[int]) -> str | None:
    """Free as few GPUs as are needed for all workers of a job, the first of some.

    Args:
        case: The job.
        able: GPUs that would take a worker if they were empty.
        taken: Those of them that have tenants.
    """

    def enough(rows: list[int]) -> bool:
        uuids = {case.view.columns.uuid[row] for row in rows}
        return case.room_once_free is not None and case.room_once_free(able, uuids) >= case.wanted

    if not taken or not enough(taken):
        return None
    low, high = 0, len(taken)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(taken[:middle]) else (middle, high)
    least = taken[:high]
    for row in least[:-1]:  # the last one is needed
        without = [other for other in least if other != row]
        least = without if enough(without) else least
    return _once_free(case, sorted(least))


def is_there(case: Case, row: int) -> bool:
    """Whether another worker of the job is on a GPU: nobody waits for that one to end."""
    own = (case.demand.namespace, case.demand.job_name)
    return any((one.namespace, one.job) == own for one in case.view.columns.tenants[row])


def _once_free(case: Case, rows: list[int]) -> str:
    columns = case.view.columns
    of_node = groupby(rows, lambda row: int(columns.node[row]))
    which = " and ".join(_gpus(case, node, [*members]) for node, members in of_node)
    names = sorted({str(tenant) for row in rows for tenant in columns.tenants[row]})
    there = f"{names[0]} is" if len(names) == 1 else f"{counted(len(names), 'job')} are"
    return f"once {which} {'is' if len(rows) == 1 else 'are'} free ({there} there)"


def _gpus(case: Case, node: int, rows: list[int]) -> str:
    numbers = ", ".join(str(int(case.view.columns.gpu_index[row])) for row in rows)
    return f"GPU{'' if len(rows) == 1 else 's'} {numbers} of {case.view.node_names[node]}"


def _emptied(columns: Columns) -> Columns:
    """Return GPUs as if they had no tenants."""
    all_ = np.arange(len(columns.alive))
    empty = columns.take(all_)
    for column in (empty.mode, empty.count, empty.mig_gb, empty.mig_slices):
        column[:] = 0
    for each in (empty.memory_mib, empty.util, empty.sm, empty.dram):
        each[:] = 0
    empty.user[:], empty.namespace[:], empty.max_slowdown[:], empty.cluster_tenancy[:] = NOBODY, NOBODY, np.inf, False
    work_out(empty, all_)
    return empty
