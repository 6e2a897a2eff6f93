"""Whether all workers of a job would find places: asked before its first one gets one."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from carpool_core.values import GpuUuid, JobUid, PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessment, Assessments
from carpool_extender.placement.ever import workers_ever
from carpool_extender.placement.refusal import PREFIX, counted
from carpool_extender.placement.room import places_for, room
from carpool_extender.placement.rules import Rules
from carpool_extender.state.cluster import Cluster
from carpool_extender.state.view import Rows


class Seen(Protocol):
    """What has to be known of the cluster."""

    @property
    def cluster(self) -> Cluster:
        """The GPUs."""
        ...

    def succeeded(self, job_uid: JobUid, pod_uid: PodUid) -> int:
        """How many pods of a job have done their work in the attempt that one of them is of."""
        ...


class Gangs:
    """Keeps a job from getting some of its places while there is no room for the others.

    Args:
        seen: What is known of the cluster.
        assessments: What is known of demands.
        rules: What the site has chosen.
    """

    def __init__(self, seen: Seen, assessments: Assessments, rules: Rules) -> None:
        self._seen, self._assessments, self._rules = seen, assessments, rules

    def refusal(self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None = None) -> str | None:
        """Say why a pod has to wait until all of its job's workers fit; None where it need not.

        Args:
            applicant: What each worker demands.
            pod_uid: The pod that asks.
            offered: The nodes in question; all when None.
        """
        demand = applicant.demand
        wanted, found = self._asked(applicant, pod_uid, offered)
        if found >= wanted:
            return None
        most = workers_ever(self._assessments.of(applicant).verdict, self._rules.slots)
        ever = f", and for {most:,} at most if all GPUs were empty" if most < wanted else ""
        return (
            f"{PREFIX}job {demand.namespace}/{demand.job_name} needs places for {counted(wanted, 'worker')} of "
            f"{counted(demand.gpus, 'GPU')} at once, there is room for {found:,}{ever}; none starts before all can"
        )

    def waits(self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None = None) -> bool:
        """Whether a pod has to wait, as `refusal` would say."""
        wanted, found = self._asked(applicant, pod_uid, offered)
        return found < wanted

    def wanted(self, applicant: Applicant, pod_uid: PodUid) -> int:
        """How many workers of the job that a pod is of have not done their work."""
        return applicant.workers - self._seen.succeeded(applicant.demand.job_uid, pod_uid)

    def _asked(self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None) -> tuple[int, int]:
        """Return how many workers have to find places at once, and for how many there is room.

        Once a worker has its place the others take what there is: the job's gang is then the operator's to look after.
        """
        if applicant.workers == 1 or self._seen.cluster.pods_of(applicant.demand.job_uid) - {pod_uid}:
            return 0, 0
        wanted = self.wanted(applicant, pod_uid)
        return wanted, self.room_for(applicant, wanted, offered)

    def room_for(self, applicant: Applicant, wanted: int, offered: Sequence[str] | None) -> int:
        """Say how many of some workers find a place, at most as many as are wanted; on all nodes if none are named."""
        assessment = self._assessments.of(applicant)
        return room(assessment, _fitting(assessment, offered), wanted)

    def gpus_for(self, applicant: Applicant, wanted: int, offered: Sequence[str] | None) -> set[tuple[str, GpuUuid]]:
        """Return GPUs, each with its node's name, on which some workers would find places, or as many of them as do."""
        assessment = self._assessments.of(applicant)
        view = assessment.verdict.view
        rows = np.unique(places_for(assessment, _fitting(assessment, offered), wanted))
        nodes = [view.node_names[number] for number in view.columns.node[rows].tolist()]
        return set(zip(nodes, view.columns.uuid[rows].tolist(), strict=True))


def _fitting(assessment: Assessment, offered: Sequence[str] | None) -> Rows:
    """Rows of the GPUs that would take a worker."""
    rows = np.flatnonzero(assessment.verdict.ok)
    if offered is None:
        return rows
    wanted = np.zeros(len(assessment.verdict.view.node_names) + 1, np.bool_)
    wanted[assessment.verdict.view.ids(offered)] = True
    wanted[-1] = False
    return rows[wanted[assessment.verdict.view.columns.node[rows]]]
