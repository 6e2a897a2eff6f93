"""What an attempt teaches: how its measured memory and activity compare with what was predicted. Pure.

A running attempt tells its peak once it is old enough for that to count, and again when the peak has not moved for
long; an attempt that is over tells it for good. Only workers of a single GPU can be compared with a prediction.
"""

from collections.abc import Sequence

import msgspec
from carpool_core.clock import parse_rfc3339
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.pods import Pod
from carpool_core.products import hardware_name
from carpool_core.resources.job import Attempt, GpuTrainingJob, WorkerPlacement
from carpool_core.resources.node import Device, GpuNode, Tenant
from carpool_core.values import GpuUuid, SharingMode
from carpool_predictor.calibration.document import Measured
from carpool_predictor.calibration.observe import SEEN_S, STEADY_S

from carpool_operator import attempts, status
from carpool_operator.actions import Learn
from carpool_operator.observations import Lesson, Use
from carpool_operator.outcomes import GPU_OUT_OF_MEMORY
from carpool_operator.status import Draft

AWAITED_S = 30.0
"""How long the next attempt waits until it is learned what the last one died of, in seconds."""
LOOK_AGAIN_S = 1.0
"""When a job is looked at again that waits for that."""


def sample_of(job: GpuTrainingJob, attempt: Attempt) -> str:
    """Name an attempt among all of the cluster."""
    return f"{job.metadata.uid}/{attempt.number}"


def peak_of(pods: Sequence[Pod], nodes: Sequence[GpuNode]) -> int:
    """Return the largest memory that the agents saw of these pods on one GPU, in MiB; 0 where they saw none."""
    uids = {pod.metadata.uid for pod in pods}
    return max(
        (max(t.memory_mib, t.peak_memory_mib) for n in nodes for t in n.status.tenants if t.pod_uid in uids), default=0
    )


def tell(draft: Draft, attempt: Attempt | None, pods: Sequence[Pod]) -> None:
    """Have learned what the latest attempt teaches, and write down that it was."""
    known = draft.snapshot.knowledge
    if attempt is None or not known.is_on or attempt.learned:
        return
    if sample_of(draft.job, attempt) in known.learned:
        latest = attempts.present(draft.status)
        if latest is not None and latest.number == attempt.number:
            draft.status = attempts.with_attempt(draft.status, msgspec.structs.replace(latest, learned=True))
        return
    latest = attempts.present(draft.status)
    if latest is None or latest.number != attempt.number:
        return
    lesson = lesson_of(draft, latest, pods)
    if lesson is not None:
        draft.then(Learn(lesson))


def is_awaited(draft: Draft, last: Attempt | None) -> bool:
    """Whether the next attempt waits until it is learned what the last one died of."""
    known = draft.snapshot.knowledge
    if last is None or not known.is_on or last.learned or last.outcome != GPU_OUT_OF_MEMORY or not last.ended_at:
        return False
    since_s = (draft.snapshot.now - parse_rfc3339(last.ended_at)).total_seconds()
    return since_s < AWAITED_S and lesson_of(draft, last, []) is not None


def lesson_of(draft: Draft, attempt: Attempt, pods: Sequence[Pod]) -> Lesson | None:
    """Return what an attempt teaches by now; None where it teaches nothing, or not yet.

    Args:
        draft: The job, with its placement in this attempt.
        attempt: The latest attempt.
        pods: Its pods, where it is under way.
    """
    places = draft.status.placement
    counted = _counted_mib(draft, places)
    if counted is None:
        return None
    measured = _ended(draft, attempt, places) if attempt.ended_at is not None else _running(draft, attempt, pods)
    if measured is None:
        return None
    is_ended = attempt.ended_at is not None
    return Lesson(
        sample=sample_of(draft.job, attempt),
        product=hardware_name(places[0].product),
        simulated=places[0].product.startswith(SIMULATED_PREFIX),
        counted_mib=counted,
        measured=msgspec.structs.replace(measured, sample=sample_of(draft.job, attempt)),
        mode=places[0].mode,
        together=() if is_ended else _together(draft, places[0]),
    )


