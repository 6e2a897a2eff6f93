"""What a training script uses in place of CUDA. The environment decides what it sees, as CDI set it."""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from carpool_simulated.device import Device
from carpool_simulated.environment import parse_environment
from carpool_simulated.errors import NoDeviceError
from carpool_simulated.gpu import Gpu


class Gpus(tuple[Gpu, ...]):
    """The GPUs of this process; leaving the `with` block closes them all."""

    __slots__ = ()

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for gpu in self:
            gpu.close()


def open_gpus(
    environ: Mapping[str, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Gpus:
    """Open every GPU that the container was given, in CUDA's order.

    Args:
        environ: The environment; the process's own when None.
        clock: Monotonic seconds, the same for all processes of the machine.
        sleep: Waits for some seconds.

    Raises:
        NoDeviceError: No GPU is visible, or a directory is missing.
        DeviceUnavailableError: A GPU's mode does not admit this process.
        MpsError: A GPU is shared by MPS and its daemon cannot be reached.
        OutOfMemoryError: Not even a context fits.
        DeviceStateError: A device's file is corrupt.
    """
    environment = parse_environment(os.environ if environ is None else environ)
    opened: list[Gpu] = []
    try:
        for index, name in enumerate(environment.uuids):
            directory = environment.root / name
            if not directory.is_dir():
                raise NoDeviceError(
                    f"no CUDA-capable device is detected (expected GPU {name} in {environment.root}, found no such "
                    "directory; was the container started by the node agent's CDI spec?)"
                )
            opened.append(Gpu(Device(directory, clock), index, environment, clock, sleep))
    except BaseException:
        for gpu in opened:
            gpu.close()
        raise
    return Gpus(opened)
