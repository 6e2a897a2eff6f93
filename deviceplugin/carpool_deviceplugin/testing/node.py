"""A node with fake GPUs, processes and MPS daemons, and agents that run in simulated time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from carpool_core.kube.api import KubeApi
from carpool_core.testing.clock import FakeClock

from carpool_deviceplugin.app import Agent, build
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.dcgm import CounterSource
from carpool_deviceplugin.gpu import Devices
from carpool_deviceplugin.mps import HostedMps, Mps
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.gpus import FakeProcess
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals, TimeLimitedCaller


def uid(pod: str) -> str:
    """Return a UID for a pod's short name, in the format of Kubernetes."""
    return f"00000000-0000-4000-8000-{int.from_bytes(pod.encode(), 'big'):012x}"


@dataclass
class Node:
    """A node in memory: GPUs, processes, MPS daemons."""

    nvml: FakeNvml
    mps: FakeMpsCommands
    root: Path
    seconds: float = 1000.0
    may_switch_mig: bool = False
    sources: tuple[CounterSource, ...] = ()
    mps_host: Path | None = None
    """Socket of the process that starts MPS daemons; None if the agent starts them."""

    def __post_init__(self) -> None:
        """Servers of MPS are processes of the node."""
        self.mps.ended = self.end_server

    def devices(self) -> NvmlDevices:
        """Make an adapter; each represents an agent on the same node."""
        directory, long_s = self.root / "mps", 60.0  # the machine may be busy
        return NvmlDevices(
            self.nvml,
            mps=HostedMps(self.mps, directory, self.mps_host, within_s=long_s, clean_within_s=long_s)
            if self.mps_host
            else Mps(self.mps, directory, clean_within_s=long_s),
            cdi=NvidiaCdi([self.root / "etc-cdi", self.root / "cdi"], self.root / "mig-minors"),
            state_dir=self.root / "state",
            processes=ProcTree(self.root / "proc"),
            may_switch_mig=self.may_switch_mig,
            sources=self.sources,
            sysfs=self.root / "sys",
            monotonic=lambda: self.seconds,
            wall=lambda: self.nvml.now_us / 1e6,
        )

    def advance(self, seconds: float) -> None:
        """Time passes everywhere."""
        self.seconds += seconds
        self.nvml.advance(seconds)

    def start(
        self,
        gpu: int,
        pid: int,
        pod: str | None,
        memory_mib: int = 1000,
        *,
        sm: float = 0.0,
        dram: float = 0.0,
        instance: int | None = None,
        user: int = 0,
    ) -> FakeProcess:
        """Start a process with a CUDA context, of a pod or of the host."""
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        slice_ = f"kubepods-burstable-pod{uid(pod).replace('-', '_')}.slice" if pod else "user.slice"
        (directory / "cgroup").write_text(
            f"0::/kubepods.slice/kubepods-burstable.slice/{slice_}/cri-containerd-1.scope\n"
        )
        (directory / "stat").write_text(f"{pid} (python (3)) S " + " ".join(["0"] * 18) + f" {pid * 100} 0 0\n")
        (directory / "status").write_text(f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        process = self.nvml.start(gpu, pid, memory_mib, instance=instance)
        process.sm, process.dram = sm, dram
        return process

    def end_server(self, pid: int) -> None:
        """An MPS server ends, on each GPU where it has a context."""
        for index, gpu in enumerate(self.nvml.gpus):
            if pid in gpu.processes:
                self.end(index, pid)

    def end(self, gpu: int, pid: int) -> None:
        """A process ends."""
        self.nvml.end(gpu, pid)
        for file in (self.root / "proc" / str(pid)).iterdir():
            file.unlink()
        (self.root / "proc" / str(pid)).rmdir()


T = TypeVar("T")


class Inline(TimeLimitedCaller):
    """Runs calls inline, without threads."""

    def __init__(self) -> None:
        super().__init__("GPU", 60.0, start=lambda work: work())


_STEP_S, _PER_STEP_S = 0.1, 0.001
"""Simulated and real seconds of a step: threads and sockets need some real time."""


class Flow(FakeClock):
    """Clock of agents that runs a hundred times faster than real time."""

    async def run(self) -> None:
        """Let time pass, until cancelled."""
        while True:
            self.advance(_STEP_S)
            await asyncio.sleep(_PER_STEP_S)


def flowing(
    settings: AgentSettings,
    api: KubeApi,
    devices: Devices | None = None,
    intervals: Intervals = Intervals(labels_s=30.0),  # noqa: B008  # a value
) -> Agent:
    """Build an agent with a simulated clock."""
    clock = Flow()
    return build(settings, api, clock, devices, replace(intervals, sleep=clock.sleep))


async def until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    """Wait until the condition is true, and return its value."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() >= end:
            raise AssertionError(f"expected it to come true within {within_s:g} s, found it still false")
        await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def running(*agents: Agent) -> AsyncIterator[Agent]:
    """Run agents and their clocks during the block."""
    tasks = [asyncio.ensure_future(agent.run()) for agent in agents]
    tasks += [asyncio.ensure_future(agent.clock.run()) for agent in agents if isinstance(agent.clock, Flow)]
    try:
        yield agents[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
