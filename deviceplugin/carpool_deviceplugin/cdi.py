"""CDI specifications (version 0.6.0): writes those of slots, and reads NVIDIA's."""

import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.keys import CDI_KIND, DOMAIN
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.files import write_file
from carpool_deviceplugin.gpu import Access, DeviceError, Mount
from carpool_deviceplugin.mig import MigDevice

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

    The container's slots are in order, as many as the reservation has GPUs.
    """
    env = [f"{name}={value}" for name, value in environment(reservation, access).items()]
    version = max([CDI_VERSION, *(one.cdi_version for one in access.values())], key=_numbers)
    specs: dict[str, dict[str, Any]] = {}
    for slot, uuid in zip(slots, reservation.gpu_uuids, strict=True):
        of_gpu = access[uuid]
        mounts = list(of_gpu.mounts)
        if slot == slots[0] and reservation.mode is SharingMode.MPS:
            mounts += [mount for mount in (of_gpu.mps_pipe, of_gpu.mps_shm) if mount is not None]
        edits = _merged(of_gpu.edits, {"mounts": [_mount(m) for m in mounts]})
        if slot == slots[0]:
            edits = _merged(of_gpu.common_edits, edits, {"env": env})
        specs[slot] = {
            "cdiVersion": version,
            "kind": CDI_KIND,
            "annotations": {ANNOTATION_POD_UID: reservation.pod_uid},
            "devices": [{"name": slot, "containerEdits": edits}],
        }
    return specs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _merged(*edits: Mapping[str, Any]) -> dict[str, Any]:
    """Merge container edits in order, without duplicates; later variables override earlier ones."""
    merged: dict[str, Any] = {}
    for one in edits:
        for name, values in one.items():
            if isinstance(values, list):
                present = merged.setdefault(name, [])
                present += [value for value in values if value not in present]
            else:
                merged[name] = values
    if "env" in merged:
        by_name = {entry.partition("=")[0]: entry for entry in merged["env"]}
        merged["env"] = list(by_name.values())
    return {name: values for name, values in merged.items() if values}


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
    }


def write(directory: Path, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the slots' specifications, each atomically; raises OSError."""
    for slot, spec in specs.items():
        write_file(path_of(directory, slot), msgspec.json.format(msgspec.json.encode(spec)) + b"\n")


def foreign_specifications(directory: Path) -> list[Path]:
    """Return the specifications that Carpool did not write, sorted by name; empty if the directory is absent."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    foreign = (name for name in names if name.endswith((".json", ".yaml")) and not name.startswith(f"{DOMAIN}-slot-"))
    return [directory / name for name in sorted(foreign)]


def claimed_by_others(directory: Path) -> list[Path]:
    """Return foreign files that name our CDI kind; a runtime refuses a device that two files describe."""
    found: list[Path] = []
    for path in foreign_specifications(directory):
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
    for path in sorted([*directory.glob(f"{DOMAIN}-slot-*.json"), *directory.glob(f".{DOMAIN}-slot-*.new")]):
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


NVIDIA_GPU = "nvidia.com/gpu"
CAPS_DIR = "/dev/nvidia-caps/"
"""Directory of the device files that open MIG instances."""
_BY_RUNTIME = Access(env={"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}, mounts=(), needs_runtime_env=True)
"""Without a specification NVIDIA's container runtime injects the device."""


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


MIG_MINORS, PROC_DEVICES = Path("/proc/driver/nvidia-caps/mig-minors"), Path("/proc/devices")
_GPU_MAJOR = 195
"""Registered major number of /dev/nvidiaN."""


class NvidiaCdi:
    """NVIDIA's CDI specifications; the first directory with the GPU wins.

    `mig_minors` is the driver's list of device files of MIG instances, `proc_devices` the kernel's list of major
    numbers.
    """

    def __init__(
        self, directories: Sequence[Path], mig_minors: Path = MIG_MINORS, proc_devices: Path = PROC_DEVICES
    ) -> None:
        self._directories, self._mig_minors, self._proc_devices = directories, mig_minors, proc_devices

    def gpu(self, uuid: str, minor: int | None) -> Access:
        """Return the access to a whole GPU; `minor` is N of /dev/nvidiaN. Raises DeviceError."""
        return self.find(uuid, minor) or _BY_RUNTIME

    def mig_device(self, gpu_minor: int | None, device: MigDevice) -> Access:
        """Return the access to a MIG device of /dev/nvidiaN: its own specification, or composed device nodes.

        `nvidia-ctk` lists the MIG devices of the time when it runs; the agent creates others later.

        Raises:
            DeviceError: A specification cannot be read.
        """
        return replace(self.find(device.uuid) or self._composed(gpu_minor, device) or _BY_RUNTIME, name=device.uuid)

    def find(self, name: str, minor: int | None = None) -> Access | None:
        """Return the access to a GPU or MIG device by its UUID; None if no specification contains it.

        `minor` is N of /dev/nvidiaN, for specifications that name GPUs by index only.

        Raises:
            DeviceError: A specification cannot be read.
        """
        for specification in self._specifications():
            for device in specification.devices:
                if device.name == name or (minor is not None and _is_whole_gpu(device, minor)):
                    return _access(specification, device.containerEdits)
        return None

    def _composed(self, gpu_minor: int | None, device: MigDevice) -> Access | None:
        """Compose the edits from the driver's numbers alone: no entry of a specification names only this instance.

        Type, major and minor make a device node that need not exist on the node yet.
        """
        minors = {path: int(minor) for path, minor in _pairs(self._mig_minors) if minor.isdecimal()}
        major = next((int(major) for major, name in _pairs(self._proc_devices) if name == "nvidia-caps"), None)
        instance = f"gpu{gpu_minor}/gi{device.gpu_instance_id}"
        caps = [minors.get(f"{instance}/access"), minors.get(f"{instance}/ci{device.compute_instance_id}/access")]
        if gpu_minor is None or None in caps:
            return None
        nodes = [{"path": f"/dev/nvidia{gpu_minor}", "type": "c", "major": _GPU_MAJOR, "minor": gpu_minor}]
        for minor in caps:
            path: dict[str, Any] = {"path": f"{CAPS_DIR}nvidia-cap{minor}"}
            nodes.append(path if major is None else {**path, "type": "c", "major": major, "minor": minor})
        return next((_access(found, {"deviceNodes": nodes}) for found in self._specifications()), None)

    def _specifications(self) -> list[_Specification]:
        paths = [path for directory in self._directories for path in foreign_specifications(directory)]
        return [found for found in map(_decoded, paths) if found is not None and found.kind == NVIDIA_GPU]


def _access(found: _Specification, edits: Mapping[str, Any]) -> Access:
    return Access(env={}, mounts=(), edits=edits, common_edits=found.containerEdits, cdi_version=found.cdiVersion)


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
        return None  # removed meanwhile
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


def _pairs(path: Path) -> list[list[str]]:
    """Return the lines of two words in a file of the kernel or driver; none without the file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [pair for line in lines if len(pair := line.split()) == 2]
