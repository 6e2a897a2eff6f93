"""GPUs that are kept for a moment for one job."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from carpool_core.clock import Clock
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.placement.queueing import Ticket
from carpool_extender.reservations.line import Line
from carpool_extender.state.standing import Standing
from carpool_extender.telemetry import Telemetry

PATIENCE_S = 3.0
"""How long GPUs are kept: kube-scheduler sits out a backoff of 2 s at most before it asks about a pod again."""
REMINDED_S = 1.0
"""After this time kube-scheduler is reminded: what made room may have gone unheard."""
EACH_S = 0.01
"""Both are so much longer for each pod that waits: it asks about one after the other."""
LOOK_S = 0.5
"""How often that is looked at."""
MOST_IN_VAIN = 1024
"""Jobs that are remembered for which GPUs were kept in vain."""

Gpu = tuple[str, GpuUuid]
"""A GPU by its node's name and its UUID."""


@dataclass(slots=True, eq=False)
class Kept:
    """GPUs that take nobody but the pods of one job."""

    job: JobUid
    ticket: Ticket
    since_s: float
    gpus: set[Gpu] = field(default_factory=set)
    told: dict[PodUid, set[Gpu]] = field(default_factory=dict)
    """Those of pods that were told a place already."""
    counted: dict[PodUid, tuple[str, Reservation]] = field(default_factory=dict)
    """What pods of several count with on which node, as if they had what they were told: others are told the rest."""
    served: set[PodUid] = field(default_factory=set)
    """Pods that had a reservation since."""
    to_come: int = 0
    """Workers of the job that were not told a place yet, since others were."""
    is_reminded: bool = False
    has_refused: bool = False
    """Whether anybody was refused meanwhile, who has to hear of it when they are kept no longer."""

    @property
    def nodes(self) -> set[str]:
        """Names of their nodes."""
        return {node for node, _ in self.gpus}


