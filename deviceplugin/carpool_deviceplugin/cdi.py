"""CDI specifications (version 0.6.0): writes those of slots, and reads NVIDIA's."""

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.keys import CDI_KIND, DOMAIN
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.gpu import Access, DeviceError, Mount

CDI_VERSION = "0.6.0"
ANNOTATION_POD_UID = f"{DOMAIN}/pod-uid"
"""Annotation with the pod's UID in a slot's specification; a later agent uses it to remove stale files."""


def device_name(slot: str) -> str:
    """Return the fully qualified CDI name of a slot, such as `carpool.dev/slot=slot-3`."""
    return f"{CDI_KIND}={slot}"


def path_of(directory: Path, slot: str) -> Path:
    """Return the path of a slot's specification, such as `carpool.dev-slot-3.json`."""
    return directory / f"{DOMAIN}-{slot}.json"


def environment(reservation: Reservation, access: Mapping[GpuUuid, Access]) -> dict[str, str]:
    """Return the container's environment variables, which override those of the pod's spec.

    NVIDIA_VISIBLE_DEVICES=void keeps NVIDIA's container runtime from adding all GPUs to an image that asks for `all`.

    Args:
        reservation: Reservation of the container's pod.
        access: Access to each GPU of the reservation.
    """
    is_named = any(one.needs_runtime_env for one in access.values())
    names = [access[uuid].name or uuid for uuid in reservation.gpu_uuids]
    env = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(names) if is_named else "void",
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
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={limit}M"  # index 0: an MPS job has one GPU
        if reservation.thread_percentage is not None:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(reservation.thread_percentage)
    return env


def specifications(
    reservation: Reservation, slots: Sequence[str], access: Mapping[GpuUuid, Access]
) -> dict[str, dict[str, Any]]:
    """Return a CDI specification for each slot: slot k adds the k-th GPU, and the first slot the environment.

    Args:
        reservation: Reservation of the container's pod.
        slots: The container's slots in order, as many as the reservation has GPUs.
        access: Access to each GPU of the reservation.
    """
    env = [f"{name}={value}" for name, value in environment(reservation, access).items()]
    version = max([CDI_VERSION, *(one.cdi_version for one in access.values())], key=_numbers)
    specs: dict[str, dict[str, Any]] = {}
    for slot, uuid in zip(slots, reservation.gpu_uuids, strict=True):
        given = access[uuid]
        mounts = list(given.mounts)
        if slot == slots[0] and reservation.mode is SharingMode.MPS:
            mounts += [mount for mount in (given.mps_pipe, given.mps_shm) if mount is not None]
        edits = _joined(given.edits, {"mounts": [_mount(m) for m in mounts]})
        if slot == slots[0]:
            edits = _joined(given.common_edits, edits, {"env": env})
        specs[slot] = {
            "cdiVersion": version,
            "kind": CDI_KIND,
            "annotations": {ANNOTATION_POD_UID: reservation.pod_uid},
            "devices": [{"name": slot, "containerEdits": edits}],
        }
    return specs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _joined(*edits: Mapping[str, Any]) -> dict[str, Any]:
    """Merge container edits in order, without duplicates; later variables override earlier ones."""
    joined: dict[str, Any] = {}
    for one in edits:
        for name, values in one.items():
            if isinstance(values, list):
                there = joined.setdefault(name, [])
                there += [value for value in values if value not in there]
            else:
                joined[name] = values
    if "env" in joined:
        by_name = {entry.partition("=")[0]: entry for entry in joined["env"]}
        joined["env"] = list(by_name.values())
    return {name: values for name, values in joined.items() if values}


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
    }


def write(directory: Path, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the slots' specifications, each atomically; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for slot, spec in specs.items():
        path = path_of(directory, slot)
        # Runtimes read every *.json and *.yaml file here, so the temporary file has another suffix.
        temporary = directory / f".{path.name}.{os.getpid()}.new"
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(spec)) + b"\n")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


STATIC_DIR = Path("/etc/cdi")
"""Directory of static specifications, which container runtimes also read."""


