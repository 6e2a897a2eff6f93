"""Documents of the commands `status`, `top` and `diagnose`, computed from jobs and GpuNodes. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Literal

from carpool_core.clock import parse_rfc3339
from carpool_core.demand import prediction_message
from carpool_core.durations import MEASURED_STEPS
from carpool_core.keys import (
    ANOMALIES,
    CONDITION_COMPLETE,
    CONDITION_FAILED,
    CONDITION_PLACED,
    CONDITION_PREDICTED,
    CONDITION_RUNNING,
    CONDITION_SUSPENDED,
    OUTCOME_GPU_OUT_OF_MEMORY,
    REASONS_PODS_REFUSED,
)
from carpool_core.products import hardware_name
from carpool_core.resources.job import Attempt, GpuTrainingJob, Observed, WorkerPlacement
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import Device, GpuNode, Tenant
from carpool_core.resources.prediction import Interval, ProductPrediction
from carpool_core.resources.schema import Resource, field
from carpool_core.values import DeviceHealth, GpuUuid, JobState, PartitionState, SharingMode

LOW_UTILIZATION_PERCENT = 50.0
"""GPU utilization below which `diagnose` names the usual causes. Jobs below it are what Gao et al. (ICSE '24) study."""
LONG_WAIT = 0.2
"""Share of a job's time from which `diagnose` names a wait."""
FAR_FACTOR = 2.0
"""Measured memory is far from the prediction if one is more than so many times the other."""
_ENDED, _REFUSED = (JobState.COMPLETE, JobState.FAILED), (JobState.UNPLACEABLE, JobState.FAILED)
_MEDIAN, _UPPER = attrgetter("median"), attrgetter("upper")


class Progress(Resource, frozen=True, kw_only=True):
    """Steps that the step probe counted, or else an estimate from time."""

    steps_done: Annotated[
        int | None,
        field("Steps of this attempt; absent without a report, and once the job is Complete."),
    ] = None
    steps_age_seconds: Annotated[
        float | None, field("Time since `stepsDone` was counted, in seconds; absent if the end is known.")
    ] = None
    steps: Annotated[int | None, field("spec.training.steps.")] = None
    elapsed_seconds: Annotated[float, field("Time since all workers run, in seconds.")]
    expected_seconds: Annotated[
        float | None,
        field(
            "Time from then to the expected end: measured, or else spec.training.steps times the predicted step time "
            "and slowdown, in seconds; absent if unknown."
        ),
    ] = None
    latest_seconds: Annotated[float | None, field("The same by the 95% quantile of the step time.")] = None

    @property
    def ratio(self) -> float | None:
        """Share that is done, 0..1; None if it is unknown."""
        if self.steps_done is not None and self.steps:
            return min(1.0, self.steps_done / self.steps)
        return None if not self.expected_seconds else min(1.0, self.elapsed_seconds / self.expected_seconds)


class JobView(Resource, frozen=True, kw_only=True):
    """One job, as `carpool status` prints it."""

    namespace: Annotated[str, field("Namespace of the job.")]
    name: Annotated[str, field("Name of the job.")]
    state: Annotated[JobState, field("State of the job.")]
    reason: Annotated[str, field("Reason of the condition that explains the state.")] = ""
    message: Annotated[str, field("Message of that condition.")] = ""
    prediction: Annotated[str, field("Predicted, or why there is no prediction.")] = ""
    predicted_memory_mib: Annotated[int | None, field("Predicted median of memory on each GPU, in MiB.")] = None
    memory_bound_mib: Annotated[int | None, field("Memory on each GPU that placement counts with, in MiB.")] = None
    predicted_util_percent: Annotated[float | None, field("Predicted median of GPU utilization, 0..100.")] = None
    observed: Annotated[Observed | None, field("Measurements, as in the job's status.")] = None
    expected_slowdown: Annotated[float | None, field("Predicted slowdown by the co-tenants; absent if unplaced.")] = (
        None
    )
    nodes: Annotated[list[str], field("Nodes of its workers.")] = []
    products: Annotated[list[str], field("Products of its GPUs.")] = []
    modes: Annotated[list[SharingMode], field("How its GPUs are shared.")] = []
    workers: Annotated[int, field("Number of its workers.")] = 1
    cotenants: Annotated[list[str], field("Jobs that share its GPUs, as NAMESPACE/NAME.")] = []
    progress: Annotated[Progress | None, field("How far it is; absent before it runs.")] = None
    restarts: Annotated[int, field("Failures charged to backoffLimit.")] = 0


class JobViewList(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Answer of `carpool status`."""

    kind: Annotated[Literal["JobStatusList"], field("Kind of the document.")] = "JobStatusList"
    items: Annotated[list[JobView], field("Jobs by namespace and name.")]


class TenantView(Resource, frozen=True, kw_only=True):
    """One tenant of a GPU."""

    namespace: Annotated[str, field("Namespace of the pod.")]
    job: Annotated[str, field("Name of the job.")]
    pod: Annotated[str, field("Name of the pod.")]
    partition: Annotated[PartitionState | None, field("Whether the agent has prepared its share.")] = None
    bound_mib: Annotated[int | None, field("Predicted upper bound of its memory, in MiB; absent if unknown.")] = None
    counted_mib: Annotated[int | None, field("Memory that placement counts, in MiB; absent: the whole GPU.")] = None
    use: Annotated[Tenant | None, field("Measured use, as in the GpuNode; absent before the first measurement.")] = None
    expected_slowdown: Annotated[float, field("Predicted slowdown when it was placed.")] = 1.0


class GpuView(Resource, frozen=True, kw_only=True):
    """One GPU, as `carpool top` prints it."""

    node: Annotated[str, field("Node of the GPU.")]
    device: Annotated[Device, field("The GPU, as in the GpuNode.")]
    tenants: Annotated[list[TenantView], field("Pods with a reservation for it.")] = []

    @property
    def is_idle(self) -> bool:
        """Whether it is healthy and has no tenant."""
        return not self.tenants and self.device.health is DeviceHealth.HEALTHY

    @property
    def used_mib(self) -> int:
        """Memory in use by its tenants, in MiB."""
        return sum(tenant.use.memory_mib for tenant in self.tenants if tenant.use is not None)


class GpuViewList(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Answer of `carpool top`."""

    kind: Annotated[Literal["GpuUseList"], field("Kind of the document.")] = "GpuUseList"
    items: Annotated[list[GpuView], field("GPUs by node and index.")]


class Comparison(Resource, frozen=True, kw_only=True):
    """A quantity of a job, predicted and measured."""

    quantity: Annotated[str, field("Name of the quantity, with its unit.")]
    product: Annotated[str, field("GPU product of the prediction.")]
    predicted: Annotated[Interval, field("Prediction; memory has an upper bound only, and 0 as its lower end.")]
    measured: Annotated[float | None, field("Measured value; absent before it was measured.")] = None
    at_most: Annotated[float | None, field("Upper end since it was measured; absent before.")] = None


class EventView(Resource, frozen=True, kw_only=True):
    """An event of a job or of one of its pods."""

    type: Annotated[str, field("Normal or Warning.")] = ""
    reason: Annotated[str, field("One CamelCase word.")] = ""
    object: Annotated[str, field("Kind and name of its object.")] = ""
    message: Annotated[str, field("A sentence.")] = ""
    time: Annotated[str, field("When it happened last, RFC 3339.")] = ""


class Diagnosis(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Answer of `carpool diagnose`."""

    kind: Annotated[Literal["JobDiagnosis"], field("Kind of the document.")] = "JobDiagnosis"
    job: Annotated[JobView, field("The job.")]
    comparisons: Annotated[list[Comparison], field("Predicted beside measured quantities.")]
    attempts: Annotated[list[Attempt], field("Attempts, the latest last, as in the job's status.")]
    findings: Annotated[list[str], field("What is unusual, with its usual cause.")]
    events: Annotated[list[EventView], field("Its latest events and those of its pods, the latest last.")]


# Jobs


def job_view(job: GpuTrainingJob, now: datetime) -> JobView:
    """Return one job."""
    status, places = job.status, job.status.placement
    beside = {f"{n.namespace}/{n.job}" for place in places for n in place.neighbours}
    explains = _explaining(status.conditions)
    by_type = {condition.type: condition for condition in status.conditions}
    predicted = by_type.get(CONDITION_PREDICTED)
    products = [one for _, one in _relevant(job)]
    bounds = [place.counted_mib(one.memory) if place else one.memory.upper_mib for place, one in _relevant(job)]
    return JobView(
        namespace=job.metadata.namespace,
        name=job.metadata.name,
        state=status.state,
        reason="" if explains is None else explains.reason,
        message="" if explains is None else explains.message,
        prediction="" if predicted is None else predicted.reason,
        predicted_memory_mib=max((one.memory.median_mib for one in products), default=None),
        memory_bound_mib=max(filter(None, bounds), default=None),
        predicted_util_percent=max((one.activity.gpu_util_percent.median for one in products), default=None),
        observed=status.observed,
        expected_slowdown=max((place.expected_slowdown for place in places), default=None),
        nodes=sorted({place.node for place in places}),
        products=sorted({place.product for place in places}),
        modes=sorted({place.mode for place in places}),
        workers=job.spec.workers,
        cotenants=[] if status.state in _ENDED else sorted(beside),
        progress=_progress(job, by_type, now),
        restarts=status.restarts,
    )


def _explaining(conditions: Sequence[Condition]) -> Condition | None:
    """Return the condition that explains the state: the end, else the first step that is not done."""
    by_type = {condition.type: condition for condition in conditions}
    for type_ in (CONDITION_FAILED, CONDITION_COMPLETE, CONDITION_SUSPENDED):
        if type_ in by_type and by_type[type_].status == "True":
            return by_type[type_]
    steps = [by_type[t] for t in (CONDITION_PLACED, CONDITION_RUNNING) if t in by_type]
    open_ = [condition for condition in steps if condition.status != "True"]
    return open_[0] if open_ else steps[-1] if steps else by_type.get(CONDITION_PREDICTED)


def _progress(job: GpuTrainingJob, by_type: Mapping[str, Condition], now: datetime) -> Progress | None:
    running, status, steps = by_type.get(CONDITION_RUNNING), job.status, job.spec.training.steps
    seen = status.observed or Observed()
    if status.completion_time and status.start_time:
        took = (parse_rfc3339(status.completion_time) - parse_rfc3339(status.start_time)).total_seconds()
        if status.state is JobState.COMPLETE:  # it went on after the last reading of its counters
            return Progress(elapsed_seconds=took)
        return Progress(steps_done=seen.steps, steps=steps, elapsed_seconds=took)
    if running is None or running.status != "True" or not running.last_transition_time:
        return None
    began = parse_rfc3339(running.last_transition_time)
    expected, latest = (
        None if end is None else (parse_rfc3339(end) - began).total_seconds()
        for end in (seen.expected_end, seen.latest_end)
    )
    predicted = [(place.expected_slowdown, one.step_time_seconds) for place, one in _relevant(job) if place]
    if expected is None and steps is not None and predicted:
        expected, latest = (steps * max(by * at(one) for by, one in predicted) for at in (_MEDIAN, _UPPER))
    elapsed = max(0.0, (now - began).total_seconds())
    is_open = seen.steps_at is not None and steps is None
    return Progress(
        steps_done=seen.steps,
        steps_age_seconds=max(0.0, (now - parse_rfc3339(seen.steps_at or "")).total_seconds()) if is_open else None,
        steps=steps,
        elapsed_seconds=elapsed,
        expected_seconds=expected,
        latest_seconds=latest,
    )


def _relevant(job: GpuTrainingJob) -> list[tuple[WorkerPlacement | None, ProductPrediction]]:
    """Return each worker's placement with the prediction for its product; all predictions before there is one."""
    known = {one.product: one for one in job.status.prediction.products} if job.status.prediction else {}
    if not job.status.placement:
        return [(None, one) for one in known.values()]
    named = [(place, hardware_name(place.product)) for place in job.status.placement]
    return [(place, known[product]) for place, product in named if product in known]


# GPUs


def gpu_views(nodes: Iterable[GpuNode]) -> list[GpuView]:
    """Return all GPUs by node and index, with their tenants."""
    return [
        GpuView(node=node.metadata.name, device=device, tenants=list(_tenants(node, device.uuid)))
        for node in sorted(nodes, key=lambda one: one.metadata.name)
        for device in sorted(node.status.devices, key=lambda one: one.index)
    ]


def _tenants(node: GpuNode, uuid: GpuUuid) -> Iterator[TenantView]:
    used = {tenant.pod_uid: tenant for tenant in node.status.tenants if tenant.gpu_uuid == uuid}
    states = {partition.pod_uid: partition.state for partition in node.status.partitions}
    for held in node.spec.reservations:
        if uuid in held.gpu_uuids:
            use = used.get(held.pod_uid)
            yield TenantView(
                namespace=held.pod_namespace,
                job=held.job_name,
                pod=held.pod_name,
                partition=states.get(held.pod_uid),
                bound_mib=held.tenant.memory_mib,
                counted_mib=held.tenant.counted_mib(0 if use is None else use.peak_memory_mib),
                use=use,
                expected_slowdown=held.expected_slowdown,
            )


# Diagnosis


def diagnose(job: GpuTrainingJob, events: Sequence[EventView], now: datetime) -> Diagnosis:
    """Return what is known of a job's use of its GPUs."""
    return Diagnosis(
        job=job_view(job, now),
        comparisons=list(_comparisons(job)),
        attempts=job.status.attempts,
        findings=list(_findings(job, now)),
        events=list(events),
    )


def is_open(attempt: Attempt) -> bool:
    """Whether an attempt has pods, or waits for them, and has not ended: the job's state says more than its outcome."""
    return not attempt.ended_at and attempt.outcome in ("Creating", "Running")


def _comparisons(job: GpuTrainingJob) -> Iterator[Comparison]:
    """Yield memory, utilization and step time for each product of the placement, or of the prediction before one."""
    seen = job.status.observed or Observed()
    for one in {one.product: one for _, one in _relevant(job)}.values():
        places = [place for place, of in _relevant(job) if place and of is one]
        bound = max((place.bound_mib(one.memory) or 0 for place in places), default=0) or one.memory.upper_mib
        memory = Interval(median=one.memory.median_mib, lower=0, upper=bound)
        is_measured = any(place.measured_mib for place in places)
        counted = max(place.counted_mib(one.memory) or 0 for place in places) or None if is_measured else None
        latest = None if seen.step_time_interval is None else seen.step_time_interval.upper
        sm_active = None if seen.sm_active_ratio is None else 100 * seen.sm_active_ratio
        for quantity, interval, value, at_most in (
            ("memory (MiB)", memory, seen.peak_memory_mib or None, counted),
            ("GPU utilization (%)", one.activity.gpu_util_percent, seen.gpu_util_percent, None),
            ("SM activity (%)", _percent_of(one.activity.sm_active_ratio), sm_active, None),
            ("step time (s)", one.step_time_seconds, seen.step_time_seconds, latest),
        ):
            yield Comparison(
                quantity=quantity, product=one.product, predicted=interval, measured=value, at_most=at_most
            )


def _percent_of(ratio: Interval) -> Interval:
    return Interval(median=100 * ratio.median, lower=100 * ratio.lower, upper=100 * ratio.upper)


def _findings(job: GpuTrainingJob, now: datetime) -> Iterator[str]:
    status, observed, spec = job.status, job.status.observed, job.spec
    has_ended, explains = status.state in _ENDED, _explaining(status.conditions)
    if explains is not None and (status.state in _REFUSED or explains.reason in REASONS_PODS_REFUSED):
        yield f"{status.state.value} ({explains.reason}): {explains.message}"
    if status.state is not JobState.COMPLETE:
        for condition in status.conditions:
            if condition.type == CONDITION_RUNNING and condition.status == "False" and condition.message:
                yield f"not running ({condition.reason}): {condition.message}"
    for condition in status.conditions:
        if condition.type in ANOMALIES and condition.status == "True":
            yield f"{condition.type} ({condition.reason}) since {condition.last_transition_time}: {condition.message}"
    if status.prediction is not None and status.prediction.outcome != "Predicted":
        yield f"no prediction: {prediction_message(status.prediction, spec.sharing.mode, spec.memory.limit)}"
    elif status.prediction is None and not has_ended:
        yield "no prediction: it is being computed"
    ends = [attempt for attempt in status.attempts if attempt.outcome == OUTCOME_GPU_OUT_OF_MEMORY]
    if ends:
        yield f"ran out of GPU memory in {len(ends)} of {len(status.attempts)} attempts: {ends[-1].message}"
    if observed is None or not observed.peak_memory_mib:
        if status.attempts and (has_ended or status.state is JobState.RUNNING):
            yield "no use of a GPU was measured: its processes took no GPU memory, or the node's agent did not see them"
        return
    bounds = [(place.bound_mib(of.memory) or math.inf, place.product) for place, of in _relevant(job) if place]
    bound, product = max(bounds, default=(math.inf, ""))  # the peak is that of the worker that took most
    if observed.peak_memory_mib > bound:
        yield (
            f"took {observed.peak_memory_mib:,} MiB, more than the bound of {bound:,} MiB on {product}: "
            "co-tenants may run out of memory; give its limit in spec.memory.limit"
        )
    for _, predicted in _relevant(job) if observed.peak_memory_mib <= bound else ():
        factor = observed.peak_memory_mib / max(1, predicted.memory.median_mib)
        is_whole_peak = status.state is JobState.COMPLETE or (observed.steps or 0) >= MEASURED_STEPS
        if factor > FAR_FACTOR or (is_whole_peak and factor < 1 / FAR_FACTOR):
            yield (
                f"took {observed.peak_memory_mib:,} MiB, {factor:.2g} times the {predicted.memory.median_mib:,} MiB "
                f"predicted on {predicted.product}: compare spec.model and spec.training with what it runs"
            )
            break
    waits = {"input data": observed.data_wait_ratio, "checkpoints": observed.checkpoint_ratio,
             "copies to the GPU": observed.copy_ratio}  # fmt: skip
    measured = [f"{ratio:.0%} of its time for {what}" for what, ratio in waits.items() if ratio and ratio >= LONG_WAIT]
    if measured:
        yield f"waits {', '.join(measured)}"
    utilization = observed.gpu_util_percent
    if utilization is not None and utilization < LOW_UTILIZATION_PERCENT and not measured:
        yield (
            f"its kernels run {utilization:.0f}% of the time: mostly the GPU waits for input data, for synchronisation "
            "with the CPU, or the batch is small (Gao et al., ICSE '24)"
        )
    slowdown, limit = observed.slowdown, job.spec.sharing.max_slowdown
    if slowdown is not None and slowdown > limit:
        cotenants = ", ".join(job_view(job, now).cotenants) or "former co-tenants"
        yield f"measured slowdown {slowdown:.2f} by {cotenants}, more than spec.sharing.maxSlowdown ({limit:g})"
    elif slowdown is None and observed.step_time_ratio is not None and observed.step_time_ratio > limit:
        yield (
            f"a step takes {observed.step_time_ratio:.2f} times the one predicted alone: co-tenants or an error of the "
            "prediction; its own steps alone were never measured"
        )
