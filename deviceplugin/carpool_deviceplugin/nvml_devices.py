"""NVIDIA GPUs behind the port `Devices`."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from carpool_core.resources.node import Device
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.dcgm import CounterFeed, CounterSource
from carpool_deviceplugin.gpu import (
    CONTAINER_MPS,
    FRAGMENTATION_MIB,
    Access,
    Counters,
    CreateInstance,
    DestroyInstance,
    DeviceError,
    GpuActual,
    Mount,
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
    MigInstances,
    foreign_instances,
    mig_instances_of,
    possible_modes,
)
from carpool_deviceplugin.mps import Mps, driver_problem
from carpool_deviceplugin.nvlib import (
    ComputeMode,
    Identity,
    NvmlLibrary,
    Session,
    Telemetry,
    UnusableDriverError,
    find_gpus,
    linked_gpus,
    read_identity,
    read_telemetry,
)
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.sampling import NVML, Sampler

MPS, MIG = SharingMode.MPS, SharingMode.MIG

CONTAINER_SHM = "/dev/shm"  # noqa: S108  # where CUDA opens it
_IDENTITY_AGE_S = 60.0
"""Power limits and compute modes may change; after a restart of the driver they are read at once."""

_Found = tuple[Telemetry, GpuProcesses]
"""What was read of a GPU at one moment."""


@dataclass
class GpuState:
    """State of one GPU."""

    identity: Identity
    identified: tuple[int, float]
    """Opening of the driver, and time in seconds, of reading the identity."""
    file: CheckpointFile
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Only one call at a time reads the actual state; two would each see half of the events."""
    modes: frozenset[SharingMode] = frozenset()
    """Modes as last read."""
    instances: Sequence[FoundInstance] = ()
    """MIG instances as last read."""
    foreign_processes: str = ""
    """Names of the processes outside of pods, as last read."""
    is_read: bool = False
    """Whether instances, processes and memory were read, and were not the values from before the first reading."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each counter, as last read; empty before, and until other programs on the node were asked."""
    unowned_mib: int = 0
    """Memory in use beside the reserved, as last read, where the GPU is whole and has no process."""


