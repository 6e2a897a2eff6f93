"""Who came to a GPU after a reservation: what that one says was decided before them."""

from carpool_core.resources.node import GpuNode, Reservation

MOST_TOLD = 5
"""Jobs that are named; of more it is said how many."""


def joined_since(node: GpuNode, own: Reservation) -> str:
    """Say who came to a reservation's GPUs after it, to stand behind its reason; empty where nobody did."""
    later = sorted(
        {
            f"{other.pod_namespace}/{other.job_name}"
            for other in node.spec.reservations
            if other.job_uid != own.job_uid and other.reserved_at > own.reserved_at
            if set(other.gpu_uuids) & set(own.gpu_uuids)
        }
    )
    if not later:
        return ""
    more = [f"{len(later) - MOST_TOLD} more"] if len(later) > MOST_TOLD else []
    return f"; joined since by {', '.join([*later[:MOST_TOLD], *more])}, whom this does not count"
