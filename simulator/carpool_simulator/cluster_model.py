"""The cluster of a simulation: GpuNodes as their agents would report them, and the ledger."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Reservation, Tenant
from carpool_core.values import PodUid, SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.cluster import ClusterCache, GpuBackoff
from carpool_extender.cache.peaks import StablePeak, peaks_of, use_measured_peak
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import EvaluationCache, FilterRunner, filter_rows
from carpool_extender.queue.scheduling_queue import Claim

from carpool_simulator.truth import Truth, WorkloadError


class Physics(Protocol):
    """True slowdowns on a GPU."""

    def slowdowns(self, mode: SharingMode, tenants: list[Truth]) -> list[float]:
        """Return each tenant's true slowdown."""
        ...

    def utilization(self, mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
        """Return the share of time in which the GPU is truly busy, 0..1."""
        ...


START = datetime(1970, 1, 1, tzinfo=UTC)
"""Calendar time at which every simulation starts."""
CACHED_REQUESTS = 256
"""Requests whose evaluations are cached."""


class ClusterModel:
    """The cluster of a simulation: GpuNodes as their agents would report them, and the ledger."""

    def __init__(
        self,
        nodes: Mapping[str, Sequence[Device]],
        config: SchedulerConfig,
        filter_runner: FilterRunner = filter_rows,
        closed: GpuBackoff | None = None,
    ) -> None:
        self.cluster = ClusterCache(config.slots, closed)
        """GPUs, reservations and claims as the scheduler sees them."""
        self.evaluations = EvaluationCache(self.cluster, config, CACHED_REQUESTS, filter_runner)
        """Evaluations on it."""
        self._devices = {name: list(devices) for name, devices in nodes.items()}
        self._capacity = {
            name: ledger.Capacity({device.uuid: device for device in devices}, config.slots)
            for name, devices in nodes.items()
        }
        self._metas = {name: ObjectMeta(name=name, uid=name) for name in nodes}
        self._specs = {name: GpuNodeSpec() for name in nodes}
        self._tenants: dict[str, list[Tenant]] = {name: [] for name in nodes}
        for name in nodes:
            self._show(name)

    def reserve(self, claim: Claim) -> None:
        """Write a claim into the ledger, which refuses what would break a promise."""
        node, wanted = claim
        spec = ledger.reserve(self._specs[node], wanted, self._capacity[node])
        if isinstance(spec, ledger.Rejected):
            raise AssertionError(f"the ledger refused what was decided on {node}: {spec.reason}")
        self._specs[node] = spec
        self._show(node)
        self.cluster.forget(node, wanted.pod_uid)

    def release(self, node: str, uid: PodUid, *, is_shown: bool = True) -> None:
        """End a pod's reservation; decisions see it at once if it is shown, else with the next report."""
        self._specs[node] = ledger.release(self._specs[node], uid)
        self._tenants[node] = [tenant for tenant in self._tenants[node] if tenant.pod_uid != uid]
        if is_shown:
            self._show(node)

    def report(self, node: str, tenants: list[Tenant], held: Mapping[PodUid, Reservation]) -> None:
        """Take in what the node's agent measures, and what a monitor writes into reservations of blind strategies."""
        if held:
            changed = [held.get(r.pod_uid, r) for r in self._specs[node].reservations]
            self._specs[node] = msgspec.structs.replace(self._specs[node], reservations=changed)
        self._tenants[node] = tenants
        self._show(node)

    def use_measured_peak(self, node: str, uid: PodUid, by: float) -> None:
        """Count a pod with so many times its measured memory peak."""
        measured = {(tenant.pod_uid, tenant.gpu_uuid): tenant for tenant in self._tenants[node]}
        held = ledger.held(self._specs[node], uid)
        peaks = None if held is None else peaks_of(held, measured)
        if peaks is None:
            return
        spec = use_measured_peak(self._specs[node], measured, {uid: StablePeak(peaks, by)})
        if spec is not self._specs[node]:
            self._specs[node] = spec
            self._show(node)

    def reservations(self, node: str) -> list[Reservation]:
        """Return the reservations on a node."""
        return self._specs[node].reservations

    def _show(self, name: str) -> None:
        status = GpuNodeStatus(devices=self._devices[name], tenants=self._tenants[name])
        self.cluster.apply(GpuNode(metadata=self._metas[name], spec=self._specs[name], status=status))


def moment(now_s: float) -> datetime:
    """Return the calendar time so many seconds after the start; raises WorkloadError after the calendar's end."""
    try:
        return START + timedelta(seconds=now_s)
    except OverflowError as error:
        raise WorkloadError(
            f"expected a simulation to end before the year 10000, found jobs that run or come {now_s:.3g} s after its "
            "start; use shorter durations, more GPUs, or times that lie closer together"
        ) from error
