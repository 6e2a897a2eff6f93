"""Running the steps of one GPU."""

import re
import threading
from collections.abc import Callable

import pytest
from carpool_core.resources.node import Partition
from carpool_core.values import PartitionState, PodUid, SharingMode
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import DeviceError, GpuActual, StartMps, Step
from carpool_deviceplugin.simulated import SimulatedDevices
from carpool_deviceplugin.timeouts import Intervals

A, B = PodUid("uid-a"), PodUid("uid-b")
READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED
MPS = SharingMode.MPS


def partition(pod: PodUid, state: PartitionState, message: str = "") -> Partition:
    return Partition(pod_uid=pod, generation=1, state=state, message=message)


class Flaky:
    """Simulated GPUs with steps that fail or never return."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices = devices
        self.steps: list[Step] = []
        self.before: Callable[[Step], None] = lambda _: None
        self.idle: list[Step] = []
        """Steps that report success and do nothing."""

    def actual(self, uuid) -> GpuActual:
        return self._devices.actual(uuid)

    def apply(self, uuid, step: Step) -> None:
        self.steps.append(step)
        self.before(step)
        if step not in self.idle:
            self._devices.apply(uuid, step)


@pytest.fixture
def flaky(devices) -> Flaky:
    return Flaky(devices)


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
async def worker(flaky, devices, changes) -> GpuWorker:
    return GpuWorker(devices.uuids[0], flaky, lambda: changes.append(1), Intervals())


async def test_prepares_and_returns(worker, flaky, devices, reserve) -> None:
    worker.want([reserve("a", mode=MPS, memory_limit_mib=1000)])
    assert await worker.once()
    assert worker.partitions == {A: partition(A, READY)}
    assert devices.actual(worker.uuid).mps_daemon
    worker.want([])
    assert await worker.once()
    assert worker.partitions == {}
    assert devices.actual(worker.uuid).mode is None
    count = len(flaky.steps)
    assert await worker.once()
    assert len(flaky.steps) == count, "nothing is done twice"


async def test_step_that_did_nothing_is_noticed(worker, flaky, reserve) -> None:
    """The state read from the GPU counts."""
    flaky.idle = [StartMps()]
    worker.want([reserve("a", mode=MPS, memory_limit_mib=1000)])
    assert not await worker.once()
    assert worker.partitions[A].state is FAILED
    assert "read back, the GPU still needs start MPS" in worker.partitions[A].message
    flaky.idle = []
    assert await worker.once()
    assert worker.partitions == {A: partition(A, READY)}


@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("error", [DeviceError("no daemon"), PermissionError(1, "no daemon")], ids=["device", "system"])
async def test_a_failed_step_is_reported_and_the_next_plan_goes_on_or_returns(
    worker, flaky, devices, reserve, error: Exception, is_wanted: bool
) -> None:
    """Regression: a signal that AppArmor forbids ended the agent, and every one after it."""

    def fail(step: Step) -> None:
        if step == StartMps():
            raise error

    flaky.before = fail
    worker.want([reserve("a", mode=MPS)])
    assert not await worker.once()
    assert worker.partitions[A].state is FAILED
    assert re.fullmatch("start MPS failed: .*no daemon", worker.partitions[A].message)
    flaky.before = lambda _: None
    worker.want([reserve("a", mode=MPS)] if is_wanted else [])
    assert await worker.once()
    assert worker.partitions == ({A: partition(A, READY)} if is_wanted else {})
    assert (devices.actual(worker.uuid).mode is MPS) is is_wanted


async def test_a_failure_does_not_affect_ready_pods(worker, flaky, devices, reserve, enter) -> None:
    worker.want([reserve("a", mode=MPS)])
    await worker.once()

    def fail(step: Step) -> None:
        raise DeviceError("no")

    flaky.before = fail
    with enter(worker.uuid, "a"):
        worker.want([reserve("a", mode=MPS), reserve("b", mode=MPS)])
        await worker.once()
        assert (worker.partitions[A].state, worker.partitions[B].state) == (READY, FAILED)
        assert devices.actual(worker.uuid).mps_daemon


async def test_step_that_never_ends_fails_by_its_deadline(flaky, devices, changes, reserve) -> None:
    intervals = Intervals(step_deadline_s=0.5, progress_after_s=0.05)
    worker = GpuWorker(devices.uuids[0], flaky, lambda: changes.append(1), intervals)
    release = threading.Event()
    flaky.before = lambda _: release.wait(10) and None
    worker.want([reserve("a")])
    assert not await worker.once()
    assert "expected an answer within 0.5 s, found none" in worker.partitions[A].message
    assert len(changes) == 2, "it was reported as Preparing in the meantime"
    assert not await worker.once()
    assert "an earlier call has not come back yet" in worker.partitions[A].message
    release.set()


async def test_an_unreadable_gpu_fails_new_reservations_only(worker, devices, reserve, tmp_path) -> None:
    worker.want([reserve("a")])
    await worker.once()
    (tmp_path / "state" / "simulated" / worker.uuid / "device.json").write_text("{")
    worker.want([reserve("a"), reserve("b")])
    assert not await worker.once()
    assert worker.partitions[A].state is READY
    assert "expected JSON" in worker.partitions[B].message
