"""Serves those that wait in their order."""

from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod, job_reference
from carpool_core.values import JobUid, PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessments
from carpool_extender.placement.decide import place
from carpool_extender.placement.gangs import Gangs
from carpool_extender.reservations.ahead import Ahead
from carpool_extender.reservations.kept import Gpu, Kept, KeptGpus
from carpool_extender.reservations.line import Line, Waiting
from carpool_extender.reservations.offers import packed
from carpool_extender.reservations.promises import Promises
from carpool_extender.state.standing import Standing
from carpool_extender.telemetry import Telemetry

MANY = 50
"""Pods that wait, from which on what is kept for a moment is not told to each of them."""


class Keeper:
    """Serves those that wait in their order, which kube-scheduler does not.

    Its queue goes by the time of the last try, so that each refusal puts a pod behind all others of its priority. When
    something becomes free, it tries them all, in that order. So before somebody gets a place, it is looked who comes
    before it and would find one, too. For these GPUs are kept until they are asked about, and whoever finds no other
    is refused for the moment. Nobody is waited for: what fits none of those before it goes to whom it fits.

    A GPU that is kept takes nobody else, though there may be room for two: what a pod gets beside others must not hang
    on somebody who is not there. It is no matter to who comes before its owner, unless that was told it already.

    As soon as one of several workers of a job is told its place, GPUs are kept on which the others find theirs, and it
    counts as if it had its own, so that they are told what is left.

    A pod may be held up by what the extender does not know, such as a taint, or too little memory of the node. Nothing
    is kept for it where it was not offered; and where it is not asked about at all, it is passed after a moment.

    Args:
        line: Those that wait.
        watches: Tell of pods that are bound or gone.
        standing: Has GPUs take nobody.
        assessments: Where places are found.
        gangs: Whether all workers of a job would find one.
        clock: The time.
        sleep: Waits.
        telemetry: Counts what becomes of GPUs that were kept.
        remind: Has kube-scheduler try those that wait, because of a node.
    """

    def __init__(
        self,
        line: Line,
        watches: Watches,
        standing: Standing,
        *,
        assessments: Assessments,
        gangs: Gangs,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        telemetry: Telemetry,
        remind: Callable[[str], None],
    ) -> None:
        self._line, self._watches, self._assessments = line, watches, assessments
        self._kept = KeptGpus(
            line,
            watches,
            standing,
            clock=clock,
            sleep=sleep,
            telemetry=telemetry,
            remind=remind,
            is_anybody_next=lambda: self._ahead.is_anybody_next(),
        )
        self._ahead = Ahead(line, watches.cluster, self._kept, assessments, gangs)
        self._promises = Promises(line, watches.cluster, self._kept, assessments=assessments, gangs=gangs, clock=clock)
        self._opened: list[Kept] = []
        watches.on_pod(self._pod_changed)

    async def run(self) -> None:
        """Look after what is kept for long, for ever."""
        await self._kept.run()

    def held_up(self) -> AbstractContextManager[None]:
        """Let nobody's patience end meanwhile: kube-scheduler waits for an answer, and asks about nobody else."""
        return self._kept.held_up()

    def asked(self, pod: Pod, applicant: Applicant) -> None:
        """Open what is kept for a pod, and for those that come after it: it is decided about it until `answered`."""
        uid = PodUid(pod.metadata.uid)
        if (known := self._line.get(uid)) is not None:
            known.is_passed = known.is_served = False
        ticket = self._line.ticket(pod, applicant) if len(self._kept) else None
        for kept in self._kept:
            if kept.job == applicant.demand.job_uid:
                self._kept.retract(kept, uid)
                self._kept.open(kept)
            elif ticket is not None and not self._kept.has_begun(kept) and self._line.precedes(ticket, kept.ticket):
                self._kept.open(kept)
            else:
                continue
            self._opened.append(kept)

    def has_begun(self, applicant: Applicant) -> bool:
        """Whether a job has begun to find its places: whether all of its workers fit was asked then."""
        kept = self._kept.of(applicant.demand.job_uid)
        return kept is not None and self._kept.has_begun(kept)

    def holders(self, job: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be: more than being told a place."""
        return self._kept.holders(job)

    @contextmanager
    def comparing(self, uid: PodUid, applicant: Applicant) -> Iterator[None]:
        """Have everything as it was when a pod was told its place, while it is compared with others."""
        if (kept := self._kept.of(applicant.demand.job_uid)) is None:
            yield
            return
        counted = self._kept.count_no_more(kept, uid)
        self._kept.open(kept)
        try:
            yield
        finally:
            self._kept.close(kept)
            if counted is not None:
                self._kept.count(kept, *counted)

    def first(self, pod: Pod, applicant: Applicant, node: str) -> bool:
        """Keep GPUs for those that come before a pod and would find a place; say whether there are such.

        Args:
            pod: That fits.
            applicant: What it demands.
            node: Where it would go.
        """
        job = applicant.demand.job_uid
        if not len(self._line) or self.has_begun(applicant) or self._watches.cluster.pods_of(job):
            return False  # its turn has come already
        own = self._kept.of(job)
        if own is not None and self._gpus(applicant, node) <= own.gpus:
            return False  # so it has, for these
        if own is not None:
            self._kept.close(own)
        ticket, out, found = self._line.ticket(pod, applicant), set[Hashable](), False
        while self._ahead.keep_for_next(ticket, job, out):
            self._line.advance()
            found = True
        if own is not None:
            self._kept.open(own)
        return found

    def answered(self, pod: Pod, applicant: Applicant, offered: Sequence[str], nodes: Sequence[str], said: str) -> str:
        """Take note of what a pod was told.

        Args:
            pod: That was asked about.
            applicant: What it demands.
            offered: The nodes in question.
            nodes: Where it fits, the best first; none where it was refused.
            said: Why it was refused.

        Returns:
            Why it is refused. Where many wait in the words of before, while something is kept: these will be true
            again in a moment, and each new sentence is a write for every pod that waits.
        """
        job, uid = applicant.demand.job_uid, PodUid(pod.metadata.uid)
        there = self._watches.pod(uid)
        opened, self._opened = self._opened, []
        own = self._kept.of(job)
        if there is not None and there.spec.node_name:
            pass  # it has its place
        elif nodes:
            if own is None and not self._watches.cluster.pods_of(job):
                self._line.advance()
            later = [kept for kept in opened if kept is not own]
            self._promises.give(pod, applicant, nodes[0], later=later, offered=offered)
        elif there is not None:  # otherwise it is gone, or will be asked about once more
            known = self._line.join(pod, applicant, packed(self._watches.cluster.view(), offered))
            known.is_passed = own is not None  # something is against it that is not known here
            said = self._refused(known, said)
        if not nodes and own is not None and not self._kept.has_begun(own):
            self._kept.drop(own, "refused")
        for kept in opened:
            self._kept.close(kept)
        return said

    @contextmanager
    def deciding(self, applicant: Applicant) -> Iterator[None]:
        """Open what is kept for a pod while it is decided what is reserved for it."""
        if (kept := self._kept.of(applicant.demand.job_uid)) is None:
            yield
            return
        self._kept.open(kept)
        try:
            yield
        finally:
            self._kept.close(kept)

    def binding(self, uid: PodUid) -> None:
        """Take note that a pod is being bound."""
        if (known := self._line.get(uid)) is not None:
            known.is_served = True

    def reserving(self, uid: PodUid, job: JobUid) -> None:
        """Count a pod no more as if it had what it was told: it is decided what is reserved for it."""
        if (kept := self._kept.of(job)) is not None:
            self._kept.count_no_more(kept, uid)

    def reserved(self, uid: PodUid, job: JobUid, gpus: set[Gpu]) -> None:
        """Keep the GPUs of a pod no more: its reservation counts from now on."""
        if (kept := self._kept.of(job)) is None:
            return
        kept.told.pop(uid, None)
        if not kept.told and kept.to_come <= 0 and all(one.is_served for one in self._line.of_job(job)):
            self._kept.drop(kept, "taken")
            return
        self._kept.serve(kept, uid)
        if kept.to_come <= 0:
            self._kept.release(kept, gpus.difference(*kept.told.values()))

    def unbound(self, uid: PodUid) -> None:
        """Take note that a pod could not be bound."""
        if (known := self._line.get(uid)) is not None:
            known.is_served = False

    def _gpus(self, applicant: Applicant, node: str) -> set[Gpu]:
        """Return which GPUs of a node somebody would have."""
        chosen = place(self._assessments.of(applicant), node, tells=False)
        return set() if isinstance(chosen, str) else {(node, gpu) for gpu in chosen.gpu_uuids}

    def _refused(self, known: Waiting, said: str) -> str:
        for kept in self._kept:
            kept.has_refused = True
        if not len(self._kept) or len(self._line) < MANY:
            known.said = said
        return known.said or said

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or (new is not None and not new.is_finished and not new.spec.node_name):
            return
        uid, owner = PodUid(pod.metadata.uid), job_reference(pod.metadata)
        waited, job = self._line.leave(uid) is not None, JobUid("" if owner is None else owner.uid)
        kept, is_bound = self._kept.of(job), new is not None and not new.is_finished
        if is_bound:
            self._kept.bound(job)
        if kept is None or not (waited or uid in kept.told or not pod.spec.node_name):
            return
        self._kept.retract(kept, uid)
        if not (kept.told or (is_bound and kept.to_come > 0) or any(True for _ in self._line.of_job(kept.job))):
            self._kept.drop(kept, "gone")
