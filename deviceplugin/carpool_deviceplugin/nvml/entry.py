"""What brings a GPU, or a MIG device, into a container."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool_core.values import GpuUuid

from carpool_deviceplugin.cdi.nvidia import FALLBACK_ENV, GpuEdits, NvidiaCdi
from carpool_deviceplugin.devices.gpu import Access, Mount
from carpool_deviceplugin.mps.daemons import Mps
from carpool_deviceplugin.nvml.mig import MigDevice
from carpool_deviceplugin.nvml.values import Identity

CONTAINER_MPS = "/run/carpool/mps"
CONTAINER_SHM = "/dev/shm"  # noqa: S108  # where CUDA looks for it
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")


class Entry:
    """Composes access from NVIDIA's CDI specifications, or for NVIDIA's runtime.

    Args:
        cdi: NVIDIA's CDI specifications of this node.
        mps: The MPS daemons; None where the node cannot run any.
        mig_minors: The driver's list of the device files that open MIG instances.
    """

    def __init__(self, cdi: NvidiaCdi, mps: Mps | None, mig_minors: Path = MIG_MINORS) -> None:
        self._cdi, self._mps, self._mig_minors = cdi, mps, mig_minors

    def to_gpu(self, uuid: GpuUuid, known: Identity) -> Access:
        """Return what brings a whole GPU; raises DeviceError."""
        pipe = shm = None
        if self._mps is not None:
            pipe = Mount(str(self._mps.pipe(uuid)), CONTAINER_MPS)
            shm = Mount(str(self._mps.shm(uuid)), CONTAINER_SHM)
        edits = self._cdi.find(uuid, known.minor)
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

    def to_instance(self, uuid: GpuUuid, known: Identity, device: MigDevice) -> Access:
        """Return what brings a MIG device: its own specification, or the GPU's and the two files that open it.

        `nvidia-ctk` writes down the MIG devices that there are when it runs; ours come and go later.
        """
        edits = self._cdi.find(device.uuid)
        if edits is None:
            edits = self._composed(self._cdi.find(uuid, known.minor), known, device)
        if edits is None:
            return Access(env=FALLBACK_ENV, mounts=(), is_named_to_runtime=True, name=device.uuid)
        return Access(
            env={},
            mounts=(),
            edits=edits.device,
            common_edits=edits.common,
            cdi_version=edits.cdi_version,
            name=device.uuid,
        )

    def _composed(self, whole: GpuEdits | None, known: Identity, device: MigDevice) -> GpuEdits | None:
        minors = self._minors()
        instance = f"gpu{known.minor}/gi{device.gpu_instance_id}"
        files = [minors.get(f"{instance}/access"), minors.get(f"{instance}/ci{device.compute_instance_id}/access")]
        if whole is None or None in files:
            return None
        nodes: list[Mapping[str, Any]] = [*whole.device.get("deviceNodes", [])]
        nodes += [{"path": f"/dev/nvidia-caps/nvidia-cap{minor}"} for minor in files]
        return GpuEdits(whole.cdi_version, {**whole.device, "deviceNodes": nodes}, whole.common)

    def _minors(self) -> dict[str, int]:
        try:
            lines = self._mig_minors.read_text().splitlines()
        except OSError:
            return {}
        pairs = [line.split() for line in lines]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
