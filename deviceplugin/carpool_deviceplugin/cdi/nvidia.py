"""NVIDIA's own CDI specification of the node, as `nvidia-ctk` writes it: what a GPU needs in a container."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from carpool_deviceplugin.cdi.slots import of_others
from carpool_deviceplugin.devices.gpu import DeviceError

NVIDIA_GPU = "nvidia.com/gpu"
FALLBACK_ENV = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""What NVIDIA's container runtime asks of a container besides the GPUs' names."""


class _Node(msgspec.Struct):
    path: str


class _Edits(msgspec.Struct):
    """What must be as the specification says, for it is gone through; everything is handed on as it stands."""

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
    """What NVIDIA's specification does to a container for one GPU."""

    cdi_version: str
    device: Mapping[str, Any]
    """For this GPU alone."""
    common: Mapping[str, Any]
    """Once for each container: the driver's libraries, control devices, hooks."""


class NvidiaCdi:
    """Reads a specification again when its file is another one: the driver may have been updated.

    To read one takes milliseconds, and a container with eight GPUs waits for eight answers.

    Args:
        directories: Where they may stand; the first that has the GPU wins.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._known: dict[Path, tuple[tuple[int, int, int], _Specification | None]] = {}

    def find(self, name: str, minor: int | None = None) -> GpuEdits | None:
        """Find what a GPU or MIG device needs.

        Args:
            name: Its UUID.
            minor: N of /dev/nvidiaN, for specifications that name GPUs by index only.

        Returns:
            None where no specification knows it.

        Raises:
            DeviceError: A specification cannot be read.
        """
        for specification in self._specifications():
            for device in specification.devices:
                if device.name == name or (minor is not None and _gpus_of(device) == {f"/dev/nvidia{minor}"}):
                    return GpuEdits(specification.cdiVersion, device.containerEdits, specification.containerEdits)
        return None

    def _specifications(self) -> list[_Specification]:
        paths = [path for directory in self._directories for path in of_others(directory)]
        known = self._known
        self._known = {path: known[path] for path in paths if path in known}  # somebody may write new names each time
        specifications = map(self._read, paths)
        return [found for found in specifications if found is not None and found.kind == NVIDIA_GPU]

    def _read(self, path: Path) -> _Specification | None:
        try:
            stat = path.stat()
        except OSError:
            return None  # gone again
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
            return None  # somebody else's: whether it is sound is not ours to say
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


def _gpus_of(device: _Device) -> set[str]:
    paths = {node.path for node in msgspec.convert(device.containerEdits, _Edits).deviceNodes}
    return {p for p in paths if p.removeprefix("/dev/nvidia").isdecimal()}
