"""The port to NVML: its contract on each fake GPU, on the installed library, and through the real bindings."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest
from agent_world import agent_on, status_of
from carpool_core import products
from carpool_core.keys import LABEL_RELEASE_GPUS
from carpool_core.kube.api import NODES
from carpool_core.products import PRODUCTS, DeviceClass, find_product, product_of
from carpool_core.resources.node import NO_FIGURES, NvmlFigures
from carpool_core.testing.kube import FakeKube
from carpool_deviceplugin.app import real_devices
from carpool_deviceplugin.check import CHECKS, CONTRACT, Rule
from carpool_deviceplugin.gpu import FRAGMENTATION_MIB, NoDevicesError
from carpool_deviceplugin.health import XidWatch
from carpool_deviceplugin.mig import Placement
from carpool_deviceplugin.mig_instances import (
    create_instance,
    destroy_instance,
    read_instances,
    read_mig_devices,
    read_table,
)
from carpool_deviceplugin.nvlib import (
    DriverGoneError,
    GpuLostError,
    NvmlError,
    NvmlLibrary,
    Session,
    SuspendedError,
    list_gpus,
    load_nvml,
    read_identity,
    read_telemetry,
)
from carpool_deviceplugin.reconciler import UPGRADE_STATE
from carpool_deviceplugin.sampling import DRAM_ACTIVE, SM_ACTIVE, GpmSampler
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.gpus import HARDWARE, TABLES, Hardware
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from documents import commands
from node_world import verdicts


def answers() -> bool:
    """Whether the loader finds a libnvidia-ml.so.1 that answers, NVIDIA's or another one."""
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return False
    return True


LIBRARIES = [
    *(pytest.param(kind, id=kind) for kind in HARDWARE),
    pytest.param("installed", id="installed", marks=[] if answers() else [pytest.mark.gpu]),
]


def at_work(kind: str) -> FakeNvml:
    """Two GPUs of a kind; on the first one two processes have run for a while."""
    fake = FakeNvml([kind, kind])
    for pid, sm in ((42, 0.25), (43, 0.5)):
        fake.start(0, pid, 1000).sm = sm
    fake.advance(3)
    return fake


@pytest.fixture(params=LIBRARIES)
def session(request) -> Iterator[Session]:
    library: NvmlLibrary = load_nvml() if request.param == "installed" else at_work(request.param)
    opened = Session(library)
    opened.open()
    yield opened
    opened.close()


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(session: Session, rule: Rule) -> None:
    """Every GPU keeps these rules; `carpool node check` checks them on the node."""
    assert list(rule(session)) == []


def device_files() -> list[str]:
    """NVIDIA's device files that this process holds open; the mock of NVML has none."""
    paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [path for path in paths if path.startswith("/dev/nvidia")]


LABELS = {LABEL_RELEASE_GPUS: ("true", None), UPGRADE_STATE: ("cordon-required", "uncordon-required")}
"""Ours, and GPU Operator's: the value that releases the GPUs, and the one that gives them back."""


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("library", LIBRARIES[-1:])
async def test_a_label_releases_the_librarys_gpus_and_the_agent_takes_them_back(
    library: str, label: str, tmp_path: Path, kube: FakeKube
) -> None:
    """NVIDIA's mock reads its driver's version once, so an upgrade is one of the fake only."""
    devices = real_devices(AgentSettings(state_dir=tmp_path), load_nvml())

    def messages() -> list[str]:
        return [device.health_message for device in status_of(kube).devices]

    async def put(value: str | None) -> None:
        await kube.patch(NODES, "node-1", {"metadata": {"labels": {label: value}}})

    async with running(agent_on(devices, tmp_path, kube)):
        before = await until(messages)
        await put(LABELS[label][0])
        await until(lambda: all("the agent holds no handle of the GPUs" in one for one in messages()))
        assert device_files() == []
        with pytest.raises(SuspendedError):
            read_telemetry(devices.session, devices.uuids[0])
        await put(LABELS[label][1])
        await until(lambda: messages() == before)


