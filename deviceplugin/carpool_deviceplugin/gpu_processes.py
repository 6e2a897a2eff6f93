"""Processes on a GPU, the pods that they belong to, and failures of MPS clients."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from carpool_core.values import GpuUuid, PodUid

from carpool_deviceplugin.mps import Mps, MpsStatus
from carpool_deviceplugin.nvlib import RunningProcess, Session, read_processes
from carpool_deviceplugin.processes import Process, ProcTree
from carpool_deviceplugin.quoting import printable

_HANGS_AFTER_S = 10.0
"""A daemon without an answer for this time counts as hung."""
_MPS_EVERY_S = 60.0
"""Interval of asking a healthy daemon while the GPU's processes stay the same."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on the GPU and its owner."""

    running: RunningProcess
    process: Process


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """Processes on a GPU."""

    pods: tuple[GpuProcess, ...] = ()
    foreign_processes: tuple[Process | int, ...] = ()
    """Processes that belong to no pod; a process ID if /proc does not show the process."""
    instances: frozenset[int] = frozenset()
    """MIG instances with any process."""

    def pod_uids(self, instance: int | None = None) -> frozenset[PodUid]:
        """Return the pods with a process on one MIG instance; on the whole GPU if None."""
        return frozenset(
            p.process.pod_uid
            for p in self.pods
            if p.process.pod_uid is not None and instance in (None, p.running.gpu_instance_id)
        )

    def without_instances(self, instances: frozenset[int]) -> "GpuProcesses":
        """Return the processes outside of these MIG instances."""
        fine = tuple(p for p in self.pods if p.running.gpu_instance_id not in instances)
        return GpuProcesses(fine, self.foreign_processes, self.instances - instances)


class ProcessWatcher:
    """Reads the processes of GPUs; without `mps` the node cannot run MPS daemons."""

    def __init__(self, session: Session, processes: ProcTree, mps: Mps | None, monotonic: Callable[[], float]) -> None:
        self._session, self._processes, self._mps, self._monotonic = session, processes, mps, monotonic
        self._asked: dict[GpuUuid, tuple[float, frozenset[int], MpsStatus]] = {}
        self._silent_since: dict[GpuUuid, float] = {}
        self._known: dict[GpuUuid, Mapping[int, Process | None]] = {}
        """Processes at the last read, by process ID."""

    def forget(self, uuid: GpuUuid) -> None:
        """Ask the GPU's daemon at the next read, because something has happened."""
        self._asked[uuid] = (-math.inf, frozenset(), MpsStatus())

    def is_hung(self, uuid: GpuUuid) -> bool:
        """Whether the GPU's daemon has not answered for ten seconds, as of the last read."""
        return self._monotonic() - self._silent_since.get(uuid, math.inf) >= _HANGS_AFTER_S

    def user(self, uuid: GpuUuid) -> int | None:
        """Return the user ID of the MPS server's clients at the last read; None without clients. Never blocks."""
        status = self._asked.get(uuid, (0.0, frozenset(), MpsStatus()))[2]
        users = {self._processes.user(pid) for pid in status.servers} if status.clients else set()
        return users.pop() if len(users) == 1 else None

    def look(self, uuid: GpuUuid, foreign_instances: frozenset[int] = frozenset()) -> tuple[GpuProcesses, MpsStatus]:
        """Read the processes of a GPU and the state of its MPS daemon; raises NvmlError.

        Each question to a daemon starts a program. So it is asked when it or a process has come or gone, after
        `forget`, and otherwise rarely. Processes on foreign MIG instances, which the agent did not create, are not
        foreign.
        """
        found = read_processes(self._session, uuid)
        known = self._known.get(uuid, {})
        # Before the daemon is asked, because they may end.
        whose = self._known[uuid] = {p.pid: self._processes.find(p.pid, known.get(p.pid)) for p in found}
        if None in whose.values():
            still = {p.pid for p in read_processes(self._session, uuid)}  # a process that has just ended is not foreign
            found = [p for p in found if whose[p.pid] is not None or p.pid in still]
        status = self._daemon(uuid, frozenset(p.pid for p in found))
        return _sorted(found, whose, status, foreign_instances), status

    def _daemon(self, uuid: GpuUuid, pids: frozenset[int]) -> MpsStatus:
        if self._mps is None:
            return MpsStatus()
        now, is_running = self._monotonic(), self._mps.is_running(uuid)
        before = self._asked.get(uuid)
        asked_at, were, status = before or (-math.inf, frozenset(), MpsStatus())
        is_same = pids == were and is_running == status.is_running and not status.problem
        if not is_same or now - asked_at > _MPS_EVERY_S:
            status = self._mps.status(uuid, pids)  # servers may outlive it
            if not status.is_silent:
                self._silent_since.pop(uuid, None)
            else:
                self._silent_since.setdefault(uuid, now)
            if self._asked.get(uuid) is before:  # otherwise `forget` was called meanwhile
                self._asked[uuid] = (now, pids, status)
        return status


