"""The contract of NVML as the agent uses it: over the fake of each kind of GPU, and over what is installed."""

from collections.abc import Iterator

import pynvml
import pytest
from carpool_core.products import find_product
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import Create, Destroy
from carpool_deviceplugin.node.battery.contract import CONTRACT, Rule
from carpool_deviceplugin.nvml.calls import DriverGoneError, GpuLostError, NotPermittedError, NvmlError, Session
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.library import NvmlLibrary, installed
from carpool_deviceplugin.nvml.mig import apply_step, read_instances, read_mig_devices, read_table
from carpool_deviceplugin.nvml.reading import (
    list_gpus,
    read_identity,
    read_processes,
    read_telemetry,
    read_utilization,
)
from carpool_deviceplugin.nvml.xids import XidWatch
from carpool_deviceplugin.testing.mig_tables import TABLES
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_hardware import HARDWARE


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
    library: NvmlLibrary = installed() if request.param == "installed" else at_work(request.param)
    opened = Session(library)
    opened.open()
    yield opened
    opened.close()


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(session: Session, rule: Rule) -> None:
    """What holds for every GPU; `carpool node battery` asks the same of a real one."""
    assert list(rule(session)) == []


# What only a GPU does that may be handled roughly.


def opened(*kinds: str) -> tuple[FakeNvml, Session, list]:
    fake = FakeNvml(kinds)
    session = Session(fake)
    session.open()
    return fake, session, list_gpus(session)


def test_the_real_bindings_have_every_function() -> None:
    names = [name for name in vars(NvmlLibrary) if name.startswith("nvml")]
    assert len(names) > 45
    for name in names:
        assert callable(getattr(installed(), name))
        assert callable(getattr(FakeNvml, name))


def test_the_fakes_hardware_is_that_of_the_products() -> None:
    for hardware in HARDWARE.values():
        product = find_product(hardware.product)
        assert hardware.memory_mib == product.memory_mib
        assert product.compute_capability == ".".join(map(str, hardware.compute_capability))
        assert hardware.mig is TABLES.get(product.name)


@pytest.mark.parametrize("kind", [k for k, h in HARDWARE.items() if h.mig])
def test_drivers_word_on_mig_agrees_with_the_table(kind: str) -> None:
    _, session, (uuid,) = opened(kind)
    found, table = read_table(session, uuid), HARDWARE[kind].mig
    assert {p.name: p.starts for p in found.profiles} == {p.name: p.starts for p in table.profiles}
    assert found.memory_slices == table.memory_slices


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "expected libnvidia-ml.so.1, found none"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "found it not loaded: run modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "found different ones"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "found no permission: give the container /dev/nvidiactl"),
        (pynvml.NVML_ERROR_UNKNOWN, "expected NVML to start, found: Unknown Error; look at dmesg and nvidia-smi -q"),
        (777, "found: NVML Error with code 777; this code is newer than the agent"),
    ],
)
def test_no_start_says_what_to_do(code: int, says: str) -> None:
    fake = FakeNvml(["T4"])
    fake.init_error = code
    with pytest.raises(NoDevicesError, match=says):
        Session(fake).open()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, NotPermittedError),
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverGoneError),
        (pynvml.NVML_ERROR_TIMEOUT, NvmlError),
    ],
)
def test_errors_say_which_call_on_which_gpu(code: int, kind: type[NvmlError]) -> None:
    fake, session, (uuid,) = opened("T4")
    fake.fail_next("nvmlDeviceGetMemoryInfo", code)
    with pytest.raises(kind, match=f"GPU {uuid}: nvmlDeviceGetMemoryInfo failed: .*; ") as caught:
        read_telemetry(session, uuid)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (777, "NVML Error with code 777; this code is newer than the agent, .*: update the agent, and look at dmesg"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error; look at dmesg .*; if it stays so, restart the node"),
        (pynvml.NVML_ERROR_INSUFFICIENT_POWER, "; look at its power cables"),
    ],
)
def test_errors_say_what_to_do_whatever_their_code(code: int, says: str) -> None:
    """Regression: a code that was not foreseen, one of a newer driver above all, gave no way out."""
    fake, session, (uuid,) = opened("T4")
    fake.fail_next("nvmlDeviceGetMemoryInfo", code)
    with pytest.raises(NvmlError, match=says):
        read_telemetry(session, uuid)


