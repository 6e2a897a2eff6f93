"""An agent killed at every call of a GPU's life with MPS, before and after it: the next one goes on or undoes."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
from carpool_core.values import PartitionState, PodUid, SharingMode
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.partitions.plan import plan
from carpool_deviceplugin.partitions.worker import GpuWorker
from carpool_deviceplugin.testing.agents import Inline
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid

MPS, EXCLUSIVE = SharingMode.MPS, SharingMode.EXCLUSIVE


class KilledError(BaseException):
    """The agent is gone at once."""


class Deadly(FakeMpsCommands):
    """Programs in whose calls the agent may die: before they do anything, and after they did."""

    def __init__(self) -> None:
        super().__init__()
        self.left: Iterator[int] = count()

    def step(self) -> None:
        if next(self.left, None) is None:
            raise KilledError

    def start(self, environment, shm) -> None:
        self.step()
        super().start(environment, shm)
        self.step()

    def ask(self, environment, command) -> str:
        self.step()
        answer = super().ask(environment, command)
        self.step()
        return answer


def live(devices: NvmlDevices, wanted: list, then: list) -> None:
    """Prepare a GPU, use it, prepare it for somebody else, and return it."""
    gpu = devices.uuids[0]
    for reservations in (wanted, then, []):
        for step in plan(devices.actual(gpu), reservations).steps:
            devices.apply(gpu, step)


async def test_at_every_call(tmp_path: Path, reserve) -> None:
    for at in count():
        mps = Deadly()
        node = Node(FakeNvml(["T4"]), mps, tmp_path / str(at))
        devices = node.devices()
        gpu = devices.uuids[0]
        a, b, c = (
            msgspec.structs.replace(reserve(pod, gpu, mode=mode, memory_limit_mib=1000), pod_uid=PodUid(uid(pod)))
            for pod, mode in (("a", MPS), ("b", MPS), ("c", EXCLUSIVE))
        )
        mps.left = iter(range(at))
        node.nvml.before_each(lambda _, mps=mps: mps.step())
        try:
            live(devices, [a, b], [c])
        except KilledError:
            mps.left = count()
        else:
            break
        worker = GpuWorker(gpu, node.devices(), lambda: None, Rhythm(), caller=Inline())
        for wanted, mode, has_daemon in (([a, b], MPS, True), ([c], EXCLUSIVE, False), ([], None, False)):
            worker.want(wanted)
            await worker.once()
            assert {o.state for o in worker.outcomes.values()} <= {PartitionState.READY}, at
            actual = worker._devices.actual(gpu)
            assert (actual.mode, actual.mps_daemon, bool(mps.daemons)) == (mode, has_daemon, has_daemon), at
            assert actual.limits.keys() == {r.pod_uid for r in wanted if mode is MPS}, at
    assert at > 40


@pytest.mark.parametrize("where", ["state", "cdi"])
def test_half_written_files_of_a_killed_agent_are_no_files(tmp_path: Path, where: str) -> None:
    """What is written becomes visible whole; the rest of a write that was cut off is never read."""
    node = Node(FakeNvml(["T4"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    gpu = devices.uuids[0]
    directory = tmp_path / ("state/gpus" if where == "state" else "cdi")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f".{gpu}.json.77.new").write_text('{"mode": "MP')
    assert node.devices().actual(gpu).mode is None
    assert node.devices().access(gpu).is_named_to_runtime