def describe_process(process: Process | int) -> str:
    """Return a name for messages, such as `process 42 (python)`."""
    if isinstance(process, int):
        return f"process {process}"
    return f"process {process.pid} ({printable(process.name[:32])})"


def describe_foreign(found: Sequence[Process | int]) -> str:
    """Return a message about processes of no pod; empty without any."""
    if not found:
        return ""
    names = ", ".join(map(describe_process, found[:4])) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f"{names} on the GPU belong to no pod: end them, or run the agent with the host's PIDs so that it knows them"


def _sorted(
    found: Iterable[RunningProcess],
    whose: Mapping[int, Process | None],
    mps: MpsStatus,
    foreign_instances: frozenset[int],
) -> GpuProcesses:
    pods: list[GpuProcess] = []
    foreign_processes: list[Process | int] = []
    instances: set[int] = set()
    for running in found:
        if running.gpu_instance_id is not None:
            instances.add(running.gpu_instance_id)
        if running.pid in mps.servers:
            continue
        process = whose[running.pid]
        if process is not None and process.pod_uid is not None:
            pods.append(GpuProcess(running, process))
        elif running.gpu_instance_id not in foreign_instances:
            foreign_processes.append(running.pid if process is None else process)
    return GpuProcesses(tuple(pods), tuple(foreign_processes), frozenset(instances))


FAULT = "a client's fatal fault has hit its MPS server"
DEATH = "its MPS daemon ended under its clients"
_WITHIN_S = 20.0
"""Clients that end within this time after an XID end because of it: their next CUDA call fails."""
_REPORTED_FOR_S = 600.0
"""How long ended pods are reported; the operator reads the status sooner."""

Pids = Mapping[int, PodUid]


@dataclass
class _Gpu:
    """The clients of one GPU."""

    were: Pids = field(default_factory=dict)
    """Clients at the last read."""
    suspected: Pids = field(default_factory=dict)
    """Clients at the time of an XID."""
    until: float = 0.0
    """End of the suspicion, in seconds."""
    fault: str = ""
    """The current fault; empty without one."""
    hit: Pids = field(default_factory=dict)
    """Clients that the current fault ends."""
    reported: dict[PodUid, tuple[float, str]] = field(default_factory=dict)
    """Time and message of each pod that a fault has ended or ends."""


class MpsFailures:
    """Finds the pods that a fault of their MPS daemon ends together, also those that end between two reads."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._gpus: dict[GpuUuid, _Gpu] = {}

    def see(
        self, uuid: GpuUuid, mps: MpsStatus, present: GpuProcesses, *, is_expected: bool, has_new_xid: bool
    ) -> dict[PodUid, str]:
        """Update the state of a GPU; return the present pods that end together, with the message.

        `is_expected` is whether the GPU is in mode MPS: then each pod is a client of the daemon. `has_new_xid` is
        whether the driver has reported an XID since the last read.
        """
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        there = {p.running.pid: p.process.pod_uid for p in present.pods if p.process.pod_uid is not None}
        gone = {pid: pod for pid, pod in gpu.were.items() if pid not in there}
        if is_expected and has_new_xid:
            gpu.suspected, gpu.until = {**gpu.suspected, **gpu.were, **there}, now + _WITHIN_S
        elif now > gpu.until:
            gpu.suspected = {}
        fault, hit = _find_fault(mps, there, gone, gpu.suspected, is_expected=is_expected)
        gpu.were = there if is_expected else {}
        if fault:
            gpu.hit = {**gpu.hit, **hit} if fault == gpu.fault else hit
            gpu.fault = fault
        pods = sorted(set(gpu.hit.values()))
        why = f"GPU {uuid}: {gpu.fault}: pods that it ends together: {', '.join(pods)}"
        if fault:
            gpu.reported.update(dict.fromkeys(pods, (now, why)))
        struck = sorted({there[pid] for pid in gpu.hit.keys() & there.keys()})
        if not struck:
            gpu.fault, gpu.hit = "", {}
        return dict.fromkeys(struck, why)

    def ended(self, uuid: GpuUuid) -> dict[PodUid, str]:
        """Return the pods that a fault has ended in the last ten minutes, with the message."""
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        gpu.reported = {pod: at for pod, at in gpu.reported.items() if now - at[0] <= _REPORTED_FOR_S}
        return {pod: why for pod, (_, why) in gpu.reported.items()}


def _find_fault(mps: MpsStatus, there: Pids, gone: Pids, suspected: Pids, *, is_expected: bool) -> tuple[str, Pids]:
    """Return the fault since the last read and the clients that it ends; empty without one."""
    hit, known = dict[int, PodUid](), {**gone, **there}
    for clients in mps.hit:
        named = {pid: known[pid] for pid in clients & known.keys()}
        if len(set(named.values())) > 1 or named.keys() != clients:  # a single pod has failed by itself
            hit |= named
    if hit:
        return FAULT, hit
    if is_expected and not mps.is_running and (there or gone):
        return DEATH, {**gone, **there}
    left = {pid: pod for pid, pod in suspected.items() if pid not in there}
    if len(set(left.values())) > 1:  # a single pod may have failed by itself
        return FAULT, left
    return "", {}
