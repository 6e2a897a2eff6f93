"""Processes that meet on a simulated GPU."""

import fcntl
import json
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.gpu import DeviceError, Devices, Limits, NoDevicesError, SetLimits, SetMode, StartMps, StopMps
from carpool_deviceplugin.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.status import above_limit, presentable
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_simulated import (
    DeviceStateError,
    DeviceUnavailableError,
    MpsError,
    NoDeviceError,
    OutOfMemoryError,
    SimulatedGpuError,
    open_gpus,
    state,
)
from carpool_simulated.device import Activity, Device, contention, dynamic_power_w
from carpool_simulated.gpu import parse_environment
from carpool_simulated.state import Claim, encode_claim
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

FREE_MIB = 40960 - 624


def test_full_device_fails_with_pytorchs_words(device: Device, environ) -> None:
    with open_gpus(environ()) as (gpu,):
        gpu.allocate(38000)
        with pytest.raises(OutOfMemoryError) as refused:
            gpu.allocate(2048)
        assert str(refused.value).startswith(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.89 GiB "
            "is free. Including non-PyTorch memory, this process has 37.50 GiB memory in use."
        )
        gpu.free(38000)
        gpu.allocate(FREE_MIB - 400)
    assert device.reading().claims == ()


def test_killed_process_gives_everything_back(device: Device, environ, start) -> None:
    other = start(environ("pod-b"), "hold", "30000")
    assert other.stdout.readline() == "ready\n"
    assert [held.claim.pod_uid for held in device.reading().claims] == ["pod-b"]
    with open_gpus(environ()) as (gpu,), pytest.raises(OutOfMemoryError, match=r"of which 9\.\d+ GiB is free"):
        gpu.allocate(10_000)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert device.reading().claims == ()
    with open_gpus(environ()) as (gpu,):
        gpu.allocate(35_000)
        device.tidy()
        assert len(list(device.claims_directory.iterdir())) == 1, "the agent removes the dead claim"


def test_forked_child_does_not_keep_the_claim_alive(device: Device, environ) -> None:
    (gpu,) = open_gpus(environ())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gpu.allocate(1)
        except SimulatedGpuError as e:
            os.write(writer, str(e)[:40].encode())
        os.read(reader, 0)
        signal.pause()
    assert os.read(reader, 100) == b"Cannot re-initialize CUDA in forked subp"
    gpu.close()
    assert device.reading().claims == ()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)


def test_race_for_the_last_memory_has_one_winner(device: Device, environ, start) -> None:
    racers = [start(environ(f"pod-{i}"), "race", str(FREE_MIB - 4 * 400)) for i in range(4)]
    assert [racer.stdout.readline() for racer in racers] == ["open\n"] * 4
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = sorted(racer.stdout.readline().partition(" ")[0].strip() for racer in racers)
    assert said == ["OutOfMemoryError:"] * 3 + ["ready"]


def test_exclusive_admits_one_pod_and_idle_none(device: Device, environ) -> None:
    device.set_mode("Exclusive")
    refused = pytest.raises(DeviceUnavailableError, match=r"busy or unavailable.*expected to be alone.*pod-a")
    with open_gpus(environ("pod-a")), open_gpus(environ("pod-a")), refused:
        open_gpus(environ("pod-b"))
    open_gpus(environ("pod-b"))[0].close()
    device.set_mode("Idle")
    with pytest.raises(DeviceUnavailableError, match=r"busy or unavailable.*no reservation"):
        open_gpus(environ())


@pytest.fixture
def mps(device: Device, tmp_path, environ):
    device.set_mode("MPS")
    pipe = tmp_path / "mps"
    device.start_mps(pipe)

    def of(pod: str = "pod-a", **more: str) -> dict[str, str]:
        return environ(pod, CUDA_MPS_PIPE_DIRECTORY=str(pipe), **more)

    of.pipe = pipe
    return of


