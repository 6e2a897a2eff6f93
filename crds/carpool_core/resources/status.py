"""`GpuTrainingJob.status`: what Carpool answers."""

from typing import Annotated

from carpool_core.resources.meta import Condition
from carpool_core.resources.prediction import MemoryPrediction, Prediction
from carpool_core.resources.schema import ATOMIC, COUNTED, OWN, Resource, field
from carpool_core.values import GpuUuid, JobState, NodeName, PodUid, SharingMode


class Neighbour(Resource, frozen=True, kw_only=True):
    """Another job on the same GPU."""

    namespace: Annotated[str, field("Its namespace.")]
    job: Annotated[str, field("Its name.")]
    gpu_uuid: Annotated[GpuUuid, field("The GPU that both use.")]


class WorkerPlacement(Resource, frozen=True, kw_only=True):
    """Where a worker was put, and why there."""

    worker: Annotated[int, field("Index of the worker.", ge=0)]
    pod: Annotated[str, field("Its pod.")]
    pod_uid: Annotated[PodUid, field("The pod's UID.")]
    node: Annotated[NodeName, field("Its node.")]
    gpu_uuids: Annotated[list[GpuUuid], field("Its GPUs.", schema=ATOMIC)]
    product: Annotated[str, field("Product of these GPUs.")]
    mode: Annotated[SharingMode, field("How they are shared.")]
    memory_limit_mib: Annotated[int, field("Memory limit on each GPU, in MiB.", ge=0)] | None = None
    thread_percentage: Annotated[int, field("MPS active thread percentage.", ge=1, le=100)] | None = None
    mig_profile: Annotated[str, field("MIG profile.")] | None = None
    provisional: Annotated[
        bool, field("Whether what counts of its memory counts only until its own peak was measured.")
    ] = False
    measured_mib: (
        Annotated[int, field("What counts of its memory since that was measured, in MiB; none before.", ge=1)] | None
    ) = None
    expected_slowdown: Annotated[float, field("Predicted step time here over step time alone.", ge=1)] = 1.0
    neighbours: Annotated[list[Neighbour], field("Jobs that share its GPUs.", schema=ATOMIC)] = []
    reason: Annotated[str, field("Why this place, this mode and these limits.", max_length=4096)] = ""

    def bound_mib(self, predicted: MemoryPrediction | None) -> int | None:
        """Return what counted for its memory on each GPU before anything was measured, in MiB; None if that is unknown.

        Args:
            predicted: What was predicted for its product.
        """
        if self.memory_limit_mib is not None or predicted is None:
            return self.memory_limit_mib
        return predicted.bound_mib(self.mode, len(self.gpu_uuids))


class Attempt(Resource, frozen=True, kw_only=True):
    """One try at running the job."""

    number: Annotated[int, field("Counts from 1.", ge=1)]
    started_at: Annotated[str, field("When its pods were created, RFC 3339.")] = ""
    ended_at: Annotated[str, field("When it ended, RFC 3339.")] | None = None
    outcome: Annotated[str, field("Running, Complete, or why it failed, one CamelCase word.")] = "Running"
    message: Annotated[str, field("A sentence for people.", max_length=4096)] = ""
    pod_uids: Annotated[
        list[PodUid],
        field(
            "UIDs of its pods, once all of them exist; only of the latest attempt. Any other pod that names the job as "
            "its controller is not the job's.",
            schema=ATOMIC,
            max_length=1024,
        ),
    ] = []
    spec_digest: Annotated[
        str,
        field(
            "Digest of the spec without runPolicy that its pods were built from; another spec begins another attempt.",
            max_length=128,
        ),
    ] = ""
    peak_memory_mib: Annotated[
        int, field("Largest GPU memory that one of its workers was measured to take on one GPU, in MiB.", ge=0)
    ] = 0
    learned: Annotated[
        bool, field("Whether what it showed was taken into the cluster's calibration; it counts once.")
    ] = False


class Observed(Resource, frozen=True, kw_only=True):
    """What the agents measured, over all workers."""

    peak_memory_mib: Annotated[int, field("Largest GPU memory of a worker on one GPU, in MiB.", ge=0)] = 0
    gpu_util_percent: (
        Annotated[float, field("Mean share of time in which some kernel of the job ran, 0..100.")] | None
    ) = None
    sm_active_ratio: Annotated[float, field("Mean share of SMs with the job's work, 0..1.")] | None = None
    step_time_seconds: Annotated[float, field("Mean time of a step, where the job reports it, in seconds.")] | None = (
        None
    )
    step_time_ratio: (
        Annotated[
            float,
            field(
                "Observed step time over the step time predicted alone: what neighbours cost and what the prediction "
                "missed, together."
            ),
        ]
        | None
    ) = None


class JobSummary(Resource, frozen=True, kw_only=True):
    """The columns of `kubectl get gtj`, which can show no more than single values. Computed; decide nothing by it."""

    node: Annotated[str, field("Nodes of the workers.", max_length=256)] = ""
    gpu: Annotated[str, field("Product of the GPUs, and how many where there are several.", max_length=256)] = ""
    mode: Annotated[str, field("How the GPUs are shared.")] = ""
    predicted_memory: Annotated[str, field("Predicted median of memory on each GPU, with its unit.")] = ""
    memory_bound: Annotated[
        str, field("Memory on each GPU that placement counts with: the job's own limit, else the predicted bound.")
    ] = ""
    predicted_utilization: Annotated[str, field("Predicted median GPU utilization, with its unit.")] = ""
    observed_memory: Annotated[str, field("Largest memory measured on one GPU, with its unit.")] = ""
    observed_utilization: Annotated[str, field("Mean GPU utilization measured, with its unit.")] = ""
    slowdown: Annotated[str, field("Expected step time beside the neighbours over step time alone.")] = ""
    step_time: Annotated[str, field("Mean step time measured, and how many times the one predicted alone it is.")] = ""


class JobStatus(Resource, frozen=True, kw_only=True):
    """What Carpool knows of the job."""

    observed_generation: Annotated[int, field("`metadata.generation` that this status was computed from.", ge=0)] = 0
    state: Annotated[JobState, field("Computed from the conditions, for people.")] = JobState.PREDICTING
    conditions: Annotated[
        list[Condition], field("Predicted, Placed, Running, Suspended, Complete, Failed.", schema=OWN)
    ] = []
    prediction: Annotated[Prediction, field("What was predicted before it ran.")] | None = None
    placement: Annotated[list[WorkerPlacement], field("Where each worker runs.", schema=COUNTED)] = []
    attempts: Annotated[list[Attempt], field("Tries so far, the latest last, at most ten.", schema=OWN)] = []
    restarts: Annotated[int, field("Failures that were charged to backoffLimit.", ge=0)] = 0
    observed: Annotated[Observed, field("What was measured.")] | None = None
    summary: Annotated[JobSummary, field("What `kubectl get` shows.")] | None = None
    start_time: Annotated[str, field("When the first container ran, RFC 3339.")] | None = None
    completion_time: Annotated[str, field("When the job ended, RFC 3339.")] | None = None
