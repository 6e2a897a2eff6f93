"""Keeps places for a moment for those whose turn it is."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Reservation
from carpool_core.values import PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.kube.workloads import too_many
from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessment, Assessments
from carpool_extender.placement.decide import Place, best_place, place, reservation
from carpool_extender.placement.gangs import Gangs
from carpool_extender.placement.queueing import Ticket
from carpool_extender.placement.refusal import PREFIX
from carpool_extender.serving.line import Line, Waiting
from carpool_extender.state.view import Bools
from carpool_extender.telemetry import Telemetry

PATIENCE_S = 3.0
"""How long a place is kept: kube-scheduler sits out a backoff of 2 s at most before it asks about a pod again."""
EACH_S = 0.01
"""So much longer for each pod that waits: it asks about one after the other."""
REMINDED_S = 1.0
"""After this time kube-scheduler is reminded: what made room may have gone unheard."""
LOOK_S = 0.5
"""How often that is looked at."""
MOST_KINDS = 8
"""Demands that are tried before somebody goes ahead of them: each takes a while."""
MOST_KEPT = 64
"""Places that are kept at a time. Where there is room for so many, it hardly matters who comes first."""
MOST_NAMED = 3
"""Jobs that a refusal names."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A place that counts as taken until its pod is asked about."""

    owner: Waiting
    node: str
    reserved: Reservation
    since_s: float
    is_reminded: bool = False
    has_refused: bool = False
    """Whether anybody was refused meanwhile, who has to hear of it if the place is not taken."""

    def is_where(self, other: "_Kept | None") -> bool:
        """Whether another place is the same one."""
        return other is not None and other.reserved.gpu_uuids == self.reserved.gpu_uuids


