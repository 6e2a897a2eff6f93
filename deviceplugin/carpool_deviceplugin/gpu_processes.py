"""Who is on a GPU: pods, and those that belong to none."""

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
"""A daemon that has not answered for so long is none that is merely slow."""
_RECENT_S = 0.5
"""What was seen for the measures serves the health that is looked at right after them."""
_MPS_EVERY_S = 60.0
"""How often a daemon that lives is asked while the same processes are there and nothing is wrong."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on the GPU, and whose it is."""

    running: RunningProcess
    process: Process


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """Who is on a GPU."""

    pods: tuple[GpuProcess, ...] = ()
    foreign_processes: tuple[Process | int, ...] = ()
    """Processes of no pod; a number where even that cannot be told."""
    instances: frozenset[int] = frozenset()
    """MIG instances with a process, of whomever."""

    def pod_uids(self, instance: int | None = None) -> frozenset[PodUid]:
        """Pods with a process, on one MIG instance or anywhere."""
        return frozenset(
            p.process.pod_uid
            for p in self.pods
            if p.process.pod_uid is not None and instance in (None, p.running.gpu_instance_id)
        )

    def without_instances(self, instances: frozenset[int]) -> "GpuProcesses":
        """Leave out who is on these MIG instances."""
        fine = tuple(p for p in self.pods if p.running.gpu_instance_id not in instances)
        return GpuProcesses(fine, self.foreign_processes, self.instances - instances)


class ProcessWatcher:
    """Looks who is there.

    Args:
        session: The open library.
        processes: The node's processes.
        mps: The MPS daemons; None where the node cannot run any.
        monotonic: Seconds.
    """

    def __init__(self, session: Session, processes: ProcTree, mps: Mps | None, monotonic: Callable[[], float]) -> None:
        self._session, self._processes, self._mps, self._monotonic = session, processes, mps, monotonic
        self._asked: dict[GpuUuid, tuple[float, frozenset[int], MpsStatus]] = {}
        self._silent_since: dict[GpuUuid, float] = {}
        self._last: dict[GpuUuid, tuple[float, tuple[GpuProcesses, MpsStatus]]] = {}

    def forget(self, uuid: GpuUuid) -> None:
        """Ask a GPU's daemon anew at the next look: something happened there."""
        self._asked[uuid] = (-math.inf, frozenset(), MpsStatus())
        self._last.pop(uuid, None)

    def is_hung(self, uuid: GpuUuid) -> bool:
        """Whether a GPU's daemon has not answered for a while, as of the last look."""
        return self._monotonic() - self._silent_since.get(uuid, math.inf) >= _HANGS_AFTER_S

    def user(self, uuid: GpuUuid) -> int | None:
        """Return whose clients a GPU's MPS server had at the last look; None where it had none. Never blocks."""
        status = self._asked.get(uuid, (0.0, frozenset(), MpsStatus()))[2]
        users = {self._processes.user(pid) for pid in status.servers} if status.clients else set()
        return users.pop() if len(users) == 1 else None

    def look(self, uuid: GpuUuid, foreign_instances: frozenset[int] = frozenset()) -> tuple[GpuProcesses, MpsStatus]:
        """Look who is on a GPU, and how its MPS daemon is; raises NvmlError.

        Each question to a daemon starts a program, so it is asked when it appeared or vanished, when somebody came or
        went, and when `forget` was called; besides that, rarely.

        Args:
            uuid: The GPU.
            foreign_instances: MIG instances of others: whoever is there is none of our business.
        """
        found = read_processes(self._session, uuid)
        whose = {p.pid: self._processes.find(p.pid) for p in found}  # the daemon takes its time, and they may end
        if None in whose.values():
            still = {p.pid for p in read_processes(self._session, uuid)}  # who ended just now is no stranger
            found = [p for p in found if whose[p.pid] is not None or p.pid in still]
        status = self._daemon(uuid, frozenset(p.pid for p in found))
        return _sorted(found, whose, status, foreign_instances), status

    def now(self, uuid: GpuUuid) -> tuple[GpuProcesses, MpsStatus]:
        """Look who is on a GPU, and remember it for a moment; raises NvmlError."""
        self._last.pop(uuid, None)
        seen = self.look(uuid)
        self._last[uuid] = (self._monotonic(), seen)
        return seen

    def recent(self, uuid: GpuUuid, foreign_instances: frozenset[int] = frozenset()) -> tuple[GpuProcesses, MpsStatus]:
        """Return who is on a GPU for one who only tells of it, such as its health; raises NvmlError.

        What `now` saw half a second ago or less is good enough for that, once: whoever asks next gets a look of their
        own, and so does whoever asks when `forget` was called since, or leaves out others' instances. Whoever is about
        to change the GPU must not rely on it, and calls `look`.
        """
        at, seen = self._last.pop(uuid, (-math.inf, None))
        if seen is None or foreign_instances or self._monotonic() - at > _RECENT_S:
            return self.look(uuid, foreign_instances)
        return seen

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
            if self._asked.get(uuid) is before:  # otherwise something has happened since
                self._asked[uuid] = (now, pids, status)
        return status


