"""Real GPUs behind the port."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool_core.resources.node import Device
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.cdi import FALLBACK_ENV, GpuEdits, NvidiaCdi
from carpool_deviceplugin.dcgm import CounterFeed, CounterSource
from carpool_deviceplugin.gpu import (
    Access,
    Counters,
    CreateInstance,
    DestroyInstance,
    DeviceError,
    GpuActual,
    Mount,
    NoDevicesError,
    Reading,
    SetLimits,
    SetMode,
    StartMps,
    Step,
    StopMps,
)
from carpool_deviceplugin.gpu_processes import (
    GpuProcesses,
    MpsFailures,
    ProcessWatcher,
    describe_foreign,
    describe_process,
)
from carpool_deviceplugin.health import HealthMonitor
from carpool_deviceplugin.mig_instances import (
    CheckpointFile,
    FoundInstance,
    MigDevice,
    MigInstances,
    foreign_instances,
    mig_instances_of,
    possible_modes,
)
from carpool_deviceplugin.mps import Mps, MpsStatus
from carpool_deviceplugin.nvlib import (
    Identity,
    NvmlLibrary,
    Session,
    TelemetryCache,
    linked_gpus,
    list_gpus,
    read_identity,
)
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.sampling import NVML, Sampler

MPS, MIG = SharingMode.MPS, SharingMode.MIG


class StepApplier:
    """Takes steps.

    Args:
        instances: The MIG instances of the node's GPUs.
        watcher: Sees who is there.
        mps: The MPS daemons; None where the node cannot run any.
        on_switch: Called with a GPU whose MIG mode was switched.
        may_switch: Whether MIG may be switched on and off on a GPU that nobody uses.
    """

    def __init__(
        self,
        instances: MigInstances,
        watcher: ProcessWatcher,
        mps: Mps | None,
        on_switch: Callable[[GpuUuid], None],
        *,
        may_switch: bool,
    ) -> None:
        self._instances, self._watcher, self._mps = instances, watcher, mps
        self._on_switch, self._may_switch = on_switch, may_switch
        self.mig_manager = ""
        """Who else divides the node's GPUs; empty where nobody does."""

    def apply(self, uuid: GpuUuid, file: CheckpointFile, step: Step) -> None:
        """Take one step; raises DeviceError."""
        match step:
            case SetMode(mode):
                self._set_mode(uuid, file, mode)
            case StartMps():
                mode = file.read().mode
                if mode is not MPS:
                    raise DeviceError(f"GPU {uuid}: expected mode MPS, found {mode or 'Idle'}; set it first")
                if self._mps is None:
                    raise DeviceError(f"GPU {uuid}: expected nvidia-cuda-mps-control on this node, found none")
                if not self._mps.is_running(uuid):  # a dead daemon's server may serve them still, and would be ended
                    self._check_that_no_pod_is_there(uuid)
                self._mps.start(uuid)
            case StopMps():
                self._check_that_it_is_empty(uuid, file)
                if self._mps is not None:
                    with suppress(DeviceError):  # a full disk: to stop the daemon may be what frees it
                        file.write(replace(file.read(), is_cleanup_pending=True))
                    self._mps.stop(uuid)
                    self._watcher.forget(uuid)  # no daemon and no server any more
                file.write(replace(file.read(), limits={}, is_cleanup_pending=False))
            case SetLimits(pod_uid, limits):
                file.write(file.read().limiting(pod_uid, limits))
            case CreateInstance(placement, pod_uid):
                self._check_that_it_is_ours(uuid)
                self._instances.create(uuid, file, placement, pod_uid)
            case DestroyInstance(placement):
                self._check_that_it_is_ours(uuid)
                self._instances.destroy(uuid, file, placement)

    def _set_mode(self, uuid: GpuUuid, file: CheckpointFile, mode: SharingMode | None) -> None:
        setting = file.read()
        is_divided = self._instances.is_enabled(uuid)
        is_switching = mode is not None and (mode is MIG) != is_divided
        if mode is setting.mode and not is_switching:
            return
        self._check_that_it_is_empty(uuid, file)
        if is_switching:
            self._check_that_it_is_ours(uuid)
            if not self._may_switch:
                raise DeviceError(
                    f"GPU {uuid}: expected MIG to be switched {'on' if mode is MIG else 'off'}, found it not so, and "
                    "the agent may not switch it; do it (nvidia-smi -mig), or set CARPOOL_MIG_SWITCH"
                )
            self._instances.switch(uuid, on=mode is MIG)
            self._on_switch(uuid)
        file.write(replace(setting, mode=mode, limits={}))

    def _check_that_it_is_ours(self, uuid: GpuUuid) -> None:
        if self.mig_manager:
            raise DeviceError(f"GPU {uuid}: expected nobody else to divide it, found that {self.mig_manager}")

    def _check_that_no_pod_is_there(self, uuid: GpuUuid) -> None:
        self._watcher.forget(uuid)
        if whom := sorted(self._watcher.look(uuid)[0].pod_uids()):
            raise DeviceError(
                f"GPU {uuid}: expected no pod's process where an MPS daemon starts, found {', '.join(whom)}; wait "
                "until they end"
            )

    def _check_that_it_is_empty(self, uuid: GpuUuid, file: CheckpointFile) -> None:
        others = foreign_instances(self._instances.find(uuid, file)) if self._instances.is_enabled(uuid) else set()
        self._watcher.forget(uuid)
        present = self._watcher.look(uuid, frozenset(others))[0].without_instances(frozenset(others))
        whom = sorted(map(str, present.pod_uids())) + [describe_process(s) for s in present.foreign_processes]
        if whom:
            raise DeviceError(
                f"GPU {uuid}: expected no process on the GPU, found {', '.join(whom)}; wait until it ends"
            )


