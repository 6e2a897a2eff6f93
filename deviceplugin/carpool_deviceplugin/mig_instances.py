"""MIG through NVML: what a GPU can be divided into, its instances, and one step at a time."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pynvml
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.gpu import DeviceError, Limits, MigInstance
from carpool_deviceplugin.gpu_processes import GpuProcesses
from carpool_deviceplugin.mig import Create, Destroy, Instance, MigPlan, MigStep, MigTable, Placement, Profile
from carpool_deviceplugin.nvlib import Handle, Session, read_processes

_MOST = 16
"""More instances, or placements of a profile, than any GPU has."""
_NEVER_HEARD_OF = pynvml.NVML_ERROR_INVALID_ARGUMENT
"""What drivers say of profiles that came after them; those that a GPU merely lacks are NOT_SUPPORTED."""


@dataclass(frozen=True, slots=True)
class MigDevice:
    """What a container is given of a GPU instance."""

    uuid: str
    """`MIG-…`."""
    gpu_instance_id: int
    compute_instance_id: int


def read_table(session: Session, uuid: GpuUuid) -> MigTable | None:
    """Ask the driver what the GPU can be divided into; None without MIG. Works whether MIG is switched on or off."""
    library, handle = session.library, session.handle(uuid)
    profiles: list[Profile] = []
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = session.ask(uuid, library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index, absent=_NEVER_HEARD_OF)
        if info is None:
            continue
        placements = (pynvml.c_nvmlGpuInstancePlacement_t * _MOST)()
        count = ctypes.c_uint(_MOST)
        session.call(
            uuid, library.nvmlDeviceGetGpuInstancePossiblePlacements, handle, info.id, placements, ctypes.byref(count)
        )
        found = [placements[i] for i in range(count.value)]
        if found:
            profiles.append(_profile(info, found))
    if not profiles:
        return None
    profiles.sort(key=lambda p: (-p.memory_slices, -p.compute_slices, p.has_media))
    return MigTable(max(s + p.memory_slices for p in profiles for s in p.starts), tuple(profiles))


def _profile(info: Any, placements: list[Any]) -> Profile:
    name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
    name = name.removeprefix("MIG ")
    return Profile(
        name=name,
        id=info.id,
        compute_slices=info.sliceCount,
        memory_slices=placements[0].size,
        starts=tuple(sorted(p.start for p in placements)),
        memory_mib=info.memorySizeMB,
        sm_count=info.multiprocessorCount,
        has_media="+me" in name,
    )


def read_instances(session: Session, uuid: GpuUuid, table: MigTable) -> list[Instance]:
    """List a GPU's instances; raises NvmlError. Empty where MIG is switched off."""
    library, handle = session.library, session.handle(uuid)
    found: list[Instance] = []
    for profile in table.profiles:
        handles = (pynvml.c_nvmlGpuInstance_t * _MOST)()
        count = ctypes.c_uint(_MOST)
        if (
            session.ask(uuid, library.nvmlDeviceGetGpuInstances, handle, profile.id, handles, ctypes.byref(count))
            is None
        ):
            return []
        for i in range(count.value):
            info = session.call(uuid, library.nvmlGpuInstanceGetInfo, handles[i])
            found.append(Instance(info.id, Placement(profile, info.placement.start)))
    return sorted(found, key=lambda i: i.id)


