"""Reconciles one GpuNode: reads reservations, prepares and measures GPUs, reports status."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import msgspec
import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.keys import LABEL_RELEASE_GPUS
from carpool_core.kube.api import GPU_NODES, NODES, KubeApi, Selector
from carpool_core.kube.errors import Conflict, KubeError, Refused
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, Partition, Reservation, Tenant
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid

from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import DeviceError, Devices, Reading
from carpool_deviceplugin.metering import JobEnergy, Meter, SavedTime
from carpool_deviceplugin.preflight import NO_INFO, NodeInfo, Outcome
from carpool_deviceplugin.probe import ProbeFiles
from carpool_deviceplugin.status import (
    EventWriter,
    NodeEvent,
    Reporter,
    above_limit,
    device_events,
    partition_events,
    partition_of,
    presentable,
    struck_events,
    struck_of,
)
from carpool_deviceplugin.timeouts import Intervals, Poll, TimeLimitedCaller, wait_for_event

MIG_CONFIG = "nvidia.com/mig.config"
"""Label of NVIDIA's MIG manager."""
UPGRADE_STATE = "nvidia.com/gpu-driver-upgrade-state"
"""Label of GPU Operator's driver upgrade."""
_NO_UPGRADE = frozenset({"", "upgrade-required", "uncordon-required", "upgrade-done"})
"""States of that label in which the operator neither empties the node nor replaces its driver; in any other it may.

Source: NVIDIA/k8s-operator-libs, `pkg/upgrade/consts.go`."""
_UNKNOWN = "the Node's labels could not be read yet"
_STRUCK_FOR_S = 600.0
"""How long pods in an earlier agent's `status.struck` stay in the status, in seconds."""


class _NodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    node_info: NodeInfo = NO_INFO


class _Node(msgspec.Struct, frozen=True):
    """The part of a Node that the agent reads."""

    metadata: ObjectMeta
    status: _NodeStatus = _NodeStatus()


class NodeLabels:
    """Reads labels of the Node: another MIG manager's, the request to release the GPUs, and GPU Operator's.

    Until they were read, the agent partitions no GPU. For simulated GPUs they are not read.
    """

    def __init__(self, node: NodeName, api: KubeApi, devices: Devices) -> None:
        self._node, self._api, self._devices = node, api, devices
        self._mig_manager = _UNKNOWN
        self.release_reason = ""
        """Why the agent must release the GPUs; empty if it must not."""
        self.info = NO_INFO
        """Container runtime and operating system of the Node."""
        self._log = structlog.get_logger().bind(node=node)
        if not devices.simulated:
            devices.set_mig_manager(_UNKNOWN)

    async def read(self) -> bool:
        """Read the labels; return whether one changed. On an error the last values stay."""
        if self._devices.simulated and self.info != NO_INFO:
            return False
        try:
            found = await self._api.get(NODES, self._node, _Node)
        except KubeError as e:
            self._log.info("node not read", error=str(e))
            return False
        self.info = found.status.node_info
        if self._devices.simulated:
            return False
        labels, before = found.metadata.labels, (self._mig_manager, self.release_reason)
        config, upgrade = labels.get(MIG_CONFIG, ""), labels.get(UPGRADE_STATE, "")
        self._mig_manager = f"the Node's label {MIG_CONFIG} is {config}" if config else ""
        self.release_reason = ""
        if labels.get(LABEL_RELEASE_GPUS) == "true":
            self.release_reason = f"the Node's label {LABEL_RELEASE_GPUS} is true"
        elif upgrade not in _NO_UPGRADE:
            self.release_reason = f"the Node's label {UPGRADE_STATE} is {upgrade}"
        self._devices.set_mig_manager(self._mig_manager)
        return (self._mig_manager, self.release_reason) != before


