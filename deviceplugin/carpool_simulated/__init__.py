"""Simulated GPUs: files on the node that containers and the agent share. Depends only on the standard library.

A training script in a container writes

    from carpool_simulated import open_gpus

    with open_gpus() as (gpu,):
        gpu.allocate(6000)                                        # MiB; raises OutOfMemoryError as PyTorch would
        gpu.run(step_time_s=0.2, gpu_util=0.7, sm_active=0.5)     # one step; takes longer beside neighbours
"""

from carpool_simulated.gpu import Gpu, open_gpus
from carpool_simulated.state import (
    DeviceStateError,
    DeviceUnavailableError,
    MpsError,
    NoDeviceError,
    OutOfMemoryError,
    SimulatedGpuError,
)

__all__ = [
    "DeviceStateError",
    "DeviceUnavailableError",
    "Gpu",
    "MpsError",
    "NoDeviceError",
    "OutOfMemoryError",
    "SimulatedGpuError",
    "open_gpus",
]
