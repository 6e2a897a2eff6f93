"""What would have to change for a job to have a place now: one thing is changed on paper, and decided again."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from carpool_core.values import RequestedMode, Tenancy

from carpool_extender.cache.gpu_table import Floats, GpuTable, Rows, update_aggregates
from carpool_extender.cache.health import SILENT
from carpool_extender.explain.freeing import freed, is_there
from carpool_extender.explain.paperwork import Case, Change, complete_sets, fails, looked_at
from carpool_extender.framework.admission_limits import AdmissionLimits, Quantile
from carpool_extender.framework.diagnosis import pluralize
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import SLACK, Check, Evaluation
from carpool_extender.framework.selection import Placement, best_place

MOST_TOLD = 3
"""Changes that are told of those that would do."""
MOST_PATIENT = 10.0
"""The largest slowdown that a job can accept."""
NEAREST = 8
"""GPUs that are tried of those where neighbours would be slowed too much, the nearest to their limits first."""


def needed(case: Case) -> list[str]:
    """Say in one line what would have to change for a place; nothing where no GPU is known, or nothing can be tried."""
    if not case.snapshot.gpus.alive.any():
        return []
    tried = [change for attempt in ATTEMPTS for change in attempt(case)]
    ways = [change.how for change in tried if change.how is not None]
    if ways:
        return [f"it would have a place {', or '.join(ways[:MOST_TOLD])}"]
    names = ", ".join(dict.fromkeys(change.what for change in tried))
    return [f"tried one at a time, and none would give it a place: {names}"] if names else []


def _memory(case: Case) -> Iterator[Change]:
    """Count it with as much memory as the GPUs have that would take the least less."""
    small = CachedEvaluation(case.asking(memory_limit_mib=1), case.rules, case.snapshot).evaluation
    rows = np.flatnonzero(small.ok & case.offered)
    short = (case.now.need_mib(rows) - case.snapshot.gpus.free_mib[rows]).astype(np.float64)
    sets, each = complete_sets(case, small, rows, short)
    free, needs = case.snapshot.gpus.free_mib[rows[sets]] // each, case.now.need_mib(rows[sets])
    if not (free < needs).any():
        return
    least, need = int(free.min()), int(needs[np.argmin(free)])
    fits = least > 0 and case.find(case.asking(memory_limit_mib=least)) is not None
    how = _less(case, need, least, int(rows[sets[0]])) if fits else None
    if how is not None or not fits:  # it would have a place with a limit that it is predicted to exceed: no advice
        yield Change("less memory", how)


def _less(case: Case, need: int, least: int, row: int) -> str | None:
    """Say how it would count with less memory; nothing where only a limit would do that it is predicted to exceed."""
    less, demand = f"with {need - least:,} MiB less", case.demand
    if demand.memory_limit_mib is not None:
        return f"{less} (spec.memory.limit says {need:,} MiB)"
    predicted = demand.prediction_on(case.snapshot.product(row))
    if predicted is not None and predicted.memory.trusted:
        if need > predicted.memory.upper_mib:
            return f"{less} (its first run counts with {need:,} MiB, because nothing limits it by turns)"
        return f"{less} (its prediction says {need:,} MiB at most)"
    if predicted is None:
        return f"with a spec.memory.limit of {least:,} MiB or less (without one it counts with the whole GPU)"
    memory = predicted.memory
    if least < memory.median_mib:
        return None
    told = f"predicted are {memory.median_mib:,} MiB, at most {memory.upper_mib:,}"
    return f"with a spec.memory.limit of {least:,} MiB (without one it counts with the whole GPU; {told})"


def _own_limit(case: Case) -> Iterator[Change]:
    """Let it accept whatever slowdown there is; then no more than it needs to."""
    if not fails(case, Check.SLOWDOWN).size:
        return
    patient = CachedEvaluation(case.asking(max_slowdown=MOST_PATIENT), case.rules, case.snapshot).evaluation
    rows = np.flatnonzero(patient.ok & case.offered)
    slow = _own_slowdowns(patient, rows)
    sets, _ = complete_sets(case, patient, rows, slow)
    how = None
    for limit in (_rounded_up(float(slow[sets].max())), MOST_PATIENT) if sets.size else ():
        if limit > case.demand.max_slowdown and case.find(case.asking(max_slowdown=limit)) is not None:
            how = f"if it accepted {limit:.2f} instead of {case.demand.max_slowdown:.2f} (spec.sharing.maxSlowdown)"
            break
    yield Change("a larger maxSlowdown", how)


def _own_slowdowns(evaluation: Evaluation, rows: Rows) -> Floats:
    if evaluation.limits.quantile is Quantile.MEDIAN:
        return evaluation.results.slowdown[rows]
    return np.array([evaluation.upper(row) for row in rows.tolist()])


def _rounded_up(slowdown: float) -> float:
    return math.ceil((slowdown - SLACK) * 100) / 100


def _their_limits(case: Case) -> Iterator[Change]:
    """Let the neighbours that it would slow too much accept that, on the GPUs where that is least."""
    if case.wanted > 1 or case.demand.gpus > 1:
        return
    rows = fails(case, Check.SLOWDOWN)
    rows = rows[np.argsort(-case.now.results.slowdown_margin[rows], kind="stable")][:NEAREST]
    if rows.size:
        ways = (_accepting(case, row) for row in rows.tolist())
        yield Change("larger limits of its neighbours", next((way for way in ways if way is not None), None))


def _accepting(case: Case, row: int) -> str | None:
    own, *others = case.now.met(row)
    if own.slowdown - own.limit > SLACK or is_there(case, row):
        return None
    beyond = [one for one in others if one.slowdown - one.limit > SLACK]
    columns, told = case.snapshot.gpus.take(np.array([row])), []
    for one in beyond:
        limit = _rounded_up(one.slowdown)
        columns.max_slowdown[0, one.tenant] = limit
        tenant = case.snapshot.gpus.tenants[row][one.tenant]
        told.append(f"{tenant} accepted {limit:.2f} instead of {one.limit:.2f}")
    update_aggregates(columns, np.array([0]))
    return f"if {' and '.join(told)}" if _fits_alone(case, columns) else None


def _fits_alone(case: Case, columns: GpuTable) -> bool:
    """Whether one GPU, as it would be, passes all checks."""
    return bool(looked_at(case, columns).ok.all())


def _reporting(case: Case) -> Iterator[Change]:
    """Let one agent report again that is silent."""
    silent = [row for row, why in case.snapshot.unavailable.items() if why.kind == SILENT and case.offered[row]]
    if case.wanted > 1 or not silent:
        return
    columns = case.snapshot.gpus
    heard = columns.take(np.arange(len(columns.alive)))
    heard.unavailable[silent] = False
    evaluation = looked_at(case, heard)
    rows = np.flatnonzero(evaluation.ok & case.offered)
    # Whatever node has enough that fit now is a silent one: the others have not.
    sets, _ = complete_sets(case, evaluation, rows, columns.count[rows].astype(np.float64))
    how = None
    if sets.size:
        how = f"if the agent of {case.snapshot.node_names[int(columns.node[rows[sets[0]]])]} reported again"
    yield Change("an agent that reports again", how)


def _fewer_workers(case: Case) -> Iterator[Change]:
    """Let so many workers be enough as there is room for at once."""
    if case.room is not None:
        found = case.room(case.pod_request, case.rules, case.wanted)
        less = f"with {pluralize(case.wanted - found, 'worker')} less (spec.workers)"
        yield Change("fewer workers", less if found else None)


def _fewer_gpus(case: Case) -> Iterator[Change]:
    """Let a worker do with fewer GPUs, the most that would have a place."""
    asked = case.demand.gpus
    ways = (gpus for gpus in range(asked - 1, 0, -1) if case.find(case.asking(gpus=gpus)) is not None)
    if asked > 1:
        most = next(ways, None)
        how = (
            None if most is None else f"with {pluralize(asked - most, 'GPU')} less for each worker (spec.gpusPerWorker)"
        )
        yield Change("fewer GPUs", how)


def _other_asks(case: Case) -> Iterator[Change]:
    """Leave out what it asks of GPUs, one after the other, and how it wants to share them."""
    demand = case.demand
    asks: tuple[tuple[str, object, dict[str, object]], ...] = (
        ("spec.gpu.product", demand.product, {"product": None}),
        ("spec.gpu.minMemory", demand.min_memory_mib, {"min_memory_mib": 0}),
        ("spec.gpu.minComputeCapability", demand.min_compute_capability, {"min_compute_capability": None}),
    )
    for name, asked, without in asks:
        if asked:
            found = case.find(case.asking(**without))
            yield Change(f"no {name}", None if found is None else f"without {name}, on {_product(case, found[1])}")
    if demand.mode is not RequestedMode.AUTO:
        found = case.find(case.asking(mode=RequestedMode.AUTO))
        yield Change("sharing mode Auto", None if found is None else f"by {found[1].mode} with spec.sharing.mode Auto")
    if demand.tenancy is not Tenancy.CLUSTER and fails(case, Check.TENANCY).size:
        found = case.find(case.asking(tenancy=Tenancy.CLUSTER))
        yield Change("tenancy Cluster", None if found is None else "with spec.sharing.tenancy Cluster")


def _product(case: Case, place: Placement) -> str:
    return case.snapshot.product(int(np.flatnonzero(case.snapshot.gpus.uuid == place.gpu_uuids[0])[0]))


def _conditions(case: Case) -> Iterator[Change]:
    """Leave out what the site asks of GPUs before its policy looks at them."""
    asked = case.rules.limits
    if not asked.any_set or not fails(case, Check.CONDITION).size:
        return
    without = replace(case.rules, limits=AdmissionLimits(alone=asked.alone, quantile=asked.quantile))
    found = case.find(case.pod_request, without)
    yield Change("no preconditions", None if found is None else f"without the preconditions ({asked})")


def _offered(case: Case) -> Iterator[Change]:
    """Let kube-scheduler offer what it would not."""
    elsewhere = case.snapshot.gpus.alive & ~case.offered
    if case.wanted > 1 or not elsewhere.any():
        return
    found = best_place(CachedEvaluation(case.pod_request, case.rules, case.snapshot), elsewhere, with_reason=False)
    how = None if found is None else f"if kube-scheduler offered node {found[0]} ({case.refused.get(found[0], '')})"
    yield Change("nodes that are not offered", how)


ATTEMPTS: tuple[Callable[[Case], Iterator[Change]], ...] = (
    _memory,
    _own_limit,
    _their_limits,
    _reporting,
    freed,
    _fewer_workers,
    _fewer_gpus,
    _other_asks,
    _conditions,
    _offered,
)
"""The changes, in the order in which they are told."""