async def create_gpu_node(name: NodeName, api: KubeApi) -> NodeInfo:
    """Create the GpuNode with the Node as owner, so that both are deleted together; one that exists stays.

    Returns what the Node says of itself. If it cannot be read, that is empty, and the GpuNode has no owner.
    """
    log = structlog.get_logger().bind(node=name)
    owners: list[Mapping[str, Any]] = []
    info = NO_INFO
    try:
        node = await api.get(NODES, name, _Node)
        info = node.status.node_info
        owners = [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid}]
    except Refused as e:
        log.info("gpunode has no owner", reason=str(e))
    metadata = {"name": name, "ownerReferences": owners}
    try:
        await api.create(GPU_NODES, {"metadata": metadata, "spec": {"reservations": []}})
        log.info("gpunode created")
    except Conflict:
        log.debug("gpunode exists already")
    return info


class Reconciler:
    """Manages one node.

    `on_health` is called with the healthy GPUs after each reading of their health, `on_progress` after each change of
    reservations or their state. `probe` has the step counters of pods; None on a node without a kubelet.
    `preflight` returns the rows of the preflight, and may block.
    """

    def __init__(
        self,
        node: NodeName,
        api: KubeApi,
        clock: Clock,
        devices: Devices,
        intervals: Intervals,
        on_health: Callable[[Collection[GpuUuid]], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
        probe: ProbeFiles | None = None,
        preflight: Callable[[NodeInfo], Sequence[Outcome]] = lambda _: (),
    ) -> None:
        self._preflight = preflight
        self._preflight_caller = TimeLimitedCaller("preflight", intervals.step_deadline_s)
        self._node, self._api, self._clock, self._devices, self._intervals = node, api, clock, devices, intervals
        self._log = structlog.get_logger().bind(node=node)
        self.reporter = Reporter(
            node,
            api,
            clock,
            devices,
            intervals,
            tenants=self._tenants,
            on_devices=self._see_devices,
            on_missing=self._create,
        )
        self._on_health, self._on_progress, self._probe = on_health, on_progress, probe
        self._event_writer = EventWriter(node, api, clock)
        self._seen_devices: dict[GpuUuid, Device] = {}
        self._seen_partitions: dict[PodUid, Partition] = {}
        self._reported_partitions: Sequence[Partition] | None = None
        self._seen_struck: dict[PodUid, str] = {}
        self._struck_before: tuple[float, Mapping[PodUid, str]] = (0.0, {})
        """Monotonic time of reading an earlier agent's status, and the struck pods in it."""
        self._removed: list[str] = []
        self._above: Set[tuple[PodUid, GpuUuid]] = frozenset()
        self.meters = {uuid: Meter(uuid) for uuid in devices.uuids}
        self.job_energy, self.saved_time = JobEnergy(), SavedTime()
        self._measure_again, self._surveyed = asyncio.Event(), asyncio.Event()
        self._partitions: list[Partition] | None = None
        """Cached partitions; None after a change of reservations or GPUs."""
        self._labels = NodeLabels(node, api, devices)
        self._workers = {
            uuid: GpuWorker(uuid, devices, self._progress, intervals, self._labels.read, peaks=self.meters[uuid].peaks)
            for uuid in devices.uuids
        }
        self._poll = Poll(intervals.step_deadline_s)
        self.reflector: Reflector[GpuNode] = Reflector(
            api,
            GPU_NODES,
            GpuNode,
            selector=Selector(fields=f"metadata.name={node}"),
            clock=clock,
            on_change=self._on_change,
        )

    @property
    def reservations(self) -> Sequence[Reservation]:
        """The node's reservations, from the watch."""
        found = self.reflector.store.get(self._node)
        return found.spec.reservations if found else ()

    @property
    def partitions(self) -> Sequence[Partition]:
        """The present state of each reservation."""
        if self._partitions is None:
            of_gpus = {uuid: worker.partitions for uuid, worker in self._workers.items()}
            ordered = sorted(self.reservations, key=lambda r: r.pod_uid)
            self._partitions = [partition_of(r, of_gpus) for r in ordered]
        return self._partitions

    async def run(self) -> None:
        """Manage the node until cancelled."""
        await self._labels.read()
        await self._check()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reflector.run())
            tasks.create_task(self._watch_labels())
            tasks.create_task(self._repeat_check())
            tasks.create_task(self._refresh_counters())
            await self.reflector.wait_synced()
            for worker in self._workers.values():
                tasks.create_task(worker.run())
            tasks.create_task(self._measure())
            tasks.create_task(self.reporter.run())
            tasks.create_task(self._event_writer.run())

    async def _check(self) -> None:
        """Run the preflight; a changed row is written to the status."""
        try:
            found = await self._preflight_caller.call(self._preflight, self._labels.info)
        except DeviceError as e:
            self._log.warning("preflight not done", error=str(e))
        else:
            if found != self.reporter.preflight:
                self.reporter.preflight = found
                self.reporter.look_again()

    async def _repeat_check(self) -> None:
        await self._surveyed.wait()  # the first check knew nothing of processes, memory and MIG instances
        while True:
            await self._check()
            await self._intervals.sleep(self._intervals.preflight_s)

    async def _watch_labels(self) -> None:
        caller = TimeLimitedCaller("release of the GPUs", self._intervals.step_deadline_s)
        applied, is_changed = "", False
        while True:
            reason = self._labels.release_reason
            if reason or applied:  # pods may have ended since
                try:
                    await caller.call(self._devices.release, reason)
                    applied = reason
                except DeviceError as e:
                    self._log.warning("gpus not released", error=str(e))
            if reason or is_changed:
                self.reporter.look_again()
            await self._intervals.sleep(self._intervals.labels_s)
            is_changed = await self._labels.read() or reason != self._labels.release_reason

    async def _refresh_counters(self) -> None:
        caller = TimeLimitedCaller("metrics sources", self._intervals.step_deadline_s)
        while not self._devices.simulated:
            try:
                await caller.call(self._devices.refresh_counters)
            except DeviceError as e:
                self._log.debug("counters not refreshed", error=str(e))  # earlier values expire
            await self._intervals.sleep(self._intervals.counters_s)

    def _on_change(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if new is None:
            self.reporter.vanished()
        elif old is None or old.metadata.uid != new.metadata.uid:
            self.reporter.appeared(new.status)
            self._remember(new)
        elif old.spec == new.spec:
            return  # only the status changed, and the agent wrote it
        reservations = new.spec.reservations if new else []
        for uuid, worker in self._workers.items():
            worker.want([r for r in reservations if uuid in r.gpu_uuids])
        pods = {r.pod_uid for r in reservations}
        gone = {r.pod_uid for r in old.spec.reservations} - pods if old else set()
        for meter in self.meters.values():
            meter.keep(pods)
            meter.discard(gone)
        if self._probe is not None:
            self._probe.keep(pods)
        if gone:
            self._measure_again.set()
        self._progress()

    def _remember(self, node: GpuNode) -> None:
        ready = frozenset(p.pod_uid for p in node.status.partitions if p.state is PartitionState.READY)
        for worker in self._workers.values():
            worker.remember(ready)
        for meter in self.meters.values():
            meter.remember(node.status.tenants)
        self._seen_struck = {s.pod_uid: s.message for s in node.status.struck}
        self._struck_before = (self._clock.monotonic(), self._seen_struck)
        self._seen_devices = {d.uuid: d for d in node.status.devices}
        self._seen_partitions = {p.pod_uid: p for p in node.status.partitions}

    def _see_devices(self, devices: Sequence[Device]) -> None:
        self._on_health({d.uuid for d in devices if d.health is DeviceHealth.HEALTHY})
        found = device_events(self._seen_devices, devices)
        self._record_events(found)
        if found:
            for worker in self._workers.values():
                worker.look_again()
        self._seen_devices = {d.uuid: d for d in devices}

    def _see_partitions(self, partitions: Sequence[Partition]) -> None:
        struck = {pod: why for of_gpu in self._struck() for pod, why in of_gpu.items()}
        if partitions is self._reported_partitions and struck == self._seen_struck:
            return
        self._reported_partitions = partitions
        reservations = {r.pod_uid: r for r in self.reservations}
        self._record_events(
            partition_events(self._seen_partitions, partitions, reservations)
            + struck_events(self._seen_struck, struck, reservations)
        )
        self._seen_partitions, self._seen_struck = {p.pod_uid: p for p in partitions}, struck

    def _record_events(self, found: Sequence[NodeEvent]) -> None:
        node = self.reflector.store.get(self._node)
        self._event_writer.enqueue(found, node.metadata.uid if node is not None else "")

    def _progress(self) -> None:
        """Report a change of reservations or their state."""
        self._partitions = None
        self._on_progress()
        self._report()

    def _report(self) -> None:
        partitions = self.partitions
        self._see_partitions(partitions)
        self.reporter.report(partitions, struck_of(self._struck()))

    def _tenants(self) -> Sequence[Tenant]:
        now = rfc3339(self._clock.now())
        tenants = [tenant for meter in self.meters.values() for tenant in meter.tenants(now)]
        valid, removed = presentable(tenants, {r.pod_uid for r in self.reservations})
        if removed != self._removed:
            self._removed = removed
            self._log.warning("tenants left out of the status", count=len(removed), first=removed[:3])
        self._warn_above_limit(tenants)
        return valid

    def _struck(self) -> list[Mapping[PodUid, str]]:
        """Return the pods that MPS faults have ended, including recent ones from an earlier agent's status."""
        read_at, before = self._struck_before
        earlier = before if self._clock.monotonic() - read_at <= _STRUCK_FOR_S else {}
        return [earlier, *(worker.ended for worker in self._workers.values())]

    def _warn_above_limit(self, tenants: Sequence[Tenant]) -> None:
        above = above_limit(tenants, self.reservations)
        for pod, gpu in sorted(above.keys() - self._above):
            self._log.warning("tenant above its limit", pod=pod, gpu=gpu, why=above[pod, gpu])
        self._above = above.keys()

    async def _create(self) -> None:
        await create_gpu_node(self._node, self._api)

    async def _measure(self) -> None:
        count = 0
        while True:
            self._measure_again.clear()
            is_full = count % self._intervals.idle_samples == 0
            busy = {uuid for r in self.reservations for uuid in r.gpu_uuids}
            if is_full:
                surveys = await self._poll.ask(self._devices.survey, self._devices.uuids)
                described = {uuid: s if isinstance(s, DeviceError) else s[0] for uuid, s in surveys.items()}
                self._sample({uuid: s if isinstance(s, DeviceError) else s[1] for uuid, s in surveys.items()})
                self.reporter.see(described)
                self._surveyed.set()
            else:
                due = [uuid for uuid, meter in self.meters.items() if uuid in busy or meter.usage]
                self._sample(await self._poll.ask(self._devices.read, due))
            self._report()
            count += 1
            await wait_for_event(self._measure_again, self._intervals.sample_s, self._intervals.sleep)

    def _sample(self, answers: Mapping[GpuUuid, Reading | DeviceError]) -> None:
        reserved = {r.pod_uid: r.memory_limit_mib for r in self.reservations}
        self.saved_time.add(self.reservations, self._clock.monotonic())
        usable_mib = {device.uuid: device.memory_mib - device.reserved_mib for device in self.reporter.devices}
        reports = {} if self._probe is None else {pod: self._probe.read(pod) for pod in sorted(reserved)}
        for uuid, found in answers.items():
            meter = self.meters[uuid]
            if isinstance(found, DeviceError):
                meter.is_current = False
                self._log.debug("gpu not measured", gpu=uuid, error=str(found))  # its health reports the error
                continue
            before = meter.running()
            drawn = meter.sample(found, reports, reserved, usable_mib.get(uuid))
            self.job_energy.add(self.reservations, drawn, self._clock.monotonic())
            if before - meter.running():
                self._workers[uuid].look_again()  # an MPS fault may have ended them
            meter.keep(reserved.keys())
