"""What a slot brings into a container, as a CDI specification (version 0.6.0)."""

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.keys import CDI_KIND, DOMAIN
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.gpu import Access, Mount

CDI_VERSION = "0.6.0"
ANNOTATION_POD_UID = f"{DOMAIN}/pod-uid"
"""In a slot's specification: whose it is, so that any later agent can tell whether it is stale."""


def device_name(slot: str) -> str:
    """Fully qualified CDI name of a slot: `carpool.dev/slot=slot-3`."""
    return f"{CDI_KIND}={slot}"


def path_of(directory: Path, slot: str) -> Path:
    """Where a slot's specification stands: `carpool.dev-slot-3.json`."""
    return directory / f"{DOMAIN}-{slot}.json"


def environment(reservation: Reservation, access: Mapping[GpuUuid, Access]) -> dict[str, str]:
    """Variables of the container, which override those of the pod's spec.

    NVIDIA_VISIBLE_DEVICES=void keeps NVIDIA's own container runtime from adding every GPU of the node to an image that
    asks for `all`: what the container gets is what is mounted here.

    Args:
        reservation: Of the container's pod.
        access: To each GPU of the reservation.
    """
    env = {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "CARPOOL_POD_UID": reservation.pod_uid,
        "CARPOOL_VISIBLE_GPUS": ",".join(reservation.gpu_uuids),
        "CARPOOL_GPU_MODE": reservation.mode.value,
    }
    limit = reservation.memory_limit_mib
    if limit is not None:
        env["CARPOOL_MEMORY_LIMIT_MIB"] = str(limit)
    for one in access.values():
        env.update(one.env)
    if reservation.mode is SharingMode.MPS:
        pipe = access[reservation.gpu_uuids[0]].mps_pipe
        if pipe is not None:
            env["CUDA_MPS_PIPE_DIRECTORY"] = pipe.container_path
        if limit is not None:
            count = len(reservation.gpu_uuids)
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{index}={limit}M" for index in range(count))
        if reservation.thread_percentage is not None:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(reservation.thread_percentage)
    return env


def specifications(
    reservation: Reservation, slots: Sequence[str], access: Mapping[GpuUuid, Access]
) -> dict[str, dict[str, Any]]:
    """Write down what each slot brings: slot k the k-th GPU, the first one the environment too.

    Args:
        reservation: Of the container's pod.
        slots: The container's slots in order, as many as the reservation has GPUs.
        access: To each GPU of the reservation.

    Returns:
        A CDI specification for each slot.
    """
    env = [f"{name}={value}" for name, value in environment(reservation, access).items()]
    specs: dict[str, dict[str, Any]] = {}
    for slot, uuid in zip(slots, reservation.gpu_uuids, strict=True):
        mounts = list(access[uuid].mounts)
        pipe = access[uuid].mps_pipe
        if slot == slots[0] and reservation.mode is SharingMode.MPS and pipe is not None:
            mounts.append(pipe)
        edits: dict[str, Any] = {"mounts": [_mount(m) for m in mounts]}
        if slot == slots[0]:
            edits["env"] = env
        specs[slot] = {
            "cdiVersion": CDI_VERSION,
            "kind": CDI_KIND,
            "annotations": {ANNOTATION_POD_UID: reservation.pod_uid},
            "devices": [{"name": slot, "containerEdits": edits}],
        }
    return specs


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
    }


def write(directory: Path, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the slots' specifications; a reader sees the old or the new one, never a part."""
    directory.mkdir(parents=True, exist_ok=True)
    for slot, spec in specs.items():
        path = path_of(directory, slot)
        # Runtimes read every *.json and *.yaml here, so the unfinished file is called otherwise.
        temporary = directory / f".{path.name}.{os.getpid()}.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(spec)) + b"\n")
        temporary.replace(path)


class _Annotated(msgspec.Struct):
    annotations: dict[str, str] = {}


def remove_stale(directory: Path, living: Set[PodUid]) -> list[str]:
    """Remove the specifications of pods that are gone, and those that cannot be read; return the files' names."""
    removed: list[str] = []
    for path in _ours(directory):
        try:
            owner = msgspec.json.decode(path.read_bytes(), type=_Annotated).annotations.get(ANNOTATION_POD_UID, "")
        except msgspec.DecodeError:
            owner = ""
        if owner not in living:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _ours(directory: Path) -> Iterable[Path]:
    return sorted([*directory.glob(f"{DOMAIN}-slot-*.json"), *directory.glob(f".{DOMAIN}-slot-*.new")])