def opened(*kinds: str) -> tuple[FakeNvml, Session, list]:
    fake = FakeNvml(kinds)
    session = Session(fake)
    session.open()
    return fake, session, list_gpus(session)


def test_the_real_bindings_have_every_function() -> None:
    names = [name for name in vars(NvmlLibrary) if name.startswith("nvml")]
    assert len(names) > 45
    for name in names:
        assert callable(getattr(load_nvml(), name))
        assert callable(getattr(FakeNvml, name))


def test_the_fakes_hardware_is_that_of_the_products() -> None:
    for hardware in HARDWARE.values():
        product = find_product(hardware.product)
        assert hardware.memory_mib == product.memory_mib
        assert product.compute_capability == ".".join(map(str, hardware.compute_capability))
        assert hardware.mig is TABLES.get(product.name)


@pytest.mark.parametrize("kind", [k for k, h in HARDWARE.items() if h.mig])
def test_mig_profiles_of_the_fake_are_those_of_the_product(kind: str) -> None:
    _, session, (uuid,) = opened(kind)
    found, table = read_table(session, uuid), HARDWARE[kind].mig
    assert {p.name: p.starts for p in found.profiles} == {p.name: p.starts for p in table.profiles}
    assert found.memory_slices == table.memory_slices


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "expected libnvidia-ml.so.1, found none"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "found it not loaded; run modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "found different ones"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "found no permission; give the container /dev/nvidiactl"),
        (pynvml.NVML_ERROR_UNKNOWN, "expected NVML to start, found Unknown Error; check dmesg and nvidia-smi -q"),
        (777, "found NVML Error with code 777; this code is newer than the agent"),
    ],
)
def test_a_driver_that_does_not_start_is_an_error_with_advice(code: int, message: str) -> None:
    fake = FakeNvml(["T4"])
    fake.init_error = code
    with pytest.raises(NoDevicesError, match=message):
        Session(fake).open()


def test_a_driver_that_is_too_old_is_an_error_with_advice() -> None:
    """Regression: NVIDIA's bindings raised NVMLLibraryMismatchError at the first reading, and the agent ended."""
    fake = FakeNvml(["T4"])
    fake.driver_version = "470.256.02"
    with pytest.raises(NoDevicesError, match=r"expected driver 510 or newer, found 470\.256\.02; update"):
        Session(fake).open()
    fake.driver_version = "510.39.01"
    Session(fake).open()


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, NvmlError, "Insufficient Permissions; run the agent as root"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError, "GPU is lost; it has fallen off the bus"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverGoneError, "Driver Not Loaded; load the driver"),
        (pynvml.NVML_ERROR_INSUFFICIENT_POWER, NvmlError, "; check its power cables"),
        (pynvml.NVML_ERROR_UNKNOWN, NvmlError, "Unknown Error; check dmesg .*; if it stays so, restart the node"),
        (777, NvmlError, "code 777; this code is newer than the agent, .*: update the agent, and check dmesg"),
    ],
)
def test_errors_name_the_call_the_gpu_and_what_to_do(code: int, kind: type[NvmlError], advice: str) -> None:
    fake, session, (uuid,) = opened("T4")
    fake.fail_next("nvmlDeviceGetMemoryInfo", code)
    with pytest.raises(kind, match=f"GPU {uuid}: nvmlDeviceGetMemoryInfo failed: .*{advice}") as caught:
        read_telemetry(session, uuid)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


