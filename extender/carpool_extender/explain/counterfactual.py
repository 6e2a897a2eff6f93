"""Changes with which a waiting job would get a place.

Each attempt changes one thing and places the job again: the request, the site's configuration, or the snapshot of the
cluster. The scheduler's own filters and gang placement decide.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import numpy as np
from carpool_core.demand import Demand
from carpool_core.values import RequestedMode, Tenancy, pluralize

from carpool_extender.cache.cluster import AGENT_DOWN, ClusterCache, without_pods
from carpool_extender.cache.gpu_table import GpuTable, Snapshot, update_aggregates
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import SLACK, AdmissionLimits
from carpool_extender.framework.gang import max_workers
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import CachedEvaluation, EvaluationCache, Placement, best_place

MAX_ADVICE = 3
"""Working changes that the advice names."""
MAX_SLOWDOWN_LIMIT = 10.0
"""The largest spec.sharing.maxSlowdown that the schema accepts."""
MAX_NECESSITY_TESTS = 8
"""Up to this many sets of emptied GPUs, each is tested for being needed."""
MAX_NAMED_NODES = 3
"""Nodes whose GPUs are listed; of more nodes the first is the example."""
NO_ADVICE = (
    "no single change would give it a place; tried: less memory, larger slowdown limits, agents that report again, "
    "free GPUs, fewer workers or GPUs, each of its requirements, the site's admission limits"
)


@dataclass(frozen=True, eq=False)
class Scenario:
    """A waiting job on a cluster."""

    request: PodRequest
    config: SchedulerConfig
    cluster: ClusterCache
    """It is changed while an attempt runs, and is as before afterwards."""
    workers: int = 1
    """Workers that must find places at once."""

    @property
    def snapshot(self) -> Snapshot:
        """The cluster's GPUs."""
        return self.cluster.snapshot()

    @cached_property
    def now(self) -> CachedEvaluation:
        """Evaluation of the unchanged request."""
        return CachedEvaluation(self.request, self.config, self.snapshot)

    @property
    def demand(self) -> Demand:
        """Demand of one worker."""
        return self.request.demand

    def requesting(self, **changes: Any) -> PodRequest:
        """Return the request with a changed demand."""
        of = self.request
        return PodRequest(
            replace(of.demand, **changes),
            of.policy,
            of.workers,
            of.user,
            of.may_use_measured_peak,
            constraints=of.constraints,
        )

    def place(
        self,
        request: PodRequest | None = None,
        config: SchedulerConfig | None = None,
        table: GpuTable | None = None,
    ) -> Placement | None:
        """Return the placement of the first worker if all workers fit after a change; None otherwise."""
        snapshot = self.snapshot if table is None else replace(self.snapshot, gpus=table)
        cached = CachedEvaluation(request or self.request, config or self.config, snapshot)
        if max_workers(cached) < self.workers:
            return None
        found = best_place(cached, with_reason=False)
        return None if found is None else found[1]

    def row(self, place: Placement) -> int:
        """Return the row of a placement's first GPU."""
        return int(np.flatnonzero(self.snapshot.gpus.uuid == place.gpu_uuids[0])[0])

    def holds_worker(self, row: int) -> bool:
        """Return whether a worker of the same job has the GPU of a row."""
        own = (self.demand.namespace, self.demand.job_name)
        return any((one.namespace, one.job) == own for one in self.snapshot.gpus.tenants[row] or ())


def advice(scenario: Scenario) -> list[str]:
    """Return one line with the changes that would give the job a place; no line if the cluster has no GPU."""
    if not scenario.snapshot.gpus.alive.any():
        return []
    working = [*islice((way for attempt in ATTEMPTS for way in attempt(scenario)), MAX_ADVICE)]
    return [f"it would have a place {', or '.join(working)}" if working else NO_ADVICE]


def _less_memory(scenario: Scenario) -> Iterator[str]:
    """Try the largest memory limit with which the job fits."""

    def fits(limit_mib: int) -> Placement | None:
        return scenario.place(scenario.requesting(memory_limit_mib=limit_mib))

    most = int(scenario.now.evaluation.need_mib(None).max())
    if fits(1) is None or fits(most) is not None:
        return
    limit = bisect_left(range(most), True, lo=1, key=lambda mib: fits(mib) is None) - 1
    if (place := fits(limit)) is not None and (how := _memory_advice(scenario, scenario.row(place), limit)):
        yield how


