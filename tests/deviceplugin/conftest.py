"""Devices on a temporary directory, and other processes that use them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from carpool_core.kube.api import NODES
from carpool_core.resources.node import Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps import PROGRAM, Mps, MpsProgram
from carpool_deviceplugin.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_e2e.binaries import ensure
from carpool_simulated.device import Device
from carpool_simulated.gpu import Gpus, open_gpus
from carpool_simulated.state import Facts
from hypothesis import HealthCheck, settings

# --import-mode=importlib gives test folders no import path of their own; the world is shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "docs"))

from agent_world import reservation
from mps_world import LONG_S, STAND_IN

# The duration of examples depends on the load of the machine; tests with a time limit measure processor time.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

PROCESS = Path(__file__).parent / "simulated_process.py"
PACKAGES = Path(__file__).parents[2] / "deviceplugin"

A100 = Facts(
    uuid="GPU-1",
    product="Simulated NVIDIA A100-SXM4-40GB",
    memory_mib=40960,
    reserved_mib=624,
    context_mib=400,
    power_limit_w=400.0,
    idle_power_w=50.0,
)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """One A100, time-sliced."""
    made = Device(tmp_path / "gpus" / A100.uuid)
    made.create(A100)
    made.set_mode("TimeSlicing")
    return made


Environ = Callable[..., dict[str, str]]


@pytest.fixture
def environ(device: Device) -> Environ:
    def of(pod: str = "pod-a", **more: str) -> dict[str, str]:
        return {
            "CARPOOL_SIMULATED_GPUS_DIR": str(device.directory.parent),
            "CARPOOL_VISIBLE_GPUS": device.directory.name,
            "CARPOOL_POD_UID": pod,
            **more,
        }

    return of


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start another process; the isolated interpreter shows that nothing but Python is needed."""
    running: list[subprocess.Popen[str]] = []

    def begin(env: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
        code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); sys.argv = sys.argv[1:]; import runpy; "
        code += "runpy.run_path(sys.argv[0])"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(PROCESS), *arguments],
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def reserve() -> Callable[..., Reservation]:
    return reservation


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Two H100 behind NVML."""
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


CDI = json.loads((Path(__file__).parent / "cdi" / "schema.json").read_text())
CDI_SINCE = {"type": 4, "hostPath": 5, "annotations": 6, "additionalGids": 7}
"""Minor version that a field needs; a runtime refuses it in a specification of an older one."""


def _fields(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not (place == "mounts" and name == "hostPath"):  # these had theirs from the beginning
                yield name
            yield from _fields(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, place)


@pytest.fixture(params=["schema", pytest.param("nvidia-ctk", marks=pytest.mark.vendor)])
def valid_cdi(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    """Check a CDI specification by NVIDIA's toolkit, or against the schema, and its fields against its version."""

    def load(spec: dict[str, Any]) -> None:
        (tmp_path / "checked").mkdir(exist_ok=True)
        (tmp_path / "checked" / "spec.json").write_text(json.dumps(spec))
        command = [ensure(["nvidia-ctk"])["nvidia-ctk"], "cdi", "list", "--spec-dir", str(tmp_path / "checked")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "errors" not in done.stderr, done.stderr
        assert done.stdout.split() == [f"{spec['kind']}={device['name']}" for device in spec["devices"]]

    def check(spec: dict[str, Any]) -> None:
        jsonschema.validate(spec, CDI)
        minor = int(spec["cdiVersion"].split(".")[1])
        early = {name for name in _fields(spec) if CDI_SINCE.get(name, 0) > minor}
        assert not early, f"expected a newer cdiVersion than {spec['cdiVersion']} for {early}"

    return load if request.param == "nvidia-ctk" else check


@pytest.fixture
def kube() -> FakeKube:
    """An API server with the Node `node-1`."""
    kube = FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    return kube


@pytest.fixture
def devices(tmp_path: Path) -> SimulatedDevices:
    """Two simulated A100."""
    return SimulatedDevices(parse_inventory("NVIDIA A100-SXM4-40GB:2"), "node-1", tmp_path / "state")


@pytest.fixture
def enter(devices: SimulatedDevices) -> Callable[[str, str], Gpus]:
    """Open a GPU as a pod's process would: with what the agent gives its container, outside of one."""

    def of(uuid: str, pod: str) -> Gpus:
        access = devices.access(GpuUuid(uuid))
        env = {
            "CARPOOL_SIMULATED_GPUS_DIR": str(Path(access.mounts[0].host_path).parent),
            "CARPOOL_VISIBLE_GPUS": uuid,
            "CARPOOL_POD_UID": f"uid-{pod}",
        }
        if access.mps_pipe:
            env["CUDA_MPS_PIPE_DIRECTORY"] = access.mps_pipe.host_path
        return open_gpus(env)

    return of


@pytest.fixture
def commands() -> FakeMpsCommands:
    """MPS daemons in memory."""
    return FakeMpsCommands()


@pytest.fixture
def mps(commands: FakeMpsCommands, tmp_path: Path) -> Mps:
    """The same, as the agent has them."""
    return Mps(commands, tmp_path, clean_within_s=LONG_S)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MpsProgram:
    """A substitute for NVIDIA's program."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / PROGRAM
    file.write_text(STAND_IN)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return MpsProgram(private_shm=False, within_s=5.0)
