"""One real GPU through a random history: who reserves, runs, fails and dies there."""

import random
from pathlib import Path

import pynvml
from agent_world import reservation
from carpool_core.resources.node import Reservation
from carpool_core.values import PartitionState, PodUid, SharingMode
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.mps import MpsError
from carpool_deviceplugin.testing.gpus import FakeInstance
from carpool_deviceplugin.testing.mps import FakeDaemon, FakeMpsCommands
from carpool_deviceplugin.testing.node import Inline, Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals

PODS = "abc"
NAMESPACES = {"a": "one", "b": "one", "c": "another"}
CODES = (
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
    pynvml.NVML_ERROR_IN_USE,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
EXCLUSIVE, TIME_SLICING, MPS, MIG = SharingMode
READY = PartitionState.READY


CHANGES = ("Create", "Destroy", "SetMigMode", "GpuInstances", "ComputeInstances")
"""In the names of functions that change a GPU, or are called between two that do."""


class KilledError(BaseException):
    """The agent is killed."""


class FlakyMps(FakeMpsCommands):
    """Daemons whose program fails now and then, and in whose calls the agent dies now and then."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self.fault = self.death = 0.0

    def _maybe(self) -> None:
        if self.death and self._draw.random() < self.death:
            raise KilledError
        if self.fault and self._draw.random() < self.fault:
            raise MpsError("injected")

    def start(self, daemon, shm) -> None:
        self._maybe()
        super().start(daemon, shm)
        try:
            self._maybe()
        except MpsError:
            super().kill(daemon)  # a start that raises leaves no daemon; an agent that dies leaves it
            raise

    def kill(self, daemon) -> None:
        self._maybe()
        super().kill(daemon)

    def ask(self, daemon, command) -> str:
        self._maybe()
        return super().ask(daemon, command)


class History:
    """One GPU, its agent, who reserved it and who runs there."""

    def __init__(self, seed: int, root: Path) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self.kind = kind = self.draw.choice(["A100-40", "A100-40", "H100", "H100", "T4"])
        self.mps = FlakyMps(self.draw)
        self.nvml = FakeNvml([kind])
        self.nvml.gpus[0].energy_mj = 1e9  # it has been on for days: a new agent sees that the counter was reset
        self.mig = self.nvml.gpus[0].mig
        self.profiles = [p.name for p in self.mig.table.profiles] if self.mig.table else ["1g.5gb"]
        self.foreign_instances: FakeInstance | None = None
        if self.mig.table and self.draw.random() < 0.3:
            self.divide_by_hand()
        self.node = Node(self.nvml, self.mps, root, may_switch_mig=self.draw.random() < 0.7)
        self.takes_reset = False
        """Whether an XID has come that only a reset mends."""
        self.fault = self.death = 0.0
        self.nvml.before_each(self._maybe_fail)
        self.wanted: dict[str, Reservation] = {}
        self.running: dict[str, tuple[int, int | None]] = {}
        """Process and MIG instance of each pod."""
        self.served: dict[str, int] = {}
        """Process of the server behind which each client of MPS is."""
        self.behind: dict[int, tuple[FakeDaemon, set[str]]] = {}
        """Namespaces of all clients that a daemon ever had, by its ID while it is kept here."""
        self.pids = iter(range(100, 10_000))
        self.worker: GpuWorker | None = None
        self.begin_agent()

    def divide_by_hand(self) -> None:
        """An administrator switched MIG on, and made an instance for themselves."""
        self.mig.is_enabled = self.mig.is_pending = True
        if self.draw.random() < 0.5:
            profile = self.mig.table.profiles[-2]
            self.foreign_instances = self.mig.create(profile.id, 0, profile.memory_slices)

    def _maybe_fail(self, name: str) -> None:
        times = 20 if any(part in name for part in CHANGES) else 1
        if self.death and self.draw.random() < times * self.death:
            raise KilledError
        if self.fault and self.draw.random() < times * self.fault:
            self.nvml.fail_next(name, self.draw.choice(CODES))

    def begin_agent(self) -> None:
        """An agent that knows only what the GPU, its own files and the status say."""
        ready = self.ready() if self.worker else set()
        self.safe()
        self.nvml._failures.clear()
        self.devices = self.node.devices()
        self.worker = GpuWorker(self.devices.uuids[0], self.devices, lambda: None, Intervals(), caller=Inline())
        self.worker.remember(frozenset(ready))

    def ready(self) -> set[PodUid]:
        return {pod for pod, partition in self.worker.partitions.items() if partition.state is READY}

    def reserve(self) -> None:
        pod = self.draw.choice(PODS)
        if pod in self.wanted or pod in self.running:
            return
        mode = self.draw.choice([EXCLUSIVE, TIME_SLICING, MPS, MPS, MIG, MIG, MIG])
        self.wanted[pod] = reservation(
            pod,
            *self.devices.uuids,
            pod_uid=uid(pod),
            pod_namespace=NAMESPACES[pod],
            mode=mode,
            mig_profile=self.draw.choice(self.profiles) if mode is MIG else None,
            memory_limit_mib=None if mode is MIG else self.draw.choice([None, 3_000, 30_000]),
            reserved_at=str(next(self.pids)),
        )

    def event(self) -> None:
        pod = self.draw.choice(PODS)
        what = ["reserve", "reserve", "release", "start", "start", "end", "restart", "kill", "time", "time", "driver"]
        what += ["xid", "fatal", "wedge", "fault", "replace"]
        match self.draw.choice(what):
            case "reserve":
                self.reserve()
            case "release":
                self.wanted.pop(pod, None)  # it may run on for a while
            case "replace":
                self.wanted.clear()  # together with the new reservation
                self.reserve()
            case "start" if self.may_start(pod):
                pid = next(self.pids)
                instance = self.instance_of(pod)
                self.running[pod] = (pid, instance)
                self.node.start(0, pid, pod, instance=instance)
                if self.wanted[pod].mode is MPS:
                    self.served[pod] = self.connect(pid)
                    (daemon,) = self.mps.daemons.values()
                    behind = self.behind.setdefault(id(daemon), (daemon, set()))[1]
                    behind.add(NAMESPACES[pod])
                    assert len(behind) == 1, "a daemon was handed on to another namespace"
            case "end" if pod in self.running:
                self.end(pod)
            case "restart":
                self.begin_agent()
            case "kill" if self.mps.daemons:
                self.mps.daemons.clear()  # their servers live on, and serve who is there
            case "time":
                self.node.seconds += 4000  # whatever passes has passed
            case "xid":
                self.nvml.raise_xid(0, self.draw.choice([13, 31, 94]))
            case "fatal" if self.foreign_instances is None and self.draw.random() < 0.3:
                self.nvml.raise_xid(0, 95)
                self.takes_reset = True
            case "wedge":
                for daemon in self.mps.daemons.values():
                    daemon.is_wedged = True
            case "fault":
                for daemon in self.mps.daemons.values():
                    daemon.fault()
            case "driver" if not self.running and self.foreign_instances is None:
                self.restart_driver()

    def restart_driver(self) -> None:
        """Processes with a context end before, the servers of MPS among them."""
        for servers in self.mps.servers_of.values():
            for pid in servers:
                self.node.end_server(pid)
        self.mps.servers_of.clear()
        for daemon in self.mps.daemons.values():
            daemon.server = None
        self.nvml.restart_driver()
        self.takes_reset = False

    def connect(self, pid: int) -> int:
        """A client makes its daemon start a server, which has a context of its own, in another pod."""
        (pipe,) = self.mps.daemons
        server = self.mps.connect(pipe, pid)
        if server not in self.nvml.gpus[0].processes:
            self.node.start(0, server, "m")
        return server

    def end(self, pod: str) -> None:
        pid = self.running.pop(pod)[0]
        self.served.pop(pod, None)
        self.node.end(0, pid)
        for daemon in self.mps.daemons.values():
            daemon.leave(pid)

    def instance_of(self, pod: str) -> int | None:
        """As the container's own device would be: what the agent brings into it."""
        if self.wanted[pod].mode is not MIG:
            return None
        name = self.devices.access(self.devices.uuids[0], PodUid(uid(pod))).name
        return next(i.id for i in self.mig.instances.values() for c in i.compute.values() if c.uuid == name)

    def may_start(self, pod: str) -> bool:
        """A client of a dead or hung daemon does not start, and no container whose GPU has vanished."""
        if pod not in self.wanted or pod in self.running or uid(pod) not in self.ready():
            return False
        match self.wanted[pod].mode:
            case SharingMode.MPS:
                return any(not d.is_wedged for d in self.mps.daemons.values()) and not self.mig.is_enabled
            case SharingMode.MIG:
                return self.has_instance(pod)
        return not self.mig.is_enabled and self.setting().mode is self.wanted[pod].mode

    def has_instance(self, pod: str) -> bool:
        own = [o for o in self.setting().instances if o.pod_uid == uid(pod)]
        devices = {c.uuid for i in self.mig.instances.values() for c in i.compute.values()}
        known = {f.device.uuid for f in self.devices._gpus[self.devices.uuids[0]].instances if f.device}
        return any(o.device in devices & known for o in own)

    def setting(self):
        return self.devices._gpus[self.devices.uuids[0]].file.read()

    async def look(self) -> None:
        self.worker.want(list(self.wanted.values()))
        try:
            await self.worker.once()
        except KilledError:
            self.begin_agent()

    def dangerous(self) -> None:
        """Mostly a fault or two, now and then a driver that fails all the time."""
        self.fault = self.draw.choice([0.0, 0.0, 0.001, 0.004, 0.05])
        self.death = self.draw.choice([0.0, 0.0, 0.001, 0.004])
        self.mps.fault, self.mps.death = 30 * self.fault, 30 * self.death

    def safe(self) -> None:
        self.fault = self.mps.fault = self.death = self.mps.death = 0.0

    def check(self) -> None:
        """Running pods keep their instances, and foreign instances stay."""
        for pod, (_, instance) in self.running.items():
            assert instance is None or instance in self.mig.instances, "the instance was destroyed under a tenant"
            assert self.mig.is_enabled == (instance is not None), "MIG was switched under a tenant"
            if pod in self.wanted and instance is None:
                assert self.setting().mode is self.wanted[pod].mode, "the mode changed under a tenant"
            server = self.served.get(pod)
            assert server is None or server in self.nvml.gpus[0].processes, "its server was ended under a client"
        if self.foreign_instances is not None:
            assert self.mig.instances.get(self.foreign_instances.id) is self.foreign_instances

    async def is_ready_afresh(self, root: Path) -> bool:
        """Whether all wanted pods are ready if nothing failed and there is no foreign instance."""
        nvml = FakeNvml([self.kind])
        nvml.gpus[0].mig.is_enabled = nvml.gpus[0].mig.is_pending = self.mig.is_enabled
        devices = Node(nvml, FakeMpsCommands(), root, may_switch_mig=self.node.may_switch_mig).devices()
        worker = GpuWorker(devices.uuids[0], devices, lambda: None, Intervals(), caller=Inline())
        worker.want(list(self.wanted.values()))
        await worker.once()
        return self.foreign_instances is None and all(
            partition.state is READY for partition in worker.partitions.values()
        )

    async def settle(self) -> None:
        """The faults have ended; a lost GPU or a fatal state takes a minute of quiet."""
        self.safe()
        self.nvml._failures.clear()
        for _ in range(4):
            self.node.seconds += 4000
            await self.look()
            self.check()