def describe_process(stranger: Process | int) -> str:
    """Such as `process 42 (python)`."""
    return (
        f"process {stranger}"
        if isinstance(stranger, int)
        else f"process {stranger.pid} ({printable(stranger.name[:32])})"
    )


def describe_foreign(found: Sequence[Process | int]) -> str:
    """Say who is there and belongs to no pod; empty where nobody is."""
    if not found:
        return ""
    whom = ", ".join(describe_process(s) for s in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f"{whom} on the GPU belong to no pod: end them, or run the agent with the host's PIDs so that it knows them"


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
"""Clients that leave so soon after an XID leave because of it: they are told at their next call, and have to end."""
_TOLD_FOR_S = 600.0
"""How long it is told of pods that are gone: whoever starts them again looks sooner."""

Pids = Mapping[int, PodUid]


@dataclass
class _Gpu:
    """What is known of one GPU's clients."""

    were: Pids = field(default_factory=dict)
    """At the last look."""
    suspected: Pids = field(default_factory=dict)
    """Who was there when an XID came."""
    until: float = 0.0
    """How long they are suspected."""
    what: str = ""
    """The fault that goes on; empty where none does."""
    hit: Pids = field(default_factory=dict)
    """Whom it has hit."""
    told: dict[PodUid, tuple[float, str]] = field(default_factory=dict)
    """When and what, of pods that are there and that are gone."""


class MpsFailures:
    """Remembers what happened to the clients of each GPU's daemon, also to those that left before anybody looked.

    Args:
        monotonic: Seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._gpus: dict[GpuUuid, _Gpu] = {}

    def see(
        self, uuid: GpuUuid, mps: MpsStatus, present: GpuProcesses, *, is_expected: bool, has_new_xid: bool
    ) -> dict[PodUid, str]:
        """Take in how a daemon is; return which pods that are there end together, and what happened to them.

        Args:
            uuid: The GPU.
            mps: Its daemon.
            present: Who is on the GPU.
            is_expected: Whether there should be a daemon: then whoever is there is its client.
            has_new_xid: Whether the driver reported an error of the GPU since the last look.
        """
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        there = {p.running.pid: p.process.pod_uid for p in present.pods if p.process.pod_uid is not None}
        gone = {pid: pod for pid, pod in gpu.were.items() if pid not in there}
        if is_expected and has_new_xid:
            gpu.suspected, gpu.until = {**gpu.suspected, **gpu.were, **there}, now + _WITHIN_S
        elif now > gpu.until:
            gpu.suspected = {}
        what, hit = _what_happened(mps, there, gone, gpu.suspected, is_expected=is_expected)
        gpu.were = there if is_expected else {}
        if what:
            gpu.hit = {**gpu.hit, **hit} if what == gpu.what else hit
            gpu.what = what
        pods = sorted(set(gpu.hit.values()))
        why = f"GPU {uuid}: {gpu.what}: pods that it ends together: {', '.join(pods)}"
        if what:
            gpu.told.update(dict.fromkeys(pods, (now, why)))
        struck = sorted({there[pid] for pid in gpu.hit.keys() & there.keys()})
        if not struck:
            gpu.what, gpu.hit = "", {}
        return dict.fromkeys(struck, why)

    def ended(self, uuid: GpuUuid) -> dict[PodUid, str]:
        """Return which pods a fault has ended together lately, and what happened to them."""
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        gpu.told = {pod: told for pod, told in gpu.told.items() if now - told[0] <= _TOLD_FOR_S}
        return {pod: why for pod, (_, why) in gpu.told.items()}


def _what_happened(mps: MpsStatus, there: Pids, gone: Pids, suspected: Pids, *, is_expected: bool) -> tuple[str, Pids]:
    """Say what happened since the last look, and to whom; empty where nothing did."""
    left = {pid: pod for pid, pod in suspected.items() if pid not in there}
    if mps.faulty:
        return FAULT, {**left, **{pid: pod for pid, pod in there.items() if pid in mps.faulty}}
    if is_expected and not mps.is_running and (there or gone):
        return DEATH, {**gone, **there}
    if len(set(left.values())) > 1:  # one alone is its own affair
        return FAULT, left
    return "", {}
