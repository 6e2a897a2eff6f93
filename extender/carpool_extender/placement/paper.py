"""Workers of a job placed on paper, one after the other."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import msgspec
from carpool_core.values import PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessment
from carpool_extender.placement.decide import Place, best_place, reservation
from carpool_extender.placement.rules import Rules
from carpool_extender.state import ledger
from carpool_extender.state.cluster import Cluster
from carpool_extender.state.view import Bools, View

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
