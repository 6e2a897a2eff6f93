"""What can go wrong on a simulated GPU.

SimulatedGpuError             a RuntimeError, as all errors of CUDA are in PyTorch
├── OutOfMemoryError          the device is full, or the MPS limit is reached
├── DeviceUnavailableError    the device's mode does not admit this process
├── MpsError                  the device is shared by MPS and its daemon cannot be reached
├── NoDeviceError             the environment names no device, or one that is not there
└── DeviceStateError          a file of the device does not hold what it should
"""

import os
from pathlib import Path


class SimulatedGpuError(RuntimeError):
    """Something went wrong on a simulated GPU."""


class OutOfMemoryError(SimulatedGpuError):
    """The words are those of `torch.OutOfMemoryError`, so that whoever looks for them finds them."""


class DeviceUnavailableError(SimulatedGpuError):
    """The device's mode does not admit this process."""


class MpsError(SimulatedGpuError):
    """The MPS daemon cannot be reached."""


class NoDeviceError(SimulatedGpuError):
    """No device is visible."""


class DeviceStateError(SimulatedGpuError):
    """A file of a device does not hold what it should."""

    def __init__(self, path: Path, *, expected: str, found: str, do: str) -> None:
        # Whoever names a file chooses its bytes; not all of them can be sent on.
        name = os.fsencode(path).decode(errors="backslashreplace")
        super().__init__(f"{name}: expected {expected}, found {found}; {do}")
        self.path = path
        self.expected = expected
        self.found = found
        self.do = do
