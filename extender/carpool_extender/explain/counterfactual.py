"""What would have to change for a waiting job to get a place: one thing is changed in a scenario and evaluated again.

Each attempt calls the scheduler's own filters and gang placement on a changed request, configuration or GPU table.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from carpool_core.demand import Demand
from carpool_core.resources.node import GpuNode
from carpool_core.values import GpuUuid, PodUid, RequestedMode, Tenancy

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import (
    MODES,
    NO_TENANT,
    Floats,
    GpuTable,
    Rows,
    Snapshot,
    update_aggregates,
)
from carpool_extender.cache.health import SILENT
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.admission_limits import AdmissionLimits, Quantile
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import (
    LIMITS,
    SLACK,
    SLOWDOWN,
    TENANCY,
    Check,
    Evaluation,
    pluralize,
    run_filters,
)
from carpool_extender.framework.gang import max_workers
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import Placement, best_place

MAX_ADVICE = 3
"""Working changes that the advice names."""
MAX_SLOWDOWN_LIMIT = 10.0
"""The largest spec.sharing.maxSlowdown that the schema accepts."""
MAX_SLOWED_GPUS = 8
"""GPUs on which larger limits of the co-tenants are tried, closest to their limits first."""
MAX_FREED_GPUS = 32
"""GPUs that are emptied for the workers of one gang."""
MAX_NECESSITY_TESTS = 8
"""Up to this many emptied GPUs, each is tested for being needed."""
MAX_NAMED_NODES = 3
"""Nodes whose GPUs are listed; of more nodes the first is the example."""


class Change(NamedTuple):
    """One attempted change."""

    what: str
    """The attempt, in a few words."""
    how: str | None
    """The change that gives the job a place, to follow `it would have a place`; None where no amount of it does."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A waiting job on a snapshot of the cluster."""

    pod_request: PodRequest
    config: SchedulerConfig
    cluster: ClusterCache
    wanted: int = 1
    """Workers that must find places at once."""
    whole_gang: bool = False
    """Whether the job is refused because not all its workers find places."""

    @cached_property
    def snapshot(self) -> Snapshot:
        """The cluster's GPUs."""
        return self.cluster.snapshot()

    @cached_property
    def cached_evaluation(self) -> CachedEvaluation:
        """The unchanged request's evaluation."""
        return CachedEvaluation(self.pod_request, self.config, self.snapshot)

    @property
    def now(self) -> Evaluation:
        """The filters' results for the unchanged request."""
        return self.cached_evaluation.evaluation

    @property
    def demand(self) -> Demand:
        """The demand of one worker."""
        return self.pod_request.demand

    def requesting(self, **changes: Any) -> PodRequest:
        """Return the request with a changed demand."""
        of = self.pod_request
        return PodRequest(replace(of.demand, **changes), of.policy, of.workers, of.user, of.may_use_measured_peak)

    def place(self, pod_request: PodRequest, config: SchedulerConfig | None = None) -> tuple[str, Placement] | None:
        """Return node and placement of the first worker if all wanted workers fit; None otherwise."""
        evaluated = CachedEvaluation(pod_request, config or self.config, self.snapshot)
        if self.whole_gang and max_workers(evaluated, self.wanted) < self.wanted:
            return None
        return best_place(evaluated, with_reason=False)

    def evaluate(self, table: GpuTable) -> Evaluation:
        """Run all filters on a changed GPU table."""
        return replace(self.now, results=run_filters(self.now, table))

    def failing(self, check: Check) -> Rows:
        """Return the rows of the GPUs that this check refuses."""
        return np.flatnonzero(self.now.results.failed == check.number)


def advice(scenario: Scenario) -> list[str]:
    """Return one line with the changes that would give the job a place; no line where no GPU is known."""
    if not scenario.snapshot.gpus.alive.any():
        return []
    tried = [change for attempt in ATTEMPTS for change in attempt(scenario)]
    ways = [change.how for change in tried if change.how is not None]
    if ways:
        return [f"it would have a place {', or '.join(ways[:MAX_ADVICE])}"]
    names = ", ".join(dict.fromkeys(change.what for change in tried))
    return [f"tried one at a time, and none would give it a place: {names}"] if names else []


