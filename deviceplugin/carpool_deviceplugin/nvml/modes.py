"""What the agent decided about a GPU, kept in a file: the driver knows no sharing modes, nor who made an instance."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from carpool_core.values import PodUid, SharingMode

from carpool_deviceplugin.devices.gpu import DeviceError, Limits


@dataclass(frozen=True, slots=True)
class OwnInstance:
    """A MIG instance that the agent made, or was about to make when it died."""

    profile: str
    start: int
    pod_uid: PodUid | None = None
    """Whom it was made for."""
    device: str = ""
    """UUID of its MIG device; empty until it was seen."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a GPU is shared, what MPS holds its pods to, and which MIG instances are ours."""

    mode: SharingMode | None = None
    limits: dict[PodUid, Limits] = field(default_factory=dict)
    instances: tuple[OwnInstance, ...] = ()
    is_untidied: bool = False
    """Whether an MPS daemon's stop was begun, and has not ended."""

    def limiting(self, pod_uid: PodUid, limits: Limits | None) -> "Setting":
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
    parts = {SharingMode.MIG} if has_mig and may_divide and (is_divided or may_switch) else set()
    return frozenset(parts | (whole if not is_divided or (may_divide and may_switch) else set()))


class ModeFile:
    """A GPU's setting on disk; a reader sees the old or the new one, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Setting:
        """Return the setting; a GPU without one is idle; one whose file is damaged is written anew."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Setting)
        except FileNotFoundError:
            return Setting()
        except msgspec.DecodeError:
            return Setting()
        except OSError as e:
            raise DeviceError(f"{self._path}: expected to read the GPU's mode, found {e}") from e

    def write(self, setting: Setting) -> None:
        """Keep the setting; raises DeviceError where it cannot be kept (a full disk, say)."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(setting))
            temporary.replace(self._path)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            raise DeviceError(f"{self._path}: expected to keep the GPU's mode there, found {e}; free some space") from e
