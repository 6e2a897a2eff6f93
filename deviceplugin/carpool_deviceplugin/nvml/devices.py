"""Real GPUs behind the port."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pynvml
from carpool_core.resources.node import Device
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.devices import NoDevicesError
from carpool_deviceplugin.gpu import (
    Access,
    DeviceError,
    GpuActual,
    Limits,
    Mount,
    Reading,
    SetLimits,
    SetMode,
    StartMps,
    Step,
    StopMps,
)
from carpool_deviceplugin.health import Health, Signals, advance
from carpool_deviceplugin.mps import Mps, MpsStatus
from carpool_deviceplugin.nvidia_cdi import FALLBACK_ENV, NvidiaCdi
from carpool_deviceplugin.nvml.accounting import Ledger, Moment, Present
from carpool_deviceplugin.nvml.calls import DriverGoneError, GpuLostError, Session
from carpool_deviceplugin.nvml.counters import dcgm_values
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.library import NvmlLibrary
from carpool_deviceplugin.nvml.mig import read_table
from carpool_deviceplugin.nvml.modes import ModeFile, Setting
from carpool_deviceplugin.nvml.reading import list_gpus, read_identity, read_processes, read_telemetry, read_utilization
from carpool_deviceplugin.nvml.values import Identity, Telemetry
from carpool_deviceplugin.nvml.xids import XidWatch
from carpool_deviceplugin.processes import Process, ProcTree

_FRAGMENTATION_MIB = 256
"""Kept free beside the driver's memory: allocators lose some to fragmentation."""
_MPS_EVERY_S = 5.0
"""How often the daemon is asked while the same processes are there."""
CONTAINER_MPS = "/run/carpool/mps"
CONTAINER_SHM = "/dev/shm"  # noqa: S108  # where CUDA looks for it
_HOT = pynvml.nvmlClocksEventReasonHwThermalSlowdown