def _memory_advice(scenario: Scenario, row: int, limit_mib: int) -> str | None:
    """Return how the request could count with less memory; None if only a limit below the prediction would do."""
    demand, need = scenario.demand, int(scenario.now.evaluation.need_mib(np.array([row]))[0])
    less = f"with {need - limit_mib:,} MiB less"
    if demand.memory_limit_mib is not None:
        return f"{less} (spec.memory.limit is {need:,} MiB)"
    predicted = demand.prediction_on(scenario.snapshot.product(row))
    whole_gpu = "without one it counts with the whole GPU"
    if predicted is None:
        return f"with a spec.memory.limit of {limit_mib:,} MiB or less ({whole_gpu})"
    memory = predicted.memory
    if memory.trusted:
        if need > memory.upper_mib:
            return f"{less} (its first run counts with {need:,} MiB, because time-slicing enforces no limit)"
        return f"{less} (its predicted bound is {need:,} MiB)"
    if limit_mib < memory.median_mib:
        return None
    figures = f"predicted are {memory.median_mib:,} MiB, at most {memory.upper_mib:,}"
    return f"with a spec.memory.limit of {limit_mib:,} MiB ({whole_gpu}; {figures})"


def _larger_own_limit(scenario: Scenario) -> Iterator[str]:
    """Try the smallest maxSlowdown with which the job fits, in hundredths."""

    def fits(hundredths: int) -> bool:
        return scenario.place(scenario.requesting(max_slowdown=hundredths / 100)) is not None

    own, most = scenario.demand.max_slowdown, round(100 * MAX_SLOWDOWN_LIMIT)
    if own < MAX_SLOWDOWN_LIMIT and fits(most):
        limit = bisect_left(range(most), True, lo=math.floor(100 * own) + 1, key=fits) / 100
        yield f"if it accepted {limit:.2f} instead of {own:.2f} (spec.sharing.maxSlowdown)"


def _larger_limits_of_tenants(scenario: Scenario) -> Iterator[str]:
    """Try without the limits of the co-tenants, and name those that would be exceeded."""
    if scenario.workers > 1 or scenario.demand.gpus > 1:
        return
    table = scenario.snapshot.gpus.take(np.arange(len(scenario.snapshot.gpus.alive)))
    others = [row for row in np.flatnonzero(table.count).tolist() if not scenario.holds_worker(row)]
    table.max_slowdown[others] = np.inf
    update_aggregates(table, np.array(others, np.intp))
    if (place := scenario.place(table=table)) is None:
        return
    row, parts = scenario.row(place), []
    for one in scenario.now.evaluation.members(row)[1:]:
        if one.slowdown - one.limit > SLACK:
            limit = math.ceil((one.slowdown - SLACK) * 100) / 100
            name = scenario.snapshot.gpus.tenants[row][one.tenant]
            parts.append(f"{name} accepted {limit:.2f} instead of {one.limit:.2f}")
    yield f"if {' and '.join(parts)}"


def _reporting_agent(scenario: Scenario) -> Iterator[str]:
    """Try the GPUs whose agents are down."""
    down = [row for row, why in scenario.snapshot.unavailable.items() if why.kind == AGENT_DOWN]
    if down:
        table = scenario.snapshot.gpus.take(np.arange(len(scenario.snapshot.gpus.alive)))
        table.unavailable[down] = False
        if (place := scenario.place(table=table)) is not None:
            node = scenario.snapshot.node_names[int(table.node[scenario.row(place)])]
            yield f"if the agent of {node} ran again"