def without_pods(node: GpuNode, pods: Collection[PodUid]) -> GpuNode:
    """Return a GpuNode without the reservations and measurements of some pods."""
    reservations = [one for one in node.spec.reservations if one.pod_uid not in pods]
    tenants = [one for one in node.status.tenants if one.pod_uid not in pods]
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, reservations=reservations),
        status=msgspec.structs.replace(node.status, tenants=tenants),
    )


def _team(evaluation: Evaluation, rows: Rows) -> Rows:
    """Return one number for all GPUs that one worker can use together: same node and sharing mode."""
    team: Rows = evaluation.snapshot.gpus.node[rows].astype(np.intp) * len(MODES) + evaluation.results.mode[rows]
    return team


def _complete_sets(scenario: Scenario, evaluation: Evaluation, rows: Rows, lacks: Floats) -> tuple[Rows, int]:
    """Return the worst GPU of each complete set for one worker, in the order of what is lacking there.

    Args:
        scenario: The job.
        evaluation: The filters' results by which `rows` fit.
        rows: The GPUs.
        lacks: What each lacks, in one unit.

    Returns:
        Indices into `rows`, one for each worker as far as there are sets, and the workers that each stands for.
    """
    gpus = scenario.demand.gpus
    team = _team(evaluation, rows)
    order = np.lexsort((lacks, team))
    number = np.arange(order.size) - np.searchsorted(team[order], team[order])
    last = order[number % gpus == gpus - 1]
    needed = last[np.argsort(lacks[last], kind="stable")][: scenario.wanted]
    return needed, math.ceil(scenario.wanted / max(1, needed.size))


def _less_memory(scenario: Scenario) -> Iterator[Change]:
    """Try the memory of the GPUs that lack least."""
    small = CachedEvaluation(scenario.requesting(memory_limit_mib=1), scenario.config, scenario.snapshot).evaluation
    rows = np.flatnonzero(small.ok)
    free_mib = scenario.snapshot.gpus.free_mib
    short = (scenario.now.need_mib(rows) - free_mib[rows]).astype(np.float64)
    sets, each = _complete_sets(scenario, small, rows, short)
    free, needs = free_mib[rows[sets]] // each, scenario.now.need_mib(rows[sets])
    if not (free < needs).any():
        return
    least, need = int(free.min()), int(needs[np.argmin(free)])
    fits = least > 0 and scenario.place(scenario.requesting(memory_limit_mib=least)) is not None
    how = _memory_advice(scenario, need, least, int(rows[sets[0]])) if fits else None
    if how is not None or not fits:  # a limit below the predicted median is no advice
        yield Change("less memory", how)


def _memory_advice(scenario: Scenario, need: int, least: int, row: int) -> str | None:
    """Return how the request could count with `least` MiB; None where only a limit below the prediction would do."""
    less, demand = f"with {need - least:,} MiB less", scenario.demand
    if demand.memory_limit_mib is not None:
        return f"{less} (spec.memory.limit is {need:,} MiB)"
    predicted = demand.prediction_on(scenario.snapshot.product(row))
    if predicted is None:
        return f"with a spec.memory.limit of {least:,} MiB or less (without one it counts with the whole GPU)"
    memory = predicted.memory
    if memory.trusted:
        if need > memory.upper_mib:
            return f"{less} (its first run counts with {need:,} MiB, because time-slicing enforces no limit)"
        return f"{less} (its predicted bound is {need:,} MiB)"
    if least < memory.median_mib:
        return None
    figures = f"predicted are {memory.median_mib:,} MiB, at most {memory.upper_mib:,}"
    return f"with a spec.memory.limit of {least:,} MiB (without one it counts with the whole GPU; {figures})"


def _larger_own_limit(scenario: Scenario) -> Iterator[Change]:
    """Try the largest maxSlowdown, then the smallest that suffices."""
    if not scenario.failing(SLOWDOWN).size:
        return
    patient_request = scenario.requesting(max_slowdown=MAX_SLOWDOWN_LIMIT)
    patient = CachedEvaluation(patient_request, scenario.config, scenario.snapshot).evaluation
    rows = np.flatnonzero(patient.ok)
    slowdowns = _own_slowdowns(patient, rows)
    sets, _ = _complete_sets(scenario, patient, rows, slowdowns)
    how, own = None, scenario.demand.max_slowdown
    for limit in (_round_up(float(slowdowns[sets].max())), MAX_SLOWDOWN_LIMIT) if sets.size else ():
        if limit > own and scenario.place(scenario.requesting(max_slowdown=limit)) is not None:
            how = f"if it accepted {limit:.2f} instead of {own:.2f} (spec.sharing.maxSlowdown)"
            break
    yield Change("a larger maxSlowdown", how)