def read_mig_devices(session: Session, uuid: GpuUuid) -> list[MigDevice]:
    """List what can be handed to containers; raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    devices: list[MigDevice] = []
    for index in range(session.ask(uuid, library.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        # Indices have gaps: that of a destroyed instance is not found.
        device = session.ask(
            uuid, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index, absent=pynvml.NVML_ERROR_NOT_FOUND
        )
        if device is None:
            continue
        devices.append(
            MigDevice(
                uuid=session.call(uuid, library.nvmlDeviceGetUUID, device),
                gpu_instance_id=session.call(uuid, library.nvmlDeviceGetGpuInstanceId, device),
                compute_instance_id=session.call(uuid, library.nvmlDeviceGetComputeInstanceId, device),
            )
        )
    return devices


def read_processes_of_instances(session: Session, uuid: GpuUuid) -> set[int]:
    """Return the IDs of the GPU instances that have a process; raises NvmlError."""
    return {p.gpu_instance_id for p in read_processes(session, uuid) if p.gpu_instance_id is not None}


def apply_step(session: Session, uuid: GpuUuid, step: MigStep) -> None:
    """Take one step; a step that was taken already changes nothing. Raises NvmlError or DeviceError."""
    match step:
        case Destroy(instance):
            _destroy(session, uuid, instance)
        case Create(placement):
            _create(session, uuid, placement)


def _instances_at(session: Session, uuid: GpuUuid, profile: Profile) -> dict[int, tuple[int, Handle]]:
    """Instances of one profile: ID and handle by first slice."""
    library, handle = session.library, session.handle(uuid)
    handles = (pynvml.c_nvmlGpuInstance_t * _MOST)()
    count = ctypes.c_uint(_MOST)
    session.call(uuid, library.nvmlDeviceGetGpuInstances, handle, profile.id, handles, ctypes.byref(count))
    found = {}
    for i in range(count.value):
        info = session.call(uuid, library.nvmlGpuInstanceGetInfo, handles[i])
        found[info.placement.start] = (info.id, handles[i])
    return found


def _create(session: Session, uuid: GpuUuid, placement: Placement) -> None:
    library, handle, profile = session.library, session.handle(uuid), placement.profile
    there = _instances_at(session, uuid, profile).get(placement.start)
    if there is None:
        place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, profile.memory_slices)
        made = session.call(
            uuid, library.nvmlDeviceCreateGpuInstanceWithPlacement, handle, profile.id, ctypes.byref(place)
        )
    else:
        made = there[1]
    full = _full_compute_profile(session, uuid, made, profile)
    if not _compute_instances(session, uuid, made, full):
        session.call(uuid, library.nvmlGpuInstanceCreateComputeInstance, made, full)


def _destroy(session: Session, uuid: GpuUuid, instance: Instance) -> None:
    library, profile = session.library, instance.placement.profile
    there = _instances_at(session, uuid, profile).get(instance.placement.start)
    if there is None:
        return
    number, handle = there
    if number != instance.id:
        raise DeviceError(
            f"GPU {uuid}: expected {instance}, found instance {number} in its place; somebody else divides this GPU: "
            "let one manager do it"
        )
    for compute_profile in _compute_profiles(session, uuid, handle):
        for compute in _compute_instances(session, uuid, handle, compute_profile):
            session.call(uuid, library.nvmlComputeInstanceDestroy, compute)
    session.call(uuid, library.nvmlGpuInstanceDestroy, handle)


def _compute_profiles(session: Session, uuid: GpuUuid, instance: Handle) -> dict[int, int]:
    """IDs of the compute instance profiles of a GPU instance, with their slices."""
    found: dict[int, int] = {}
    for index in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        info = session.ask(
            uuid,
            session.library.nvmlGpuInstanceGetComputeInstanceProfileInfo,
            instance,
            index,
            pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
            absent=_NEVER_HEARD_OF,
        )
        if info is not None:
            found[info.id] = info.sliceCount
    return found


def _full_compute_profile(session: Session, uuid: GpuUuid, instance: Handle, profile: Profile) -> int:
    for number, slices in _compute_profiles(session, uuid, instance).items():
        if slices == profile.compute_slices:
            return number
    raise DeviceError(
        f"GPU {uuid}: expected a compute instance profile for all of {profile}, found none; update the driver"
    )


def _compute_instances(session: Session, uuid: GpuUuid, instance: Handle, profile_id: int) -> list[Handle]:
    handles = (pynvml.c_nvmlComputeInstance_t * _MOST)()
    count = ctypes.c_uint(_MOST)
    session.call(
        uuid, session.library.nvmlGpuInstanceGetComputeInstances, instance, profile_id, handles, ctypes.byref(count)
    )
    return [handles[i] for i in range(count.value)]


@dataclass(frozen=True, slots=True)
class CreatedInstance:
    """A MIG instance that the agent made, or was about to make when it died."""

    profile: str
    start: int
    pod_uid: PodUid | None = None
    """Whom it was made for."""
    device: str = ""
    """UUID of its MIG device; empty until it was seen."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How a GPU is shared, what MPS holds its pods to, and which MIG instances are ours."""

    mode: SharingMode | None = None
    limits: dict[PodUid, Limits] = field(default_factory=dict)
    instances: tuple[CreatedInstance, ...] = ()
    is_cleanup_pending: bool = False
    """Whether an MPS daemon's stop was begun, and has not ended."""

    def limiting(self, pod_uid: PodUid, limits: Limits | None) -> "Checkpoint":
        """Set what MPS holds a pod to; None removes it."""
        others = {pod: known for pod, known in self.limits.items() if pod != pod_uid}
        return replace(self, limits=others if limits is None else {**others, pod_uid: limits})