def test_mps_limit_is_kept(mps) -> None:
    with open_gpus(mps(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=9G")) as (gpu,):
        gpu.allocate(9216 - 400)
        with pytest.raises(OutOfMemoryError, match=r"of which 0\.00 MiB is free.*9\.00 GiB allowed"):
            gpu.allocate(1)


def test_mps_without_its_daemon(device: Device, mps, environ) -> None:
    with pytest.raises(MpsError, match="expected CUDA_MPS_PIPE_DIRECTORY to be set"):
        open_gpus(environ())
    device.stop_mps(mps.pipe)
    with pytest.raises(MpsError, match=r"failed to connect.*expected its daemon to run, found it stopped"):
        open_gpus(mps())


def test_step_alone_takes_its_time_and_is_accounted(device: Device, environ) -> None:
    time = FakeClock()
    device = Device(device.directory, time.monotonic)
    before = device.reading().energy_j
    with open_gpus(environ(), clock=time.monotonic, sleep=time.advance) as (gpu,):
        assert gpu.run(1.0, sm_active=0.5, dram_active=0.25, gpu_util=0.8) == pytest.approx(1.0)
        during = device.reading()
    assert before < during.energy_j <= device.reading().energy_j, "the GPU's energy never falls"
    claim = during.claims[0].claim
    assert (claim.steps, claim.steps_s) == (1, pytest.approx(1.0))
    assert (claim.busy_s, claim.sm_s, claim.dram_s) == (pytest.approx(0.8), pytest.approx(0.5), pytest.approx(0.25))
    assert claim.energy_j == pytest.approx((400 - 50) * (0.7 * 0.5 + 0.3 * 0.25))


def test_neighbour_slows_a_step_down_only_while_it_works(device: Device, environ) -> None:
    time = FakeClock()
    (a,), (b,) = (open_gpus(environ(pod), clock=time.monotonic, sleep=time.advance) for pod in ("pod-a", "pod-b"))
    b.run(1.0)
    assert a.run(0.5) > 0.75, "the neighbour is between two steps"
    time.advance(60)
    assert a.run(1.0) == pytest.approx(1.0), "the neighbour is idle"
    a.close()
    b.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"uuid": "GPU-1"}',
        b'{"uuid": 7}',
        b"\xff\xfe",
        b'{"uuid": "GPU-1", "product": "x", "memory_mib": 1, "reserved_mib": 2, "context_mib": 1, '
        b'"power_limit_w": 1, "idle_power_w": 1}',
    ],
)
def test_corrupt_device_is_named_with_a_remedy(device: Device, environ, content: bytes) -> None:
    (device.directory / "device.json").write_bytes(content)
    with pytest.raises(DeviceStateError, match=r"device\.json: expected .*, found .*; restart the node agent"):
        open_gpus(environ())


def test_corrupt_files_do_not_disturb_a_running_process(device: Device, mps) -> None:
    with open_gpus(mps()) as (gpu,):
        (device.directory / "mode.json").write_text("{")
        (device.directory / "device.json").write_text("{")
        (device.claims_directory / "broken.claim").write_text("nonsense")
        gpu.run(0.001)
        gpu.allocate(100)
        with pytest.raises(DeviceStateError, match=r"mode\.json: expected JSON"):
            device.set_mode("Exclusive")


def test_unreadable_claim_of_a_running_process_is_reported(device: Device, environ) -> None:
    with open_gpus(environ()) as (gpu,):
        (claim,) = device.claims_directory.iterdir()
        claim.write_text("nonsense")
        assert "expected a checksum" in device.reading().problems[0]
        gpu.allocate(5)
        assert device.reading().problems == (), "its owner writes it anew"
    assert state.read_mode(device.directory).mode == "TimeSlicing"


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({}, NoDeviceError, "no CUDA-capable device"),
        ({"CARPOOL_VISIBLE_GPUS": "GPU-9"}, NoDeviceError, "expected GPU GPU-9 in"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "9216"}, SimulatedGpuError, "expected index=amount"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "much"}, SimulatedGpuError, "more than 0 up to 100"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "0"}, SimulatedGpuError, "more than 0 up to 100"),
    ],
)
def test_invalid_environment_is_named(environ, variables, error, message) -> None:
    with pytest.raises(error, match=message):
        open_gpus({**environ(), **variables} if variables else {})


@pytest.mark.parametrize(("text", "mib"), [("0=1G", 1024), ("0=9216M", 9216), ("0=2GB,1=1G", 2048), ("1=1G", None)])
def test_memory_limits_are_read_as_mps_reads_them(environ, text: str, mib: int | None) -> None:
    assert parse_environment(environ(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=text)).limits_mib.get(0) == mib


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_invalid_sizes_and_times_are_named(device: Device, environ, bad: float) -> None:
    with open_gpus(environ()) as (gpu,):
        with pytest.raises(ValueError, match="expected"):
            gpu.allocate(bad)
        with pytest.raises(ValueError, match="expected"):
            gpu.run(bad)
        with pytest.raises(ValueError, match="expected"):
            gpu.free(bad)
        with pytest.raises(ValueError, match="between 0 and 1"):
            gpu.run(1.0, gpu_util=85)


