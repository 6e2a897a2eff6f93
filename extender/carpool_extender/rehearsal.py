"""Places a job's workers on paper, one after the other, as kube-scheduler and the extender would together."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import numpy as np
from carpool_core.values import PodUid

from carpool_extender import ledger
from carpool_extender.applicant import Applicant
from carpool_extender.assessments import Assessment, Assessments
from carpool_extender.cluster import Cluster
from carpool_extender.decide import Place, best_place, reservation
from carpool_extender.gangs import MOST_TRIED, Gangs, Seen
from carpool_extender.refusal import counted
from carpool_extender.rules import Rules
from carpool_extender.view import Bools, View

_NO_TIME = datetime.fromtimestamp(0, UTC)


class Offering(Protocol):
    """Which nodes kube-scheduler would offer."""

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
        applicant: What each worker asks for.
        rules: What the site has chosen.
        offers: Which nodes kube-scheduler would offer.
    """

    def __init__(self, seen: Seen, applicant: Applicant, rules: Rules, offers: Offering) -> None:
        self.applicant = applicant
        self._seen, self._rules, self._offers = seen, rules, offers

    def refused(self) -> dict[str, str]:
        """Why nodes would not be offered, by name."""
        found = {name: self._offers.refusal(name) for name in self._seen.cluster.nodes}
        return {name: why for name, why in found.items() if why is not None}

    def gang(self) -> str | None:
        """Say why all of the job's workers have to wait until they all fit; None where they need not."""
        cluster, refused = self._seen.cluster, self.refused()
        offered = [name for name in sorted(cluster.nodes) if name not in refused]
        gangs = Gangs(self._seen, Assessments(cluster, self._rules), self._rules)
        return gangs.refusal(self.applicant, PodUid(""), offered)

    def outcome(self) -> list[str]:
        """Say where the workers would go now, or that they would have to wait."""
        waits = self.gang()
        if waits:
            return [f"would have to wait now: {waits}"]
        workers = self.applicant.workers
        tried = min(workers, MOST_TRIED)
        places = self._places(self._seen.cluster, tried)
        if not places:
            return ["would have to wait now"]
        if workers == 1:
            return [f"would go to {places[0][0]}: {places[0][1].reason}"]
        return [_of_several(len(places), tried, workers), *_told(places)]

    def _places(self, cluster: Cluster, wanted: int) -> list[tuple[str, Place]]:
        found: list[tuple[str, Place]] = []
        for number in range(wanted):
            view = cluster.view()
            chosen = best_place(Assessment(self.applicant, self._rules, view), self._offered(view))
            if chosen is None:
                break
            name, place = chosen
            node = cluster.nodes[name]
            one = reservation(place, self.applicant, PodUid(f"{number}"), "", now=_NO_TIME, deadline=_NO_TIME)
            spec = ledger.reserve(node.spec, one, ledger.capacity_of(node, self._rules.slots))
            if isinstance(spec, ledger.Rejected):
                break
            found.append(chosen)
            self._offers.take(name)
            cluster.apply(msgspec.structs.replace(node, spec=spec))
        return found

    def _offered(self, view: View) -> Bools:
        """Which GPUs, shape (gpus,), are on nodes that would be offered."""
        refused = view.ids(sorted(self.refused()))
        able = np.ones(len(view.node_names) + 1, np.bool_)
        able[refused[refused >= 0]] = False
        result: Bools = able[view.columns.node] & view.columns.alive
        return result


def _of_several(placed: int, tried: int, workers: int) -> str:
    if placed == workers:
        return f"all {workers} workers would get places now"
    if placed == tried:
        return f"the first {tried} of {workers} workers would get places now; more were not tried"
    others = counted(workers - placed, "worker")
    return f"only {placed} of {workers} workers would get places now; {others} would have to wait for theirs"


def _told(places: Sequence[tuple[str, Place]]) -> list[str]:
    return [f"  worker {number} would go to {name}: {place.reason}" for number, (name, place) in enumerate(places)]
