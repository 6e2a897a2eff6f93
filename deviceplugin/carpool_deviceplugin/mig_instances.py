"""MIG through NVML: profiles, instances, steps with read-back, and the record of the agent's own instances."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pynvml
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.files import write_file
from carpool_deviceplugin.gpu import DeviceError, Limits, MigInstance
from carpool_deviceplugin.gpu_processes import GpuProcesses
from carpool_deviceplugin.mig import Instance, MigDevice, MigPlan, MigTable, Placement, Profile
from carpool_deviceplugin.nvlib import Handle, Session, read_processes

_MAX = 16
"""Length of arrays for the driver; no GPU has more instances, or placements of a profile."""
_UNKNOWN_PROFILE = pynvml.NVML_ERROR_INVALID_ARGUMENT
"""A driver's error for profiles that are newer than itself; the error for those that a GPU lacks is NOT_SUPPORTED."""


def _listed(session: Session, uuid: GpuUuid, function: Callable[..., Any], kind: Any, *args: Any) -> list[Any]:
    """Call a function that fills an array of `kind`; return the entries, none if the GPU does not support it."""
    entries, count = (kind * _MAX)(), ctypes.c_uint(_MAX)
    if session.ask(uuid, function, *args, entries, ctypes.byref(count)) is None:
        return []
    return [entries[i] for i in range(count.value)]


def read_table(session: Session, uuid: GpuUuid) -> MigTable | None:
    """Return the GPU's MIG profiles, whether MIG is on or off; None without MIG. Raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    profiles: list[Profile] = []
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = session.ask(uuid, library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index, absent=_UNKNOWN_PROFILE)
        if info is None:
            continue
        function, kind = library.nvmlDeviceGetGpuInstancePossiblePlacements, pynvml.c_nvmlGpuInstancePlacement_t
        placements = _listed(session, uuid, function, kind, handle, info.id)
        if not placements:
            continue
        name = (info.name.decode() if isinstance(info.name, bytes) else str(info.name)).removeprefix("MIG ")
        profiles.append(
            Profile(
                name=name,
                id=info.id,
                compute_slices=info.sliceCount,
                memory_slices=placements[0].size,
                starts=tuple(sorted(p.start for p in placements)),
                memory_mib=info.memorySizeMB,
                sm_count=info.multiprocessorCount,
                has_media="+me" in name,
            )
        )
    if not profiles:
        return None
    profiles.sort(key=lambda p: (-p.memory_slices, -p.compute_slices, p.has_media))
    return MigTable(max(s + p.memory_slices for p in profiles for s in p.starts), tuple(profiles))


def read_instances(session: Session, uuid: GpuUuid, table: MigTable) -> list[Instance]:
    """Return a GPU's instances by ID; none if MIG is off. Raises NvmlError."""
    found = [instance for p in table.profiles for instance, _ in _instances(session, uuid, p)]
    return sorted(found, key=lambda i: i.id)


def _instances(session: Session, uuid: GpuUuid, profile: Profile) -> list[tuple[Instance, Handle]]:
    library, handle = session.library, session.handle(uuid)
    found = []
    for each in _listed(
        session, uuid, library.nvmlDeviceGetGpuInstances, pynvml.c_nvmlGpuInstance_t, handle, profile.id
    ):
        info = session.call(uuid, library.nvmlGpuInstanceGetInfo, each)
        found.append((Instance(info.id, Placement(profile, info.placement.start)), each))
    return found


def _at(session: Session, uuid: GpuUuid, placement: Placement) -> tuple[Instance, Handle] | None:
    return next((f for f in _instances(session, uuid, placement.profile) if f[0].placement == placement), None)


def read_mig_devices(session: Session, uuid: GpuUuid) -> list[MigDevice]:
    """Return a GPU's MIG devices; raises NvmlError."""
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


