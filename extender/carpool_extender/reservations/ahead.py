"""Who of those that wait comes before somebody, and would find a place."""

from collections.abc import Hashable

from carpool_core.values import JobUid

from carpool_extender.kube.workloads import too_many
from carpool_extender.placement.assessments import Assessments
from carpool_extender.placement.decide import best_place
from carpool_extender.placement.gangs import Gangs
from carpool_extender.placement.queueing import Ticket
from carpool_extender.reservations.kept import Gpu, KeptGpus
from carpool_extender.reservations.line import Line, Waiting
from carpool_extender.reservations.offers import among, names
from carpool_extender.state.cluster import Cluster

MOST_KINDS = 8
"""Demands that are tried before somebody goes ahead of them: each takes a while."""
MOST_KEPT = 32
"""GPUs that are kept at a time. Where there is room for so many, it hardly matters who comes first."""


class Ahead:
    """Keeps GPUs for those that come first.

    Args:
        line: Those that wait.
        cluster: The GPUs.
        kept: What is kept.
        assessments: Where places are found.
        gangs: Where all workers of a job would find one.
    """

    def __init__(self, line: Line, cluster: Cluster, kept: KeptGpus, assessments: Assessments, gangs: Gangs) -> None:
        self._line, self._cluster, self._kept = line, cluster, kept
        self._assessments, self._gangs = assessments, gangs

    def _is_due(self, one: Waiting) -> bool:
        """Whether others look after it: not if it is served already, or could not have a place if there were one."""
        if one.is_passed or one.is_served or one.job in self._kept:
            return False
        return too_many(one.applicant, one.uid, self._kept.holders(one.job)) is None

    def keep_for_next(self, ticket: Ticket, job: JobUid, out: set[Hashable]) -> bool:
        """Keep GPUs for the first before somebody that would find a place, and say whether there was one.

        Args:
            ticket: Of whoever asks.
            job: Its job, whose other pods are not in its way.
            out: Kinds that find none.
        """
        if sum(len(kept.gpus) for kept in self._kept if not self._kept.has_begun(kept)) >= MOST_KEPT:
            return False
        for one in self._line.before(ticket, lambda other: other.job != job and self._is_due(other)):
            if one.kind in out:
                continue
            if len(out) == MOST_KINDS:
                return False
            if self._keep_for(one):
                return True
            out.add(one.kind)
        return False

    def _keep_for(self, one: Waiting) -> bool:
        """Keep GPUs for the pods of a job that wait, if all would find a place."""
        offered = names(self._cluster.view(), one.offered)
        if self._gangs.waits(one.applicant, one.uid, offered):
            return False
        mates = [mate for mate in self._line.of_job(one.job) if not (mate.is_passed or mate.is_served)]
        gpus = self._gangs.gpus_for(one.applicant, len(mates), offered) if len(mates) > 1 else self._best_for(one)
        if gpus:
            self._kept.add(one.job, one.ticket, gpus)
        return bool(gpus)

    def _best_for(self, one: Waiting) -> set[Gpu]:
        assessment = self._assessments.of(one.applicant)
        if not assessment.best.fits.any():
            return set()
        chosen = best_place(assessment, among(assessment.verdict.view, one.offered), tells=False)
        return set() if chosen is None else {(chosen[0], gpu) for gpu in chosen[1].gpu_uuids}

    def is_anybody_next(self) -> bool:
        """Whether anybody of those that wait would find a place now, as far as a few of them tell."""
        heads = self._line.before(None, self._is_due)[:MOST_KINDS]
        return any(self._assessments.of(one.applicant).best.fits.any() for one in heads)
