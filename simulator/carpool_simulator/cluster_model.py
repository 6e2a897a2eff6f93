"""The cluster of a simulation: GpuNodes as their agents would report them, the ledger, and the extender's decisions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
import numpy as np
from carpool_core.clock import rfc3339
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Reservation, Tenant
from carpool_core.values import DeviceHealth, GpuUuid, PodUid
from carpool_extender.cache import ledger
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Bools, GpuTable, Rows
from carpool_extender.cache.peaks import StablePeak, peaks_of, use_measured_peak
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.filters import Evaluation, FilterResults, empty_results, run_filters
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import Placement, best_place, reservation_of

from carpool_simulator.truth import WorkloadError

MOST_STATES = 50_000
OF_GPU = ("alive", "device_class", "unavailable", "mode", "prepared", "count", "mig_gb", "mig_slices", "user")
OF_TENANTS = ("memory_mib", "util", "sm", "dram", "max_slowdown", "namespace", "cluster_tenancy")
"""What the checks look at; the aggregates follow from it."""


class _Known(NamedTuple):
    """What was found about one demand, by state; shape (states,) each."""

    is_known: Bools
    found: FilterResults


class Alike:
    """Runs the checks on GPUs of a cluster whose classes of devices and namespaces stay as they are.

    Args:
        cluster: What is simulated.
        most: States that are remembered; beyond, all are forgotten.
        looking: Runs the checks on GPUs.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        most: int = MOST_STATES,
        looking: Callable[[Evaluation, GpuTable], FilterResults] = run_filters,
    ) -> None:
        self._cluster, self._most, self._look = cluster, most, looking
        self._generation = -1
        self._number: dict[tuple[object, ...], int] = {}
        self._state: Rows = np.zeros(0, np.intp)
        self._known: dict[bytes, _Known] = {}

    def __call__(self, asked: Evaluation, rows: Rows | None) -> FilterResults:
        """Run all checks of a demand on some GPUs; on all where None."""
        columns = asked.snapshot.gpus
        self._follow(columns)
        states = self._state if rows is None else self._state[rows]
        known = self._of(asked)
        if not known.is_known[states].all():
            new, first = np.unique(states, return_index=True)
            first = first[~known.is_known[new]]
            new = states[first]
            known.found.put(new, self._look(asked, columns.take(first if rows is None else rows[first])))
            known.is_known[new] = True
        return known.found.of(states)

    def _of(self, asked: Evaluation) -> _Known:
        states = len(self._number)
        shape = asked.pod_request.shape
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = _Known(np.zeros(states, np.bool_), empty_results(states))
        elif len(known.is_known) < states:
            more = np.append(known.is_known, np.zeros(2 * states - len(known.is_known), np.bool_))
            known = self._known[shape] = _Known(more, known.found.resized(2 * states))
        return known

    def _follow(self, columns: GpuTable) -> None:
        """Number the states of GPUs that changed."""
        gpus, generation = len(columns.alive), self._cluster.generation
        changed = self._cluster.changed_since(self._generation) if len(self._state) == gpus else None
        if len(self._number) > self._most:
            self._number.clear()
            self._known.clear()
            changed = None
        if changed is None:
            self._state, changed = np.zeros(gpus, np.intp), np.arange(gpus)
        of_gpus = zip(*[getattr(columns, name)[changed].tolist() for name in OF_GPU], strict=True)
        of_tenants = [getattr(columns, name) for name in OF_TENANTS]
        for row, of_gpu, count in zip(changed.tolist(), of_gpus, columns.count[changed].tolist(), strict=True):
            state = (*of_gpu, *[array[row, :count].tobytes() for array in of_tenants]) if count else of_gpu
            self._state[row] = self._number.setdefault(state, len(self._number))
        self._generation = generation


START = datetime(2026, 1, 1, tzinfo=UTC)
REMEMBERED = 256
"""Demands whose assessments are kept; there are few different ones, and clusters are smaller than real ones."""