class NvmlDevices:
    """The NVIDIA GPUs of this node.

    Without `mps` the node cannot run MPS daemons, because of `mps_problem`. `state_dir` holds the agent's state of each
    GPU. `may_switch_mig` allows switching MIG on and off on an idle GPU. `may_write` is whether health is saved, and
    false beside an agent that does so. A counter comes from the first of the `sources` that has it. `sysfs` is where
    Linux describes PCI devices. `monotonic` returns seconds, and `wall` seconds since 1970.

    Raises:
        UnusableDriverError: There is no driver or no usable GPU.
    """

    simulated = False

    def __init__(
        self,
        library: NvmlLibrary,
        *,
        mps: Mps | None,
        mps_problem: str = "",
        cdi: NvidiaCdi,
        state_dir: Path,
        processes: ProcTree,
        may_switch_mig: bool = False,
        may_write: bool = True,
        sources: Sequence[CounterSource] = (),
        sysfs: Path = Path("/sys"),
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sysfs, self._processes = sysfs, processes
        self.session = session = Session(library)
        """The open library."""
        session.open()
        self.mps_missing = mps_problem
        """Why the node cannot run MPS daemons, whatever its driver; empty if it can."""
        self.driver = self._read_driver()
        """Version of the driver as last read."""
        self._mps, self._may_switch, self._monotonic = mps, may_switch_mig, monotonic
        self.mig_manager = self._released = ""
        self._mig = MigInstances(session)
        self.unreadable: Sequence[str] = ()
        """Reasons why GPUs of the node are not among `uuids`; they are read once, at the start."""
        self.hidden: Sequence[int] = ()
        """Indices of the GPUs whose device files the container does not have."""
        directory = state_dir / "gpus"
        self._gpus = self._find(directory)
        self.uuids: Sequence[GpuUuid] = [*self._gpus]
        """The GPUs by index."""
        self._watcher, self._clients = ProcessWatcher(session, processes, mps, monotonic), MpsFailures(monotonic)
        self._health = HealthMonitor(session, self.uuids, directory, monotonic, may_write=may_write)
        self._cdi, self._feed = cdi, CounterFeed(sources, monotonic)
        self._sampler = Sampler(session, self.uuids, self._feed, monotonic, wall)

    def _find(self, directory: Path) -> dict[GpuUuid, GpuState]:
        """Identify the GPUs. One that cannot be read does not keep the agent from using the others."""
        gpus: dict[GpuUuid, GpuState] = {}
        try:
            uuids, unreadable, self.hidden = find_gpus(self.session)
        except DeviceError as e:
            uuids, unreadable = [], [str(e)]
        for uuid in uuids:
            try:
                identity = read_identity(self.session, uuid, self._sysfs)
                if identity.mig_capable:
                    self._mig.learn(uuid)
            except DeviceError as e:
                unreadable.append(str(e))
                continue
            identified = (self.session.generation, self._monotonic())
            gpus[uuid] = GpuState(identity, identified, CheckpointFile(directory / f"{uuid}.json"))
        if not gpus:
            found = "; ".join(unreadable) or "a driver and none"
            advice = "repair one, then restart the agent" if unreadable else "give the container /dev/nvidia*"
            raise UnusableDriverError(found, "GPUs on this node", advice, name="gpus")
        self.unreadable = [f"{reason} (repair it, then restart the agent)" for reason in unreadable]
        for reason in self.unreadable:
            structlog.get_logger().warning("gpu not used", reason=reason)
        return gpus

    @property
    def numa_nodes(self) -> Collection[int]:
        """The NUMA nodes of the GPUs; empty if one of them has none."""
        found = {gpu.identity.numa_node for gpu in self._gpus.values()}
        return sorted(node for node in found if node is not None) if None not in found else ()

    @property
    def mps_problem(self) -> str:
        """Why no GPU of the node offers mode MPS, empty if they do; a running daemon is still read and stopped."""
        return self.mps_missing or driver_problem(self.driver)

    def _read_driver(self) -> str:
        return self.session.ask("", self.session.library.nvmlSystemGetDriverVersion) or "unknown"

    def identity(self, uuid: GpuUuid) -> Identity:
        """Return a GPU's identity as last read."""
        return self.state(uuid).identity

    def graphics_processes(self, uuid: GpuUuid) -> str:
        """Return the names of a GPU's living graphics programs outside of pods, as last read."""
        found = map(self._processes.find, self.state(uuid).identity.graphics_pids)
        return ", ".join(describe_process(one) for one in found if one is not None and one.pod_uid is None)

    def set_mig_manager(self, manager: str) -> None:
        """Set the name of another MIG manager of the node; empty if there is none."""
        self.mig_manager = manager

    def release(self, reason: str) -> None:
        """Give the GPUs no new work while there is a reason; without processes and MPS daemons, close the driver."""
        self._released = reason
        if not reason:
            self.session.suspend("")
        else:
            with ExitStack() as locks:  # no other call loses its handle
                for gpu in self._gpus.values():
                    locks.enter_context(gpu.lock)
                if not any(map(self._is_used, self.uuids)):
                    self.session.suspend(f"{reason}: the agent holds no handle of the GPUs until the label changes")

    def _is_used(self, uuid: GpuUuid) -> bool:
        """Whether a pod's process or an MPS daemon is on the GPU; a GPU that cannot be read counts as unused."""
        if self._mps is not None and self._mps.is_running(uuid):
            return True
        try:
            return bool(self._present(uuid).pods)
        except DeviceError:
            return False

    def state(self, uuid: GpuUuid) -> GpuState:
        """Return what is known of a GPU, as last read."""
        if uuid not in self._gpus:
            raise DeviceError(f"GPU {uuid}: expected one of {', '.join(self.uuids)}; other GPUs cannot be changed")
        return self._gpus[uuid]

    def _identify(self, uuid: GpuUuid) -> None:
        gpu = self._gpus[uuid]
        gpu.identity = read_identity(self.session, uuid, self._sysfs)
        self.driver = self._read_driver()
        gpu.identified = (self.session.generation, self._monotonic())

    def inventory(self) -> list[Device]:
        """Describe every GPU."""
        return [self.describe(uuid) for uuid in self.uuids]

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU."""
        return self._describe(uuid)[0]

    def survey(self, uuid: GpuUuid) -> tuple[Device, Reading | DeviceError]:
        """Describe a GPU and read its counters, with its telemetry and processes read once."""
        device, found = self._describe(uuid)
        if found is None:
            return device, DeviceError(device.health_message)
        try:
            return device, self._reading(uuid, *found)
        except DeviceError as e:
            return device, e

    def _describe(self, uuid: GpuUuid) -> tuple[Device, _Found | None]:
        """Describe a GPU; return also what was read, None if it could not be read."""
        gpu, mode, problem, found = self._gpus[uuid], None, "", None
        try:
            with gpu.lock:
                actual, found = self._actual(uuid)
            mode, problem = actual.mode, actual.problem
            generation, at = gpu.identified
            if generation != self.session.generation or self._monotonic() - at > _IDENTITY_AGE_S:
                self._identify(uuid)
        except DeviceError as e:
            problem = str(e)
        known, table = gpu.identity, self._mig.table(uuid)
        device = Device(
            uuid=uuid,
            index=known.index,
            product=known.product,
            memory_mib=known.memory_mib,
            reserved_mib=known.reserved_mib + FRAGMENTATION_MIB,
            compute_capability=known.compute_capability,
            figures=known.figures,
            mig_profiles=[p.name for p in reversed(table.profiles)] if table else [],
            modes=sorted(gpu.modes, key=list(SharingMode).index),
            mode=mode,
            health=DeviceHealth.UNHEALTHY if problem else DeviceHealth.HEALTHY,
            health_message=problem,
            numa_node=known.numa_node,
            nvlink_peers=linked_gpus(known, {uuid: one.identity for uuid, one in self._gpus.items()}),
        )
        return device, found

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read the actual state of a GPU."""
        with self.state(uuid).lock:
            return self._actual(uuid)[0]

    def _actual(self, uuid: GpuUuid) -> tuple[GpuActual, _Found]:
        gpu, manager = self._gpus[uuid], self.mig_manager
        known, setting, (problem, telemetry) = gpu.identity, gpu.file.read(), self._health.update(uuid)
        is_divided = self._mig.is_enabled(uuid)
        found = self._mig.find(uuid, gpu.file) if is_divided else []
        if has_new_xid := self._health.has_new_xid(uuid):
            self._watcher.forget(uuid)  # an MPS client's fatal fault causes an XID, too
        present, mps = self._watcher.look(uuid, foreign_instances(found))
        struck = self._clients.see(uuid, mps, present, is_expected=setting.mode is MPS, has_new_xid=has_new_xid)
        self._health.clear_xid(uuid)
        possible = possible_modes(
            has_mps=self._mps is not None and not self.mps_problem,
            has_mig=self._mig.table(uuid) is not None,
            is_divided=is_divided,
            may_divide=not manager,
            may_switch=self._may_switch and all(f.own for f in found),
        )
        is_empty = not (present.pods or present.foreign_processes or known.graphics_pids or is_divided)
        gpu.unowned_mib = telemetry.memory_used_mib - known.reserved_mib if is_empty else 0
        gpu.foreign_processes = ", ".join(map(describe_process, present.foreign_processes[:4]))
        gpu.is_read = True
        gpu.instances, gpu.modes = found, possible - known.compute_mode.withdrawn_modes
        problems = [problem, mps.problem, *set(struck.values()), describe_foreign(present.foreign_processes)]
        if self._released:
            problems.append(f"{self._released}: the agent closes its handles when pods and MPS daemons have ended")
        if known.compute_mode is ComputeMode.PROHIBITED:
            problems.append(f"its compute mode is Prohibited: allow programs with nvidia-smi -i {known.index} -c 0")
        if is_divided and self._mig.table(uuid) is None:
            problems.append(
                "MIG is on, but the driver lists no MIG profile: switch it off "
                f"(nvidia-smi -i {known.index} -mig 0), or update the driver"
            )
        elif is_divided and manager:
            problems.append(f"MIG is switched on, and {manager}: leave the GPU to that, or remove the label")
        self._sampler.set_instances(uuid, found)
        actual = GpuActual(
            uuid=uuid,
            usable_mib=known.memory_mib - known.reserved_mib,
            modes=gpu.modes,
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
            mig_table=self._mig.table(uuid),
            mig_instances=mig_instances_of(found, present),
            mig_manager=manager,
        )
        return actual, (telemetry, present)

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Apply one step."""
        file = self.state(uuid).file
        match step:
            case SetMode(mode):
                self._set_mode(uuid, file, mode)
            case StartMps():
                mode = file.read().mode
                if mode is not MPS:
                    raise DeviceError(f"GPU {uuid}: expected mode MPS, found {mode or 'Idle'}; set it first")
                if self._mps is None or self.mps_problem:
                    raise DeviceError(f"GPU {uuid}: {self.mps_problem or 'expected MPS daemons, found none'}")
                if not self._mps.is_running(uuid) and (pods := sorted(self._present(uuid).pod_uids())):
                    # They may be clients of a server that outlived its daemon, and a new daemon would end it.
                    raise DeviceError(
                        f"GPU {uuid}: expected no pod's process where an MPS daemon starts, found {', '.join(pods)}; "
                        "wait until they end"
                    )
                self._mps.start(uuid)
            case StopMps():
                self._check_is_empty(uuid, file)
                if self._mps is not None:
                    with suppress(DeviceError):  # on a full disk, stopping the daemon may free space
                        file.write(replace(file.read(), is_cleanup_pending=True))
                    self._mps.stop(uuid)
                    self._watcher.forget(uuid)
                file.write(replace(file.read(), limits={}, is_cleanup_pending=False))
            case SetLimits(pod_uid, limits):
                file.write(file.read().limiting(pod_uid, limits))
            case CreateInstance(placement, pod_uid):
                self._check_may_divide(uuid)
                self._mig.create(uuid, file, placement, pod_uid)
            case DestroyInstance(placement):
                self._check_may_divide(uuid)
                self._mig.destroy(uuid, file, placement)

    def _set_mode(self, uuid: GpuUuid, file: CheckpointFile, mode: SharingMode | None) -> None:
        setting = file.read()
        is_switching = mode is not None and (mode is MIG) != self._mig.is_enabled(uuid)
        if mode is setting.mode and not is_switching:
            return
        self._check_is_empty(uuid, file)
        if is_switching:
            self._check_may_divide(uuid)
            if not self._may_switch:
                raise DeviceError(
                    f"GPU {uuid}: expected MIG to be switched {'on' if mode is MIG else 'off'}, found it not so, and "
                    "the agent may not switch it; do it (nvidia-smi -mig), or set CARPOOL_MIG_SWITCH"
                )
            self._mig.switch(uuid, on=mode is MIG)
            # The switch may have reset the GPU, which ends event registrations and invalidates samples.
            self._health.after_reset(uuid)
            self._sampler.after_reset(uuid)
            self._identify(uuid)
        file.write(replace(setting, mode=mode, limits={}))

    def _check_may_divide(self, uuid: GpuUuid) -> None:
        if self.mig_manager:
            raise DeviceError(f"GPU {uuid}: expected no other MIG manager, found that {self.mig_manager}")

    def _present(self, uuid: GpuUuid, others: frozenset[int] = frozenset()) -> GpuProcesses:
        """Read the processes on the GPU, without those on other managers' MIG instances."""
        self._watcher.forget(uuid)
        return self._watcher.look(uuid, others)[0].without_instances(others)

    def _check_is_empty(self, uuid: GpuUuid, file: CheckpointFile) -> None:
        others = foreign_instances(self._mig.find(uuid, file)) if self._mig.is_enabled(uuid) else frozenset[int]()
        present = self._present(uuid, others)
        found = sorted(map(str, present.pod_uids())) + [describe_process(p) for p in present.foreign_processes]
        if found:
            raise DeviceError(
                f"GPU {uuid}: expected no process on the GPU, found {', '.join(found)}; wait until it ends"
            )

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        self.state(uuid)
        return self._reading(uuid, read_telemetry(self.session, uuid), self._watcher.look(uuid)[0])

    def _reading(self, uuid: GpuUuid, telemetry: Telemetry, present: GpuProcesses) -> Reading:
        reading = self._sampler.read(uuid, self._gpus[uuid].identity, telemetry, present.pods)
        self._health.set_idle_power(uuid, reading.idle_power_w)
        xid = self._health.counters(uuid)
        counters = (reading.counters or Counters()).completed_by(Counters(xid, dict.fromkeys(xid, NVML)))
        if self._feed.is_refreshed:
            self._gpus[uuid].sources = counters.sources
        return replace(reading, counters=counters)

    def refresh_counters(self) -> None:
        """Read the other programs that measure the GPUs."""
        self._feed.refresh()

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return what a container needs for the GPU, or for the pod's MIG instance of it. Calls no driver."""
        gpu = self.state(uuid)
        if gpu.file.read().mode is not MIG:
            access = self._cdi.gpu(uuid, gpu.identity.minor)
            if self._mps is None:
                return access
            daemon = self._mps.daemon(uuid)
            return replace(
                access,
                mps_pipe=Mount(str(daemon.pipe), CONTAINER_MPS),
                mps_shm=Mount(str(daemon.shm), CONTAINER_SHM),
                mps_user=self._watcher.user(uuid),
            )
        device = next((f.device for f in gpu.instances if f.own is not None and f.own.pod_uid == pod_uid), None)
        if device is None:
            raise DeviceError(
                f"GPU {uuid}: expected a MIG instance of pod {pod_uid}, found none; the agent tries again"
            )
        return self._cdi.mig_device(gpu.identity.minor, device)
