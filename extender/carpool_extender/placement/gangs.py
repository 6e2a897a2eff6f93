"""Whether all workers of a job would find places: asked before its first one gets one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobUid, PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessment, Assessments
from carpool_extender.placement.ever import workers_ever
from carpool_extender.placement.modes import EXCLUSIVE
from carpool_extender.placement.paper import placed
from carpool_extender.placement.refusal import PREFIX, counted
from carpool_extender.placement.rules import Rules
from carpool_extender.state.cluster import Cluster
from carpool_extender.state.view import MODES, Rows

MOST_TRIED = 128
"""Workers that are placed on paper one after the other. Of more the others are counted only: trying takes too long."""

MOST_KNOWN = 16
"""Trials that are remembered."""


class Seen(Protocol):
    """What has to be known of the cluster."""

    @property
    def cluster(self) -> Cluster:
        """The GPUs."""
        ...

    def succeeded(self, job_uid: JobUid) -> int:
        """How many pods of a job have done their work."""
        ...


class Room(NamedTuple):
    """For how many of some workers there is room at once."""

    workers: int
    is_certain: bool = True
    """Whether that is certain; otherwise there is no more room than that, by memory and slots alone."""

    def __str__(self) -> str:
        return f"{self.workers:,}{'' if self.is_certain else ' at most'}"


class Gangs:
    """Keeps a job from getting some of its places while there is no room for the others.

    Args:
        seen: What is known of the cluster.
        assessments: What is known of demands.
        rules: What the site has chosen.
    """

    def __init__(self, seen: Seen, assessments: Assessments, rules: Rules) -> None:
        self._seen, self._assessments, self._rules = seen, assessments, rules
        self._known: dict[tuple[int, bytes, int, bytes], int] = {}

    def refusal(
        self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None = None, *, thorough: bool = False
    ) -> str | None:
        """Say why a pod has to wait until all of its job's workers fit; None where it need not.

        Args:
            applicant: What each worker demands.
            pod_uid: The pod that asks.
            offered: The nodes in question; all when None.
            thorough: Whether to find out for how many there is room, which takes longer.
        """
        demand = applicant.demand
        wanted, found = self._asked(applicant, pod_uid, offered)
        if found.workers >= wanted:
            return None
        if thorough:
            found = self.tried(applicant, wanted, offered)
        most = self.most_ever(applicant)
        found = found._replace(workers=min(found.workers, most))
        ever = f", and for {most:,} at most if all GPUs were empty" if most < wanted else ""
        return (
            f"{PREFIX}job {demand.namespace}/{demand.job_name} needs places for {counted(wanted, 'worker')} of "
            f"{counted(demand.gpus, 'GPU')} at once, there is room for {found}{ever}; none starts before all can"
        )

    def waits(self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None = None) -> bool:
        """Whether a pod has to wait, as `refusal` would say."""
        wanted, found = self._asked(applicant, pod_uid, offered)
        return found.workers < wanted

    def _asked(self, applicant: Applicant, pod_uid: PodUid, offered: Sequence[str] | None) -> tuple[int, Room]:
        """Return how many workers have to find places at once, and for how many there is room.

        Once a worker has its place the others take what there is: the job's gang is then the operator's to look after.
        """
        uid = applicant.demand.job_uid
        if applicant.workers == 1 or self._seen.cluster.pods_of(uid) - {pod_uid}:
            return 0, Room(0)
        wanted = applicant.workers - self._seen.succeeded(uid)
        return wanted, self.room_for(applicant, wanted, offered)

    def most_ever(self, applicant: Applicant) -> int:
        """Say for how many workers there is memory and places on all nodes if their GPUs are empty and healthy."""
        return workers_ever(self._assessments.of(applicant).verdict, self._rules.slots)

    def tried(self, applicant: Applicant, wanted: int, offered: Sequence[str] | None) -> Room:
        """Say the same as `room_for`, but place workers on paper also where there is no room for all of them."""
        found = self.room_for(applicant, wanted, offered)
        if found.is_certain or found.workers == wanted:
            return found
        return self.room_for(applicant, found.workers, offered)

    def room_for(self, applicant: Applicant, wanted: int, offered: Sequence[str] | None) -> Room:
        """Say how many of some workers find a place, at most as many as are wanted; on all nodes if none are named.

        Workers are placed on paper, the first 128 of them, unless it is plain without that there is room or none.
        """
        assessment = self._assessments.of(applicant)
        rows = _fitting(assessment, offered)
        apart = _sets_apart(assessment, rows)
        most = _most(assessment, rows, self._rules.slots) if apart < wanted and rows.size else apart
        if most == apart:
            return Room(min(apart, wanted))
        if most < wanted:
            return Room(most, is_certain=False)
        some = min(wanted, MOST_TRIED)
        found = some if apart >= some else self._placed(applicant, assessment, rows, some)
        return Room(found) if found < some or some == wanted else Room(wanted, is_certain=False)

    def _placed(self, applicant: Applicant, assessment: Assessment, rows: Rows, workers: int) -> int:
        """Place workers on paper on some GPUs; what came of it is remembered, for the job's other pods ask the same."""
        key = (self._seen.cluster.generation, applicant.shape, workers, rows.tobytes())
        if (known := self._known.get(key)) is not None:
            return known
        paper = Cluster(self._rules.slots)
        for node in self._on_paper(assessment, rows):
            paper.apply(node)
        found = len([*placed(paper, applicant, self._rules, workers, tells=False)])
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[key] = found
        return found

    def _on_paper(self, assessment: Assessment, rows: Rows) -> list[GpuNode]:
        """Return the nodes of some GPUs with nothing but these GPUs."""
        columns = assessment.verdict.view.columns
        uuids = set(columns.uuid[rows].tolist())
        found = []
        for number in np.unique(columns.node[rows]).tolist():
            node = self._seen.cluster.counted(assessment.verdict.view.node_names[number])
            if node is not None:
                devices = [device for device in node.status.devices if device.uuid in uuids]
                found.append(
                    msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, devices=devices))
                )
        return found


def _fitting(assessment: Assessment, offered: Sequence[str] | None) -> Rows:
    """Rows of the GPUs that would take a worker."""
    rows = np.flatnonzero(assessment.verdict.ok)
    if offered is None:
        return rows
    wanted = np.zeros(len(assessment.verdict.view.node_names) + 1, np.bool_)
    wanted[assessment.verdict.view.ids(offered)] = True
    wanted[-1] = False
    return rows[wanted[assessment.verdict.view.columns.node[rows]]]


def _sets_apart(assessment: Assessment, rows: Rows) -> int:
    """How many workers find GPUs that no other of them uses."""
    verdict = assessment.verdict
    gpus = verdict.applicant.demand.gpus
    if gpus == 1:
        return int(rows.size)
    team = verdict.view.columns.node[rows].astype(np.int64) * len(MODES) + verdict.found.mode[rows]
    return int((np.unique(team, return_counts=True)[1] // gpus).sum())


def _most(assessment: Assessment, rows: Rows, slots: int) -> int:
    """How many workers there is memory and places for, whatever else stands against it."""
    verdict = assessment.verdict
    columns = verdict.view.columns
    shared = np.minimum(columns.free_mib[rows] // verdict.need_mib(rows), slots - columns.count[rows])
    each = np.where(verdict.found.mode[rows] == EXCLUSIVE, 1, shared)
    return int(each.sum()) // verdict.applicant.demand.gpus