def test_a_function_that_an_old_driver_lacks_is_an_absent_value() -> None:
    fake, session, (uuid,) = opened("H100")
    fake.fail_next("nvmlDeviceGetPersistenceMode", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert read_identity(session, uuid).is_persistent is None


PUBLISHED = json.loads(Path(products.__file__).with_name("nvml_figures.json").read_text())
CAPPED = {"NVIDIA A10G", "NVIDIA L20", "NVIDIA L40", "NVIDIA H20", "NVIDIA H20-3e"}
"""Products with less tensor throughput than their chip, which NVML does not report."""


@pytest.mark.parametrize("gpu", PUBLISHED["gpus"], ids=lambda gpu: gpu["name"])
def test_every_product_is_described_from_what_nvml_reports(gpu: dict[str, Any]) -> None:
    """As published, or faster where the clock may exceed the published boost clock; a renamed GPU is in no table."""
    fake, session, (uuid,) = opened("T4")
    figures, published = msgspec.convert(gpu["figures"], NvmlFigures), gpu["published"]
    capability, memory_mib = tuple(map(int, gpu["capability"].split("."))), gpu["memoryMib"]
    fake.gpus[0].hardware = Hardware(f"New {gpu['name']}", memory_mib, 0, capability, 0, 0, figures=figures)
    found = read_identity(session, uuid)
    kind = DeviceClass(found.product, found.memory_mib, 0, found.compute_capability, (), figures=found.figures)
    derived, named = product_of(kind), product_of(replace(kind, product=gpu["name"]))
    assert derived.is_derived
    assert product_of(replace(kind, figures=NO_FIGURES)) is None
    assert named.is_derived != (gpu["name"] in {product.name for product in PRODUCTS})
    assert (derived.memory_mib, derived.power_limit_w) == (named.memory_mib, named.power_limit_w)
    assert derived.sm_count == named.sm_count
    assert derived.memory_bandwidth_gb_s == pytest.approx(published["bandwidthGbS"], rel=0.03)
    assert 0.89 * published["fp32Tflops"] < derived.fp32_tflops < 1.36 * published["fp32Tflops"]
    assert 0.89 * published["tensorTflops"] <= derived.tensor_tflops
    assert derived.tensor_tflops <= 1.36 * published["tensorTflops"] or gpu["name"] in CAPPED


@pytest.mark.parametrize(("name", "capability"), PUBLISHED["unified"].items())
def test_a_gpu_that_shares_the_cpus_memory_is_refused(name: str, capability: str) -> None:
    fake, session, (uuid,) = opened("T4")
    fake.gpus[0].hardware = Hardware(name, 122_880, 0, tuple(map(int, capability.split("."))), 0, 0)
    with pytest.raises(
        NvmlError, match=f"expected a GPU with memory of its own, found {re.escape(name)}, which shares the CPU's"
    ):
        read_identity(session, uuid)


def test_a_restarted_driver_is_opened_again() -> None:
    fake, session, (uuid,) = opened("A100-40")
    watch = XidWatch(session, [uuid])
    assert watch.poll(uuid) == []
    fake.restart_driver()
    with pytest.raises(DriverGoneError, match="opens the driver again"):
        read_telemetry(session, uuid)
    assert read_telemetry(session, uuid).power_w
    assert session.generation == 2
    fake.raise_xid(0, 79)
    assert watch.poll(uuid) == [], "the registration with the old driver is gone"
    fake.raise_xid(0, 31)
    assert watch.poll(uuid) == [(31, None)]


def test_gpm_measures_between_two_samples() -> None:
    fake, session, (uuid,) = opened("H100")
    process = fake.start(0, 42, 1000)
    process.sm, process.dram = 0.5, 0.25
    gpm = GpmSampler(session)
    gpm.sample(uuid)
    fake.advance(2)
    found = gpm.sample(uuid)
    assert [found[name] for name in (SM_ACTIVE, DRAM_ACTIVE, "DCGM_FI_PROF_SM_OCCUPANCY")] == [
        pytest.approx(0.5, rel=0.01),
        pytest.approx(0.25, rel=0.01),
        pytest.approx(0.25, rel=0.01),
    ]
    process.sm = 0.0
    fake.advance(2)
    assert gpm.sample(uuid)[SM_ACTIVE] == 0
    assert SM_ACTIVE not in gpm.sample(uuid), "no time has passed"


def mig_on(kind: str) -> tuple[FakeNvml, Session, str]:
    fake, session, (uuid,) = opened(kind)
    fake.gpus[0].mig.is_enabled = fake.gpus[0].mig.is_pending = True
    return fake, session, uuid


@pytest.mark.parametrize("kind", [k for k, h in HARDWARE.items() if h.mig])
def test_mig_steps_are_read_back_and_idempotent(kind: str) -> None:
    fake, session, uuid = mig_on(kind)
    table = read_table(session, uuid)
    whole, small = table.profiles[0], table.find(table.profiles[-1].name.removesuffix("+me"))
    for start in (0, 2):
        for _ in range(2):
            create_instance(session, uuid, Placement(small, start))
    instances = read_instances(session, uuid, table)
    assert [i.placement for i in instances] == [Placement(small, 0), Placement(small, 2)]
    assert len({d.uuid for d in read_mig_devices(session, uuid)}) == 2
    with pytest.raises(NvmlError, match=r"nvmlDeviceCreateGpuInstanceWithPlacement failed.*no room"):
        create_instance(session, uuid, Placement(whole, 0))
    for _ in range(2):
        destroy_instance(session, uuid, instances[0])
    assert read_instances(session, uuid, table) == instances[1:]
    fake.start(0, 42, 100, instance=instances[1].id)
    with pytest.raises(NvmlError, match=r"nvmlComputeInstanceDestroy failed.*something still uses it"):
        destroy_instance(session, uuid, instances[1])


def test_a_gpu_with_mig_off_has_no_instances() -> None:
    _, session, (uuid,) = opened("A100-40")
    assert read_instances(session, uuid, read_table(session, uuid)) == []
    assert read_mig_devices(session, uuid) == []


HERE = Path(__file__).parent
READ = """
import json, time
from carpool_deviceplugin.nvlib import Session
from carpool_deviceplugin.sampling import GpmSampler
from carpool_deviceplugin.nvlib import load_nvml
from carpool_deviceplugin.nvlib import (
    list_gpus, read_identity, read_processes, read_telemetry, read_utilization)
from carpool_deviceplugin.health import XidWatch
session = Session(load_nvml())
session.open()
gpus = list_gpus(session)
known, gpm = [read_identity(session, gpu) for gpu in gpus], GpmSampler(session)
watch, telemetry = XidWatch(session, gpus), read_telemetry(session, gpus[0])
gpm.sample(gpus[0])
between = gpm.sample(gpus[0])
print(json.dumps({
    "memory": [known[0].memory_mib, known[0].reserved_mib],
    "pci": [k.pci_bus_id for k in known],
    "minor": [k.minor for k in known],
    "absent": [known[0].mig_capable, list(known[0].nvlink_peers)],
    "telemetry": [getattr(telemetry, name) for name in (
        "gpu_util_percent", "power_w", "energy_mj", "temperature_c", "sm_clock_mhz", "rows_remapped_correctable",
        "ecc_uncorrectable")],
    "processes": [[p.pid, p.memory_mib, p.gpu_instance_id] for p in read_processes(session, gpus[0])],
    "samples": [list(s) for s in read_utilization(session, gpus[0], 5000)],
    "no samples": list(read_utilization(session, gpus[1], 5000)),
    "xids": [watch.poll(gpu) for gpu in gpus] + [watch.poll(gpus[0])],
    "gpm": [between.get(f"DCGM_FI_PROF_{name}_ACTIVE") for name in ("SM", "DRAM", "PIPE_TENSOR")],
}))
"""


CARPOOL = str(Path(sys.executable).parent / "carpool")


def library(directory: Path, *flags: str) -> dict[str, str]:
    """Build the stand-in library; return the environment of a process that loads it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run(
        [*command, "-o", str(directory / "libnvidia-ml.so.1"), str(HERE / "nvml" / "libnvidia-ml.c")], check=True
    )
    paths = {name: str(directory) for name in ("LD_LIBRARY_PATH", "HOME", "CARPOOL_STATE_DIR", "CARPOOL_CDI_DIR")}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **paths}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """GPUs without MIG."""
    return library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """GPUs with MIG, which the first one has switched on."""
    return library(tmp_path_factory.mktemp("nvml-mig"), "-DWITH_MIG")


MOCKED = ["a100", "b200", "gb200", "gb300", "h100", "l40s", "t4"]
"""Machines of NVIDIA's mock, each with its product's GPUs."""


@pytest.fixture
def mock(request: pytest.FixtureRequest) -> dict[str, str]:
    """A machine of NVIDIA's mock. Go's module proxy has no copy of it: the developer builds it."""
    folder = os.environ["CARPOOL_MOCK_NVML"]
    config = f"{folder}/configs/mock-nvml-config-{getattr(request, 'param', 'h100')}.yaml"
    paths = {"LD_LIBRARY_PATH": folder, "MOCK_NVML_CONFIG": config, "HOME": "/nonexistent"}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **paths}


def run(environment: dict[str, str], *command: str, code: int = 0) -> str:
    """Run a command; return its output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout + (done.stderr if code else "")


def keep_contract(environment: dict[str, str], rules: str, count: int) -> None:
    """Run the rules over the environment's library."""
    contract = ["-m", "pytest", "-q", "-k", rules, "-p", "no:cacheprovider", __file__]
    printed = run(environment, sys.executable, *contract)
    assert f"{count} passed" in printed
    assert "skipped" not in printed, "no test may wait for a GPU"


@pytest.mark.parametrize("kind", ["environment", "divided"])
def test_the_contract_holds_through_the_real_bindings(request: pytest.FixtureRequest, kind: str) -> None:
    keep_contract(request.getfixturevalue(kind), "installed", len(CONTRACT) + len(LABELS))


@pytest.mark.vendor("CARPOOL_MOCK_NVML")
@pytest.mark.parametrize("mock", MOCKED, indirect=True)
def test_the_contract_holds_on_nvidias_mock(mock: dict[str, str]) -> None:
    """The mock has MIG and no profiles. The agent releases its GPUs, and takes them back."""
    keep_contract(mock, "installed and not mig_profiles", len(CONTRACT) - 1 + len(LABELS))


MEMORY = """
import json
from carpool_deviceplugin.nvlib import Session, list_gpus, load_nvml, read_identity, read_telemetry
session = Session(load_nvml())
session.open()
found = [(read_identity(session, gpu), read_telemetry(session, gpu)) for gpu in list_gpus(session)]
print(json.dumps([
    [known.product, known.memory_mib, known.reserved_mib, now.memory_used_mib, now.memory_free_mib]
    for known, now in found
]))
"""
A_MACHINE = 8
"""Most GPUs of one machine of the mock."""


@pytest.mark.vendor("CARPOOL_MOCK_NVML")
@pytest.mark.parametrize("first", range(0, len(PUBLISHED["gpus"]), A_MACHINE))
def test_nvidias_mock_reserves_memory_that_no_job_can_use(mock: dict[str, str], tmp_path: Path, first: int) -> None:
    """The mock has every product, idle and in use, beside 256 GiB of BAR1.

    Its first version of the query, unlike the real library's, leaves the reserved memory out of the used.
    """
    config, products = (
        msgspec.yaml.decode(Path(mock["MOCK_NVML_CONFIG"]).read_text()),
        PUBLISHED["gpus"][first:][:A_MACHINE],
    )
    config["devices"], expected = config["devices"][: len(products)], []
    for index, (device, gpu) in enumerate(zip(config["devices"], products, strict=True)):
        total, reserved, used = gpu["memoryMib"], 300 + 100 * index, 1024 * (index % 3)
        sizes = {"total": total, "reserved": reserved, "free": total - reserved - used, "used": used}
        major, minor = map(int, gpu["capability"].split("."))
        device |= {"name": gpu["name"], "compute_capability": {"major": major, "minor": minor}}
        device["memory"] = {f"{name}_bytes": size << 20 for name, size in sizes.items()}
        expected.append([gpu["name"], total, reserved, reserved + used, total - reserved - used])
    (file := tmp_path / "machine.yaml").write_bytes(msgspec.yaml.encode(config))
    assert json.loads(run({**mock, "MOCK_NVML_CONFIG": str(file)}, sys.executable, "-c", MEMORY)) == expected


NUMA = """
import json, sys
from pathlib import Path
from carpool_deviceplugin.nvlib import Session, list_gpus, load_nvml, read_identity
session = Session(load_nvml())
session.open()
known = [read_identity(session, gpu, Path(sys.argv[1])) for gpu in list_gpus(session)]
print(json.dumps({one.pci_bus_id[4:]: one.numa_node for one in known}))
"""


@pytest.mark.vendor("CARPOOL_MOCK_NVML")
@pytest.mark.parametrize("mock", MOCKED, indirect=True)
def test_numa_nodes_are_those_of_nvidias_mock(mock: dict[str, str], tmp_path: Path) -> None:
    config = mock["MOCK_NVML_CONFIG"]
    run(mock, f"{mock['LD_LIBRARY_PATH']}/render-pci-sysfs", "--config", config, "--output", str(tmp_path), "--strict")
    roots = msgspec.yaml.decode(Path(config).read_text())["pcie_topology"]["root_complexes"]
    nodes = {bus: root["numa_node"] for root in roots for bus in root["devices"]}
    assert json.loads(run(mock, sys.executable, "-c", NUMA, str(tmp_path / "sys"))) == nodes


@pytest.mark.parametrize("kind", HARDWARE)
def test_usable_memory_leaves_out_what_the_driver_reserves(tmp_path: Path, kind: str) -> None:
    devices = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path).devices()
    gpu, hardware = devices.uuids[0], HARDWARE[kind]
    assert devices.actual(gpu).usable_mib == hardware.memory_mib - hardware.reserved_mib
    described = devices.describe(gpu)
    assert described.memory_mib - described.reserved_mib == devices.actual(gpu).usable_mib - FRAGMENTATION_MIB
    counters = devices.read(gpu).counters
    assert counters is not None
    assert counters.values["DCGM_FI_DEV_FB_USED"] == 0
    assert counters.values["DCGM_FI_DEV_FB_FREE"] == devices.actual(gpu).usable_mib