def possible_modes(
    *, has_mps: bool, has_mig: bool, is_divided: bool, may_divide: bool, may_switch: bool
) -> frozenset[SharingMode]:
    """Say what a GPU can be prepared for.

    Args:
        has_mps: The node can run MPS daemons.
        has_mig: The GPU has MIG.
        is_divided: MIG is switched on.
        may_divide: Nobody else divides the node's GPUs.
        may_switch: MIG may be switched, and doing so takes no instance from anybody else.
    """
    whole = {SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING} | ({SharingMode.MPS} if has_mps else set())
    divided = {SharingMode.MIG} if has_mig and may_divide and (is_divided or may_switch) else set()
    return frozenset(divided | (whole if not is_divided or (may_divide and may_switch) else set()))


class CheckpointFile:
    """A GPU's setting on disk; a reader sees the old or the new one, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Checkpoint:
        """Return the setting; a GPU without one is idle; one whose file is damaged is written anew."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Checkpoint)
        except FileNotFoundError:
            return Checkpoint()
        except msgspec.DecodeError:
            return Checkpoint()
        except OSError as e:
            raise DeviceError(f"{self._path}: expected to read the GPU's mode, found {e}") from e

    def write(self, setting: Checkpoint) -> None:
        """Keep the setting; raises DeviceError where it cannot be kept (a full disk, say)."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(setting))
            temporary.replace(self._path)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            raise DeviceError(f"{self._path}: expected to keep the GPU's mode there, found {e}; free some space") from e


@dataclass(frozen=True, slots=True)
class FoundInstance:
    """One instance as the driver shows it."""

    instance: Instance
    device: MigDevice | None
    """None where it has no compute instance (yet)."""
    own: CreatedInstance | None
    """None where somebody else made it."""


class MigInstances:
    """The instances of a node's GPUs.

    Args:
        session: The open library.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tables: dict[GpuUuid, MigTable | None] = {}

    def learn(self, uuid: GpuUuid) -> MigTable | None:
        """Ask what a GPU can be divided into; raises NvmlError."""
        self._tables[uuid] = read_table(self._session, uuid)
        return self._tables[uuid]

    def table(self, uuid: GpuUuid) -> MigTable | None:
        """Return what a GPU can be divided into; None without MIG."""
        return self._tables.get(uuid)

    def is_enabled(self, uuid: GpuUuid) -> bool:
        """Whether MIG is switched on now; raises NvmlError."""
        if self.table(uuid) is None:
            return False
        session = self._session
        mode = session.ask(uuid, session.library.nvmlDeviceGetMigMode, session.handle(uuid))
        return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def find(self, uuid: GpuUuid, file: CheckpointFile) -> list[FoundInstance]:
        """List a GPU's instances; raises NvmlError."""
        table = self.table(uuid)
        if table is None:
            return []
        owned = {(o.profile, o.start): o for o in file.read().instances}
        instances = read_instances(self._session, uuid, table)
        devices = {d.gpu_instance_id: d for d in read_mig_devices(self._session, uuid)} if instances else {}
        return [_whose(i, devices.get(i.id), owned) for i in instances]

    def create(self, uuid: GpuUuid, file: CheckpointFile, placement: Placement, pod_uid: PodUid | None) -> None:
        """Make an instance, or go on where an earlier agent died; it is written down before it is made."""
        own = CreatedInstance(placement.profile.name, placement.start, pod_uid)
        there = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if there is not None and there.device is not None:
            _write(file, replace(own, device=there.device.uuid))
            return
        _write(file, own)
        try:
            apply_step(self._session, uuid, Create(placement))
        except DeviceError:
            if there is None and not self._exists(uuid, placement):
                _forget(file, placement)
            raise
        made = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if made is None or made.device is None:
            raise DeviceError(f"GPU {uuid}: expected {placement} to be there, read back it is not; look at dmesg")
        _write(file, replace(own, device=made.device.uuid))

    def destroy(self, uuid: GpuUuid, file: CheckpointFile, placement: Placement) -> None:
        """Destroy an instance of ours; one that is gone is only forgotten."""
        there = next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)
        if there is not None and there.own is None:
            raise DeviceError(f"GPU {uuid}: expected {there.instance} to be Carpool's own, found somebody else's")
        if there is not None:
            apply_step(self._session, uuid, Destroy(there.instance))
            if self._exists(uuid, placement):
                raise DeviceError(f"GPU {uuid}: expected {placement} to be gone, read back it is still there")
        _forget(file, placement)

    def _exists(self, uuid: GpuUuid, placement: Placement) -> bool:
        table = self.table(uuid)
        return table is not None and placement in {i.placement for i in read_instances(self._session, uuid, table)}

    def switch(self, uuid: GpuUuid, *, on: bool) -> None:
        """Switch MIG on or off, where nobody is on the GPU; raises DeviceError where it takes more than that.

        Ampere resets the GPU for it, which virtual machines with a GPU passed through cannot; Hopper needs no reset.
        """
        session, library = self._session, self._session.library
        handle, word = session.handle(uuid), "on" if on else "off"
        status = session.call(uuid, library.nvmlDeviceSetMigMode, handle, int(on))
        session.forget(uuid)  # it may have been reset: handles and minor numbers are new
        if status == pynvml.NVML_SUCCESS and self.is_enabled(uuid) == on:
            return
        # Otherwise whoever resets the GPU next would switch it by surprise.
        session.ask(uuid, library.nvmlDeviceSetMigMode, session.handle(uuid), int(not on))
        if status == pynvml.NVML_ERROR_IN_USE:
            why = "something still uses it: end its processes, DCGM and nvidia-persistenced among them"
        elif status == pynvml.NVML_ERROR_RESET_REQUIRED:
            why = "it takes a reset that cannot be made from here (a virtual machine, say): restart the node for it"
        else:
            why = f"the driver said {pynvml.NVMLError(status)}" if status else "read back, it is as before"
        raise DeviceError(f"GPU {uuid}: expected to switch MIG {word}, found that {why}")


