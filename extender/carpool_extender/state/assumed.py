"""Reservations that count though nobody has written them yet."""

from collections.abc import Iterable

import msgspec
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import JobUid, PodUid

from carpool_extender.state.several import Several


class Assumed:
    """What is about to be written on nodes, so that whoever asks meanwhile is sent elsewhere."""

    def __init__(self) -> None:
        self._on: dict[str, dict[PodUid, Reservation]] = {}
        self._of_job: Several[JobUid, tuple[str, PodUid]] = Several()

    def add(self, name: str, reservation: Reservation) -> None:
        """Count a reservation on a node."""
        self._on.setdefault(name, {})[reservation.pod_uid] = reservation
        self._of_job.add(reservation.job_uid, (name, reservation.pod_uid))

    def discard(self, name: str, pod_uid: PodUid) -> bool:
        """Count a pod's no more; say whether it did."""
        on_node = self._on.get(name, {})
        gone = on_node.pop(pod_uid, None)
        if not on_node:
            self._on.pop(name, None)
        if gone is not None:
            self._of_job.discard(gone.job_uid, (name, pod_uid))
        return gone is not None

    def pods_of(self, job_uid: JobUid) -> Iterable[PodUid]:
        """UIDs of a job's pods for which something is counted."""
        return (pod for _, pod in self._of_job.of(job_uid))

    def beside(self, node: GpuNode) -> GpuNode:
        """Return a node with what is about to be written there."""
        if not (on_node := self._on.get(node.metadata.name)):
            return node
        held = {reservation.pod_uid for reservation in node.spec.reservations}
        more = [reservation for uid, reservation in on_node.items() if uid not in held]
        spec = msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, *more])
        return msgspec.structs.replace(node, spec=spec)
