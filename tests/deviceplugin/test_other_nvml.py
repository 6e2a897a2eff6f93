"""Another `libnvidia-ml.so.1` that the loader finds: the real bindings over a library in C that is not NVIDIA's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
READ = """
import json, time
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.library import installed
from carpool_deviceplugin.nvml.reading import (
    list_gpus, read_identity, read_processes, read_telemetry, read_utilization)
from carpool_deviceplugin.nvml.xids import XidWatch
session = Session(installed())
session.open()
gpus = list_gpus(session)
known, gpm = [read_identity(session, gpu) for gpu in gpus], Gpm(session)
watch, told = XidWatch(session, gpus), read_telemetry(session, gpus[0])
gpm.sample(gpus[0])
between = gpm.sample(gpus[0])
print(json.dumps({
    "memory": [known[0].memory_mib, known[0].reserved_mib],
    "pci": [k.pci_bus_id for k in known],
    "minor": [k.minor for k in known],
    "absent": [known[0].numa_node, known[0].mig_capable, list(known[0].nvlink_peers)],
    "told": [told.gpu_util_percent, told.power_w, told.energy_mj, told.temperature_c, told.sm_clock_mhz,
             told.rows_remapped_correctable, told.ecc_uncorrectable],
    "processes": [[p.pid, p.memory_mib, p.gpu_instance_id] for p in read_processes(session, gpus[0])],
    "samples": [list(s) for s in read_utilization(session, gpus[0], 5000)],
    "no samples": list(read_utilization(session, gpus[1], 5000)),
    "xids": [watch.seen(gpu) for gpu in gpus] + [watch.seen(gpus[0])],
    "gpm": [between.sm, between.dram, between.tensor],
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process whose loader finds the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(made)]
    subprocess.run([*command, str(HERE / "nvml" / "libnvidia-ml.c")], check=True)
    return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(made.parent), "HOME": str(made.parent)}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_contract_battery_runs_on_it(environment: dict[str, str]) -> None:
    battery = ["-m", "pytest", "-q", "-k", "installed", "-p", "no:cacheprovider", str(HERE / "test_nvml_library.py")]
    said = run(environment, sys.executable, *battery)
    assert "7 passed" in said
    assert "skipped" not in said, "they waited for a GPU, whatever the loader found"


def test_every_structure_is_read_as_the_library_wrote_it(environment: dict[str, str]) -> None:
    assert json.loads(run(environment, sys.executable, "-c", READ)) == {
        "memory": [81559, 559],
        "pci": ["00000000:17:00.0", "00000000:18:00.0"],
        "minor": [4, 5],
        "absent": [None, False, []],
        "told": [60.0, 120.5, 7, 41, 1755, 1, 0],
        "processes": [[4000000, 1000, None], [4000001, 1000, None]],
        "samples": [[4000000, 6000, 50], [4000001, 7000, 25]],
        "no samples": [],
        "xids": [[31], [32], []],
        "gpm": [0.375, 0.125, None],
    }


def test_carpool_node_inspect_shows_its_gpus(environment: dict[str, str], tmp_path: Path) -> None:
    environment = {**environment, "CARPOOL_STATE_DIR": str(tmp_path), "CARPOOL_CDI_DIR": str(tmp_path)}
    said = run(environment, str(Path(sys.executable).parent / "carpool"), "node", "inspect")
    assert "driver 580.95.05, CUDA 13.0" in said
    assert "GPU 1: NVIDIA H100 PCIe  GPU-00000000-0000-4000-8000-00000000000b" in said
    assert "81,559 MiB (815 reserved), compute capability 9.0, PCI 00000000:17:00.0" in said
    assert "metrics: NVML with GPM" in said
    assert "UNHEALTHY: process 4000000, process 4000001 on the GPU belong to no pod" in said