def _own_slowdowns(evaluation: Evaluation, rows: Rows) -> Floats:
    if evaluation.limits.quantile is Quantile.MEDIAN:
        return evaluation.results.slowdown[rows]
    return np.array([evaluation.upper_slowdown(row) for row in rows.tolist()])


def _round_up(slowdown: float) -> float:
    return math.ceil((slowdown - SLACK) * 100) / 100


def _larger_limits_of_tenants(scenario: Scenario) -> Iterator[Change]:
    """Try larger limits of the co-tenants on the GPUs where they are exceeded least."""
    if scenario.wanted > 1 or scenario.demand.gpus > 1:
        return
    rows = scenario.failing(SLOWDOWN)
    rows = rows[np.argsort(-scenario.now.results.slowdown_margin[rows], kind="stable")][:MAX_SLOWED_GPUS]
    if rows.size:
        ways = (_accepting(scenario, row) for row in rows.tolist())
        yield Change("larger limits of its co-tenants", next((way for way in ways if way is not None), None))


def _accepting(scenario: Scenario, row: int) -> str | None:
    own, *tenants = scenario.now.members(row)
    if own.slowdown - own.limit > SLACK or _holds_worker(scenario, row):
        return None
    table, parts = scenario.snapshot.gpus.take(np.array([row])), []
    for one in tenants:
        if one.slowdown - one.limit > SLACK:
            limit = _round_up(one.slowdown)
            table.max_slowdown[0, one.tenant] = limit
            name = scenario.snapshot.gpus.tenants[row][one.tenant]
            parts.append(f"{name} accepted {limit:.2f} instead of {one.limit:.2f}")
    update_aggregates(table, np.array([0]))
    return f"if {' and '.join(parts)}" if bool(scenario.evaluate(table).ok.all()) else None


def _reporting_agent(scenario: Scenario) -> Iterator[Change]:
    """Try GPUs whose agents are silent."""
    silent = [row for row, why in scenario.snapshot.unavailable.items() if why.kind == SILENT]
    if scenario.wanted > 1 or not silent:
        return
    table = scenario.snapshot.gpus
    heard = table.take(np.arange(len(table.alive)))
    heard.unavailable[silent] = False
    evaluation = scenario.evaluate(heard)
    rows = np.flatnonzero(evaluation.ok)
    # The job is refused on all other nodes, so a node with enough GPUs here is a silent one.
    sets, _ = _complete_sets(scenario, evaluation, rows, table.count[rows].astype(np.float64))
    how = None
    if sets.size:
        how = f"if the agent of {scenario.snapshot.node_names[int(table.node[rows[sets[0]]])]} reported again"
    yield Change("an agent that reports again", how)


def _freed_gpus(scenario: Scenario) -> Iterator[Change]:
    """Try empty GPUs, those with the fewest tenants first."""
    table = scenario.snapshot.gpus
    empty = scenario.evaluate(_emptied(table))
    rows = np.flatnonzero(empty.ok)
    rows = rows[[not _holds_worker(scenario, row) for row in rows.tolist()]]
    tenants = table.count[rows].astype(np.float64)
    if not tenants.any():
        return
    if scenario.whole_gang:
        taken = rows[np.argsort(tenants, kind="stable")]
        taken = taken[table.count[taken] > 0]
        yield Change("GPUs that are free", _freed_for_gang(scenario, taken.tolist()[:MAX_FREED_GPUS]))
        return
    sets, _ = _complete_sets(scenario, empty, rows, tenants)
    how = None
    if sets.size:
        team = _team(empty, rows)
        mine = rows[team == team[sets[0]]]
        mine = mine[np.argsort(table.count[mine], kind="stable")][: scenario.demand.gpus]
        how = _once_free(scenario, sorted(mine[table.count[mine] > 0].tolist()))
    yield Change("a GPU that is free" if scenario.demand.gpus == 1 else "GPUs that are free", how)