@pytest.mark.vendor("CARPOOL_MOCK_NVML")
@pytest.mark.parametrize(("failure", "healthy", "reason"), [("healthy", 8, ""), ("lost", 7, "GPU is lost; it has")])
def test_nvidias_mock_of_eight_gpus_is_read(
    mock: dict[str, str], tmp_path: Path, failure: str, healthy: int, reason: str
) -> None:
    config, text = tmp_path / "h100.yaml", Path(mock["MOCK_NVML_CONFIG"]).read_text()
    config.write_text(text.replace("  - index: 3\n", f"  - index: 3\n    failure: {{mode: {failure}}}\n"))
    paths = dict.fromkeys(("HOME", "CARPOOL_STATE_DIR", "CARPOOL_CDI_DIR"), str(tmp_path))
    printed = run({**mock, **paths, "MOCK_NVML_CONFIG": str(config)}, CARPOOL, "node", "inspect")
    assert printed.count(": NVIDIA H100 80GB HBM3 ") == printed.count("\n  healthy\n") == healthy
    assert reason in printed


@pytest.mark.vendor("CARPOOL_MOCK_NVML")
def test_an_xid_of_nvidias_mock_names_no_mig_instance(mock: dict[str, str], tmp_path: Path) -> None:
    """MIG is off, but the mock reports instance 0, and the event to the first GPU that asks."""
    config, text = tmp_path / "h100.yaml", Path(mock["MOCK_NVML_CONFIG"]).read_text()
    failure = "failure: {mode: ecc_uncorrectable, xid: {code: 95}}"
    config.write_text(text.replace("  - index: 0\n", f"  - index: 0\n    {failure}\n"))
    paths = dict.fromkeys(("HOME", "CARPOOL_STATE_DIR", "CARPOOL_CDI_DIR"), str(tmp_path))
    printed = run({**mock, **paths, "MOCK_NVML_CONFIG": str(config)}, CARPOOL, "node", "inspect")
    assert printed.count("UNHEALTHY: XID 95 (uncontained ECC error): drain the GPU and reset it") == 1
    assert printed.count("\n  healthy\n") == 7


