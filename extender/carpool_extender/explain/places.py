"""Where the workers of a job are, told to people: by their reservations, and of those that no GpuNode tells of."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from carpool_core.demand import Demand
from carpool_core.resources.job import WorkerPlacement
from carpool_core.resources.node import GpuNode, Reservation, describe_later_tenants
from carpool_core.values import PodUid

from carpool_extender.cache.health import listed
from carpool_extender.explain.reading import Offers, Workers
from carpool_extender.explain.speed import pace_there

_UNSAID = "no reason was written"


def reserved(demand: Demand, node: GpuNode, held: Sequence[Reservation], steps: int | None) -> list[str]:
    """Say of each worker of a job that has its place on a node how fast it is there, and why it is.

    Args:
        demand: What each worker asks for.
        node: The node.
        held: The job's reservations there.
        steps: Of the job's training; None where nobody said.
    """
    devices, name = node.status.devices, node.metadata.name
    return [
        f"{r.pod_name} has a place on {name}{pace_there(demand, r, devices, steps)}: {r.reason or _UNSAID}"
        f"{describe_later_tenants(node, r)}{_unreported(node, r)}"
        for r in held
    ]


def _unreported(node: GpuNode, held: Reservation) -> str:
    """Say which GPUs of a reservation its node does not tell of, to stand behind its reason."""
    known = {device.uuid for device in node.status.devices}
    missing = [uuid for uuid in held.gpu_uuids if uuid not in known]
    if not missing:
        return ""
    gpus, them = ("its GPU", "it") if len(held.gpu_uuids) == 1 else ("all of its GPUs", "these")
    where = f"{node.metadata.name} does not report {gpus} now"
    return f"; {where} (missing: {listed(missing)}), so nothing more can be said of {them}"


def as_if_gone(node: GpuNode, own: Sequence[Reservation]) -> GpuNode:
    """Return a node as if some pods were not there; what they use would be a stranger's without their reservations."""
    left = [r for r in node.spec.reservations if r not in own]
    pods = {r.pod_uid for r in own}
    tenants = [tenant for tenant in node.status.tenants if tenant.pod_uid not in pods]
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, reservations=left),
        status=msgspec.structs.replace(node.status, tenants=tenants),
    )


@dataclass(frozen=True, slots=True)
class Unreserved:
    """Workers that have their places, though no GpuNode tells of them."""

    pods: frozenset[PodUid]
    """Their pods."""
    lines: list[str]
    """What is to be said of each."""


def unreserved(
    placement: Sequence[WorkerPlacement], workers: Workers, nodes: Container[str], held: Container[PodUid]
) -> Unreserved:
    """Find the workers of a job that are on a node and have no reservation.

    Only pods that are known not to have ended count: the status keeps the places of an attempt that failed until the
    next one. Of whom no pods may be read, those of nodes that nobody tells of count.

    Args:
        placement: What the job's status says of their places.
        workers: How far they are, as their pods tell.
        nodes: Names of the GpuNodes that can be read.
        held: Pods that have reservations.
    """
    places: Mapping[PodUid, WorkerPlacement] = {
        place.pod_uid: place
        for place in placement
        if (place.node not in nodes if workers.unread else place.pod_uid in workers.bound)
    }
    lines = {
        pod: f"{place.pod} has a place on {place.node}: {place.reason or _UNSAID}; {_why(place.node, nodes)}"
        for pod, place in places.items()
    }
    lines |= {
        pod: f"{name} runs on {node}: {_why(node, nodes)}"
        for pod, (name, node) in workers.bound.items()
        if pod not in places
    }
    found = {pod: line for pod, line in lines.items() if pod not in held}
    return Unreserved(frozenset(found), list(found.values()))


def _why(node: str, nodes: Container[str]) -> str:
    missing = "its reservation is not written there" if node in nodes else f"no GPUs of {node} are reported"
    return f"{missing} now, so nothing more can be said of its own"


def without_gpus(nodes: Sequence[GpuNode], offers: Offers, odd: Container[str], *, each: bool) -> list[str]:
    """Say which of the nodes that kube-scheduler would offer report no GPUs, though they should have some.

    Args:
        nodes: The GpuNodes that can be read.
        offers: Which nodes would be offered, and what is known of them.
        odd: Names of those that cannot be read, of which that is said elsewhere.
        each: Whether every node has a line of its own.
    """
    known = {node.metadata.name: bool(node.status.devices) for node in nodes}
    wanted = {name for name in [*known, *offers.ours()] if not known.get(name, False) and name not in odd}
    names = sorted(name for name in wanted if offers.refusal(name) is None)
    ask = "is the node agent running there?"
    if each or len(names) < 2:
        return [f"{name} reports no GPUs: {ask}" for name in names]
    return [f"{len(names):,} nodes report no GPUs ({listed(names)}): {ask}"]
