"""MIG through NVML: what a GPU can be divided into, its instances, and one step at a time."""

import ctypes
from dataclasses import dataclass
from typing import Any

import pynvml
from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.mig.layout import Instance, Placement
from carpool_deviceplugin.mig.planner import Create, Destroy, MigStep
from carpool_deviceplugin.mig.profiles import MigTable, Profile
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.library import Handle
from carpool_deviceplugin.nvml.reading import read_processes

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