CONTAINER_MPS = "/run/carpool/mps"
CONTAINER_SHM = "/dev/shm"  # noqa: S108  # where CUDA looks for it
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")


class ContainerAccess:
    """Composes access from NVIDIA's CDI specifications, or for NVIDIA's runtime.

    Args:
        cdi: NVIDIA's CDI specifications of this node.
        mps: The MPS daemons; None where the node cannot run any.
        mig_minors: The driver's list of the device files that open MIG instances.
    """

    def __init__(self, cdi: NvidiaCdi, mps: Mps | None, mig_minors: Path = MIG_MINORS) -> None:
        self._cdi, self._mps, self._mig_minors = cdi, mps, mig_minors

    def to_gpu(self, uuid: GpuUuid, known: Identity) -> Access:
        """Return what brings a whole GPU; raises DeviceError."""
        pipe = shm = None
        if self._mps is not None:
            daemon = self._mps.daemon(uuid)
            pipe, shm = Mount(str(daemon.pipe), CONTAINER_MPS), Mount(str(daemon.shm), CONTAINER_SHM)
        edits = self._cdi.find(uuid, known.minor)
        if edits is None:
            return Access(env=FALLBACK_ENV, mounts=(), mps_pipe=pipe, mps_shm=shm, needs_runtime_env=True)
        return Access(
            env={},
            mounts=(),
            mps_pipe=pipe,
            mps_shm=shm,
            edits=edits.device,
            common_edits=edits.common,
            cdi_version=edits.cdi_version,
        )

    def to_instance(self, uuid: GpuUuid, known: Identity, device: MigDevice) -> Access:
        """Return what brings a MIG device: its own specification, or the GPU's and the two files that open it.

        `nvidia-ctk` writes down the MIG devices that there are when it runs; ours come and go later.
        """
        edits = self._cdi.find(device.uuid)
        if edits is None:
            edits = self._composed(self._cdi.find(uuid, known.minor), known, device)
        if edits is None:
            return Access(env=FALLBACK_ENV, mounts=(), needs_runtime_env=True, name=device.uuid)
        return Access(
            env={},
            mounts=(),
            edits=edits.device,
            common_edits=edits.common,
            cdi_version=edits.cdi_version,
            name=device.uuid,
        )

    def _composed(self, whole: GpuEdits | None, known: Identity, device: MigDevice) -> GpuEdits | None:
        minors = self._minors()
        instance = f"gpu{known.minor}/gi{device.gpu_instance_id}"
        files = [minors.get(f"{instance}/access"), minors.get(f"{instance}/ci{device.compute_instance_id}/access")]
        if whole is None or None in files:
            return None
        nodes: list[Mapping[str, Any]] = [*whole.device.get("deviceNodes", [])]
        nodes += [{"path": f"/dev/nvidia-caps/nvidia-cap{minor}"} for minor in files]
        return GpuEdits(whole.cdi_version, {**whole.device, "deviceNodes": nodes}, whole.common)

    def _minors(self) -> dict[str, int]:
        try:
            lines = self._mig_minors.read_text().splitlines()
        except OSError:
            return {}
        pairs = [line.split() for line in lines]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