FULL = Activity(1.0, 1.0, 0.5)
HALF = Activity(0.5, 0.25, 0.1)
SMALL = Activity(0.2, 0.05, 0.02)

ratios = st.floats(0, 1)
activities = st.builds(Activity, ratios, ratios, ratios)


@pytest.mark.parametrize(
    ("mode", "mine", "others", "threads", "low", "high"),
    [
        ("Exclusive", FULL, [], 1.0, 1.0, 1.0),
        ("TimeSlicing", FULL, [], 1.0, 1.0, 1.0),
        ("TimeSlicing", FULL, [FULL], 1.0, 2.0, 2.1),
        ("TimeSlicing", FULL, [FULL, FULL], 1.0, 3.0, 3.1),
        ("TimeSlicing", HALF, [HALF], 1.0, 1.2, 1.4),
        ("TimeSlicing", HALF, [SMALL], 1.0, 1.05, 1.2),
        ("MPS", HALF, [HALF], 1.0, 1.0, 1.02),
        ("MPS", FULL, [FULL], 1.0, 2.0, 2.2),
        ("MPS", FULL, [], 0.5, 2.0, 2.0),
        ("MPS", HALF, [], 0.5, 1.0, 1.0),
    ],
)
def test_slowdown_beside_other_tenants(mode, mine, others, threads, low, high) -> None:
    assert low <= round(contention(mode, mine, others, threads), 9) <= high


@given(st.sampled_from(["Exclusive", "TimeSlicing", "MPS"]), activities, st.lists(activities, max_size=6), activities)
def test_a_further_neighbour_never_helps(mode, mine, others, another) -> None:
    before = contention(mode, mine, others)
    after = contention(mode, mine, [*others, another])
    assert 1 <= before <= after + 1e-6


@given(activities, st.floats(1, 100), st.floats(1, 500))
def test_power_stays_under_the_limit(activity, idle_w, more_w) -> None:
    assert 0 <= dynamic_power_w(activity, idle_w=idle_w, limit_w=idle_w + more_w) <= more_w + 1e-9


POD = PodUid("uid-a")


@dataclass
class Ground:
    """An adapter under test."""

    devices: Devices
    enter: Callable[[str, str], AbstractContextManager[object]]
    """Run a process of a pod on a GPU."""
    pod_uid: Callable[[str], str]


@pytest.fixture(params=["simulated", "nvml"])
def ground(request, tmp_path, devices: SimulatedDevices, enter) -> Ground:
    if request.param == "simulated":
        return Ground(devices, enter, lambda pod: f"uid-{pod}")
    node = Node(FakeNvml(["A100-40", "A100-40"]), FakeMpsCommands(), tmp_path)
    real = node.devices()
    pids = count(100)

    @contextmanager
    def be_there(gpu: str, pod: str) -> Iterator[None]:
        index, pid = real.uuids.index(GpuUuid(gpu)), next(pids)
        node.start(index, pid, pod)
        yield
        node.end(index, pid)

    return Ground(real, be_there, uid)


def test_inventory_describes_every_gpu_in_order(ground: Ground) -> None:
    devices = ground.devices
    found = [devices.describe(uuid) for uuid in devices.uuids]
    assert [d.uuid for d in found] == list(devices.uuids)
    assert [d.index for d in found] == [0, 1]
    for d in found:
        assert d.health is DeviceHealth.HEALTHY
        assert 0 < d.reserved_mib < d.memory_mib
        assert d.mode is None
        assert SharingMode.EXCLUSIVE in d.modes
        assert devices.simulated == d.product.startswith("Simulated ")
    first, second = (devices.access(uuid) for uuid in devices.uuids)
    assert first.env == second.env
    assert {m.container_path for m in first.mounts}.isdisjoint(m.container_path for m in second.mounts)
    with pytest.raises(DeviceError, match="expected one of GPU-"):
        devices.apply(GpuUuid("GPU-elsewhere"), SetMode(None))


