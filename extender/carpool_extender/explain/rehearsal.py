"""Places a job's workers on paper, one after the other, as kube-scheduler and the extender would together."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
from carpool_core.values import GpuUuid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Bools, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.changes import needed
from carpool_extender.explain.paperroom import PaperRoom
from carpool_extender.explain.paperwork import Case
from carpool_extender.explain.ranking import ranked
from carpool_extender.explain.speed import pace_there
from carpool_extender.framework.diagnosis import PREFIX, pluralize
from carpool_extender.framework.evaluation_cache import CachedEvaluation, EvaluationCache
from carpool_extender.framework.gang import Gangs, Seen, infeasible_when_empty, place_workers
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import Placement, filter_nodes

MOST_TRIED = 128
"""Workers that are placed on paper one after the other: it takes a while, and nobody reads of more."""


class Offering(Protocol):
    """Which nodes kube-scheduler would offer."""

    @property
    def notes(self) -> Sequence[str]:
        """What of that was not checked, as sentences."""
        ...

    def refusal(self, node: str) -> str | None:
        """Say why a node would not be offered; None where nothing known forbids it."""
        ...

    def take(self, node: str) -> None:
        """Count a worker on a node."""
        ...


class Rehearsal:
    """What would become of a job's workers.

    Args:
        seen: The cluster; workers are placed in it on paper, so ask for the rest before.
        pod_request: What each worker asks for.
        rules: What the site has chosen.
        offers: Which nodes kube-scheduler would offer.
        steps: Of the job's training; None where nobody said.

    Attributes:
        pod_request: What each worker asks for.
        wanted: Workers that need a place: those that have none there, and have not done their work.
        refused: Why nodes would not be offered, by name.
        unchecked: What was not checked, as sentences; stands right below what would become of the workers.
    """

    def __init__(
        self, seen: Seen, pod_request: PodRequest, rules: SchedulerConfig, offers: Offering, steps: int | None = None
    ) -> None:
        self.pod_request = pod_request
        job_uid = pod_request.demand.job_uid
        placed_or_done = seen.succeeded(job_uid, PodUid("")) + len(seen.cluster.pods_of_job(job_uid))
        self.wanted = max(0, pod_request.workers - placed_or_done)
        self.unchecked = list(offers.notes)
        self._seen, self._rules, self._offers, self._steps = seen, rules, offers, steps
        self.refused = {name: why for name in seen.cluster.nodes if (why := offers.refusal(name)) is not None}

    def gang(self) -> str | None:
        """Say why all of the job's workers have to wait until they all fit; None where they need not."""
        gangs = Gangs(self._seen, EvaluationCache(self._seen.cluster, self._rules), self._rules)
        return gangs.refusal(self.pod_request, PodUid(""), self._names_offered())

    def never(self) -> str | None:
        """Say why the workers could not run even if all GPUs were empty; None where nothing known forbids it."""
        evaluation = CachedEvaluation(self.pod_request, self._rules, self._seen.cluster.snapshot()).evaluation
        return infeasible_when_empty(evaluation, self._rules.slots, self.wanted)

    def ranked(self) -> list[str]:
        """Say which places the policy has to choose from for a worker, and why it takes the first of them."""
        snapshot = self._seen.cluster.snapshot()
        return ranked(CachedEvaluation(self.pod_request, self._rules, snapshot), self._offered(snapshot))

    def changes(self, *, of_all: bool = False) -> list[str]:
        """Say what would have to change for a place, of those of a job that find none now.

        Args:
            of_all: Whether all of them have to find one at once.
        """
        snapshot, cluster = self._seen.cluster.snapshot(), self._seen.cluster
        case = Case(self.pod_request, self._rules, snapshot, self._offered(snapshot), self.refused)
        if of_all:
            paper = partial(PaperRoom, cluster, self.pod_request, self._rules, self.wanted)
            case = replace(case, wanted=self.wanted, room=self._room, paper=paper)
        return needed(case)

    def _room(self, pod_request: PodRequest, rules: SchedulerConfig, wanted: int) -> int:
        gangs = Gangs(self._seen, EvaluationCache(self._seen.cluster, rules), rules)
        return gangs.room_for(pod_request, wanted, self._names_offered())

    def _names_offered(self) -> list[str]:
        return [name for name in sorted(self._seen.cluster.nodes) if name not in self.refused]

    def outcome(self) -> list[str]:
        """Say where the workers would go now, or that they would have to wait; and how that place was chosen."""
        if waits := self.gang():
            return [f"would have to wait now: {waits}", *self.unchecked, *self.changes(of_all=True)]
        choice, places = self.ranked(), self._places(self._seen.cluster)
        if not places:
            return [f"would have to wait now{self._why()}", *self.unchecked, *self.changes()]
        return [*self._go(places), *self.unchecked, *choice]

    def rest(self) -> list[str]:
        """Say the same of those workers of a job that have no place yet, where the others have theirs."""
        decided = f"decided now with policy {self._rules.policy_for(self.pod_request).name}"
        choice, places = self.ranked(), self._places(self._seen.cluster)
        if not places:
            they = "it" if self.wanted == 1 else "they"
            return [f"{decided} {they} would have to wait{self._why()}", *self.unchecked, *self.changes()]
        first, *others = self._go(places, numbered=False)
        return [f"{decided} {'it' if self.wanted == 1 else 'of these'} {first}", *others, *self.unchecked, *choice]

    def anew(self, own: Collection[frozenset[GpuUuid]]) -> list[str]:
        """Say the same of a job that has its places and keeps them, where the cluster is seen without it.

        Args:
            own: GPUs of each place that it has.
        """
        choice = self.ranked()
        told, is_placed = self._anew(own)
        return [*told, *self.unchecked, *(choice if is_placed else [])]

    def _anew(self, own: Collection[frozenset[GpuUuid]]) -> tuple[list[str], bool]:
        """Return what to say of that, and whether it would have a place that was chosen."""
        it = f"it keeps its place; decided now with policy {self._rules.policy_for(self.pod_request).name} it would"
        if len(own) != self.wanted:
            had, needed = pluralize(len(own), "place"), pluralize(self.wanted, "worker")
            why = "as until one that ended has given its own back"
            return [f"it has {had} for {needed}, {why}; they are not compared"], False
        if waits := self.gang():
            return [f"{it} have to wait: {waits}"], False
        places = self._places(self._seen.cluster)
        if not places:
            return [f"{it} have to wait{self._why()}"], False
        first, *others = self._go(places)
        if len(places) < min(self.wanted, MOST_TRIED):
            return [f"{it} not get all of them again: {first}", *others], True
        if self.wanted > MOST_TRIED:
            return [f"{it} get places, which are not compared: no more than {MOST_TRIED} workers are tried"], True
        if Counter(own) == Counter(frozenset(place.gpu_uuids) for _, place in places):
            return [f"{it} go there again"], True
        return [first.replace("would", it, 1) if not others else f"{it} go elsewhere: {first}", *others], True

    def _go(self, places: Sequence[tuple[str, Placement]], *, numbered: bool = True) -> list[str]:
        told = [self._told(*place) for place in places]
        if self.wanted == 1:
            return [f"would go to {told[0]}"]
        return [_of_several(len(places), min(self.wanted, MOST_TRIED), self.wanted), *_alike(told, numbered=numbered)]

    def _why(self) -> str:
        """Say why none of the nodes that kube-scheduler would offer has room for a worker, as it would be told."""
        offered = self._names_offered()
        if not offered:
            return ": kube-scheduler would offer none of the nodes"
        found = filter_nodes(CachedEvaluation(self.pod_request, self._rules, self._seen.cluster.snapshot()), offered)
        told = next(iter((found.refused | found.unsuitable).values()), "")
        return f": {told.removeprefix(PREFIX)}" if told else ""

    def _told(self, name: str, place: Placement) -> str:
        pace = pace_there(self.pod_request.demand, place, self._seen.cluster.nodes[name].status.devices, self._steps)
        return f"{name}{pace}: {place.reason}"

    def _places(self, cluster: ClusterCache) -> list[tuple[str, Placement]]:
        found, wanted = [], min(self.wanted, MOST_TRIED)
        for name, place in place_workers(cluster, self.pod_request, self._rules, wanted, among=self._offered):
            self._offers.take(name)
            if (why := self._offers.refusal(name)) is not None:
                self.refused[name] = why
            found.append((name, place))
        return found

    def _offered(self, snapshot: Snapshot) -> Bools:
        """Which GPUs, shape (gpus,), are on nodes that would be offered."""
        refused = snapshot.ids([*self.refused])
        able = np.ones(len(snapshot.node_names) + 1, np.bool_)
        able[refused[refused >= 0]] = False
        result: Bools = able[snapshot.gpus.node] & snapshot.gpus.alive
        return result