class Board:
    """What the scheduler sees, and what it decides.

    Args:
        nodes: Devices of each node.
        rules: The site's.
    """

    def __init__(self, nodes: Mapping[str, Sequence[Device]], rules: SchedulerConfig) -> None:
        self._rules = rules
        self._cluster = ClusterCache(rules.slots)
        self._devices = {name: list(devices) for name, devices in nodes.items()}
        self._capacity = {name: self._capacity_of(name) for name in nodes}
        self._metas = {name: ObjectMeta(name=name, uid=name) for name in nodes}
        self._specs = {name: GpuNodeSpec() for name in nodes}
        self._tenants: dict[str, list[Tenant]] = {name: [] for name in nodes}
        self._evaluation_cache = EvaluationCache(self._cluster, rules, REMEMBERED, Alike(self._cluster))
        for name in nodes:
            self._show(name, START)
        columns = self._cluster.snapshot().gpus
        self._rows = {uuid: row for row, uuid in enumerate(columns.uuid) if columns.alive[row]}

    def best(self, pod_request: PodRequest, shut: Iterable[GpuUuid] = ()) -> tuple[str, Placement] | None:
        """Decide where a worker goes, as kube-scheduler would after filter and prioritize; None where nothing fits.

        Args:
            pod_request: Who asks.
            shut: GPUs that it may not have now.
        """
        cached_evaluation, among = self._evaluation_cache.of(pod_request), None
        if shut := list(shut):
            among = np.ones(len(cached_evaluation.evaluation.snapshot.gpus.alive), np.bool_)
            among[[self._rows[uuid] for uuid in shut]] = False
        return best_place(cached_evaluation, among, with_reason=False)

    def reserve(self, node: str, chosen: Placement, pod_request: PodRequest, uid: PodUid, now_s: float) -> None:
        """Write a place into the ledger, which refuses what would break a promise."""
        now = moment(now_s)
        wanted = reservation_of(chosen, pod_request, uid, str(uid), now=now, deadline=now)
        spec = ledger.reserve(self._specs[node], wanted, self._capacity[node])
        if isinstance(spec, ledger.Rejected):
            raise AssertionError(f"the ledger refused what was decided on {node}: {spec.reason}")
        self._specs[node] = spec
        self._show(node, now)

    def release(self, node: str, uid: PodUid, now_s: float, *, is_shown: bool = True) -> None:
        """Give a pod's reservation back; decisions see it only where it is shown, or with the next report."""
        self._specs[node] = ledger.release(self._specs[node], uid)
        self._tenants[node] = [tenant for tenant in self._tenants[node] if tenant.pod_uid != uid]
        if is_shown:
            self._show(node, moment(now_s))

    def report(self, node: str, tenants: list[Tenant], held: Mapping[PodUid, Reservation], now_s: float) -> None:
        """Take what the node's agent measures, and what a monitor without promises writes into reservations."""
        if held:
            changed = [held.get(r.pod_uid, r) for r in self._specs[node].reservations]
            self._specs[node] = msgspec.structs.replace(self._specs[node], reservations=changed)
        self._tenants[node] = tenants
        self._show(node, moment(now_s))

    def use_measured_peak(self, node: str, uid: PodUid, by: float, now_s: float) -> bool:
        """Let a pod count with so many times what it is measured to take; say whether that changes anything."""
        measured = {(tenant.pod_uid, tenant.gpu_uuid): tenant for tenant in self._tenants[node]}
        held = ledger.held(self._specs[node], uid)
        peaks = None if held is None else peaks_of(held, measured)
        if peaks is None:
            return False
        spec = use_measured_peak(self._specs[node], measured, {uid: StablePeak(peaks, by)})
        if spec is self._specs[node]:
            return False
        self._specs[node] = spec
        self._show(node, moment(now_s))
        return True

    def reservations(self, node: str) -> list[Reservation]:
        """Return what is reserved on a node."""
        return self._specs[node].reservations

    def set_health(self, gpu: GpuUuid, node: str, health: DeviceHealth, now_s: float) -> None:
        """Let a GPU fail, or recover."""
        self._devices[node] = [
            msgspec.structs.replace(device, health=health) if device.uuid == gpu else device
            for device in self._devices[node]
        ]
        self._capacity[node] = self._capacity_of(node)
        self._show(node, moment(now_s))

    def _capacity_of(self, node: str) -> ledger.Capacity:
        return ledger.Capacity({device.uuid: device for device in self._devices[node]}, self._rules.slots)

    def _show(self, name: str, now: datetime) -> None:
        heartbeat = rfc3339(now) if self._tenants[name] else None
        status = GpuNodeStatus(devices=self._devices[name], tenants=self._tenants[name], heartbeat_time=heartbeat)
        self._cluster.apply(GpuNode(metadata=self._metas[name], spec=self._specs[name], status=status))


def moment(now_s: float) -> datetime:
    """Return what the calendar of a simulation says, which resources are written with.

    Args:
        now_s: Seconds since its start.

    Raises:
        WorkloadError: The calendar has ended.
    """
    try:
        return START + timedelta(seconds=now_s)
    except OverflowError as error:
        raise WorkloadError(
            f"expected a simulation to end before the year 10000, found jobs that run or come {now_s:.3g} s after its "
            "start; use shorter durations, more GPUs, or times that lie closer together"
        ) from error