def test_every_structure_is_read_as_the_library_wrote_it(environment: dict[str, str]) -> None:
    assert json.loads(run(environment, sys.executable, "-c", READ)) == {
        "memory": [81559, 559],
        "pci": ["00000000:17:00.0", "00000000:18:00.0"],
        "minor": [4, 5],
        "absent": [False, []],
        "telemetry": [60.0, 120.5, 7, 41, 1755, 1, 0],
        "processes": [[4000000, 1000, None], [4000001, 1000, None]],
        "samples": [[4000000, 6000, 50], [4000001, 7000, 25]],
        "no samples": [],
        "xids": [[[31, None]], [[32, None]], []],
        "gpm": [0.375, 0.125, None],
    }


def test_inspect_runs_through_the_real_bindings(environment: dict[str, str], divided: dict[str, str]) -> None:
    printed = run(environment, CARPOOL, "node", "inspect")
    assert "driver 580.95.05, CUDA 13.0" in printed
    assert "GPU 1: NVIDIA H100 PCIe  GPU-00000000-0000-4000-8000-00000000000b" in printed
    assert "81,559 MiB (559 the driver's, 256 more kept free), compute capability 9.0, PCI 00000000:17:00.0" in printed
    assert "metrics from nvml-gpm: PROF_DRAM_ACTIVE, " in printed
    assert "UNHEALTHY: process 4000000, process 4000001 on the GPU belong to no pod" in printed
    assert "3g.40gb       40,448 MiB, 60 SMs, at {0,4}:4" in run(divided, CARPOOL, "node", "inspect")