@pytest.mark.parametrize("mode", [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS])
def test_steps_are_read_back_and_idempotent(ground: Ground, mode: SharingMode) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    for _ in range(2):
        devices.apply(gpu, SetMode(mode))
        assert devices.actual(gpu).mode is mode
    assert devices.actual(devices.uuids[1]).mode is None, "the other GPU is left alone"
    for _ in range(2):
        devices.apply(gpu, SetMode(None))
        assert devices.actual(gpu).mode is None


def test_mps_comes_with_limits_and_goes_without_them(ground: Ground) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    with pytest.raises(DeviceError, match="expected mode MPS, found Idle"):
        devices.apply(gpu, StartMps())
    devices.apply(gpu, SetMode(SharingMode.MPS))
    for _ in range(2):
        devices.apply(gpu, StartMps())
        devices.apply(gpu, SetLimits(POD, Limits(1024, 50)))
    assert devices.actual(gpu).mps_daemon
    assert devices.actual(gpu).limits == {POD: Limits(1024, 50)}
    devices.apply(gpu, SetLimits(POD, None))
    assert devices.actual(gpu).limits == {}
    devices.apply(gpu, SetLimits(POD, Limits(1024, None)))
    for _ in range(2):
        devices.apply(gpu, StopMps())
    assert (devices.actual(gpu).mps_daemon, devices.actual(gpu).limits) == (False, {})


def test_running_processes_keep_mode_and_daemon(ground: Ground) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.MPS))
    devices.apply(gpu, StartMps())
    with ground.enter(gpu, "a"):
        assert devices.actual(gpu).tenants == {ground.pod_uid("a")}
        for step in (SetMode(SharingMode.EXCLUSIVE), SetMode(None), StopMps()):
            with pytest.raises(DeviceError, match=f"expected no process on the GPU, found {ground.pod_uid('a')}"):
                devices.apply(gpu, step)
    assert devices.actual(gpu).tenants == frozenset()


def test_reading_tells_processes_apart(devices: Devices, enter) -> None:
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.TIME_SLICING))
    devices.read(gpu)
    with enter(gpu, "a") as (first,), enter(gpu, "b"):
        first.allocate(1000)
        first.run(0.001)
        reading = devices.read(gpu)
        later = {p.pod_uid: p for p in devices.read(gpu).processes}[POD]
        assert (later.steps, later.energy_j) == (0, 0), "a reading has the use since the last one"
    assert len({p.id for p in reading.processes}) == 2
    used = {p.pod_uid: p for p in reading.processes}
    assert used[POD].memory_mib == 1000 + used[PodUid("uid-b")].memory_mib
    assert used[POD].steps == 1
    assert used[POD].energy_j > 0
    assert devices.read(gpu).processes == ()
    assert devices.read(gpu).energy_j >= reading.energy_j


def test_simulated_uuids_survive_restarts_and_the_loss_of_all_state(tmp_path: Path) -> None:
    products = parse_inventory("H200:1,Tesla T4:2")
    uuids = {tuple(SimulatedDevices(products, "n", tmp_path / where).uuids) for where in ("one", "one", "two")}
    assert len(uuids) == 1
    assert list(SimulatedDevices(products, "m", tmp_path / "one").uuids) not in [list(u) for u in uuids]


def test_corrupt_device_is_unhealthy_alone(devices: SimulatedDevices, tmp_path: Path) -> None:
    sick, well = devices.uuids
    (tmp_path / "state" / "simulated" / sick / "device.json").write_text("{")
    found = {d.uuid: d for d in map(devices.describe, devices.uuids)}
    assert found[sick].health is DeviceHealth.UNHEALTHY
    assert "device.json: expected JSON, found" in found[sick].health_message
    assert found[well].health is DeviceHealth.HEALTHY
    for call in (devices.actual, devices.read):
        with pytest.raises(DeviceError, match="expected JSON"):
            call(sick)


def test_next_agent_keeps_modes_and_writes_the_products_again(devices: SimulatedDevices, tmp_path: Path) -> None:
    devices.apply(devices.uuids[1], SetMode(SharingMode.EXCLUSIVE))
    (tmp_path / "state" / "simulated" / devices.uuids[0] / "device.json").write_text("{")
    changed = SimulatedDevices(parse_inventory("Tesla T4:2"), "node-1", tmp_path / "state")
    assert [(d.product, d.health) for d in map(changed.describe, changed.uuids)] == [
        ("Simulated Tesla T4", DeviceHealth.HEALTHY)
    ] * 2
    assert changed.actual(changed.uuids[0]).usable_mib < 15360
    assert [changed.actual(uuid).mode for uuid in changed.uuids] == [None, SharingMode.EXCLUSIVE]