class NvmlDevices:
    """The NVIDIA GPUs of this node.

    Args:
        library: NVML.
        mps: The MPS daemons; None where the node cannot run any.
        cdi: NVIDIA's CDI specifications of this node.
        state_dir: Where what the agent decided about each GPU is kept.
        processes: The node's processes.
        monotonic: Seconds.

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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = Session(library)
        self._session.open()
        self._mps, self._cdi, self._processes, self._monotonic = mps, cdi, processes, monotonic
        self._uuids = self._found()
        self._modes = {uuid: ModeFile(state_dir / "gpus" / f"{uuid}.json") for uuid in self._uuids}
        self._ledgers = {uuid: Ledger() for uuid in self._uuids}
        self._health = {uuid: Health() for uuid in self._uuids}
        self._openings = dict.fromkeys(self._uuids, self._session.openings)
        self._lost: set[GpuUuid] = set()
        self._asked: dict[GpuUuid, tuple[float, frozenset[int], MpsStatus]] = {}
        self._gpm, self._xids = Gpm(self._session), XidWatch(self._session, self._uuids)
        self._known: dict[GpuUuid, Identity] = {}
        self._profiles: dict[GpuUuid, list[str]] = {}
        self._learn()

    def _found(self) -> list[GpuUuid]:
        try:
            uuids = list_gpus(self._session)
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

    def _learn(self) -> None:
        try:
            for uuid in self._uuids:
                self._known[uuid] = read_identity(self._session, uuid)
                table = read_table(self._session, uuid) if self._known[uuid].mig_capable else None
                self._profiles[uuid] = [p.name for p in reversed(table.profiles)] if table else []
        except DeviceError as e:
            raise NoDevicesError(str(e)) from e

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
            actual = self.actual(uuid)
            mode, problem = actual.mode, actual.problem
            self._known[uuid] = read_identity(self._session, uuid)
        except DeviceError as e:
            problem = str(e)
        known = self._known[uuid]
        return Device(
            uuid=uuid,
            index=known.index,
            product=known.product,
            memory_mib=known.memory_mib,
            reserved_mib=known.reserved_mib + _FRAGMENTATION_MIB,
            compute_capability=known.compute_capability,
            mig_profiles=self._profiles[uuid],
            modes=sorted(self._possible(known), key=list(SharingMode).index),
            mode=mode,
            health=DeviceHealth.UNHEALTHY if problem else DeviceHealth.HEALTHY,
            health_message=problem,
            numa_node=known.numa_node,
        )

    def _possible(self, known: Identity) -> frozenset[SharingMode]:
        """A GPU with MIG switched on is not given out: whoever divided it looks after it."""
        if known.mig_enabled:
            return frozenset()
        modes = {SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING}
        return frozenset(modes | ({SharingMode.MPS} if self._mps is not None else set()))

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read how a GPU is divided."""
        known, setting = self._known[self._own(uuid)], self._modes[uuid].read()
        sick = self._look(uuid)
        mps = self._mps.status(uuid) if self._mps is not None else MpsStatus()
        there, strangers = self._who(uuid, mps)
        problems = [sick, mps.problem, _behind(mps, there), _strangers(strangers)]
        if known.mig_enabled:
            problems.append("MIG is switched on: switch it off (nvidia-smi -mig 0), or leave the GPU to who did")
        return GpuActual(
            uuid=uuid,
            usable_mib=known.memory_mib - known.reserved_mib,
            modes=self._possible(known),
            mode=setting.mode,
            mps_daemon=mps.is_running,
            limits=setting.limits,
            tenants=frozenset(p.process.pod_uid for p in there if p.process.pod_uid is not None),
            problem="; ".join(p for p in problems if p),
        )

    def _lately(self, uuid: GpuUuid) -> MpsStatus:
        """How the daemon was, asked again when somebody came or went: each question starts a program."""
        if self._mps is None:
            return MpsStatus()
        now, pids = self._monotonic(), frozenset(p.pid for p in read_processes(self._session, uuid))
        asked_at, were, status = self._asked.get(uuid, (-math.inf, frozenset(), MpsStatus()))
        if pids != were or now - asked_at > _MPS_EVERY_S:
            status = self._mps.status(uuid)
            self._asked[uuid] = (now, pids, status)
        return status

    def _who(self, uuid: GpuUuid, mps: MpsStatus) -> tuple[list[Present], list[Process | int]]:
        """Who of the pods is on a GPU, and who else; MPS servers are ours."""
        there: list[Present] = []
        strangers: list[Process | int] = []
        for running in read_processes(self._session, uuid):
            if running.pid in mps.servers:
                continue
            process = self._processes.find(running.pid)
            if process is None:
                strangers.append(running.pid)
            elif process.pod_uid is None:
                strangers.append(process)
            else:
                there.append(Present(running, process))
        return there, strangers

    def _look(self, uuid: GpuUuid) -> str:
        """Take in what happened to a GPU; return why no new work may go there."""
        try:
            seen = self._signals(uuid, read_telemetry(self._session, uuid))
        except (GpuLostError, DriverGoneError) as e:
            self._lost.add(uuid)
            self._health[uuid] = advance(self._health[uuid], Signals(lost=str(e)), self._monotonic())
            raise
        self._health[uuid] = advance(self._health[uuid], seen, self._monotonic())
        return self._health[uuid].problem

    def _signals(self, uuid: GpuUuid, telemetry: Telemetry) -> Signals:
        xids = self._xids.seen(uuid)  # may fail; until it does not, a reset is still to be told
        was_reset = self._openings[uuid] != self._session.openings or uuid in self._lost
        self._openings[uuid] = self._session.openings
        self._lost.discard(uuid)
        reasons = telemetry.clock_reasons
        return Signals(
            xids=xids,
            was_reset=was_reset,
            ecc_uncorrectable=telemetry.ecc_uncorrectable,
            remap_pending=telemetry.remap_pending,
            remap_failed=telemetry.remap_failed,
            is_hot=None if reasons is None else bool(reasons & _HOT),
        )

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step."""
        file = self._modes[self._own(uuid)]
        setting = file.read()
        match step:
            case SetMode(mode):
                if mode is not setting.mode:
                    self._must_be_empty(uuid)
                    file.write(Setting(mode))
            case StartMps():
                if setting.mode is not SharingMode.MPS:
                    raise DeviceError(f"GPU {uuid}: expected mode MPS, found {setting.mode or 'Idle'}; set it first")
                self._daemons(uuid).start(uuid)
            case StopMps():
                self._must_be_empty(uuid)
                if self._mps is not None:
                    self._mps.stop(uuid)
                file.write(Setting(setting.mode))
            case SetLimits(pod_uid, limits):
                file.write(replace(setting, limits=_with(setting.limits, pod_uid, limits)))

    def _daemons(self, uuid: GpuUuid) -> Mps:
        if self._mps is None:
            raise DeviceError(f"GPU {uuid}: expected nvidia-cuda-mps-control on this node, found none")
        return self._mps

    def _must_be_empty(self, uuid: GpuUuid) -> None:
        mps = self._mps.status(uuid) if self._mps is not None else MpsStatus()
        there, strangers = self._who(uuid, mps)
        whom = sorted({str(p.process.pod_uid) for p in there}) + [_name(s) for s in strangers]
        if whom:
            raise DeviceError(
                f"GPU {uuid}: expected no process on the GPU, found {', '.join(whom)}; wait until it ends"
            )

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        ledger, known = self._ledgers[self._own(uuid)], self._known[uuid]
        telemetry = read_telemetry(self._session, uuid)
        there, _ = self._who(uuid, self._lately(uuid))
        samples = read_utilization(self._session, uuid, ledger.since_us)
        gpm = self._gpm.sample(uuid)
        at = self._monotonic()
        energy_j = None if telemetry.energy_mj is None else telemetry.energy_mj / 1000
        processes = ledger.take(Moment(at, there, samples, energy_j, gpm))
        return Reading(
            at=at,
            processes=tuple(processes),
            power_w=telemetry.power_w,
            idle_power_w=ledger.idle_power_w,
            power_limit_w=known.power_limit_w,
            energy_j=energy_j,
            counters=dcgm_values(known, telemetry, gpm),
            pci_bus_id=known.pci_bus_id,
        )

    def access(self, uuid: GpuUuid) -> Access:
        """Return what brings the GPU into a container: NVIDIA's CDI specification, or a word to NVIDIA's runtime."""
        edits = self._cdi.find(uuid, self._known[self._own(uuid)].minor)
        pipe = shm = None
        if self._mps is not None:
            directory = self._mps.directory(uuid)
            pipe, shm = Mount(str(directory / "pipe"), CONTAINER_MPS), Mount(str(directory / "shm"), CONTAINER_SHM)
        if edits is None:
            return Access(env=FALLBACK_ENV, mounts=(), mps_pipe=pipe, mps_shm=shm, is_named_to_runtime=True)
        return Access(
            env={},
            mounts=(),
            mps_pipe=pipe,
            mps_shm=shm,
            edits=edits.device,
            common_edits=edits.common,
            cdi_version=edits.cdi_version,
        )


def _with(limits: Mapping[PodUid, Limits], pod: PodUid, wanted: Limits | None) -> dict[PodUid, Limits]:
    others = {p: known for p, known in limits.items() if p != pod}
    return others if wanted is None else {**others, pod: wanted}


def _name(stranger: Process | int) -> str:
    return f"process {stranger}" if isinstance(stranger, int) else f"process {stranger.pid} ({stranger.name[:32]})"


def _behind(mps: MpsStatus, there: Sequence[Present]) -> str:
    """Name the pods that a fault takes down together: only one of them is to blame."""
    pods = sorted({str(p.process.pod_uid) for p in there if p.running.pid in mps.faulty})
    return f"pods that it ends together: {', '.join(pods)}" if pods else ""


def _strangers(found: Sequence[Process | int]) -> str:
    if not found:
        return ""
    whom = ", ".join(_name(s) for s in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f"{whom} on the GPU belong to no pod: end them, or run the agent with the host's PIDs so that it knows them"