def create_instance(session: Session, uuid: GpuUuid, placement: Placement) -> None:
    """Create an instance, or complete one without a compute instance, and read it back. Raises DeviceError."""
    library, profile = session.library, placement.profile
    there = _at(session, uuid, placement)
    if there is None:
        place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, profile.memory_slices)
        create = library.nvmlDeviceCreateGpuInstanceWithPlacement
        made = session.call(uuid, create, session.handle(uuid), profile.id, ctypes.byref(place))
    else:
        made = there[1]
    compute_profiles = _compute_profiles(session, uuid, made)
    whole = next((id_ for id_, slices in compute_profiles.items() if slices == profile.compute_slices), None)
    if whole is None:
        raise DeviceError(
            f"GPU {uuid}: expected a compute instance profile for all of {profile}, found none; update the driver"
        )
    if not _compute_instances(session, uuid, made, whole):
        session.call(uuid, library.nvmlGpuInstanceCreateComputeInstance, made, whole)
    if _at(session, uuid, placement) is None:
        raise DeviceError(f"GPU {uuid}: expected {placement} to be there, read back it is not; check dmesg")


def destroy_instance(session: Session, uuid: GpuUuid, instance: Instance) -> None:
    """Destroy an instance and read it back; one that is absent is ignored. Raises DeviceError."""
    there = _at(session, uuid, instance.placement)
    if there is None:
        return
    found, handle = there
    if found.id != instance.id:
        raise DeviceError(
            f"GPU {uuid}: expected {instance}, found instance {found.id} in its place; another program divides this "
            "GPU: let one manager do it"
        )
    for compute_profile in _compute_profiles(session, uuid, handle):
        for compute in _compute_instances(session, uuid, handle, compute_profile):
            session.call(uuid, session.library.nvmlComputeInstanceDestroy, compute)
    session.call(uuid, session.library.nvmlGpuInstanceDestroy, handle)
    if _at(session, uuid, instance.placement) is not None:
        raise DeviceError(
            f"GPU {uuid}: expected {instance.placement} to be gone, read back it is still there; check dmesg"
        )


def _compute_profiles(session: Session, uuid: GpuUuid, instance: Handle) -> dict[int, int]:
    """Return the compute instance profiles of a GPU instance, as slices by profile ID."""
    function, shared = (
        session.library.nvmlGpuInstanceGetComputeInstanceProfileInfo,
        pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
    )
    found = (
        session.ask(uuid, function, instance, index, shared, absent=_UNKNOWN_PROFILE)
        for index in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
    )
    return {info.id: info.sliceCount for info in found if info is not None}


def _compute_instances(session: Session, uuid: GpuUuid, instance: Handle, profile_id: int) -> list[Handle]:
    function = session.library.nvmlGpuInstanceGetComputeInstances
    return _listed(session, uuid, function, pynvml.c_nvmlComputeInstance_t, instance, profile_id)


DEADLINE_S = 30.0
"""An instance takes well under a second; a driver that needs longer for all of them is stuck."""


def apply_plan(
    session: Session,
    uuid: GpuUuid,
    plan: MigPlan,
    monotonic: Callable[[], float],
    taken: Callable[[str], None] = lambda _: None,
) -> None:
    """Apply a plan, made from the state a moment ago, and undo all of it if one step fails.

    `taken` is called after each step with its text.

    Raises:
        DeviceError: A step failed; the message contains whether the steps were undone.
    """
    until = monotonic() + DEADLINE_S
    done: list[Placement] = []
    step = ""
    try:
        changes: tuple[Instance | Placement, ...] = (*plan.destroyed, *plan.created)
        for change in changes:
            step = f"{'destroy' if isinstance(change, Instance) else 'create'} {change}"
            if monotonic() >= until:
                raise DeviceError(f"expected all steps within {DEADLINE_S:g} s, found {step} still to do")
            if isinstance(change, Placement):
                done.append(change)
                create_instance(session, uuid, change)
            elif change.id in {p.gpu_instance_id for p in read_processes(session, uuid)}:
                raise DeviceError(f"expected {change} to be idle, found a process on it; make a new plan")
            else:
                destroy_instance(session, uuid, change)
            taken(step)
    except DeviceError as e:
        why = str(e).removeprefix(f"GPU {uuid}: ")
        raise DeviceError(f"GPU {uuid}: {step} failed: {why}; {_undo(session, uuid, plan, done)}") from e


