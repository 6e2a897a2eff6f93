"""A machine with a fake GPU for the GPU tests: processes train, take memory, fault and die with their MPS server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carpool_core.products import find_product
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.check import SkippedError
from carpool_deviceplugin.testing.mps import FakeDaemon, FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from gpu_machine import Kind, Trial

_CONTEXT_MIB, _SERVER_MIB = 600, 66
_STEPS_PER_S = 20
_LINGER_S = 0.4
"""How long clients of a server that was hit take to end, on an H100 with driver 580; others may wait longer."""


@dataclass
class Faithless:
    """Deviations of a machine, with which trials must fail."""

    ignores_limits: bool = False
    ignores_threads: bool = False
    kills_neighbours: bool = False
    """One client's lack of memory ends the others, too."""
    hides_fate: bool = False
    """The daemon does not report a fault, and survives a kill."""
    spreads_assertions: bool = False
    """A failed assertion of one client ends the others, too."""
    energy_leaks: bool = False
    wastes_s: float = 0.0
    """Processor time that each second of waiting costs."""


@dataclass
class FakeLoad:
    """One process."""

    machine: "FakeMachine"
    pid: int
    pod_uid: PodUid
    pipe: str
    limit_mib: int | None
    made: float = 0.0
    end: str | None = None
    doomed_at: float | None = None

    def steps(self) -> int:
        return int(self.made)

    def ended(self) -> str | None:
        return self.end

    def take(self, mib: int) -> None:
        """Take memory, as far as the limit lets it."""
        process = self.machine.node.nvml.gpus[0].processes[self.pid]
        if self.limit_mib is not None and process.memory_mib + mib > self.limit_mib:
            self.machine.die(self, "out of memory")
            if self.machine.faithless.kills_neighbours:
                for other in self.machine.living():
                    self.machine.die(other, "out of memory")
            return
        process.memory_mib += mib

    def fault(self) -> None:
        """Hit the server, and all its clients."""
        daemon = self.machine.daemon(self.pipe)
        if daemon is not None and not self.machine.faithless.hides_fate:
            daemon.fault()
            self.machine.node.nvml.raise_xid(0, 31)
        self.machine.doom(self.pipe)

    def fail_assertion(self) -> None:
        """End alone."""
        if self.machine.faithless.spreads_assertions:
            self.fault()
        self.machine.die(self, "AcceleratorError: CUDA error: device-side assert triggered")

    def stop(self) -> None:
        if self.end is None:
            self.machine.die(self, "stopped")


@dataclass
class FakeMachine:
    """The first GPU of a node in memory.

    Attributes:
        node: Its GPUs, daemons and files.
        faithless: What it does otherwise than it should.
    """

    node: Node
    faithless: Faithless = field(default_factory=Faithless)
    loads: list[FakeLoad] = field(default_factory=list)
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.devices = self.node.devices()

    def pod(self, name: str) -> PodUid:
        return PodUid(uid(name))

    def start(self, gpu: GpuUuid, kind: Kind, pod: str, environment: Mapping[str, str]) -> FakeLoad:
        assert environment["CUDA_VISIBLE_DEVICES"] == gpu  # otherwise the trial proves nothing
        pid, pipe = 100 + len(self.loads), environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
        limit = environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")
        percent = int(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100))
        percent = 100 if self.faithless.ignores_threads else percent
        product = find_product(self.node.nvml.gpus[0].hardware.product)
        sm = {Kind.TRAIN: 0.3, Kind.PRODUCT: 0.97 * percent / 100, Kind.BLOCK: 0.95 / product.sm_count}[kind]
        self.node.start(0, pid, pod, _CONTEXT_MIB, sm=sm, dram=0.1)
        load = FakeLoad(self, pid, self.pod(pod), pipe, None)
        if limit and not self.faithless.ignores_limits:
            load.limit_mib = int(limit.removeprefix("0=").removesuffix("M"))
        if pipe:
            server = self.node.mps.connect(pipe, pid)
            if server not in self.node.nvml.gpus[0].processes:
                self.node.start(0, server, None, _SERVER_MIB)
        self.loads.append(load)
        return load

    def living(self) -> list[FakeLoad]:
        return [load for load in self.loads if load.end is None]

    def daemon(self, pipe: str) -> FakeDaemon | None:
        return self.node.mps.daemons.get(pipe)

    def die(self, load: FakeLoad, how: str) -> None:
        """End a process; after its last client, a server that was hit gives up its context until the next one."""
        load.end = how
        self.node.end(0, load.pid)
        daemon = self.daemon(load.pipe)
        if daemon is not None:
            was_hit = daemon.is_faulty
            daemon.leave(load.pid)
            if was_hit and not daemon.clients and daemon.server is not None:
                self.node.end(0, daemon.server)

    def doom(self, pipe: str) -> None:
        """All clients will find out soon."""
        for load in self.living():
            if load.pipe == pipe:
                load.doomed_at = self.node.seconds + _LINGER_S

    def in_cgroup(self, load: object) -> str:
        return ""

    def kill_daemon(self, gpu: GpuUuid) -> None:
        """End a daemon, and its server with it."""
        pipe = str(self.node.root / "mps" / gpu / "pipe")
        if not self.faithless.hides_fate:
            server = self.node.mps.daemons[pipe].server
            self.node.mps.die(pipe)
            if server is not None:
                self.node.end(0, server)
        self.doom(pipe)

    def cpu_s(self) -> float:
        return self.spent_s

    def dmon_cpu_s(self, seconds: float) -> float:
        raise SkippedError("nvidia-smi is not on PATH")

    def wait(self, seconds: float) -> None:
        """Let time pass; processes make steps, and those that are doomed end."""
        self.spent_s += self.faithless.wastes_s * seconds
        self.node.advance(seconds)
        if self.faithless.energy_leaks:
            self.node.nvml.gpus[0].energy_mj += 100_000 * seconds
        for load in self.living():
            load.made += _STEPS_PER_S * seconds
            if load.doomed_at is not None and self.node.seconds >= load.doomed_at:
                self.die(load, "AcceleratorError: CUDA error: an illegal memory access was encountered")

    def monotonic(self) -> float:
        return self.node.seconds


def fake(directory: Path, kind: str = "H100", **faithless) -> Trial:
    machine = FakeMachine(Node(FakeNvml([kind]), FakeMpsCommands(), directory), Faithless(**faithless))
    return Trial(machine, machine.devices.uuids[0])
