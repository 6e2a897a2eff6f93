"""A trial on the node's GPU, or on a machine in memory."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.commands import find_gpu
from carpool_deviceplugin.gpu import NoDevicesError
from carpool_deviceplugin.nvlib import load_nvml
from carpool_deviceplugin.settings import AgentSettings

# --import-mode=importlib gives test folders no import path of their own.
sys.path.insert(0, str(Path(__file__).parent))

from gpu_machine import RealMachine, Trial


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The MPS daemon's sockets are in it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def hardware(short_path: Path) -> Iterator[Trial]:
    settings = AgentSettings()
    try:
        machine = RealMachine(
            load_nvml(),
            short_path,
            python=os.environ.get("CARPOOL_GPU_PYTHON", sys.executable),
            sources=metrics_sources(settings),
            cdi=(Path("/etc/cdi"), settings.cdi_dir),
        )
    except NoDevicesError as e:
        pytest.skip(str(e))
    gpu = find_gpu(machine.devices, os.environ.get("CARPOOL_GPU", "0"))
    actual = machine.devices.actual(gpu)
    if actual.tenants or actual.problem:
        pytest.skip(f"GPU {gpu}: expected a healthy and idle GPU, found {actual.problem or sorted(actual.tenants)}")
    yield Trial(machine, gpu)
    machine.close()
