"""What a job that waits is sorted by, as far as its applicant tells."""

from carpool_core.clock import parse_rfc3339
from carpool_core.lengths import length_s, rung
from carpool_core.products import hardware_name

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.queueing import QueueOrder
from carpool_extender.state.view import View


def came_s(applicant: Applicant, now_s: float) -> float:
    """Return when a job came, in seconds since 1970; now where that is not known."""
    try:
        return parse_rfc3339(applicant.came_at).timestamp()
    except ValueError:
        return now_s


def length_in(applicant: Applicant, view: View) -> float | None:
    """Return how long a job takes alone on the GPUs of a cluster that it may have, in seconds; None where unknown."""
    if applicant.steps is None:
        return None
    suitable = {hardware_name(kind.product) for kind in view.class_ids if applicant.facts(kind).reason is None}
    return length_s(applicant.steps, applicant.demand.prediction, suitable.__contains__)


def rung_in(applicant: Applicant, view: View, order: QueueOrder) -> int:
    """Return the rung of that length, by which a queue is sorted; `Arrival` goes by no lengths."""
    return rung(None if order is QueueOrder.ARRIVAL else length_in(applicant, view))
