"""When a reservation is needed no longer."""

from datetime import datetime, timedelta

from carpool_core.clock import parse_rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Reservation

from carpool_extender.state import ledger

GRACE_S = 10.0
"""Beyond a deadline before a reservation lapses: whoever was binding has long given up, whatever its clock says."""
UNCONFIRMED_S = 30.0
"""After its grace period, how long a kubelet has to confirm the end of a pod that it never started. One that lives does
so at once and starts nothing that is being deleted; of a dead node nobody ever confirms it."""


def ended(reservation: Reservation, node: str, pod: Pod | None, now: datetime) -> str | None:
    """Say why a reservation on a node is needed no longer; None where it is.

    Args:
        reservation: Whose end is in question.
        node: Name of the node that it stands on.
        pod: The pod that has its name, or None.
        now: Present time.
    """
    if pod is None or pod.metadata.uid != reservation.pod_uid:
        return "its pod is gone"
    if pod.is_finished:
        return f"its pod has ended with {pod.status.phase}"
    if pod.spec.node_name not in ("", node):
        return f"its pod runs on node {pod.spec.node_name}"
    if pod.spec.node_name and _is_given_up(pod, now):
        return f"its pod was deleted before it started, and node {node} does not confirm it"
    if not pod.spec.node_name and ledger.has_lapsed(reservation, now, GRACE_S):
        return f"its pod was not bound by {reservation.deadline}"
    return None


def _is_given_up(pod: Pod, now: datetime) -> bool:
    """Whether a pod that never started was deleted so long ago that its node must be gone."""
    if pod.has_started or pod.metadata.deletion_timestamp is None:
        return False
    # The API server writes the end of the grace period there, not its beginning.
    return now - parse_rfc3339(pod.metadata.deletion_timestamp) > timedelta(seconds=UNCONFIRMED_S)


def is_certain(reservation: Reservation, node: str, pod: Pod | None) -> bool:
    """Whether a pod runs where its reservation is: so of nearly all, and nothing more has to be asked."""
    if pod is None or pod.metadata.uid != reservation.pod_uid or pod.spec.node_name != node:
        return False
    return not pod.is_finished and pod.metadata.deletion_timestamp is None