class Keeper:
    """Serves those that wait in their order, which kube-scheduler does not.

    Its queue goes by the time of the last try, so that each refusal puts a pod behind all others of its priority. When
    something becomes free, it tries them all, in that order. So before somebody gets a place, it is looked who comes
    before it and would find one, too: to these their places are kept until they are asked about, and whoever finds none
    besides is refused for the moment. Nobody is waited for: what fits none of those before it goes to whom it fits.

    A pod may be held up by what the extender does not know, such as a taint, or too little memory of the node. It is
    not asked about then, or another node is offered, and its place is given to others after a moment.

    Args:
        line: Those that wait.
        watches: Tell of pods that are bound or gone.
        assessments: Where places are found.
        gangs: Whether all workers of a job would find one.
        clock: The time.
        sleep: Waits.
        telemetry: Counts what is kept.
        remind: Has kube-scheduler try those that wait, because of a node.
    """

    def __init__(
        self,
        line: Line,
        watches: Watches,
        *,
        assessments: Assessments,
        gangs: Gangs,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        telemetry: Telemetry,
        remind: Callable[[str], None],
    ) -> None:
        self._line, self._watches, self._assessments, self._gangs = line, watches, assessments, gangs
        self._clock, self._sleep, self._telemetry, self._remind = clock, sleep, telemetry, remind
        self._kept: dict[PodUid, _Kept] = {}
        self._stirred = asyncio.Event()
        watches.on_pod(self._pod_changed)

    async def run(self) -> None:
        """Look after places that are kept for long, for ever."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._kept:
                await self._sleep(LOOK_S)
                self._look()

    def asked(self, pod: Pod, applicant: Applicant, offered: Sequence[str]) -> None:
        """Have what is kept for a pod and its job count no more: it is decided about them now, until `answered`."""
        for kept in self._of(applicant):
            self._watches.cluster.assume_no_more(kept.node, kept.owner.uid)
        if self._line.get(PodUid(pod.metadata.uid)) is not None:
            known = self._line.join(pod, applicant)
            known.is_passed = known.is_served = False
            if known.without:
                self._line.shun(known, known.without.difference(offered))

    def first(self, pod: Pod, applicant: Applicant) -> str | None:
        """Keep places for those that come before a pod and would find one; say so, or None where nobody does."""
        if not len(self._line) or pod.metadata.uid in self._kept:  # its turn has come already
            return None
        ticket, jobs, out = self._line.ticket(pod, applicant), dict[str, None](), set[Hashable]()
        while len(self._kept) < MOST_KEPT and (found := self._next(ticket, applicant, out)) is not None:
            owner, (node, chosen) = found
            self._keep(owner, node, chosen)
            self._line.advance()
            jobs[f"{owner.applicant.demand.namespace}/{owner.applicant.demand.job_name}"] = None
        if not jobs:
            return None
        more = [f"{len(jobs) - MOST_NAMED} more"] if len(jobs) > MOST_NAMED else []
        return (
            f"{PREFIX}what is free goes first to whoever comes before it: {', '.join([*jobs][:MOST_NAMED] + more)}; "
            "it is tried again once they have their places"
        )

    def answered(self, pod: Pod, applicant: Applicant, nodes: Sequence[str]) -> None:
        """Take note of which nodes a pod was told, the best first; none where it was refused."""
        uid = PodUid(pod.metadata.uid)
        before = self._dropped(uid)
        for kept in self._of(applicant):
            self._watches.cluster.assume(kept.node, kept.reserved)
        if nodes:
            self._hold(uid, nodes[0])
            if before is None:
                self._line.advance()
        else:
            owner = self._line.join(pod, applicant)
            if before is not None:
                self._line.shun(owner, owner.without | {before.node})
            for kept in self._kept.values():
                kept.has_refused = True
        if before is not None and before.has_refused and not before.is_where(self._kept.get(uid)):
            self._remind(before.node)

    def _hold(self, uid: PodUid, node: str) -> None:
        """Keep the place on a node that a waiting pod was told, until it is reserved."""
        if (known := self._line.get(uid)) is not None:
            chosen = place(self._assessments.of(known.applicant), node, tells=False)
            if not isinstance(chosen, str):
                self._keep(known, node, chosen)

    def reserving(self, uid: PodUid) -> None:
        """Have what is kept for a pod count no more, because its reservation does from now on."""
        if (known := self._line.get(uid)) is None:
            return
        known.is_served = True
        if uid in self._kept:
            self._telemetry.place_kept("taken")
        # Those of its job, too: whether all of its workers fit is asked once more, with the room that there is.
        for kept in self._of(known.applicant):
            self._watches.cluster.assume_no_more(kept.node, kept.owner.uid)
            self._dropped(kept.owner.uid)

    def _of(self, applicant: Applicant) -> list[_Kept]:
        """Return what is kept for a job."""
        job = applicant.demand.job_uid
        return [kept for kept in self._kept.values() if kept.owner.job == job] if self._kept else []

    def _next(
        self, ticket: Ticket, applicant: Applicant, out: set[Hashable]
    ) -> tuple[Waiting, tuple[str, Place]] | None:
        """Return the first before somebody that would find a place, and where; `out` are kinds that find none."""
        for one in self._line.before(ticket):
            if one.kind in out or one.job == applicant.demand.job_uid:  # its own workers do not stand in its way
                continue
            if len(out) == MOST_KINDS:
                return None
            if (found := self._place_for(one)) is not None:
                return one, found
            out.add(one.kind)
        return None

    def _place_for(self, one: Waiting) -> tuple[str, Place] | None:
        cluster, applicant = self._watches.cluster, one.applicant
        if too_many(applicant, one.uid, cluster.pods_of(one.job)) is not None:
            return None
        if not self._of(applicant) and self._gangs.refusal(applicant, one.uid) is not None:
            return None
        assessment = self._assessments.of(applicant)
        if not assessment.best.fits.any():
            return None
        return best_place(assessment, _elsewhere(assessment, one.without), tells=False)

    def _keep(self, owner: Waiting, node: str, chosen: Place) -> None:
        now = self._clock.now()
        reserved = reservation(chosen, owner.applicant, owner.uid, owner.name, now=now, deadline=now)
        self._watches.cluster.assume(node, reserved)
        self._kept[owner.uid] = _Kept(owner, node, reserved, self._clock.monotonic())
        owner.is_kept = True
        self._stirred.set()

    def _dropped(self, uid: PodUid) -> _Kept | None:
        if (kept := self._kept.pop(uid, None)) is not None:
            kept.owner.is_kept = False
        return kept

    def _look(self) -> None:
        now = self._clock.monotonic()
        patience_s = PATIENCE_S + EACH_S * len(self._line)
        for uid, kept in list(self._kept.items()):
            if now - kept.since_s >= patience_s:
                kept.owner.is_passed = True
                self._give_up(uid, "passed")
                if self._watches.pod(uid) is None:
                    self._line.leave(uid)  # it was asked about when it was gone already
            elif now - kept.since_s >= REMINDED_S and not kept.is_reminded:
                kept.is_reminded = True
                self._remind(kept.node)

    def _give_up(self, uid: PodUid, outcome: str) -> None:
        if (kept := self._dropped(uid)) is None:
            return
        self._watches.cluster.assume_no_more(kept.node, uid)
        self._telemetry.place_kept(outcome)
        if kept.has_refused:
            self._remind(kept.node)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or (new is not None and not new.is_finished and not new.spec.node_name):
            return
        uid = PodUid(pod.metadata.uid)
        self._give_up(uid, "gone")
        self._line.leave(uid)


def _elsewhere(assessment: Assessment, without: frozenset[str]) -> Bools | None:
    """Return which GPUs are not on some nodes, shape (gpus,); None where these are none."""
    if not without:
        return None
    view = assessment.verdict.view
    found: Bools = ~np.isin(view.columns.node, view.ids([*without]))
    return found
