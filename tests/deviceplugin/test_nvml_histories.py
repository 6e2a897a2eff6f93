"""Random histories of one real GPU with faults injected into any call: they end as wanted, or with a named refusal."""

import random
from pathlib import Path

import pynvml
import pytest
from carpool_core.resources.node import Reservation
from carpool_core.values import JobUid, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.mps import MpsError
from carpool_deviceplugin.patience import Rhythm
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid
from carpool_deviceplugin.worker import GpuWorker

HISTORIES, EVENTS = 450, 12
PODS = "abc"
CODES = (
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
EXCLUSIVE, TIME_SLICING, MPS, _ = SharingMode


class FlakyMps(FakeMpsCommands):
    """Daemons whose program fails now and then."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self.fault = 0.0

    def start(self, environment, shm) -> None:
        if self._draw.random() < self.fault:
            raise MpsError("injected")
        super().start(environment, shm)

    def ask(self, environment, command) -> str:
        if self._draw.random() < self.fault:
            raise MpsError("injected")
        return super().ask(environment, command)


class History:
    """One GPU, its agent, who reserved it and who runs there."""

    def __init__(self, seed: int, root: Path) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self.mps = FlakyMps(self.draw)
        self.nvml = FakeNvml(["A100-40"])
        self.nvml.before_each(self._maybe_fail)
        self.node = Node(self.nvml, self.mps, root)
        self.fault = 0.0
        self.wanted: dict[str, Reservation] = {}
        self.running: dict[str, int] = {}
        self.pids = iter(range(100, 10_000))
        self.worker: GpuWorker | None = None
        self.begin_agent()

    def _maybe_fail(self, name: str) -> None:
        if self.draw.random() < self.fault:
            self.nvml.fail_next(name, self.draw.choice(CODES))

    def begin_agent(self) -> None:
        """An agent that knows only what the GPU and the status say."""
        ready = self.ready() if self.worker else set()
        fault, self.fault = self.fault, 0.0
        self.devices = self.node.devices()
        self.fault = fault
        self.worker = GpuWorker(self.devices.uuids[0], self.devices, lambda: None, Rhythm())
        self.worker.remember(frozenset(ready))

    def ready(self) -> set[PodUid]:
        return {pod for pod, outcome in self.worker.outcomes.items() if outcome.state is PartitionState.READY}

    def reserve(self) -> None:
        pod = self.draw.choice(PODS)
        if pod not in self.wanted and pod not in self.running:
            self.wanted[pod] = Reservation(
                pod_uid=PodUid(uid(pod)),
                pod_namespace=self.draw.choice("xy"),
                pod_name=pod,
                job_uid=JobUid(pod),
                job_name=pod,
                gpu_uuids=list(self.devices.uuids),
                mode=self.draw.choice([EXCLUSIVE, TIME_SLICING, MPS, MPS]),
                memory_limit_mib=self.draw.choice([None, 10_000, 30_000]),
                reserved_at=str(next(self.pids)),
            )

    def event(self) -> None:
        pod = self.draw.choice(PODS)
        match self.draw.choice(["reserve", "reserve", "release", "start", "start", "end", "restart", "kill", "time"]):
            case "reserve":
                self.reserve()
            case "release" if pod not in self.running:
                self.wanted.pop(pod, None)
            case "start" if self.may_start(pod):
                self.running[pod] = next(self.pids)
                self.node.start(0, self.running[pod], pod)
            case "end" if pod in self.running:
                self.node.end(0, self.running.pop(pod))
            case "restart":
                self.begin_agent()
            case "kill" if self.mps.daemons and not self.running:
                self.mps.daemons.clear()
            case "time":
                self.node.advance(5)

    def may_start(self, pod: str) -> bool:
        """A client of a dead daemon does not start."""
        if pod not in self.wanted or pod in self.running or uid(pod) not in self.ready():
            return False
        return self.wanted[pod].mode is not MPS or bool(self.mps.daemons)

    async def look(self) -> None:
        self.worker.want(list(self.wanted.values()))
        await self.worker.once()

    def check(self) -> None:
        """Who runs on what it was promised keeps it."""
        mode_file = self.devices._modes[self.devices.uuids[0]].read()
        for pod in self.running:
            assert mode_file.mode is self.wanted[pod].mode, "the mode changed under a tenant"
            if mode_file.mode is MPS:
                assert self.mps.daemons, "the daemon was stopped under a tenant"


@pytest.mark.parametrize("part", range(3))
async def test_every_history_ends_well(tmp_path: Path, part: int) -> None:
    for number in range(HISTORIES // 3):
        history = History(1000 * part + number, tmp_path / str(number))
        for _ in range(EVENTS):
            history.event()
            history.fault = history.mps.fault = history.draw.choice([0.0, 0.02, 0.2])
            await history.look()
            history.fault = history.mps.fault = 0.0
            history.check()
        history.nvml._failures.clear()
        for _ in range(4):  # the faults have ended; a lost GPU or a fatal state takes a minute of quiet
            history.node.seconds += 4000
            await history.look()
            history.check()
        for pod, outcome in history.worker.outcomes.items():
            assert outcome.state is PartitionState.READY or outcome.message, (part, number, pod)
        for pod in list(history.running):
            history.node.end(0, history.running.pop(pod))
        history.wanted.clear()
        for _ in range(2):
            await history.look()
        actual = history.devices.actual(history.devices.uuids[0])
        assert (actual.mode, actual.mps_daemon, actual.limits, actual.problem) == (None, False, {}, ""), (part, number)
