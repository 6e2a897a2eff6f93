"""Whether an attempt leaves a GPU on which a job is slowed beyond its limit, by what agents measured. Pure."""

from collections.abc import Callable, Iterable

from carpool_core.clock import parse_rfc3339
from carpool_core.moves import MAX_MOVES, SETTLED_S, Member, must_move
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, WhenSlowed

from carpool_operator import outcomes
from carpool_operator.outcomes import Outcome
from carpool_operator.pods import job_key
from carpool_operator.snapshot import Snapshot

POLL_S = 30.0
"""Seconds between reconciliations of a job that may move: time alone makes measurements count."""


def slowdowns(nodes: Iterable[GpuNode], find: Callable[[str], GpuTrainingJob | None]) -> dict[JobUid, float]:
    """Return the measured slowdowns of the jobs that have GPUs of some nodes, as far as known; `find` takes a key."""
    found: dict[JobUid, float] = {}
    for held in (one for node in nodes for one in node.spec.reservations):
        job = find(job_key(held.pod_namespace, held.job_name))
        observed = job.status.observed if job is not None and job.metadata.uid == held.job_uid else None
        if observed is not None and observed.slowdown is not None:
            found[held.job_uid] = observed.slowdown
    return found


def move(snapshot: Snapshot, status: JobStatus) -> Outcome | None:
    """Return the outcome of the active attempt if it moves now; None if it stays."""
    if snapshot.job.spec.sharing.when_slowed is WhenSlowed.STAY or status.moves >= MAX_MOVES:
        return None
    own = {place.pod_uid for place in status.placement}
    written = [
        tenant.checkpointed_at
        for node in snapshot.nodes
        for tenant in node.status.tenants
        if tenant.pod_uid in own and tenant.checkpointed_at is not None  # some trainings write in one worker only
    ]
    checkpoint_age_s = min((_age_s(snapshot, at) for at in written), default=None)
    gpus = [
        (node, place.pod_uid, uuid) for place in status.placement for node in snapshot.nodes for uuid in place.gpu_uuids
    ]
    for node, pod, uuid in gpus:
        outcome = _leave(snapshot, status, node, pod, uuid, checkpoint_age_s)
        if outcome is not None:
            return outcome
    return None


def _leave(
    snapshot: Snapshot, status: JobStatus, node: GpuNode, pod: PodUid, gpu: GpuUuid, checkpoint_age_s: float | None
) -> Outcome | None:
    """Return the outcome if the attempt leaves one GPU of a worker."""
    held = sorted((one for one in node.spec.reservations if gpu in one.gpu_uuids), key=lambda one: one.pod_uid != pod)
    tenants = [one for one in node.status.tenants if one.gpu_uuid == gpu]
    if not held or held[0].pod_uid != pod or {one.pod_uid for one in held} != {one.pod_uid for one in tenants}:
        return None  # a pod comes or goes
    if not all(one.reserved_at for one in held):
        return None
    if any(one.tenants_since is None or _age_s(snapshot, one.tenants_since) < SETTLED_S for one in tenants):
        return None
    # An earlier run of the same job may have shown its step time alone.
    own_slowdown = None if status.observed is None else status.observed.slowdown
    members = [_member(snapshot, one, held[0], own_slowdown) for one in held]
    if not must_move(snapshot.job.spec.sharing.when_slowed, members[0], members[1:], checkpoint_age_s):
        return None
    one, slowed = next((one, member) for one, member in zip(held, members, strict=True) if member.is_slowed)
    return outcomes.moved(f"{one.pod_namespace}/{one.job_name}", slowed, f"GPU {gpu} of {node.metadata.name}")


def _member(snapshot: Snapshot, held: Reservation, own: Reservation, own_slowdown: float | None) -> Member:
    """Return a job of a GPU. Trainings report their steps themselves: reports count in their tenancy domain only."""
    is_known = held.tenancy_domain == own.tenancy_domain
    slowdown = own_slowdown if held is own else snapshot.slowdowns.get(held.job_uid) if is_known else None
    return Member(slowdown, held.tenant.max_slowdown, _age_s(snapshot, held.reserved_at), held.pod_uid)


def _age_s(snapshot: Snapshot, at: str) -> float:
    return (snapshot.now - parse_rfc3339(at)).total_seconds()