def _undo(session: Session, uuid: GpuUuid, plan: MigPlan, created: Sequence[Placement]) -> str:
    """Return the instances of a plan to their state before; created ones first, because the others need their place."""
    try:
        for placement in created:
            if (there := _at(session, uuid, placement)) is not None:
                destroy_instance(session, uuid, there[0])
        for instance in plan.destroyed:
            create_instance(session, uuid, instance.placement)
    except DeviceError as e:
        return f"undoing it failed as well: {e}"
    return "it was undone"


@dataclass(frozen=True, slots=True)
class CreatedInstance:
    """A MIG instance that the agent created, or was about to create when it died."""

    profile: str
    start: int
    pod_uid: PodUid | None = None
    """Pod that it was created for."""
    device: str = ""
    """UUID of its MIG device; empty before the first read-back."""

    def is_at(self, placement: Placement) -> bool:
        """Whether it was created at this placement."""
        return (self.profile, self.start) == (placement.profile.name, placement.start)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The agent's record of a GPU: sharing mode, MPS limits and its MIG instances."""

    mode: SharingMode | None = None
    limits: dict[PodUid, Limits] = field(default_factory=dict)
    instances: tuple[CreatedInstance, ...] = ()
    is_cleanup_pending: bool = False
    """Whether the stop of an MPS daemon has begun and not ended."""

    def limiting(self, pod_uid: PodUid, limits: Limits | None) -> "Checkpoint":
        """Set a pod's MPS limits; None removes them."""
        others = {pod: known for pod, known in self.limits.items() if pod != pod_uid}
        return replace(self, limits=others if limits is None else {**others, pod_uid: limits})


class CheckpointFile:
    """A GPU's checkpoint on disk, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Checkpoint:
        """Return the checkpoint; an absent or damaged file counts as idle. Raises DeviceError."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Checkpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return Checkpoint()
        except OSError as e:
            raise DeviceError(f"{self._path}: expected to read the GPU's mode, found {e}") from e

    def write(self, setting: Checkpoint) -> None:
        """Write the checkpoint; raises DeviceError, for example on a full disk."""
        try:
            write_file(self._path, msgspec.json.encode(setting))
        except OSError as e:
            raise DeviceError(f"{self._path}: expected to keep the GPU's mode there, found {e}; free some space") from e

    def record(self, placement: Placement, created: CreatedInstance | None) -> None:
        """Record the agent's instance at a placement; None removes the record."""
        setting = self.read()
        instances = tuple(o for o in setting.instances if not o.is_at(placement)) + ((created,) if created else ())
        if instances != setting.instances:
            self.write(replace(setting, instances=instances))


def possible_modes(
    *, has_mps: bool, has_mig: bool, is_divided: bool, may_divide: bool, may_switch: bool
) -> frozenset[SharingMode]:
    """Return the modes that a GPU can be prepared for.

    `is_divided` is whether MIG is on, and `may_divide` whether the agent is the node's only MIG manager. `may_switch`
    is whether MIG may be switched, and no foreign instance would be lost.
    """
    whole = {SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING} | ({SharingMode.MPS} if has_mps else set())
    divided = {SharingMode.MIG} if has_mig and may_divide and (is_divided or may_switch) else set()
    return frozenset(divided | (whole if not is_divided or (may_divide and may_switch) else set()))


@dataclass(frozen=True, slots=True)
class FoundInstance:
    """An instance as the driver reports it."""

    instance: Instance
    device: MigDevice | None
    """None without a compute instance."""
    own: CreatedInstance | None
    """None if the agent did not create it."""