PLAN = (CARPOOL, "node", "plan", "--gpu", "0", "--to")
TWO = "mig:3g.40gb,2g.20gb"


def test_plan_runs_through_the_real_bindings(divided: dict[str, str]) -> None:
    """Tests structures and pointers of MIG, which a fake in Python cannot."""
    steps = ["create 3g.40gb on memory slices 4-7", "create 2g.20gb on memory slices 0-1"]
    assert run(divided, *PLAN, TWO).splitlines()[1:] == [f"would {step}" for step in steps]
    assert run(divided, *PLAN, TWO, "--apply").splitlines()[1:] == [*steps, "done"]


DIVIDE = """
import json, time
from pathlib import Path
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mig import plan_mig
from carpool_deviceplugin.nvlib import Session
from carpool_deviceplugin.sampling import GpmSampler
from carpool_deviceplugin.nvlib import load_nvml
from carpool_deviceplugin.mig_instances import read_instances, read_mig_devices, read_table
from carpool_deviceplugin.mig_instances import apply_plan
from carpool_deviceplugin.nvlib import list_gpus
session = Session(load_nvml())
session.open()
gpu, gpm = list_gpus(session)[0], GpmSampler(session)
table = read_table(session, gpu)
def to(*names):
    present = read_instances(session, gpu, table)
    apply_plan(session, gpu, plan_mig(table, present, set(), [table.find(n) for n in names]), time.monotonic)
    found = read_instances(session, gpu, table)
    return [[str(i.placement), i.id] for i in found], [[d.uuid, d.gpu_instance_id] for d in
                                                       read_mig_devices(session, gpu)]
first = to("3g.40gb", "2g.20gb")
memory = session.library.nvmlDeviceGetMemoryInfo(session.library.nvmlDeviceGetHandleByUUID(first[1][0][0])).total
instance = first[0][0][1]
gpm.sample(gpu, instance)
sm = gpm.sample(gpu, instance)["DCGM_FI_PROF_SM_ACTIVE"]
print(json.dumps({"first": first, "memory": memory >> 20, "sm": sm, "second": to("3g.40gb", "1g.10gb"), "third": to()}))
"""