def _freed_for_gang(scenario: Scenario, taken: list[int]) -> str | None:
    """Return the fewest of `taken` whose tenants have to end for the whole gang to fit."""
    if not taken:
        return None
    table = scenario.snapshot.gpus
    fits = np.flatnonzero(scenario.now.ok)
    beside = np.isin(table.node.take(fits), table.node.take(taken))
    # Workers on different nodes do not interact, so only the nodes of the emptied GPUs are evaluated again.
    elsewhere = max_workers(scenario.cached_evaluation, scenario.wanted, ~np.isin(table.node, table.node.take(taken)))
    emptying = _Emptying(scenario, set(table.uuid[np.append(fits[beside], taken)].tolist()))

    def suffices(rows: Sequence[int]) -> bool:
        return elsewhere + emptying.workers_once_free({table.uuid[row] for row in rows}) >= scenario.wanted

    if not suffices(taken):
        return None
    least = taken[: bisect_left(range(len(taken)), True, key=lambda last: suffices(taken[: last + 1])) + 1]
    if len(least) <= MAX_NECESSITY_TESTS:
        for row in least[:-1]:
            without = [other for other in least if other != row]
            least = without if suffices(without) else least
    return _once_free(scenario, _with_gpus_of_tenants(scenario, least))


class _Emptying:
    """A copy of some GPUs whose tenants can be removed and put back."""

    def __init__(self, scenario: Scenario, gpus: Set[GpuUuid]) -> None:
        self._scenario = scenario
        nodes = scenario.cluster.nodes.items()
        self._nodes = {name: part for name, node in nodes if (part := _only_gpus(node, gpus)) is not None}
        self._copy = ClusterCache(scenario.config.slots)
        for node in self._nodes.values():
            self._copy.apply(node)

    def workers_once_free(self, freed: Set[GpuUuid]) -> int:
        """Return how many of the wanted workers fit once the tenants of some GPUs have ended."""
        changed = list[GpuNode]()
        for node in self._nodes.values():
            gone = {one.pod_uid for one in node.spec.reservations if not freed.isdisjoint(one.gpu_uuids)}
            if gone:
                self._copy.apply(without_pods(node, gone))
                changed.append(node)
        evaluated = CachedEvaluation(self._scenario.pod_request, self._scenario.config, self._copy.snapshot())
        fitting = max_workers(evaluated, self._scenario.wanted)
        for node in changed:
            self._copy.apply(node)
        return fitting


def _only_gpus(node: GpuNode, gpus: Set[GpuUuid]) -> GpuNode | None:
    devices = [device for device in node.status.devices if device.uuid in gpus]
    status = msgspec.structs.replace(node.status, devices=devices)
    return msgspec.structs.replace(node, status=status) if devices else None


def _with_gpus_of_tenants(scenario: Scenario, rows: list[int]) -> list[int]:
    """Return GPUs and the other GPUs of their tenants, which become free at the same time, sorted."""
    table = scenario.snapshot.gpus
    pods = {tenant.pod_uid for row in rows for tenant in table.tenants[row]}
    beside = np.flatnonzero(table.alive & np.isin(table.node, table.node[rows])).tolist()
    return [row for row in beside if row in rows or any(one.pod_uid in pods for one in table.tenants[row])]


def _holds_worker(scenario: Scenario, row: int) -> bool:
    """Return whether a worker of the same job runs on a GPU."""
    own = (scenario.demand.namespace, scenario.demand.job_name)
    return any((one.namespace, one.job) == own for one in scenario.snapshot.gpus.tenants[row])


def _once_free(scenario: Scenario, rows: list[int]) -> str:
    table = scenario.snapshot.gpus
    of_nodes = [[*members] for _, members in groupby(rows, lambda row: int(table.node[row]))]
    which = " and ".join(_name_gpus(scenario, members) for members in of_nodes)
    if len(of_nodes) > MAX_NAMED_NODES:
        which = f"{pluralize(len(rows), 'GPU')} of {pluralize(len(of_nodes), 'node')}"
    names = sorted({str(tenant) for row in rows for tenant in table.tenants[row]})
    there = f"{names[0]} is" if len(names) == 1 else f"{pluralize(len(names), 'job')} are"
    such = f", such as {_name_gpus(scenario, of_nodes[0])}" if len(of_nodes) > MAX_NAMED_NODES else ""
    return f"once {which} {'is' if len(rows) == 1 else 'are'} free{such} ({there} there)"