def _counted_mib(draft: Draft, places: Sequence[WorkerPlacement]) -> int | None:
    """The prediction's bound (upperMib, in whatever mode), 0 where placement did not rely on it.

    None where what happened cannot be compared with a prediction.
    """
    prediction, spec = draft.status.prediction, draft.job.spec
    if prediction is None or prediction.outcome != "Predicted" or spec.gpus_per_worker != 1:
        return None
    if len(places) != spec.workers or len({place.product for place in places}) != 1:
        return None
    product = hardware_name(places[0].product)
    found = next((p.memory for p in prediction.products if p.product == product), None)
    if found is None:
        return None
    return found.upper_mib if found.trusted else 0


def _device(draft: Draft, place: WorkerPlacement) -> tuple[GpuNode, Device] | None:
    for node in draft.snapshot.nodes:
        for device in node.status.devices:
            if device.uuid in place.gpu_uuids:
                return node, device
    return None


def _running(draft: Draft, attempt: Attempt, pods: Sequence[Pod]) -> Measured | None:
    started, known = status.started_at(pods), draft.snapshot.knowledge
    found = _device(draft, draft.status.placement[0])
    if started is None or found is None or not attempt.peak_memory_mib:
        return None
    age_s = (draft.snapshot.now - parse_rfc3339(started)).total_seconds()
    steady_s = min(age_s, known.steady_s)
    for wanted_s in (SEEN_S, STEADY_S):
        if steady_s < wanted_s:
            draft.requeue_after(wanted_s - steady_s)
            break
    if steady_s < SEEN_S:
        return None
    return Measured(
        peak_mib=attempt.peak_memory_mib,
        capacity_mib=found[1].memory_mib,
        ended=False,
        steady=steady_s >= STEADY_S,
    )


def _ended(draft: Draft, attempt: Attempt, places: Sequence[WorkerPlacement]) -> Measured | None:
    found = _device(draft, places[0])
    capacity_mib = attempt.peak_memory_mib if found is None else found[1].memory_mib
    if attempt.outcome == attempts.COMPLETE and attempt.peak_memory_mib:
        return Measured(peak_mib=attempt.peak_memory_mib, capacity_mib=capacity_mib)
    had_mib = _had_mib(draft, places) if attempt.outcome == GPU_OUT_OF_MEMORY else None
    if had_mib is None:
        return None
    return Measured(peak_mib=had_mib, capacity_mib=max(capacity_mib, had_mib), out_of_memory=True)


def _had_mib(draft: Draft, places: Sequence[WorkerPlacement]) -> int | None:
    """How much memory there was for the worker that had least: its limit, or what its neighbours left."""
    amounts = []
    for place in places:
        found = _device(draft, place)
        if place.memory_limit_mib is not None:
            amounts.append(place.memory_limit_mib)
        if found is not None and place.mode is not SharingMode.MIG:
            node, device = found
            others = [t.memory_mib for t in _on(node, device.uuid) if t.pod_uid != place.pod_uid]
            amounts.append(device.memory_mib - device.reserved_mib - sum(others))
    return max(1, min(amounts)) if amounts else None


def _on(node: GpuNode, gpu: GpuUuid) -> list[Tenant]:
    return [tenant for tenant in node.status.tenants if tenant.gpu_uuid == gpu]


def _together(draft: Draft, place: WorkerPlacement) -> tuple[Use, ...]:
    """What all tenants of a worker's GPU are measured to do; empty where one of them is too young or not measured."""
    found = _device(draft, place)
    if found is None:
        return ()
    node, device = found
    held = {r.pod_uid: r for r in node.spec.reservations if device.uuid in r.gpu_uuids}
    tenants = {tenant.pod_uid: tenant for tenant in _on(node, device.uuid)}
    uses = []
    for uid in sorted(held, key=lambda one: one != place.pod_uid):
        tenant, reserved_at = tenants.get(uid), held[uid].reserved_at
        if tenant is None or tenant.gpu_util_percent is None or tenant.sm_active_ratio is None or not reserved_at:
            return ()
        if (draft.snapshot.now - parse_rfc3339(reserved_at)).total_seconds() < SEEN_S:
            return ()
        uses.append(Use(tenant.gpu_util_percent / 100, tenant.sm_active_ratio, held[uid].tenant.dram_active_ratio))
    return tuple(uses) if place.pod_uid in held else ()
