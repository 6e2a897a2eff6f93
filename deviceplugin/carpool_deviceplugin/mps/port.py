"""What is asked of NVIDIA's MPS program, whoever runs it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from carpool_deviceplugin.devices.gpu import DeviceError

PROGRAM = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
"""In the pipe directory: the daemon's process ID, written by itself."""


class MpsError(DeviceError):
    """The daemon did not start, did not answer, or answered no."""


class MpsCommands(Protocol):
    """NVIDIA's program `nvidia-cuda-mps-control`. Starting, asking and ending raise MpsError."""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon, which goes on without us; `shm` becomes its /dev/shm.

        Where it raises, none is left, but for one that cannot be ended: the error says so.
        """
        ...

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Send a command to the daemon of that pipe directory, and return what it answers."""
        ...

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists, answering or not."""
        ...

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """End a daemon that does not answer, if there is one, and these servers (process ID, and when it began)."""
        ...

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> Mapping[int, int]:
        """Return who of these servers (process ID, and when it began) still lives, and belongs to no other GPU."""
        ...

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Name where the daemon and its servers live, and no client can; None where there is no daemon."""
        ...

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> Mapping[int, int]:
        """Return who of these are servers of that GPU's daemon, and when they began; of no other GPU's.

        Args:
            environment: The daemon's.
            home: Where it lives, or lived; those of all GPUs may live together.
            present: Process IDs on the GPU, as the driver says.
            listed: Process IDs that came out of the pipe directory: that they are its own must be seen elsewhere.
        """
        ...