def of_others(directory: Path) -> list[Path]:
    """Return the specifications that Carpool did not write, sorted by name; empty if the directory is absent."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    theirs = (name for name in names if name.endswith((".json", ".yaml")) and not name.startswith(f"{DOMAIN}-slot-"))
    return [directory / name for name in sorted(theirs)]


def claimed_by_others(directory: Path) -> list[Path]:
    """Return foreign files that name our CDI kind; a runtime refuses a device that two files describe."""
    found: list[Path] = []
    for path in of_others(directory):
        try:
            if CDI_KIND.encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue  # removed meanwhile, or unreadable for the runtime too
    return found


class _Annotated(msgspec.Struct):
    annotations: dict[str, str] = {}


def remove_stale(directory: Path, living: Set[PodUid]) -> list[str]:
    """Remove the specifications of ended pods and unreadable ones; return the names of the removed files."""
    removed: list[str] = []
    for path in _ours(directory):
        try:
            owner = msgspec.json.decode(path.read_bytes(), type=_Annotated).annotations.get(ANNOTATION_POD_UID, "")
        except msgspec.DecodeError:
            owner = ""
        except OSError:
            continue  # not a regular file
        if owner not in living:
            with suppress(OSError):  # the next call tries again
                path.unlink()
                removed.append(path.name)
    return removed


def _ours(directory: Path) -> Iterable[Path]:
    return sorted([*directory.glob(f"{DOMAIN}-slot-*.json"), *directory.glob(f".{DOMAIN}-slot-*.new")])


NVIDIA_GPU = "nvidia.com/gpu"
CAPS_DIR = "/dev/nvidia-caps/"
"""Directory of the device files that open MIG instances."""
FALLBACK_ENV = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Variables that NVIDIA's container runtime needs besides the names of the GPUs."""


class _Node(msgspec.Struct):
    path: str


class _Edits(msgspec.Struct):
    """The validated part of container edits; the edits themselves are passed on unchanged."""

    env: list[str] = []
    deviceNodes: list[_Node] = []  # noqa: N815  # the specification's name
    mounts: list[dict[str, Any]] = []
    hooks: list[dict[str, Any]] = []


class _Device(msgspec.Struct):
    name: str
    containerEdits: dict[str, Any] = {}  # noqa: N815  # the specification's name


class _Specification(msgspec.Struct):
    kind: str
    cdiVersion: str = "0.5.0"  # noqa: N815  # as above
    devices: list[_Device] = []
    containerEdits: dict[str, Any] = {}  # noqa: N815  # as above


@dataclass(frozen=True, slots=True)
class GpuEdits:
    """Container edits of NVIDIA's specification for one GPU."""

    cdi_version: str
    device: Mapping[str, Any]
    """Edits of this GPU."""
    common: Mapping[str, Any]
    """Edits once for each container: the driver's libraries, control devices, hooks."""


class NvidiaCdi:
    """NVIDIA's CDI specifications; a file is parsed again when it changes.

    Args:
        directories: Directories to search; the first one with the GPU wins.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._known: dict[Path, tuple[tuple[int, int, int], _Specification | None]] = {}

    def find(self, name: str, minor: int | None = None) -> GpuEdits | None:
        """Return the container edits of a GPU or MIG device; None if no specification contains it.

        Args:
            name: UUID of the device.
            minor: N of /dev/nvidiaN, for specifications that name GPUs by index only.

        Raises:
            DeviceError: A specification cannot be read.
        """
        for specification in self._specifications():
            for device in specification.devices:
                if device.name == name or (minor is not None and _is_whole_gpu(device, minor)):
                    return GpuEdits(specification.cdiVersion, device.containerEdits, specification.containerEdits)
        return None

    def common(self) -> GpuEdits | None:
        """Return the edits of each container with a GPU; None without a specification. Raises DeviceError."""
        for specification in self._specifications():
            return GpuEdits(specification.cdiVersion, {}, specification.containerEdits)
        return None

    def _specifications(self) -> list[_Specification]:
        paths = [path for directory in self._directories for path in of_others(directory)]
        known = self._known
        self._known = {path: known[path] for path in paths if path in known}  # forget removed files
        specifications = map(self._read, paths)
        return [found for found in specifications if found is not None and found.kind == NVIDIA_GPU]

    def _read(self, path: Path) -> _Specification | None:
        try:
            stat = path.stat()
        except OSError:
            return None  # removed meanwhile
        state = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        known = self._known.get(path)
        if known is None or known[0] != state:
            known = self._known[path] = (state, _decoded(path))
        return known[1]


def _decoded(path: Path) -> _Specification | None:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        content = path.read_bytes()
        if NVIDIA_GPU.encode() not in content:
            return None  # for other devices: not validated
        found = decode(content, type=_Specification)
        for edits in (found.containerEdits, *(device.containerEdits for device in found.devices)):
            msgspec.convert(edits, _Edits)
        return found
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError, ValueError) as e:
        why = " ".join(str(e).split())
        raise DeviceError(
            f"{path}: expected a CDI specification, found {why}; write it again (nvidia-ctk cdi generate)"
        ) from e


def _is_whole_gpu(device: _Device, minor: int) -> bool:
    """Whether the device is this GPU alone; an entry with `nvidia-caps` opens a MIG instance, maybe of another pod."""
    paths = {node.path for node in msgspec.convert(device.containerEdits, _Edits).deviceNodes}
    gpus = {p for p in paths if p.removeprefix("/dev/nvidia").isdecimal()}
    return gpus == {f"/dev/nvidia{minor}"} and not any(p.startswith(CAPS_DIR) for p in paths)