def test_mig_instances_come_stay_and_go_through_the_bindings(divided: dict[str, str]) -> None:
    found = json.loads(run(divided, sys.executable, "-c", DIVIDE))
    assert sorted(name for name, _ in found["first"][0]) == [
        "2g.20gb on memory slices 0-1",
        "3g.40gb on memory slices 4-7",
    ]
    assert len(found["first"][1]) == 2
    assert all(uuid.startswith("MIG-00000000-") for uuid, _ in found["first"][1])
    assert {number for _, number in found["first"][1]} == {number for _, number in found["first"][0]}
    assert (found["memory"] in (40448, 20096), found["sm"]) == (True, 0.375)
    stays = next(one for one in found["first"][0] if one[0].startswith("3g"))
    assert stays in found["second"][0]
    assert sorted(name.split()[0] for name, _ in found["second"][0]) == ["1g.10gb", "3g.40gb"]
    assert found["third"] == [[], []]


def test_check_runs_through_the_real_bindings(divided: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    chosen = [part for name in CHECKS for part in ("--only", name)]  # the node's own rows depend on this machine
    printed = run(divided, CARPOOL, "node", "check", "--mig", "--out", str(out), *chosen)
    assert verdicts(printed) == {"contract": "passed", "mps": "skipped", "mig": "passed"}
    assert "1g.10gb and 2g.20gb created, read back and destroyed" in printed
    assert json.loads(out.read_text())["product"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "command", dict.fromkeys(c for _, c in commands() if re.match("carpool node (?!.*--canary)", c))
)
def test_a_documented_command_uses_the_bindings(divided: dict[str, str], command: str, tmp_path: Path) -> None:
    environment = {**divided, "PATH": f"{Path(CARPOOL).parent}:{divided['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0 or "\nFAILED" in done.stdout, done.stderr  # the node's own rows depend on this machine
    assert "NVIDIA H100 80GB HBM3" in done.stdout or "would create" in done.stdout


@pytest.mark.parametrize(
    ("refuses", "message", "command"),
    [
        (4, "found no permission; give the container /dev/nvidiactl", (CARPOOL, "node", "inspect")),
        (9, "found it not loaded; run modprobe nvidia", (CARPOOL, "node", "inspect")),
        (18, "updated under a running kernel module; restart the node", (*PLAN, TWO, "--apply")),
    ],
    ids=["no-permission", "no-module", "two-versions"],
)
def test_commands_report_a_driver_that_does_not_start(
    divided: dict[str, str], refuses: int, message: str, command: tuple[str, ...]
) -> None:
    assert message in run({**divided, "STAND_IN_REFUSES": str(refuses)}, *command, code=2)


def test_commands_without_a_driver_name_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    printed = run(environment, CARPOOL, "node", "inspect", code=2)
    assert "expected libnvidia-ml.so.1, found none; install NVIDIA's driver on the node" in printed
    assert "CARPOOL_SIMULATED_GPUS" not in printed, "it would not help here"
    out = tmp_path / "found.json"
    printed = run(environment, CARPOOL, "node", "check", "--out", str(out), code=1)
    assert printed.splitlines()[1].split() == ["FAILED", "driver", "none"], "the first row"
    assert "what to do: install NVIDIA's driver on the node" in printed
    written = json.loads(out.read_text())["outcomes"]
    assert [*verdicts(printed).items()] == [(one["name"], one["verdict"]) for one in written]
    of_host = ["container-runtime", "selinux", "directories", "device-plugins", "operating-system", "host-pids"]
    assert [one["name"] for one in written] == ["driver", *of_host, "mps-program"]