def _name_gpus(scenario: Scenario, rows: list[int]) -> str:
    """Name GPUs of one node: `GPUs 0, 1 of node-a`."""
    table = scenario.snapshot.gpus
    numbers = ", ".join(str(int(table.gpu_index[row])) for row in rows)
    return f"GPU{'' if len(rows) == 1 else 's'} {numbers} of {scenario.snapshot.node_names[int(table.node[rows[0]])]}"


def _emptied(table: GpuTable) -> GpuTable:
    """Return a copy of the GPU table without tenants."""
    rows = np.arange(len(table.alive))
    empty = table.take(rows)
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
    update_aggregates(empty, rows)
    return empty


def _fewer_workers(scenario: Scenario) -> Iterator[Change]:
    """Try as many workers as fit at once."""
    if scenario.whole_gang:
        fitting = max_workers(scenario.cached_evaluation, scenario.wanted)
        less = f"with {pluralize(scenario.wanted - fitting, 'worker')} less (spec.workers)"
        yield Change("fewer workers", less if fitting else None)


def _fewer_gpus(scenario: Scenario) -> Iterator[Change]:
    """Try fewer GPUs for each worker, the most that fit."""
    asked = scenario.demand.gpus
    if asked > 1:
        ways = (n for n in range(asked - 1, 0, -1) if scenario.place(scenario.requesting(gpus=n)) is not None)
        most = next(ways, None)
        how = (
            None if most is None else f"with {pluralize(asked - most, 'GPU')} less for each worker (spec.gpusPerWorker)"
        )
        yield Change("fewer GPUs", how)


def _other_requirements(scenario: Scenario) -> Iterator[Change]:
    """Try the job without each of its requirements."""
    demand = scenario.demand
    requirements: tuple[tuple[str, object, dict[str, object]], ...] = (
        ("spec.gpu.product", demand.product, {"product": None}),
        ("spec.gpu.minMemory", demand.min_memory_mib, {"min_memory_mib": 0}),
        ("spec.gpu.minComputeCapability", demand.min_compute_capability, {"min_compute_capability": None}),
    )
    for name, value, without in requirements:
        if value:
            found = scenario.place(scenario.requesting(**without))
            yield Change(f"no {name}", None if found is None else f"without {name}, on {_product(scenario, found[1])}")
    if demand.mode is not RequestedMode.AUTO:
        found = scenario.place(scenario.requesting(mode=RequestedMode.AUTO))
        yield Change("sharing mode Auto", None if found is None else f"by {found[1].mode} with spec.sharing.mode Auto")
    if demand.tenancy is not Tenancy.CLUSTER and scenario.failing(TENANCY).size:
        found = scenario.place(scenario.requesting(tenancy=Tenancy.CLUSTER))
        yield Change("tenancy Cluster", None if found is None else "with spec.sharing.tenancy Cluster")


def _product(scenario: Scenario, place: Placement) -> str:
    row = int(np.flatnonzero(scenario.snapshot.gpus.uuid == place.gpu_uuids[0])[0])
    return scenario.snapshot.product(row)


def _no_admission_limits(scenario: Scenario) -> Iterator[Change]:
    """Try the site's configuration without its admission limits."""
    limits = scenario.config.limits
    if not limits.set() or not scenario.failing(LIMITS).size:
        return
    without = replace(scenario.config, limits=AdmissionLimits(exclusive=limits.exclusive, quantile=limits.quantile))
    found = scenario.place(scenario.pod_request, without)
    yield Change("no admission limits", None if found is None else f"without the site's admission limits ({limits})")


ATTEMPTS: tuple[Callable[[Scenario], Iterator[Change]], ...] = (
    _less_memory,
    _larger_own_limit,
    _larger_limits_of_tenants,
    _reporting_agent,
    _freed_gpus,
    _fewer_workers,
    _fewer_gpus,
    _other_requirements,
    _no_admission_limits,
)
"""All attempts, in the order in which the advice names them."""