def mig_instances_of(found: list[FoundInstance], present: GpuProcesses) -> tuple[MigInstance, ...]:
    """Join the instances with who is there."""
    return tuple(
        MigInstance(
            f.instance,
            is_managed=f.own is not None,
            pod_uid=f.own.pod_uid if f.own is not None else None,
            users=present.pod_uids(f.instance.id),
            is_used=f.instance.id in present.instances,
        )
        for f in found
    )


def foreign_instances(found: list[FoundInstance]) -> frozenset[int]:
    """IDs of the instances that somebody else made."""
    return frozenset(f.instance.id for f in found if f.own is None)


def _whose(
    instance: Instance, device: MigDevice | None, owned: Mapping[tuple[str, int], CreatedInstance]
) -> FoundInstance:
    """An instance that stands where ours stood, under another UUID, is not ours."""
    own = owned.get((instance.placement.profile.name, instance.placement.start))
    if own is not None and own.device and device is not None and own.device != device.uuid:
        own = None
    return FoundInstance(instance, device, own)


def _write(file: CheckpointFile, own: CreatedInstance) -> None:
    setting = file.read()
    others = tuple(o for o in setting.instances if (o.profile, o.start) != (own.profile, own.start))
    if setting.instances != (*others, own):
        file.write(replace(setting, instances=(*others, own)))