def _of_several(place_workers: int, tried: int, workers: int) -> str:
    if place_workers == workers:
        return f"all {workers} workers would get places now"
    if place_workers == tried:
        return f"the first {tried} of {workers} workers would get places now; more were not tried"
    others = pluralize(workers - place_workers, "worker")
    return f"only {place_workers} of {workers} workers would get places now; {others} would have to wait for theirs"


_GPUS = re.compile(r"(?<= on GPU )[0-9, ]+(?= of )")
"""In what is said of a place."""


def _alike(told: Sequence[str], *, numbered: bool) -> Iterator[str]:
    """Say where each worker would go; of those that differ by nothing but their GPUs, one after the other, at once.

    Args:
        told: Of each worker, in the order in which they are placed.
        numbered: Whether these are all workers of the job, and so known by number.
    """
    for _, group in groupby(enumerate(told), lambda one: _GPUS.sub("", one[1], count=1)):
        members = [*group]
        first, said = members[0]
        if len(members) > 1:
            gpus = " and ".join(found[0] for _, one in members if (found := _GPUS.search(one)) is not None)
            said = _GPUS.sub(gpus, said, count=1)
        who = f"worker {first}" if len(members) == 1 else f"workers {first} to {members[-1][0]}"
        yield f"  {who if numbered else pluralize(len(members), 'worker')} would go to {said}"
