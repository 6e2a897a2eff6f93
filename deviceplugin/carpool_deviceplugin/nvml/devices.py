"""Real GPUs behind the port."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from carpool_core.resources.node import Device
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.cdi.nvidia import NvidiaCdi
from carpool_deviceplugin.devices.gpu import Access, DeviceError, GpuActual, Reading, Step
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.devices.processes import ProcTree
from carpool_deviceplugin.mps.daemons import Mps, MpsStatus
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.changes import Changes
from carpool_deviceplugin.nvml.clients import Clients
from carpool_deviceplugin.nvml.conditions import Conditions
from carpool_deviceplugin.nvml.entry import MIG_MINORS, Entry
from carpool_deviceplugin.nvml.glances import Glances
from carpool_deviceplugin.nvml.instances import Found, Instances, foreign, parts_of
from carpool_deviceplugin.nvml.library import NvmlLibrary
from carpool_deviceplugin.nvml.measuring import Measuring
from carpool_deviceplugin.nvml.modes import ModeFile, possible_modes
from carpool_deviceplugin.nvml.presence import Presence, Watcher, about_strangers
from carpool_deviceplugin.nvml.reading import list_gpus, read_identity
from carpool_deviceplugin.nvml.values import Identity, linked
from carpool_deviceplugin.sources.feed import Feed, Source

_FRAGMENTATION_MIB = 256
"""Kept free beside the driver's memory: allocators lose some to fragmentation."""
_KNOWN_FOR_S = 60.0
"""Power limits may be changed; a driver that was restarted is asked at once."""
MPS, MIG = SharingMode.MPS, SharingMode.MIG
Look = Callable[[GpuUuid, frozenset[int]], tuple[Presence, MpsStatus]]


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
        sources: Sequence[Source] = (),
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._session = Session(library)
        self._session.open()
        self._has_mps, self._may_switch = mps is not None, may_switch_mig
        self._instances, self._monotonic = Instances(self._session), monotonic
        self._known, self._known_at = dict[GpuUuid, Identity](), dict[GpuUuid, tuple[int, float]]()
        self._uuids = self._found()
        self._modes = {uuid: ModeFile(state_dir / "gpus" / f"{uuid}.json") for uuid in self._uuids}
        self._looking = {uuid: threading.Lock() for uuid in self._uuids}
        self._watcher, self._clients = Watcher(self._session, processes, mps, monotonic), Clients(monotonic)
        glances, kept = Glances(self._session, monotonic), state_dir / "gpus"
        self._conditions = Conditions(self._session, self._uuids, glances, kept, monotonic, may_write=may_write)
        self._entry, self._feed = Entry(cdi, mps, mig_minors), Feed(sources, monotonic)
        self._measuring = Measuring(self._session, self._uuids, glances, self._watcher, self._feed, monotonic, wall)
        self._changes = Changes(self._instances, self._watcher, mps, self._switched, may_switch=may_switch_mig)
        self._possible_lately: dict[GpuUuid, frozenset[SharingMode]] = {}
        self._found_lately: dict[GpuUuid, list[Found]] = {}

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
        self._known_at[uuid] = (self._session.openings, self._monotonic())

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
            openings, at = self._known_at[uuid]
            if openings != self._session.openings or self._monotonic() - at > _KNOWN_FOR_S:
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
            nvlink_peers=linked(known, self._known),
        )

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read how a GPU is divided; who else looks at it waits, or each would see half of what happened."""
        with self._looking[self._own(uuid)]:
            return self._actual(uuid, self._watcher.look)

    def _actual(self, uuid: GpuUuid, look: Look) -> GpuActual:
        known, setting, sick = self._known[uuid], self._modes[uuid].read(), self._conditions.look(uuid)
        is_divided, manager = self._instances.is_enabled(uuid), self._changes.mig_manager
        found = self._instances.find(uuid, self._modes[uuid]) if is_divided else []
        if had_xid := self._conditions.had_xid(uuid):
            self._watcher.forget(uuid)  # a client's fatal fault is one, too
        present, mps = look(uuid, foreign(found))
        struck = self._clients.see(uuid, mps, present, is_expected=setting.mode is MPS, had_xid=had_xid)
        self._conditions.took_xid(uuid)
        self._found_lately[uuid] = found
        self._possible_lately[uuid] = possible_modes(
            has_mps=self._has_mps,
            has_mig=self._instances.table(uuid) is not None,
            is_divided=is_divided,
            may_divide=not manager,
            may_switch=self._may_switch and all(f.own for f in found),
        )
        problems = [sick, mps.problem, *set(struck.values()), about_strangers(present.strangers)]
        if is_divided and manager:
            problems.append(f"MIG is switched on, and {manager}: leave the GPU to that, or remove the label")
        self._measuring.divided(uuid, found)
        return GpuActual(
            uuid=uuid,
            usable_mib=known.memory_mib - known.reserved_mib,
            modes=self._possible_lately[uuid],
            mode=setting.mode if (setting.mode is MIG) == is_divided else None,
            mps_daemon=mps.is_running,
            mps_hangs=self._watcher.hangs(uuid),
            mps_left=bool(mps.servers) and not mps.is_running,
            mps_untidied=setting.is_untidied,
            limits=setting.limits,
            tenants=present.beyond(foreign(found)).pod_uids(),
            problem="; ".join(p for p in problems if p),
            struck=struck,
            ended=self._clients.ended(uuid),
            mig_table=self._instances.table(uuid),
            parts=parts_of(found, present),
            mig_manager=manager,
        )

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step."""
        self._changes.apply(self._own(uuid), self._modes[uuid], step)

    def _switched(self, uuid: GpuUuid) -> None:
        """MIG was switched, which may have reset the GPU: what was registered with it is gone."""
        self._conditions.begin_anew(uuid)
        self._measuring.begin_anew(uuid)
        self._identify(uuid)

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        reading = self._measuring.read(self._own(uuid), self._known[uuid])
        self._conditions.idle_power(uuid, reading.idle_power_w)
        return replace(reading, counters={**self._conditions.counters(uuid), **(reading.counters or {})})

    def ask_others(self) -> None:
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