def test_corrupt_mode_of_an_idle_gpu_mends_itself(devices: SimulatedDevices, tmp_path: Path) -> None:
    gpu = devices.uuids[0]
    (tmp_path / "state" / "simulated" / gpu / "mode.json").write_text('{"mode": "Turbo"}')
    assert devices.actual(gpu).mode is None
    devices.apply(gpu, SetMode(SharingMode.MPS))
    devices.apply(gpu, StartMps())
    assert devices.actual(gpu).mps_daemon


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NVIDIA A100-SXM4-40GB:0", "count from 1"),
        ("NVIDIA A100-SXM4-40GB:many", "count from 1"),
        ("A100:2", "is ambiguous"),
        ("Banana:2", "is unknown; known products"),
        ("", "count"),
    ],
)
def test_invalid_inventory_is_named(text: str, message: str) -> None:
    with pytest.raises(NoDevicesError, match=f"CARPOOL_SIMULATED_GPUS.*{message}"):
        parse_inventory(text or ":")


GOOD = {"pod_uid": "uid-b", "pid": 1, "started": 0.0, "memory_mib": 1, "peak_memory_mib": 1}

Claims = Callable[[bytes], Path]


@pytest.fixture
def claims(devices: SimulatedDevices) -> Path:
    devices.apply(devices.uuids[0], SetMode(SharingMode.TIME_SLICING))
    return Path(devices.access(devices.uuids[0]).mounts[1].host_path)


@pytest.fixture
def hold(claims: Path) -> Iterator[Claims]:
    """Write a claim with a right checksum, and hold it as a living process does."""
    handles: list[int] = []

    def of(body: bytes) -> Path:
        path = claims / f"0{len(handles)}.claim"
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT))
        fcntl.flock(handles[-1], fcntl.LOCK_EX)
        os.write(handles[-1], b"%08x %b\n" % (zlib.crc32(body), body))
        return path

    yield of
    for handle in handles:
        os.close(handle)


BODIES = {
    "no JSON": b"nonsense",
    "nested too deep": b"[" * 60_000,
    "a number too long for int": json.dumps(GOOD).replace('"pid": 1', '"pid": ' + "1" * 5000).encode(),
    "negative memory": json.dumps(GOOD | {"memory_mib": -5}).encode(),
    "memory beyond int64": json.dumps(GOOD | {"peak_memory_mib": 2**70}).encode(),
    "energy that makes the sum infinite": json.dumps(GOOD | {"energy_j": 1e308}).encode(),
    "a ratio of two": json.dumps(GOOD | {"sm_active": 2.0}).encode(),
    "a UID that is no text": json.dumps(GOOD | {"pod_uid": "\ud800"}).encode(),
    "a UID as long as a book": json.dumps(GOOD | {"pod_uid": "x" * 10_000}).encode(),
    "larger than any claim": json.dumps(GOOD | {"pod_uid": "x" * 200_000}).encode(),
}


def sees_only_the_neighbour(devices: SimulatedDevices) -> None:
    gpu = devices.uuids[0]
    assert [p.pod_uid for p in devices.read(gpu).processes] == ["uid-a"]
    assert devices.actual(gpu).tenants == {"uid-a"}
    assert devices.describe(devices.uuids[0]).health is DeviceHealth.HEALTHY


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_invalid_claims_with_a_valid_checksum_are_ignored(
    devices: SimulatedDevices, hold: Claims, enter, body: bytes
) -> None:
    """Regression: one such claim ended the agent, or made each status invalid."""
    path = hold(body)
    with capture_logs() as logs, enter(devices.uuids[0], "a") as (gpu,):
        gpu.run(0.001)
        sees_only_the_neighbour(devices)
    assert path.name in logs[0]["first"][0], "it is named"
    assert path.exists(), "a living process holds it"


def folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


FILES = {
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parents[1] / "device.json"),
    "folder": folder,
    "unreadable": lambda path: path.touch(mode=0),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
