"""Which GPUs would have to become free for a job to have a place."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from carpool_extender.cache.gpu_table import NO_TENANT, GpuTable, update_aggregates
from carpool_extender.explain.paperwork import Case, Change, complete_sets, looked_at, team_of
from carpool_extender.framework.diagnosis import pluralize
from carpool_extender.framework.gang import max_workers

MOST_FREED = 32
"""GPUs that are freed on paper for the workers of one job."""
MOST_LEFT_OUT = 8
"""Of so many that would do it is tried whether each of them is needed."""
MOST_NODES = 3
"""Nodes of which the GPUs are named; of more an example."""


def freed(case: Case) -> Iterator[Change]:
    """Let GPUs be free that would be enough then, those with the fewest tenants; for one worker on one node."""
    columns = case.snapshot.gpus
    empty = looked_at(case, _emptied(columns))
    rows = np.flatnonzero(empty.ok & case.offered)
    rows = rows[[not is_there(case, row) for row in rows.tolist()]]
    tenants = columns.count[rows].astype(np.float64)
    if not tenants.any():
        return
    if case.paper is not None:
        taken = rows[np.argsort(tenants, kind="stable")]
        yield Change("GPUs that are free", _for_all(case, taken[columns.count[taken] > 0].tolist()[:MOST_FREED]))
        return
    sets, _ = complete_sets(case, empty, rows, tenants)
    how = None
    if sets.size:
        team = team_of(empty, rows)
        mine = rows[team == team[sets[0]]]
        mine = mine[np.argsort(columns.count[mine], kind="stable")][: case.demand.gpus]
        how = _once_free(case, sorted(mine[columns.count[mine] > 0].tolist()))
    yield Change("a GPU that is free" if case.demand.gpus == 1 else "GPUs that are free", how)


def _for_all(case: Case, taken: list[int]) -> str | None:
    """Free as few GPUs as are needed for all workers of a job, the first of some that have tenants."""
    columns = case.snapshot.gpus
    if case.paper is None or not taken:
        return None
    fits = np.flatnonzero(case.now.ok & case.offered)
    beside = np.isin(columns.node.take(fits), columns.node.take(taken))
    elsewhere = max_workers(case.cached_evaluation, fits[~beside], case.wanted)  # workers on several nodes do not meet
    paper = case.paper(set(columns.uuid[np.append(fits[beside], taken)].tolist()))

    def enough(rows: Sequence[int]) -> bool:
        return elsewhere + paper.once_free({columns.uuid[row] for row in rows}) >= case.wanted

    if not enough(taken):
        return None
    least = taken[: bisect_left(range(len(taken)), True, key=lambda last: enough(taken[: last + 1])) + 1]
    if len(least) <= MOST_LEFT_OUT:
        for row in least[:-1]:  # the last one is needed
            without = [other for other in least if other != row]
            least = without if enough(without) else least
    return _once_free(case, _with_all_of_theirs(case, least))


def _with_all_of_theirs(case: Case, rows: list[int]) -> list[int]:
    """Return GPUs with the others of their tenants, which become free with them, sorted."""
    columns = case.snapshot.gpus
    pods = {tenant.pod_uid for row in rows for tenant in columns.tenants[row]}
    beside = np.flatnonzero(columns.alive & np.isin(columns.node, columns.node[rows])).tolist()
    return [row for row in beside if row in rows or any(one.pod_uid in pods for one in columns.tenants[row])]


def is_there(case: Case, row: int) -> bool:
    """Whether another worker of the job is on a GPU: nobody waits for that one to end."""
    own = (case.demand.namespace, case.demand.job_name)
    return any((one.namespace, one.job) == own for one in case.snapshot.gpus.tenants[row])


def _once_free(case: Case, rows: list[int]) -> str:
    columns = case.snapshot.gpus
    of_nodes = [[*members] for _, members in groupby(rows, lambda row: int(columns.node[row]))]
    which = " and ".join(_gpus(case, members) for members in of_nodes)
    if len(of_nodes) > MOST_NODES:
        which = f"{pluralize(len(rows), 'GPU')} of {pluralize(len(of_nodes), 'node')}"
    names = sorted({str(tenant) for row in rows for tenant in columns.tenants[row]})
    there = f"{names[0]} is" if len(names) == 1 else f"{pluralize(len(names), 'job')} are"
    such = f", such as {_gpus(case, of_nodes[0])}" if len(of_nodes) > MOST_NODES else ""
    return f"once {which} {'is' if len(rows) == 1 else 'are'} free{such} ({there} there)"


def _gpus(case: Case, rows: list[int]) -> str:
    """Name GPUs of one node."""
    columns = case.snapshot.gpus
    numbers = ", ".join(str(int(columns.gpu_index[row])) for row in rows)
    return f"GPU{'' if len(rows) == 1 else 's'} {numbers} of {case.snapshot.node_names[int(columns.node[rows[0]])]}"


def _emptied(columns: GpuTable) -> GpuTable:
    """Return GPUs as if they had no tenants."""
    all_ = np.arange(len(columns.alive))
    empty = columns.take(all_)
    for column in (empty.mode, empty.count, empty.mig_gb, empty.mig_slices):
        column[:] = 0
    for each in (empty.memory_mib, empty.util, empty.sm, empty.dram):
        each[:] = 0
    empty.user[:], empty.namespace[:], empty.max_slowdown[:], empty.cluster_tenancy[:] = (
        NO_TENANT,
        NO_TENANT,
        np.inf,
        False,
    )
    update_aggregates(empty, all_)
    return empty