_FRAGMENTATION_MIB = 256
"""Kept free beside the driver's memory: allocators lose some to fragmentation."""
_KNOWN_FOR_S = 60.0
"""Power limits may be changed; a driver that was restarted is asked at once."""
Look = Callable[[GpuUuid, frozenset[int]], tuple[GpuProcesses, MpsStatus]]


class NvmlDevices:
    """The NVIDIA GPUs of this node.

    Args:
        library: NVML.
        mps: The MPS daemons; None where the node cannot run any.
        cdi: NVIDIA's CDI specifications of this node.
        state_dir: Where what the agent decided about each GPU is kept.
        processes: The node's processes.
        may_switch_mig: Whether MIG may be switched on and off on a GPU that nobody uses.
        may_write: Whether what is seen of a GPU's health is kept; not beside an agent that does so.
        mig_minors: The driver's list of the device files that open MIG instances.
        sources: Who else measures the GPUs, the best one first.
        monotonic: Seconds.
        wall: Seconds since 1970.

    Raises:
        NoDevicesError: There is no driver, or it may not be used.
    """

    simulated = False

    def __init__(
        self,
        library: NvmlLibrary,
        *,
        mps: Mps | None,
        cdi: NvidiaCdi,
        state_dir: Path,
        processes: ProcTree,
        may_switch_mig: bool = False,
        may_write: bool = True,
        mig_minors: Path = MIG_MINORS,
        sources: Sequence[CounterSource] = (),
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._session = Session(library)
        self._session.open()
        self._has_mps, self._may_switch = mps is not None, may_switch_mig
        self._instances, self._monotonic = MigInstances(self._session), monotonic
        self._known, self._known_at = dict[GpuUuid, Identity](), dict[GpuUuid, tuple[int, float]]()
        self._uuids = self._found()
        self._modes = {uuid: CheckpointFile(state_dir / "gpus" / f"{uuid}.json") for uuid in self._uuids}
        self._looking = {uuid: threading.Lock() for uuid in self._uuids}
        self._watcher, self._clients = ProcessWatcher(self._session, processes, mps, monotonic), MpsFailures(monotonic)
        telemetry, kept = TelemetryCache(self._session, monotonic), state_dir / "gpus"
        self._health = HealthMonitor(self._session, self._uuids, telemetry, kept, monotonic, may_write=may_write)
        self._entry, self._feed = ContainerAccess(cdi, mps, mig_minors), CounterFeed(sources, monotonic)
        self._measuring = Sampler(self._session, self._uuids, telemetry, self._watcher, self._feed, monotonic, wall)
        self._changes = StepApplier(self._instances, self._watcher, mps, self._switched, may_switch=may_switch_mig)
        self._possible_lately: dict[GpuUuid, frozenset[SharingMode]] = {}
        self._found_lately: dict[GpuUuid, list[FoundInstance]] = {}

    def _found(self) -> list[GpuUuid]:
        try:
            uuids = list_gpus(self._session)
            for uuid in uuids:
                self._identify(uuid)
                if self._known[uuid].mig_capable:
                    self._instances.learn(uuid)
        except DeviceError as e:
            raise NoDevicesError(str(e)) from e
        if not uuids:
            raise NoDevicesError("expected GPUs on this node, found a driver and none; give the container /dev/nvidia*")
        return uuids

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index."""
        return self._uuids

    @property
    def session(self) -> Session:
        """The open library, for what looks at a node without looking after it."""
        return self._session

    def identity(self, uuid: GpuUuid) -> Identity:
        """Return what a GPU is; as it was last seen where it cannot be read now."""
        return self._known[self._own(uuid)]

    def set_mig_manager(self, manager: str) -> None:
        """Say who else divides the node's GPUs; empty where nobody does."""
        self._changes.mig_manager = manager

    def _identify(self, uuid: GpuUuid) -> None:
        self._known[uuid] = read_identity(self._session, uuid)
        self._known_at[uuid] = (self._session.generation, self._monotonic())

    def _own(self, uuid: GpuUuid) -> GpuUuid:
        if uuid not in self._modes:
            raise DeviceError(f"GPU {uuid}: expected one of {', '.join(self._uuids)}; nobody else's GPU can be changed")
        return uuid

    def inventory(self) -> list[Device]:
        """Describe every GPU."""
        return [self.describe(uuid) for uuid in self._uuids]

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU."""
        mode, problem = None, ""
        try:
            with self._looking[uuid]:
                actual = self._actual(uuid, self._watcher.recent)
            mode, problem = actual.mode, actual.problem
            generation, at = self._known_at[uuid]
            if generation != self._session.generation or self._monotonic() - at > _KNOWN_FOR_S:
                self._identify(uuid)
        except DeviceError as e:
            problem = str(e)
        known, table = self._known[uuid], self._instances.table(uuid)
        return Device(
            uuid=uuid,
            index=known.index,
            product=known.product,
            memory_mib=known.memory_mib,
            reserved_mib=known.reserved_mib + _FRAGMENTATION_MIB,
            compute_capability=known.compute_capability,
            mig_profiles=[p.name for p in reversed(table.profiles)] if table else [],
            modes=sorted(self._possible_lately.get(uuid, ()), key=list(SharingMode).index),
            mode=mode,
            health=DeviceHealth.UNHEALTHY if problem else DeviceHealth.HEALTHY,
            health_message=problem,
            numa_node=known.numa_node,
            nvlink_peers=linked_gpus(known, self._known),
        )

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read how a GPU is divided; who else looks at it waits, or each would see half of what happened."""
        with self._looking[self._own(uuid)]:
            return self._actual(uuid, self._watcher.look)

    def _actual(self, uuid: GpuUuid, look: Look) -> GpuActual:
        known, setting, sick = self._known[uuid], self._modes[uuid].read(), self._health.update(uuid)
        is_divided, manager = self._instances.is_enabled(uuid), self._changes.mig_manager
        found = self._instances.find(uuid, self._modes[uuid]) if is_divided else []
        if has_new_xid := self._health.has_new_xid(uuid):
            self._watcher.forget(uuid)  # a client's fatal fault is one, too
        present, mps = look(uuid, foreign_instances(found))
        struck = self._clients.see(uuid, mps, present, is_expected=setting.mode is MPS, has_new_xid=has_new_xid)
        self._health.clear_xid(uuid)
        self._found_lately[uuid] = found
        self._possible_lately[uuid] = possible_modes(
            has_mps=self._has_mps,
            has_mig=self._instances.table(uuid) is not None,
            is_divided=is_divided,
            may_divide=not manager,
            may_switch=self._may_switch and all(f.own for f in found),
        )
        problems = [sick, mps.problem, *set(struck.values()), describe_foreign(present.foreign_processes)]
        if is_divided and manager:
            problems.append(f"MIG is switched on, and {manager}: leave the GPU to that, or remove the label")
        self._measuring.set_instances(uuid, found)
        return GpuActual(
            uuid=uuid,
            usable_mib=known.memory_mib - known.reserved_mib,
            modes=self._possible_lately[uuid],
            mode=setting.mode if (setting.mode is MIG) == is_divided else None,
            mps_daemon=mps.is_running,
            mps_hung=self._watcher.is_hung(uuid),
            mps_servers_left=bool(mps.servers) and not mps.is_running,
            mps_cleanup_pending=setting.is_cleanup_pending,
            limits=setting.limits,
            tenants=present.without_instances(foreign_instances(found)).pod_uids(),
            problem="; ".join(p for p in problems if p),
            struck=struck,
            ended=self._clients.ended(uuid),
            mig_table=self._instances.table(uuid),
            mig_instances=mig_instances_of(found, present),
            mig_manager=manager,
        )

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step."""
        self._changes.apply(self._own(uuid), self._modes[uuid], step)

    def _switched(self, uuid: GpuUuid) -> None:
        """MIG was switched, which may have reset the GPU: what was registered with it is gone."""
        self._health.after_reset(uuid)
        self._measuring.after_reset(uuid)
        self._identify(uuid)

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        reading = self._measuring.read(self._own(uuid), self._known[uuid])
        self._health.set_idle_power(uuid, reading.idle_power_w)
        xid = self._health.counters(uuid)
        counters = (reading.counters or Counters()).completed_by(Counters(xid, dict.fromkeys(xid, NVML)))
        return replace(reading, counters=counters)

    def refresh_counters(self) -> None:
        """Ask who else measures the GPUs."""
        self._feed.refresh()

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return what brings the GPU, or the pod's MIG instance of it, into a container."""
        known, file = self._known[self._own(uuid)], self._modes[uuid]
        if file.read().mode is not MIG:
            return replace(self._entry.to_gpu(uuid, known), mps_user=self._watcher.user(uuid))
        found = self._found_lately.get(uuid, [])  # no call that could hang: a container waits for this
        device = next((f.device for f in found if f.own is not None and f.own.pod_uid == pod_uid), None)
        if device is None:
            raise DeviceError(
                f"GPU {uuid}: expected a MIG instance of pod {pod_uid}, found none; the agent looks again"
            )
        return self._entry.to_instance(uuid, known, device)
