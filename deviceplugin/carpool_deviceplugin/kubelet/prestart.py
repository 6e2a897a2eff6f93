"""Whose container is about to start, and what it was promised. Pure; the answers that may still come are Later."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool_core.keys import RESOURCE_GPU
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Partition, Reservation
from carpool_core.values import PartitionState

from carpool_deviceplugin.kubelet.wire import RefusedError


class LaterError(RefusedError):
    """Refused for now: word of the pod or of its reservation may be on its way."""


class _Devices(Protocol):
    @property
    def resource_name(self) -> str: ...
    @property
    def device_ids(self) -> Iterable[str]: ...


class _Container(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> Iterable[_Devices]: ...


class HeldByPod(Protocol):
    """One pod in PodResources' answer."""

    @property
    def name(self) -> str:
        """Name of the pod."""
        ...

    @property
    def namespace(self) -> str:
        """Its namespace."""
        ...

    @property
    def containers(self) -> Iterable[_Container]:
        """Its containers and their devices."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """The container that holds some slots."""

    namespace: str
    pod: str
    container: str
    slots: tuple[str, ...]
    """All slots of the container, in order."""

    @property
    def key(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.namespace}/{self.pod}"


def slot_number(slot: str) -> int:
    """Number of `slot-N`; raises RefusedError for anything else."""
    prefix, _, number = slot.rpartition("-")
    if prefix != "slot" or not number.isdecimal():
        raise RefusedError(f"expected a slot such as slot-3, found {slot!r}; this plugin never offered it")
    return int(number)


def owner_of(slots: Iterable[str], held: Iterable[HeldByPod]) -> Owner:
    """Find the container that holds the slots, according to PodResources.

    Raises:
        LaterError: Nobody holds them (yet).
        RefusedError: They belong to several containers.
    """
    asked = sorted(set(slots), key=slot_number)
    owners: dict[tuple[str, str, str], list[str]] = {}
    for pod in held:
        for container in pod.containers:
            mine = [i for d in container.devices if d.resource_name == RESOURCE_GPU for i in d.device_ids]
            if set(mine) & set(asked):
                owners[pod.namespace, pod.name, container.name] = mine
    if not owners:
        raise LaterError(
            f"expected a container that holds {', '.join(asked)}, found none in the kubelet's PodResources"
        )
    if len(owners) > 1:
        names = ", ".join("/".join(owner) for owner in owners)
        raise RefusedError(f"expected one container to hold {', '.join(asked)}, found {names}; delete one of the pods")
    ((namespace, pod_name, container_name), all_slots) = owners.popitem()
    if set(all_slots) != set(asked):
        raise RefusedError(
            f"expected {namespace}/{pod_name} to start with {', '.join(sorted(all_slots, key=slot_number))}, which it "
            f"holds, found {', '.join(asked)}; delete the pod"
        )
    return Owner(namespace, pod_name, container_name, tuple(asked))


def holders(held: Iterable[HeldByPod]) -> dict[str, str]:
    """Return the container that holds slots, by `namespace/name` of its pod."""
    return {
        f"{pod.namespace}/{pod.name}": container.name
        for pod in held
        for container in pod.containers
        if any(d.resource_name == RESOURCE_GPU for d in container.devices)
    }


def claimant(owner: Owner, pod: Pod | None) -> Pod:
    """Return the pod that holds the slots, as the API server knows it.

    Raises:
        LaterError: It is not there yet, or one of the same name is just leaving.
    """
    if pod is None:
        raise LaterError(f"expected pod {owner.key} on this node, found none in the API server's answers so far")
    if pod.metadata.deletion_timestamp or pod.is_finished:
        raise LaterError(f"expected pod {owner.key} to be alive, found it finished or being deleted")
    return pod


def promise(
    owner: Owner, pod: Pod, reservations: Iterable[Reservation], partitions: Iterable[Partition]
) -> Reservation:
    """Return the pod's reservation, which must be ready and fit what the container holds.

    Raises:
        LaterError: There is none, or it is not ready yet.
        RefusedError: It failed, or has another number of GPUs.
    """
    uid = pod.metadata.uid
    reservation = next((r for r in reservations if r.pod_uid == uid), None)
    if reservation is None:
        raise LaterError(
            f"expected a reservation for pod {owner.key} ({uid}) on this node, found none; GPUs are given out by "
            f"carpool-scheduler only: submit a GpuTrainingJob, and leave spec.nodeName and schedulerName to it"
        )
    partition = next((p for p in partitions if p.pod_uid == uid and p.generation == reservation.generation), None)
    if partition is not None and partition.state is PartitionState.FAILED:
        raise RefusedError(f"expected the GPUs of pod {owner.key} to be ready, found: {partition.message}")
    if partition is None or partition.state is not PartitionState.READY:
        why = f" ({partition.message})" if partition and partition.message else ""
        raise LaterError(f"expected the GPUs of pod {owner.key} to be ready, found them being prepared{why}")
    _same_number(owner, reservation.gpu_uuids)
    return reservation


def earlier(reservation: Reservation, reservations: Iterable[Reservation]) -> list[Reservation]:
    """Return who was promised a place on the same GPUs before."""
    return [
        r
        for r in reservations
        if set(r.gpu_uuids) & set(reservation.gpu_uuids)
        and (r.reserved_at, r.pod_uid) < (reservation.reserved_at, reservation.pod_uid)
    ]


def same_user(owner: Owner, user: int | None, served: Mapping[str, int | None]) -> None:
    """See that an MPS daemon is asked by one user only: it runs a server for one at a time, and others wait in CUDA.

    Args:
        owner: Whose container is about to start.
        user: That it runs as; None where nobody can tell.
        served: User of each pod or server that it would stand beside, by name.

    Raises:
        LaterError: Another user's clients must end first.
    """
    for name, other in served.items():
        if user is not None and other is not None and user != other:
            raise LaterError(
                f"expected container {owner.container} of pod {owner.key} to run as user {other}, as {name} does, "
                f"found {user}; an MPS daemon serves one user at a time: give both the same securityContext.runAsUser, "
                "or set sharing.mode to TimeSlicing; it starts by itself when the other has ended"
            )


def _same_number(owner: Owner, gpus: Sequence[str]) -> None:
    if len(gpus) != len(owner.slots):
        raise RefusedError(
            f"expected container {owner.container} of pod {owner.key} to hold {len(gpus)} of {RESOURCE_GPU}, as "
            f"reserved, found {len(owner.slots)}; let one container ask for all GPUs of the pod"
        )