class KeptGpus:
    """What is kept, by job; and how long.

    Args:
        line: Those that wait.
        watches: Tell of nodes that go, and count what pods were told.
        standing: Has GPUs take nobody.
        clock: The time.
        sleep: Waits.
        telemetry: Counts what becomes of it.
        remind: Has kube-scheduler try those that wait, because of a node.
        is_anybody_next: Whether anybody of those that wait would find a place now.
    """

    def __init__(
        self,
        line: Line,
        watches: Watches,
        standing: Standing,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        telemetry: Telemetry,
        remind: Callable[[str], None],
        is_anybody_next: Callable[[], bool],
    ) -> None:
        self._line, self._standing, self._clock, self._sleep = line, standing, clock, sleep
        self._cluster = watches.cluster
        self._telemetry, self._remind, self._is_anybody_next = telemetry, remind, is_anybody_next
        self._kept: dict[JobUid, Kept] = {}
        self._in_vain: OrderedDict[JobUid, None] = OrderedDict()
        self._held_up = 0
        self._stirred = asyncio.Event()
        watches.on_node(self._node_changed)

    def __len__(self) -> int:
        return sum(len(kept.gpus) for kept in self._kept.values())

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))

    def __contains__(self, job: JobUid) -> bool:
        return job in self._kept

    def of(self, job: JobUid) -> Kept | None:
        """Return what is kept for a job."""
        return self._kept.get(job)

    async def run(self) -> None:
        """Look after what is kept for long, for ever."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._kept:
                await self._sleep(LOOK_S)
                self._look()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Let nobody's patience end meanwhile: kube-scheduler waits for an answer, and asks about nobody else."""
        self._held_up += 1
        try:
            yield
        finally:
            self._held_up -= 1

    def add(self, job: JobUid, ticket: Ticket, gpus: set[Gpu]) -> Kept:
        """Keep GPUs for a job, whose pods are sorted by some ticket; nothing more for those to whom some were open."""
        kept = self._kept.setdefault(job, Kept(job, ticket, self._clock.monotonic()))
        for other in self:
            if other is not kept and other.gpus & gpus:
                kept.has_refused |= other.has_refused
                self.drop(other, "overtaken")
        kept.gpus |= gpus
        self._standing.keep(gpus)
        self._stirred.set()
        return kept

    def count(self, kept: Kept, node: str, told: Reservation) -> None:
        """Have a pod count as if it had what it was told."""
        self.count_no_more(kept, told.pod_uid)
        kept.counted[told.pod_uid] = (node, told)
        self._cluster.assume(node, told)

    def count_no_more(self, kept: Kept, uid: PodUid) -> tuple[str, Reservation] | None:
        """Let a pod count by its reservation only, if it has one; return what it counted with, and on which node."""
        if (counted := kept.counted.pop(uid, None)) is not None:
            self._cluster.assume_no_more(counted[0], uid)
        return counted

    def retract(self, kept: Kept, uid: PodUid) -> None:
        """Forget what a pod was told: it is asked about once more, or gone."""
        self.count_no_more(kept, uid)
        kept.told.pop(uid, None)

    def holders(self, job: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be: more than being told a place."""
        kept = self._kept.get(job)
        return self._cluster.pods_of(job).difference(() if kept is None else kept.counted)

    def has_begun(self, kept: Kept) -> bool:
        """Whether all workers of a job were found places, which are kept, or one of them has its own of these."""
        is_told = kept.told and not self.is_in_vain(kept.job)
        return bool(is_told or kept.served & self._cluster.pods_of(kept.job))

    def is_in_vain(self, job: JobUid) -> bool:
        """Whether what was kept for a job went to others, and none of its pods was bound since."""
        return job in self._in_vain

    def bound(self, job: JobUid) -> None:
        """Take note that a pod of a job is bound."""
        self._in_vain.pop(job, None)

    def change(self, kept: Kept, gpus: set[Gpu]) -> None:
        """Keep other GPUs for a job than before."""
        self.release(kept, kept.gpus - gpus)
        self.add(kept.job, kept.ticket, gpus)

    def serve(self, kept: Kept, uid: PodUid) -> None:
        """Be as patient as if it were kept from now on, once for each pod: it has its reservation."""
        if uid not in kept.served:
            kept.served.add(uid)
            kept.since_s = self._clock.monotonic()

    def open(self, kept: Kept) -> None:
        """Let GPUs take others while it is decided."""
        self._standing.keep_no_more(kept.gpus)

    def close(self, kept: Kept) -> None:
        """End that, if they are kept still."""
        if self._kept.get(kept.job) is kept:
            self._standing.keep(kept.gpus)

    def release(self, kept: Kept, gpus: set[Gpu]) -> None:
        """Keep some of a job's GPUs no more."""
        kept.gpus -= gpus
        self._standing.keep_no_more(gpus)

    def drop(self, kept: Kept, outcome: str) -> None:
        """Keep nothing more for a job, and have those tried again who were refused for it."""
        del self._kept[kept.job]
        for uid in [*kept.counted]:
            self.count_no_more(kept, uid)
        self._standing.keep_no_more(kept.gpus)
        self._telemetry.no_more_kept(outcome)
        is_free = outcome != "overtaken" and (outcome != "taken" or self._is_anybody_next())
        if kept.has_refused and is_free:
            self._remind_of(kept)

    def _look(self) -> None:
        now, more_s = self._clock.monotonic(), EACH_S * len(self._line)
        for kept in self:
            waiting = [*self._line.of_job(kept.job)]
            if self._held_up or any(one.is_served for one in waiting):
                kept.since_s += LOOK_S
            elif now - kept.since_s >= PATIENCE_S + more_s:
                for one in waiting:
                    one.is_passed = True
                self._in_vain[kept.job] = None
                while len(self._in_vain) > MOST_IN_VAIN:
                    self._in_vain.popitem(last=False)
                self.drop(kept, "passed")
            elif now - kept.since_s >= REMINDED_S + more_s and not kept.is_reminded:
                kept.is_reminded = True
                self._remind_of(kept)

    def _remind_of(self, kept: Kept) -> None:
        for node in sorted(kept.nodes):
            self._remind(node)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and new is None:
            for kept in self:
                if old.metadata.name in kept.nodes:
                    self.drop(kept, "gone")