def _forget(file: CheckpointFile, placement: Placement) -> None:
    setting = file.read()
    others = tuple(o for o in setting.instances if (o.profile, o.start) != (placement.profile.name, placement.start))
    if others != setting.instances:
        file.write(replace(setting, instances=others))


DEADLINE_S = 30.0
"""An instance takes well under a second; a driver that needs longer for all of them is stuck."""


def apply_plan(
    session: Session,
    uuid: GpuUuid,
    table: MigTable,
    plan: MigPlan,
    monotonic: Callable[[], float],
    taken: Callable[[MigStep], None] = lambda _: None,
) -> None:
    """Take the steps of a plan.

    Args:
        session: The open library.
        uuid: The GPU.
        table: What it can be divided into.
        plan: What to do; made from what the GPU was a moment ago.
        monotonic: Seconds.
        taken: Hears of each step when it was read back.

    Raises:
        DeviceError: A step failed, and whether it was undone.
    """
    until = monotonic() + DEADLINE_S
    done: list[MigStep] = []
    failing = ""
    try:
        for step in plan.steps:
            failing = str(step)
            if monotonic() >= until:
                raise DeviceError(f"expected all steps within {DEADLINE_S:g} s, found {step} still to do")
            _still_idle(session, uuid, step)
            done.append(step)
            apply_step(session, uuid, step)
            _read_back(session, uuid, table, step)
            taken(step)
    except DeviceError as e:
        why = str(e).removeprefix(f"GPU {uuid}: ")
        raise DeviceError(f"GPU {uuid}: {failing} failed: {why}; {_undo(session, uuid, table, done)}") from e


def _still_idle(session: Session, uuid: GpuUuid, step: MigStep) -> None:
    """Somebody may have come since the plan was made; the driver would refuse as well, but only half-way."""
    if isinstance(step, Destroy) and step.instance.id in read_processes_of_instances(session, uuid):
        raise DeviceError(f"expected {step.instance} to be idle, found a process on it; make a new plan")


def _there(session: Session, uuid: GpuUuid, table: MigTable) -> set[Placement]:
    return {i.placement for i in read_instances(session, uuid, table)}


def _read_back(session: Session, uuid: GpuUuid, table: MigTable, step: MigStep) -> None:
    there = _there(session, uuid, table)
    if isinstance(step, Create) and step.placement not in there:
        raise DeviceError(f"read back, {step.placement} is not there")
    if isinstance(step, Destroy) and step.instance.placement in there:
        raise DeviceError(f"read back, {step.instance} is still there")


def _undo(session: Session, uuid: GpuUuid, table: MigTable, done: Sequence[MigStep]) -> str:
    try:
        for step in reversed(done):
            if isinstance(step, Destroy):
                apply_step(session, uuid, Create(step.instance.placement))
                continue
            made = [i for i in read_instances(session, uuid, table) if i.placement == step.placement]
            for instance in made:
                apply_step(session, uuid, Destroy(instance))
    except DeviceError as e:
        return f"undoing it failed as well: {e}"
    return "it was undone"
