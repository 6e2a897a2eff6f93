"""What pods were told, until it is reserved."""

from collections.abc import Sequence

from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod
from carpool_core.values import PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessments
from carpool_extender.placement.decide import place, reservation
from carpool_extender.placement.gangs import Gangs
from carpool_extender.reservations.kept import Gpu, Kept, KeptGpus
from carpool_extender.reservations.line import Line
from carpool_extender.state.cluster import Cluster


class Promises:
    """Keeps GPUs for those that were told a place there, and for the other workers of their job.

    Most pods are the only one of their job, and neither waited for their place nor took it from others: for such a pod
    nothing is kept. Should another reserve its GPUs first, it is served again as quickly.

    Args:
        line: Those that wait.
        cluster: Counts what workers were told.
        kept: What is kept.
        assessments: Where places are found.
        gangs: Where all workers of a job would find one.
        clock: The time.
    """

    def __init__(
        self, line: Line, cluster: Cluster, kept: KeptGpus, *, assessments: Assessments, gangs: Gangs, clock: Clock
    ) -> None:
        self._line, self._cluster, self._kept = line, cluster, kept
        self._assessments, self._gangs, self._clock = assessments, gangs, clock

    def give(self, pod: Pod, applicant: Applicant, node: str, *, later: Sequence[Kept], offered: Sequence[str]) -> None:
        """Keep what a pod was told.

        Args:
            pod: The pod.
            applicant: What it demands.
            node: Where it was told to go.
            later: What is kept for those that come after it.
            offered: The nodes in question.
        """
        uid, job = PodUid(pod.metadata.uid), applicant.demand.job_uid
        is_gang = applicant.workers > 1 and not self._kept.is_in_vain(job)
        is_due = is_gang or self._line.get(uid) is not None
        if not is_due and not later:
            return
        chosen = place(self._assessments.of(applicant), node, tells=False)
        if isinstance(chosen, str):
            return
        gpus = {(node, gpu) for gpu in chosen.gpu_uuids}
        if not is_due and not any(kept.gpus & gpus for kept in later):
            return
        known = self._kept.of(job)
        is_foreseen = known is not None and known.to_come > 0
        kept = self._kept.add(job, self._line.ticket(pod, applicant), gpus)
        kept.told[uid] = gpus
        if is_gang:
            now = self._clock.now()
            told = reservation(chosen, applicant, uid, pod.metadata.name, now=now, deadline=now)
            self._kept.count(kept, node, told)
            kept.to_come = self._gangs.wanted(applicant, uid) - len(self._cluster.pods_of(job))
            if kept.to_come <= 0 or not is_foreseen:
                self._keep_for_others(kept, applicant, offered)

    def _keep_for_others(self, kept: Kept, applicant: Applicant, offered: Sequence[str]) -> None:
        """Keep GPUs for the workers of a job that were not told a place yet, now that one was."""
        self._kept.open(kept)
        others = self._gangs.gpus_for(applicant, kept.to_come, offered) if kept.to_come > 0 else set[Gpu]()
        self._kept.change(kept, others.union(*kept.told.values()))