class MigInstances:
    """The instances of a node's GPUs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tables: dict[GpuUuid, MigTable | None] = {}

    def learn(self, uuid: GpuUuid) -> None:
        """Read the MIG profiles of a GPU; raises NvmlError."""
        self._tables[uuid] = read_table(self._session, uuid)

    def table(self, uuid: GpuUuid) -> MigTable | None:
        """Return the MIG profiles of a GPU; None without MIG."""
        return self._tables.get(uuid)

    def is_enabled(self, uuid: GpuUuid) -> bool:
        """Whether MIG is on; raises NvmlError."""
        if uuid not in self._tables:
            return False
        session = self._session
        mode = session.ask(uuid, session.library.nvmlDeviceGetMigMode, session.handle(uuid))
        return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def find(self, uuid: GpuUuid, file: CheckpointFile) -> list[FoundInstance]:
        """Return a GPU's instances; raises NvmlError.

        An instance at a recorded placement with another UUID is not the agent's.
        """
        table, owned = self.table(uuid), file.read().instances
        instances = read_instances(self._session, uuid, table) if table is not None else []
        devices = {d.gpu_instance_id: d for d in read_mig_devices(self._session, uuid)} if instances else {}
        found = []
        for instance in instances:
            device, own = devices.get(instance.id), next((o for o in owned if o.is_at(instance.placement)), None)
            if own is not None and own.device and device is not None and own.device != device.uuid:
                own = None
            found.append(FoundInstance(instance, device, own))
        return found

    def _find_at(self, uuid: GpuUuid, file: CheckpointFile, placement: Placement) -> FoundInstance | None:
        return next((f for f in self.find(uuid, file) if f.instance.placement == placement), None)

    def create(self, uuid: GpuUuid, file: CheckpointFile, placement: Placement, pod_uid: PodUid | None) -> None:
        """Create an instance, or complete that of an earlier agent; it is recorded before it is created."""
        own = CreatedInstance(placement.profile.name, placement.start, pod_uid)
        there = self._find_at(uuid, file, placement)
        if there is None or there.device is None:
            file.record(placement, own)
            try:
                create_instance(self._session, uuid, placement)
            except DeviceError:
                if there is None and _at(self._session, uuid, placement) is None:
                    file.record(placement, None)
                raise
            there = self._find_at(uuid, file, placement)
        if there is None or there.device is None:
            raise DeviceError(f"GPU {uuid}: expected a MIG device of {placement}, read back none; check dmesg")
        file.record(placement, replace(own, device=there.device.uuid))

    def destroy(self, uuid: GpuUuid, file: CheckpointFile, placement: Placement) -> None:
        """Destroy an instance of the agent; of an absent one only the record is removed."""
        there = self._find_at(uuid, file, placement)
        if there is not None:
            if there.own is None:
                raise DeviceError(f"GPU {uuid}: expected {there.instance} to be Carpool's own, found another program's")
            destroy_instance(self._session, uuid, there.instance)
        file.record(placement, None)

    def switch(self, uuid: GpuUuid, *, on: bool) -> None:
        """Switch MIG on or off on a GPU without processes; raises DeviceError.

        Ampere resets the GPU, which fails in virtual machines; Hopper needs no reset.
        """
        session, library = self._session, self._session.library
        handle, word = session.handle(uuid), "on" if on else "off"
        status = session.call(uuid, library.nvmlDeviceSetMigMode, handle, int(on))
        session.forget(uuid)  # it may have been reset: handles and minor numbers are new
        if status == pynvml.NVML_SUCCESS and self.is_enabled(uuid) == on:
            return
        # Otherwise the next reset of the GPU would switch the mode unexpectedly.
        session.ask(uuid, library.nvmlDeviceSetMigMode, session.handle(uuid), int(not on))
        if status == pynvml.NVML_ERROR_IN_USE:
            why = "something still uses it: end its processes, DCGM and nvidia-persistenced among them"
        elif status == pynvml.NVML_ERROR_RESET_REQUIRED:
            why = "it takes a reset that cannot be made from here (a virtual machine, say): restart the node for it"
        else:
            why = f"the driver returned {pynvml.NVMLError(status)}" if status else "read back, it is as before"
        raise DeviceError(f"GPU {uuid}: expected to switch MIG {word}, found that {why}")


def mig_instances_of(found: list[FoundInstance], present: GpuProcesses) -> tuple[MigInstance, ...]:
    """Return the instances with their owners and users."""
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
    """Return the IDs of the instances that the agent did not create."""
    return frozenset(f.instance.id for f in found if f.own is None)