def _freed_gpus(scenario: Scenario) -> Iterator[str]:
    """Try GPUs without their tenants, those with the fewest tenants first."""
    cluster, evaluations = scenario.cluster, EvaluationCache(scenario.cluster, scenario.config)
    tenants, sets = dict(enumerate(scenario.snapshot.gpus.tenants)), _sets_to_free(scenario)

    def suffices(chosen: Sequence[Sequence[int]]) -> bool:
        gone = {tenant.pod_uid for rows in chosen for row in rows for tenant in tenants[row]}
        changed = [cluster.nodes[name] for pod in gone for name in cluster.nodes_holding(pod)]
        for node in changed:
            cluster.apply(without_pods(node, gone))
        fits = max_workers(evaluations.of(scenario.request)) >= scenario.workers
        for node in changed:
            cluster.apply(node)
        return fits

    count = 1
    while count < len(sets) and not suffices(sets[:count]):
        count *= 2
    if not sets or not suffices(sets[:count]):
        return
    numbers = range(min(count, len(sets)) + 1)
    least = sets[: bisect_left(numbers, True, lo=count // 2 + 1, key=lambda number: suffices(sets[:number]))]
    if len(least) <= MAX_NECESSITY_TESTS:
        for one in least[:-1]:
            without = [other for other in least if other is not one]
            least = without if suffices(without) else least
    yield _once_free(scenario, [row for rows in least for row in rows])


def _sets_to_free(scenario: Scenario) -> list[list[int]]:
    """Return the GPUs with tenants of each set of GPUs that one worker could have if it were empty.

    A set has GPUs of one node. The sets with the fewest tenants on a GPU come first.
    """
    gpus, wanted = scenario.snapshot.gpus, scenario.demand.gpus
    able = np.flatnonzero(scenario.now.evaluation.could_when_empty())
    able = able[np.lexsort((gpus.count[able], gpus.node[able]))]
    sets = list[list[int]]()
    for _, members in groupby(able.tolist(), lambda row: int(gpus.node[row])):
        mine = [row for row in members if not scenario.holds_worker(row)]
        sets += [mine[start : start + wanted] for start in range(0, len(mine) - wanted + 1, wanted)]
    sets.sort(key=lambda rows: int(gpus.count[rows[-1]]))
    return [taken for rows in sets if (taken := [row for row in rows if gpus.count[row]])]


def _once_free(scenario: Scenario, freed: list[int]) -> str:
    """Name GPUs, and the other GPUs of their tenants, which become free at the same time."""
    table = scenario.snapshot.gpus
    pods = {tenant.pod_uid for row in freed for tenant in table.tenants[row]}
    beside = np.flatnonzero(table.alive & np.isin(table.node, table.node[freed])).tolist()
    rows = [row for row in beside if row in freed or any(one.pod_uid in pods for one in table.tenants[row] or ())]
    of_nodes = [[*members] for _, members in groupby(rows, lambda row: int(table.node[row]))]
    which, such = " and ".join(scenario.snapshot.place(*members) for members in of_nodes), ""
    if len(of_nodes) > MAX_NAMED_NODES:
        which = f"{pluralize(len(rows), 'GPU')} of {pluralize(len(of_nodes), 'node')}"
        such = f", such as {scenario.snapshot.place(*of_nodes[0])}"
    names = sorted({str(tenant) for row in rows for tenant in table.tenants[row]})
    there = f"{names[0]} is" if len(names) == 1 else f"{pluralize(len(names), 'job')} are"
    return f"once {which} {'is' if len(rows) == 1 else 'are'} free{such} ({there} there)"


def _fewer_workers(scenario: Scenario) -> Iterator[str]:
    """Try as many workers as fit at once."""
    fitting = max_workers(scenario.now)
    if 0 < fitting < scenario.workers:
        yield f"with {pluralize(fitting, 'worker')} instead of {scenario.workers} (spec.workers)"


def _fewer_gpus(scenario: Scenario) -> Iterator[str]:
    """Try fewer GPUs for each worker, the most that fit."""
    asked = scenario.demand.gpus
    for gpus in range(asked - 1, 0, -1):
        if scenario.place(scenario.requesting(gpus=gpus)) is not None:
            yield f"with {pluralize(gpus, 'GPU')} for each worker (spec.gpusPerWorker)"
            return


def _other_requirements(scenario: Scenario) -> Iterator[str]:
    """Try the job without each of its requirements."""
    for field, without, how in (
        ("product", None, "without spec.gpu.product, on {product}"),
        ("min_memory_mib", 0, "without spec.gpu.minMemory, on {product}"),
        ("min_compute_capability", None, "without spec.gpu.minComputeCapability, on {product}"),
        ("mode", RequestedMode.AUTO, "by {mode} with spec.sharing.mode Auto"),
        ("tenancy", Tenancy.CLUSTER, "with spec.sharing.tenancy Cluster"),
    ):
        if getattr(scenario.demand, field) != without:
            place = scenario.place(scenario.requesting(**{field: without}))
            if place is not None:
                yield how.format(product=scenario.snapshot.product(scenario.row(place)), mode=place.mode)


def _no_admission_limits(scenario: Scenario) -> Iterator[str]:
    """Try the site's configuration without its admission limits."""
    limits = scenario.config.limits
    without = replace(scenario.config, limits=AdmissionLimits(quantile=limits.quantile))
    if limits.set() and scenario.place(config=without) is not None:
        yield f"without the site's admission limits ({limits})"


ATTEMPTS: tuple[Callable[[Scenario], Iterator[str]], ...] = (
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