@pytest.mark.parametrize("name", ["x.claim", "x.new", os.fsdecode(b"\xff.claim")])
def test_invalid_claim_files_block_no_process(
    devices: SimulatedDevices, claims: Path, enter, make: Callable[[Path], None], name: str
) -> None:
    """Regression: a FIFO blocked the agent, and a directory prevented each change of the mode."""
    make(claims / name)
    with enter(devices.uuids[0], "a"):
        sees_only_the_neighbour(devices)
    assert make is folder or not os.path.lexists(claims / name)
    devices.apply(devices.uuids[0], SetMode(SharingMode.EXCLUSIVE))
    assert devices.actual(devices.uuids[0]).mode is SharingMode.EXCLUSIVE


def test_containers_write_in_their_claims_only(devices: SimulatedDevices) -> None:
    access = devices.access(devices.uuids[0])
    assert access.mps_pipe is not None
    everything = [*access.mounts, access.mps_pipe]
    assert [m.container_path.rpartition("/")[2] for m in everything if not m.read_only] == ["claims"]


def test_containers_as_any_user_see_the_device_and_cannot_change_it(devices: SimulatedDevices, claims: Path) -> None:
    devices.read(devices.uuids[0])
    modes = {path.name: path.stat().st_mode & 0o777 for path in [claims.parent, *claims.parent.iterdir()]}
    assert modes.pop("claims") == 0o777
    assert modes.pop(claims.parent.name) == 0o755
    assert set(modes.values()) == {0o644}


def test_links_in_the_place_of_files_are_not_followed(tmp_path: Path) -> None:
    """Regression: root wrote through them."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".mode.json.{os.getpid()}").symlink_to(victim)
    (tmp_path / "mode.json").symlink_to(victim)
    state.write(tmp_path, state.Mode("MPS"))
    assert victim.read_text() == "mine"
    assert state.read_mode(tmp_path).mode == "MPS"


def test_energy_of_the_dead_is_counted_once(device: Device) -> None:
    path = device.claims_directory / "0.claim"
    path.write_bytes(encode_claim(Claim("pod-a", 1, 0.0, 1, 1, energy_j=1e6)))
    before = device.reading().energy_j
    assert before >= 1e6
    device.tidy()
    assert not path.exists()
    assert before <= device.reading().energy_j < 2e6


A, GPU = PodUid("uid-a"), GpuUuid("GPU-1")


@pytest.mark.parametrize(
    "measures",
    [
        {"memory_mib": -5},
        {"peak_memory_mib": 2**63},
        {"gpu_util_percent": float("nan")},
        {"power_w": float("inf")},
        {"step_time_seconds": -1.0},
        {"pod_uid": PodUid("\ud800")},
        {"pod_uid": PodUid("x" * 1000)},
    ],
)
def test_tenant_that_the_api_server_would_refuse_is_left_out_alone(measures) -> None:
    """The status is one object: one bad tenant kept every partition of the node from becoming Ready."""
    good = Tenant(pod_uid=A, gpu_uuid=GPU, memory_mib=5)
    bad = Tenant(**{"pod_uid": PodUid("uid-bad"), "gpu_uuid": GPU, **measures})
    fine, left_out = presentable([bad, good], frozenset())
    assert fine == [good]
    assert len(left_out) == 1


def test_too_many_tenants_do_not_crowd_out_those_with_a_reservation() -> None:
    crowd = [Tenant(pod_uid=PodUid(f"uid-{i:05}"), gpu_uuid=GPU) for i in range(5000)]
    fine, left_out = presentable([*crowd, Tenant(pod_uid=PodUid("uid-z"), gpu_uuid=GPU)], {PodUid("uid-z")})
    assert (len(fine), len(left_out)) == (1024, 3977)
    assert fine[-1].pod_uid == "uid-z"


@pytest.mark.parametrize(
    ("memory_mib", "limit_mib", "is_reported"), [(2001, 2000, True), (2000, 2000, False), (9, None, False)]
)
def test_processes_above_the_limit_of_their_pod_are_reported(reserve, memory_mib, limit_mib, is_reported) -> None:
    """MPS limits each process, and the ledger counts the limit once for the pod."""
    tenant = Tenant(pod_uid=A, gpu_uuid=GPU, memory_mib=memory_mib)
    found = above_limit([tenant], [reserve("a", GPU, mode=SharingMode.MPS, memory_limit_mib=limit_mib)])
    assert [*found] == ([(A, GPU)] if is_reported else [])
    assert all("default/a to take at most 2,000 MiB together, found 2,001 MiB" in why for why in found.values())