def test_old_driver_without_a_function_is_a_value() -> None:
    fake, session, (uuid,) = opened("H100")
    fake.fail_next("nvmlDeviceGetNumaNodeId", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert read_identity(session, uuid).numa_node is None


def test_lost_gpu_leaves_the_others_alone_and_comes_back() -> None:
    fake, session, (lost, well) = opened("A100-40", "A100-40")
    fake.gpus[0].is_lost = True
    with pytest.raises(GpuLostError, match="fallen off the bus"):
        read_telemetry(session, lost)
    with pytest.raises(GpuLostError):
        read_telemetry(session, lost)
    assert read_telemetry(session, well).power_w
    fake.gpus[0].is_lost = False
    assert read_telemetry(session, lost).power_w


def test_restarted_driver_is_opened_again() -> None:
    fake, session, (uuid,) = opened("A100-40")
    watch = XidWatch(session, [uuid])
    assert watch.seen(uuid) == []
    fake.restart_driver()
    with pytest.raises(DriverGoneError, match="opens the driver again"):
        read_telemetry(session, uuid)
    assert read_telemetry(session, uuid).power_w
    assert session.openings == 2
    fake.raise_xid(0, 79)
    assert watch.seen(uuid) == [], "what was registered with the old driver is gone"
    fake.raise_xid(0, 31)
    assert watch.seen(uuid) == [31]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "load the driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions: restart the node"),
    ],
)
def test_driver_that_is_not_back_yet(code: int, says: str) -> None:
    fake, session, (uuid,) = opened("A100-40")
    fake.restart_driver()
    fake.init_error = code
    with pytest.raises(DriverGoneError):
        read_telemetry(session, uuid)
    for _ in range(2):
        with pytest.raises(DriverGoneError, match=says):
            read_telemetry(session, uuid)
    fake.init_error = None
    assert read_telemetry(session, uuid).power_w


def test_gpm_between_two_looks() -> None:
    fake, session, (uuid,) = opened("H100")
    process = fake.start(0, 42, 1000)
    process.sm, process.dram = 0.5, 0.25
    gpm = Gpm(session)
    gpm.sample(uuid)
    fake.advance(2)
    found = gpm.sample(uuid)
    assert (round(found.sm, 3), round(found.dram, 3), round(found.occupancy, 3)) == (0.5, 0.25, 0.25)
    process.sm = 0.0
    fake.advance(2)
    assert gpm.sample(uuid).sm == 0
    assert gpm.sample(uuid).sm is None, "no time has passed"


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
            apply_step(session, uuid, Create(Placement(small, start)))
    instances = read_instances(session, uuid, table)
    assert [i.placement for i in instances] == [Placement(small, 0), Placement(small, 2)]
    assert len({d.uuid for d in read_mig_devices(session, uuid)}) == 2
    with pytest.raises(NvmlError, match=r"nvmlDeviceCreateGpuInstanceWithPlacement failed.*no room"):
        apply_step(session, uuid, Create(Placement(whole, 0)))
    for _ in range(2):
        apply_step(session, uuid, Destroy(instances[0]))
    assert read_instances(session, uuid, table) == instances[1:]
    fake.start(0, 42, 100, instance=instances[1].id)
    with pytest.raises(NvmlError, match=r"nvmlComputeInstanceDestroy failed.*something still uses it"):
        apply_step(session, uuid, Destroy(instances[1]))


def test_create_that_died_half_way_is_continued() -> None:
    fake, session, uuid = mig_on("A100-40")
    table = read_table(session, uuid)
    step = Create(Placement(table.find("3g.20gb"), 4))
    fake.fail_next("nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NvmlError):
        apply_step(session, uuid, step)
    assert (len(read_instances(session, uuid, table)), read_mig_devices(session, uuid)) == (1, [])
    apply_step(session, uuid, step)
    assert len(read_instances(session, uuid, table)) == len(read_mig_devices(session, uuid)) == 1


def test_mig_switched_off_has_no_instances() -> None:
    _, session, (uuid,) = opened("A100-40")
    assert read_instances(session, uuid, read_table(session, uuid)) == []
    assert read_mig_devices(session, uuid) == []


def test_gpm_of_mig_instances() -> None:
    fake, session, uuid = mig_on("H100")
    table = read_table(session, uuid)
    apply_step(session, uuid, Create(Placement(table.find("3g.40gb"), 0)))
    (instance,) = read_instances(session, uuid, table)
    fake.start(0, 42, 100, instance=instance.id).sm = 0.8
    gpm = Gpm(session)
    gpm.sample(uuid, instance.id)
    fake.advance(1)
    assert round(gpm.sample(uuid, instance.id).sm, 3) == 0.8
    assert read_utilization(session, uuid, 0) is None, "the driver does not say it under MIG"
    assert read_processes(session, uuid)[0].gpu_instance_id == instance.id
