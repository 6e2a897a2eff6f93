"""Processes that meet on a simulated GPU."""

import json
import os
import signal

import pytest
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
from carpool_simulated.device import Device
from carpool_simulated.environment import parse_environment
from carpool_simulated.state import Limit

FREE_MIB = 40960 - 624


class Time:
    """Monotonic seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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


def test_neighbours_memory_counts(device: Device, environ, start) -> None:
    other = start(environ("pod-b"), "hold", "30000")
    assert other.stdout.readline() == "ready\n"
    with open_gpus(environ()) as (gpu,), pytest.raises(OutOfMemoryError, match=r"of which 9\.\d+ GiB is free"):
        gpu.allocate(10_000)


def test_killed_process_gives_everything_back(device: Device, environ, start) -> None:
    other = start(environ("pod-b"), "hold", "30000")
    assert other.stdout.readline() == "ready\n"
    assert [held.claim.pod_uid for held in device.reading().claims] == ["pod-b"]
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert device.reading().claims == ()
    with open_gpus(environ()) as (gpu,):
        gpu.allocate(35_000)
        device.tidy()
        assert len(list(device.claims_directory.iterdir())) == 1, "the agent removes the dead claim"


def test_forked_child_does_not_keep_the_claim_alive(device: Device, environ) -> None:
    (gpu,) = open_gpus(environ())
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gpu.allocate(1)
        except SimulatedGpuError as e:
            os.write(tell, str(e)[:40].encode())
        os.read(told, 0)
        signal.pause()
    assert os.read(told, 100) == b"Cannot re-initialize CUDA in forked subp"
    gpu.close()
    assert device.reading().claims == ()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)


def test_race_for_the_last_memory_has_one_winner(device: Device, environ, start) -> None:
    racers = [start(environ(f"pod-{i}"), "race", str(FREE_MIB - 4 * 400)) for i in range(4)]
    assert [racer.stdout.readline() for racer in racers] == ["open\n"] * 4
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = sorted(racer.stdout.readline().partition(" ")[0].strip() for racer in racers)
    assert said == ["OutOfMemoryError:"] * 3 + ["ready"]


def test_exclusive_admits_one_pod(device: Device, environ) -> None:
    device.set_mode("Exclusive")
    refused = pytest.raises(DeviceUnavailableError, match=r"busy or unavailable.*expected to be alone.*pod-a")
    with open_gpus(environ("pod-a")), open_gpus(environ("pod-a")), refused:
        open_gpus(environ("pod-b"))
    open_gpus(environ("pod-b"))[0].close()


def test_idle_admits_nobody(device: Device, environ) -> None:
    device.set_mode("Idle")
    with pytest.raises(DeviceUnavailableError, match=r"busy or unavailable.*nobody reserved"):
        open_gpus(environ())


def test_mode_does_not_change_under_a_process(device: Device, environ) -> None:
    with (
        open_gpus(environ()),
        pytest.raises(DeviceUnavailableError, match="expected no process on the GPU, found pod-a"),
    ):
        device.set_mode("MPS")
    device.set_mode("MPS")


@pytest.fixture
def mps(device: Device, tmp_path, environ):
    device.set_mode("MPS")
    pipe = tmp_path / "mps"
    device.start_mps(pipe)

    def of(pod: str = "pod-a", **more: str) -> dict[str, str]:
        return environ(pod, CUDA_MPS_PIPE_DIRECTORY=str(pipe), **more)

    of.pipe = pipe
    return of


@pytest.mark.parametrize("where", ["environment", "daemon"])
def test_mps_limit_is_kept(device: Device, mps, where: str) -> None:
    env = mps()
    if where == "environment":
        env = mps(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=9G")
    else:
        device.set_limit("pod-a", Limit(memory_mib=9216))
    with open_gpus(env) as (gpu,):
        gpu.allocate(9216 - 400)
        with pytest.raises(OutOfMemoryError, match=r"of which 0\.00 MiB is free.*9\.00 GiB allowed"):
            gpu.allocate(1)


def test_mps_without_its_daemon(device: Device, mps, environ) -> None:
    with pytest.raises(MpsError, match="expected CUDA_MPS_PIPE_DIRECTORY to be set"):
        open_gpus(environ())
    device.stop_mps(mps.pipe)
    with pytest.raises(MpsError, match=r"failed to connect.*expected its daemon to run, found it stopped"):
        open_gpus(mps())


def test_daemon_in_use_is_not_stopped(device: Device, mps) -> None:
    with open_gpus(mps()), pytest.raises(DeviceUnavailableError, match="stop its MPS daemon"):
        device.stop_mps(mps.pipe)


def test_step_alone_takes_its_time_and_is_accounted(device: Device, environ) -> None:
    time = Time()
    device = Device(device.directory, time.clock)
    with open_gpus(environ(), clock=time.clock, sleep=time.sleep) as (gpu,):
        assert gpu.run(1.0, sm_active=0.5, dram_active=0.25, gpu_util=0.8) == pytest.approx(1.0)
        claim = device.reading().claims[0].claim
    assert (claim.steps, claim.steps_s) == (1, pytest.approx(1.0))
    assert (claim.busy_s, claim.sm_s, claim.dram_s) == (pytest.approx(0.8), pytest.approx(0.5), pytest.approx(0.25))
    assert claim.energy_j == pytest.approx((400 - 50) * (0.7 * 0.5 + 0.3 * 0.25))


def test_energy_counter_survives_its_processes(device: Device, environ) -> None:
    time = Time()
    device = Device(device.directory, time.clock)
    before = device.reading().energy_j
    with open_gpus(environ(), clock=time.clock, sleep=time.sleep) as (gpu,):
        gpu.run(2.0)
        during = device.reading().energy_j
    assert before < during <= device.reading().energy_j


def test_neighbour_slows_a_step_down_only_while_it_works(device: Device, environ) -> None:
    time = Time()
    a = open_gpus(environ("pod-a"), clock=time.clock, sleep=time.sleep)[0]
    b = open_gpus(environ("pod-b"), clock=time.clock, sleep=time.sleep)[0]
    b.run(1.0)
    assert a.run(0.5) > 0.75, "the neighbour is between two steps"
    time.now += 60
    assert a.run(1.0) == pytest.approx(1.0), "the neighbour is idle"
    a.close()
    b.close()


def test_two_processes_slow_each_other_down(device: Device, environ, start) -> None:
    other = start(environ("pod-b"), "steps", "100", "0.05")
    assert other.stdout.readline() == "ready\n"
    with open_gpus(environ()) as (gpu,):
        gpu.run(0.1)
        assert gpu.run(0.2) > 0.3


@pytest.mark.parametrize("cut", [b"", b"{", b"[]", b'{"uuid": "GPU-1"}', b'{"uuid": 7}', b"\xff\xfe"])
def test_corrupt_device_says_what_to_do(device: Device, environ, cut: bytes) -> None:
    path = device.directory / "device.json"
    path.write_bytes(cut)
    with pytest.raises(DeviceStateError, match=r"device\.json: expected .*, found .*; remove it"):
        open_gpus(environ())


def test_absurd_device_is_refused(device: Device, environ) -> None:
    path = device.directory / "device.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reserved_mib": 50_000}))
    with pytest.raises(DeviceStateError, match=r"expected 0 <= reserved_mib < memory_mib, found reserved_mib 50000"):
        open_gpus(environ())


def test_corrupt_files_do_not_disturb_who_runs(device: Device, mps) -> None:
    with open_gpus(mps()) as (gpu,):
        (device.directory / "mode.json").write_text("{")
        (device.directory / "device.json").write_text("{")
        (device.directory / "totals.json").write_text("{")
        (device.claims_directory / "broken.claim").write_text("nonsense")
        gpu.run(0.001)
        gpu.allocate(100)
        with pytest.raises(DeviceStateError, match=r"mode\.json: expected JSON"):
            device.set_mode("Exclusive")


def test_corrupt_mode_of_an_empty_device_is_prepared_again(device: Device) -> None:
    (device.directory / "mode.json").write_text("{")
    device.set_mode("Exclusive")
    assert device.mode().mode == "Exclusive"


def test_unreadable_claim_of_a_living_process_is_told(device: Device, environ) -> None:
    with open_gpus(environ()) as (gpu,):
        (claim,) = device.claims_directory.iterdir()
        claim.write_text("nonsense")
        assert "expected a checksum" in device.reading().problems[0]
        gpu.allocate(5)
        assert device.reading().problems == (), "its owner writes it anew"
    assert state.read_mode(device.directory).mode == "TimeSlicing"


@pytest.mark.parametrize(
    ("variables", "error", "says"),
    [
        ({}, NoDeviceError, "no CUDA-capable device"),
        ({"CARPOOL_VISIBLE_GPUS": "GPU-9"}, NoDeviceError, "expected GPU GPU-9 in"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "9216"}, SimulatedGpuError, "expected index=amount"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "much"}, SimulatedGpuError, "more than 0 up to 100"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "0"}, SimulatedGpuError, "more than 0 up to 100"),
    ],
)
def test_environment_that_makes_no_sense(environ, variables, error, says) -> None:
    with pytest.raises(error, match=says):
        open_gpus({**environ(), **variables} if variables else {})


@pytest.mark.parametrize(("text", "mib"), [("0=1G", 1024), ("0=9216M", 9216), ("0=2GB,1=1G", 2048), ("1=1G", None)])
def test_memory_limits_are_read_as_mps_reads_them(environ, text: str, mib: int | None) -> None:
    assert parse_environment(environ(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=text)).limits_mib.get(0) == mib


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_sizes_and_times_that_make_no_sense(device: Device, environ, bad: float) -> None:
    with open_gpus(environ()) as (gpu,):
        with pytest.raises(ValueError, match="expected"):
            gpu.allocate(bad)
        with pytest.raises(ValueError, match="expected"):
            gpu.run(bad)
        with pytest.raises(ValueError, match="expected"):
            gpu.free(bad)
        with pytest.raises(ValueError, match="between 0 and 1"):
            gpu.run(1.0, gpu_util=85)
