"""Whether all workers of a job would find places: asked before its first one gets one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import numpy as np
from carpool_core.values import GpuUuid, JobUid, PodUid
from numpy.typing import NDArray

from carpool_extender.cache.cluster import Cluster
from carpool_extender.cache.gpu_table import MODES, NO_MODE, NOBODY, Bools, Rows, View, grid_of, work_out
from carpool_extender.cache.pod_request import Applicant
from carpool_extender.framework.candidates import select
from carpool_extender.framework.diagnosis import PREFIX, counted
from carpool_extender.framework.evaluation_cache import Assessment, Assessments
from carpool_extender.framework.filters import Verdict, look
from carpool_extender.framework.scheduler_config import Rules
from carpool_extender.framework.scores import Policy
from carpool_extender.framework.selection import Place, best_place, reservation
from carpool_extender.framework.sharing_mode import EXCLUSIVE, MIG
from carpool_extender.reservations import ledger


def room(assessment: Assessment, rows: Rows, wanted: int) -> int:
    """Say how many workers would find a place at once, at most as many as are wanted.

    Args:
        assessment: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.
    """
    apart = _sets_apart(assessment.verdict, rows)
    return wanted if apart >= wanted else len(places_for(assessment, rows, wanted))


def places_for(assessment: Assessment, rows: Rows, wanted: int) -> Rows:
    """Find places for as many workers at once as there are, or there is room for.

    Workers meet on GPUs, and those of several GPUs on nodes. So each GPU, or each node, takes one more of them on paper
    at the same time, until none does: as many rounds as one of them takes workers, where workers that are placed one
    after the other are many more. Neighbours count with what they were measured to do before anybody joined.

    Args:
        assessment: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.

    Returns:
        GPUs of each worker by their rows, shape (workers, GPUs of each), in each round the best first.
    """
    paper, wanted_gpus = _on_paper(assessment.verdict, rows), assessment.verdict.applicant.demand.gpus
    found, rounds = 0, [np.zeros((0, wanted_gpus), np.intp)]
    while found < wanted:
        taken = _taken(paper, assessment.policy)
        if not taken.size:
            break
        found += len(taken)
        rounds.append(rows[taken])
        if found < wanted:
            _join(paper, taken.ravel())
            paper.found = look(paper, paper.view.columns)
    return np.concatenate(rounds)[:wanted]


def _sets_apart(verdict: Verdict, rows: Rows) -> int:
    """How many workers find GPUs that no other of them uses."""
    gpus = verdict.applicant.demand.gpus
    if gpus == 1:
        return int(rows.size)
    team = verdict.view.columns.node[rows].astype(np.int64) * len(MODES) + verdict.found.mode[rows]
    return int((np.unique(team, return_counts=True)[1] // gpus).sum())


def _on_paper(verdict: Verdict, rows: Rows) -> Verdict:
    """Copy some GPUs, with what was found of them."""
    columns = verdict.view.columns.take(rows)
    view = replace(verdict.view, columns=columns, grid=grid_of(columns.alive, columns.node))
    return replace(verdict, view=view, found=verdict.found.of(rows))


def _taken(paper: Verdict, policy: Policy) -> Rows:
    """Return the GPUs of one more worker on each GPU that takes one, or each node, shape (workers, GPUs of each)."""
    if paper.applicant.demand.gpus > 1:
        choices = select(paper, policy)
        return choices.rows[np.argsort(choices.cost, kind="stable")]
    able = np.flatnonzero(paper.ok)
    return able[np.argsort(policy.cost(paper, able), kind="stable")][:, None]


def _join(paper: Verdict, rows: Rows) -> None:
    """Write a worker beside the tenants of some GPUs, as far as the next one of the same job looks at it."""
    columns, (facts, _, _, need_mib), demand = paper.view.columns, paper.openings, paper.applicant.demand
    of, mode, place = columns.device_class[rows], paper.found.mode[rows], columns.count[rows]
    columns.memory_mib[rows, place] = need_mib.take(columns.kind[rows])
    columns.util[rows, place] = facts.util[of]
    columns.sm[rows, place] = facts.sm[of]
    columns.dram[rows, place] = facts.dram[of]
    columns.max_slowdown[rows, place] = demand.max_slowdown
    columns.namespace[rows, place] = paper.view.namespaces.get(demand.namespace, NOBODY)
    instances = mode == MIG
    columns.mig_gb[rows[instances]] += facts.mig[of[instances], 0]
    columns.mig_slices[rows[instances]] += facts.mig[of[instances], 1]
    columns.mode[rows] = mode
    columns.count[rows] += 1
    work_out(columns, rows)


def never_fits(verdict: Verdict, slots: int, workers: int) -> str | None:
    """Say why so many workers could not even run on empty GPUs; None where nothing known forbids it.

    Args:
        verdict: Of one of them.
        slots: Most tenants of one GPU.
        workers: How many there are.
    """
    gpus, columns = verdict.applicant.demand.gpus, verdict.view.columns
    able = np.flatnonzero(verdict.could_ever())
    able = able[_of_classes(verdict, slots).take(columns.device_class.take(able)) > 0]
    most = int(np.bincount(columns.node[able], minlength=1).max())
    if most and most < gpus:
        return f"needs {gpus} suitable GPUs on one node, the best node has {most}"
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if (room := workers_ever(verdict, slots)) < workers:
        return f"needs places for {counted(workers, 'worker')} at once, and empty GPUs would have {room:,} at most"
    return None


def workers_ever(verdict: Verdict, slots: int) -> int:
    """Say for how many workers there would be room at most: how they get along is left out, and health."""
    columns, gpus = verdict.view.columns, verdict.applicant.demand.gpus
    able = np.flatnonzero(verdict.could_ever())
    each = _of_classes(verdict, slots).take(columns.device_class.take(able))
    if gpus == 1:
        return int(each.sum())
    nodes, has_room = columns.node.take(able), each > 0
    on_node = np.where(np.bincount(nodes, has_room) >= gpus, np.bincount(nodes, each) // gpus, 0)
    return int(on_node.sum())


def _of_classes(verdict: Verdict, slots: int) -> NDArray[np.int64]:
    """Say how many workers a GPU of each class takes at most, in whichever mode takes most, shape (classes,)."""
    openings, most_jobs = verdict.openings, verdict.conditions.most_jobs
    usable = np.array([kind.usable_mib for kind in verdict.view.classes], np.int64)[:, None]
    held = usable // np.maximum(openings.need_mib, 1)
    of_mig = openings.facts.mig.astype(np.int64)
    instances = (of_mig[:, 2:] // np.maximum(of_mig[:, :2], 1)).min(axis=1)[:, None]
    most = np.where(openings.mode == MIG, instances, held)
    most = np.clip(most, 1, slots if most_jobs is None else min(slots, most_jobs))  # one: they are suitable
    most = np.where(openings.mode == EXCLUSIVE, 1, most)
    result: NDArray[np.int64] = np.where(openings.mode == NO_MODE, 0, most).max(axis=1, initial=0)
    return result


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


_NO_TIME = datetime.fromtimestamp(0, UTC)
"""Of reservations that exist on paper only."""


def placed(
    cluster: Cluster,
    applicant: Applicant,
    rules: Rules,
    wanted: int,
    *,
    among: Callable[[View], Bools] | None = None,
    tells: bool = True,
) -> Iterator[tuple[str, Place]]:
    """Place workers as they would be, until so many are or there is room for no more.

    Args:
        cluster: Each place is reserved there before the next one is looked for.
        applicant: What each worker demands.
        rules: What the site has chosen.
        wanted: How many workers.
        among: Says before each which GPUs are in question, shape (gpus,); all when None.
        tells: Whether the places say why they are the best.

    Yields:
        The node's name and the place.
    """
    for number in range(wanted):
        view = cluster.view()
        found = best_place(Assessment(applicant, rules, view), None if among is None else among(view), tells=tells)
        if found is None:
            return
        node = cluster.nodes[found[0]]
        one = reservation(found[1], applicant, PodUid(f"worker-{number}"), "", now=_NO_TIME, deadline=_NO_TIME)
        spec = ledger.reserve(node.spec, one, ledger.capacity_of(node, rules.slots))
        if isinstance(spec, ledger.Rejected):
            return
        cluster.apply(msgspec.structs.replace(node, spec=spec))
        yield found
