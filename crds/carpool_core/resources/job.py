"""`GpuTrainingJob`: what a user writes, and what Carpool answers in its status."""

from typing import Annotated, Any, ClassVar

from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.model import CatalogModel as CatalogModel  # one place to import a job's types from
from carpool_core.resources.model import GraphLayer as GraphLayer
from carpool_core.resources.model import GraphModel as GraphModel
from carpool_core.resources.model import ModelSource as ModelSource
from carpool_core.resources.prediction import Prediction
from carpool_core.resources.schema import ATOMIC, MEMORY_RULES, QUANTITY, Resource, Rule, field, map_list
from carpool_core.resources.template import GPU_AMOUNT_RULE, TEMPLATE
from carpool_core.values import (
    GpuUuid,
    JobState,
    NodeName,
    Optimizer,
    PodUid,
    Precision,
    RequestedMode,
    SharingMode,
    Tenancy,
)


class Training(Resource, frozen=True, kw_only=True):
    """How the model is trained, as far as memory and speed depend on it."""

    batch_size: Annotated[int, field("Samples of one step on one worker.", ge=1, le=1_000_000)] = 32
    optimizer: Annotated[Optimizer, field("Optimizer, whose state takes memory.")] = Optimizer.ADAMW
    precision: Annotated[Precision, field("Arithmetic of the step.")] = Precision.FP32
    activation_checkpointing: Annotated[bool, field("Whether activations are recomputed instead of kept.")] = False


class Sharing(Resource, frozen=True, kw_only=True):
    """Whether and with whom the job shares its GPU."""

    mode: Annotated[
        RequestedMode,
        field(
            "How to share a GPU. Auto: the scheduler chooses. Exclusive: alone. TimeSlicing: tenants take turns, and "
            "nothing limits their memory. MPS: side by side through one Multi-Process Service daemon, each with a "
            "memory limit. MIG: a hardware instance of its own; needs gpusPerWorker 1."
        ),
    ] = RequestedMode.AUTO
    max_slowdown: Annotated[
        float,
        field(
            "The largest slowdown that the job accepts: its step time beside neighbours over its step time alone. "
            "1 accepts none; 1.5 accepts steps half as long again.",
            ge=1,
            le=10,
        ),
    ] = 1.5
    tenancy: Annotated[
        Tenancy,
        field(
            "With whose jobs it may share a GPU. Namespace: those of its own namespace. Cluster: anybody's that are "
            "willing too, but never behind one MPS daemon across namespaces."
        ),
    ] = Tenancy.NAMESPACE


class MemoryOverride(Resource, frozen=True, kw_only=True):
    """An explicit memory limit, which overrides the prediction."""

    limit: (
        Annotated[
            int | str,
            field(
                "GPU memory that one worker takes on each of its GPUs, with its unit, such as 12Gi. Placement counts "
                "with it in place of the prediction, and MPS holds each process of the worker to it: a worker of "
                "several processes can take more in all, and the node agent reports it.",
                schema=QUANTITY,
                rules=MEMORY_RULES,
            ),
        ]
        | None
    ) = None


_CAPABILITY_RULES = (
    Rule(
        "self.matches('^[0-9]{1,2}[.][0-9]$')",
        "expected a CUDA compute capability such as 8.0, in quotes",
        "'expected a CUDA compute capability such as 8.0, in quotes, found ' + self",
    ),
)


class GpuSelector(Resource, frozen=True, kw_only=True):
    """Which GPUs will do."""

    product: (
        Annotated[
            str,
            field(
                "GPU product by NVML's name or an unambiguous part of it, such as A100-SXM4-40GB.",
                min_length=1,
                max_length=128,
            ),
        ]
        | None
    ) = None
    min_memory: (
        Annotated[
            int | str,
            field("Least total memory of the GPU, with its unit, such as 40Gi.", schema=QUANTITY, rules=MEMORY_RULES),
        ]
        | None
    ) = None
    min_compute_capability: (
        Annotated[str, field("Least CUDA compute capability, such as 8.0.", max_length=8, rules=_CAPABILITY_RULES)]
        | None
    ) = None


_MAX_S = 2**31 - 1


class RunPolicy(Resource, frozen=True, kw_only=True):
    """How long and how often the job is tried."""

    suspend: Annotated[bool, field("True keeps the job from having pods.")] = False
    backoff_limit: Annotated[int, field("Restarts after failures before the job has failed.", ge=0, le=1000)] = 3
    active_deadline_seconds: (
        Annotated[
            int,
            field(
                "Seconds after its start in which the job must be complete; unlimited when left out.", ge=1, le=_MAX_S
            ),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[int, field("Seconds after its end until the job is deleted; never when left out.", ge=0, le=_MAX_S)]
        | None
    ) = None


class JobSpec(Resource, frozen=True, kw_only=True):
    """What a user asks for."""

    rules: ClassVar[tuple[Rule, ...]] = (
        GPU_AMOUNT_RULE,
        Rule(
            "self.sharing.mode != 'MIG' || self.gpusPerWorker == 1",
            "a MIG instance is a part of one GPU: set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
        Rule(
            "self.sharing.mode != 'MPS' || self.gpusPerWorker == 1",
            "each GPU has an MPS daemon of its own and a process reaches only one: "
            "set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
    )

    model: Annotated[ModelSource, field("What is trained. Left out: unknown, and the job runs alone.")] | None = None
    training: Annotated[Training, field("How it is trained.")] = Training()
    workers: Annotated[int, field("Number of pods that train together.", ge=1, le=1024)] = 1
    gpus_per_worker: Annotated[
        int, field("Number of GPUs (or shares of a GPU) of each worker, all on one node.", ge=1, le=16)
    ] = 1
    sharing: Annotated[Sharing, field("Whether and with whom it shares a GPU.")] = Sharing()
    memory: Annotated[MemoryOverride, field("Memory limit in place of the prediction.")] = MemoryOverride()
    gpu: Annotated[GpuSelector, field("Which GPUs will do.")] = GpuSelector()
    run_policy: Annotated[RunPolicy, field("How long and how often it is tried.")] = RunPolicy()
    template: Annotated[
        dict[str, Any],
        field("Pod template of a worker, as in a Job. Carpool adds what places it.", schema=TEMPLATE),
    ]


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
    expected_slowdown: Annotated[float, field("Predicted step time here over step time alone.", ge=1)] = 1.0
    neighbours: Annotated[list[Neighbour], field("Jobs that share its GPUs.", schema=ATOMIC)] = []
    reason: Annotated[str, field("Why this place, this mode and these limits.", max_length=4096)] = ""


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
        list[Condition], field("Predicted, Placed, Running, Suspended, Complete, Failed.", schema=map_list("type"))
    ] = []
    prediction: Annotated[Prediction, field("What was predicted before it ran.")] | None = None
    placement: Annotated[list[WorkerPlacement], field("Where each worker runs.", schema=map_list("worker"))] = []
    attempts: Annotated[
        list[Attempt], field("Tries so far, the latest last, at most ten.", schema=map_list("number"))
    ] = []
    restarts: Annotated[int, field("Failures that were charged to backoffLimit.", ge=0)] = 0
    observed: Annotated[Observed, field("What was measured.")] | None = None
    summary: Annotated[JobSummary, field("What `kubectl get` shows.")] | None = None
    start_time: Annotated[str, field("When the first container ran, RFC 3339.")] | None = None
    completion_time: Annotated[str, field("When the job ended, RFC 3339.")] | None = None


def _fixed_once_placed(name: str, *, is_optional: bool = False) -> Rule:
    """A transition rule: a field of the spec that the placement was decided by."""
    new, old = f"self.spec.{name}", f"oldSelf.spec.{name}"
    same = f"{new} == {old}"
    if is_optional:
        same = f"(has({new}) == has({old}) && (!has({new}) || {same}))"
    return Rule(
        f"!has(oldSelf.status) || !has(oldSelf.status.placement) || oldSelf.status.placement.size() == 0 || {same}",
        f"spec.{name} cannot change once the job is placed; only spec.runPolicy can: delete the job and apply it again",
        field_path=f".spec.{name}",
    )


class GpuTrainingJob(Resource, frozen=True, kw_only=True):
    """A deep-learning training job that shares GPUs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.metadata.name.size() <= 48",
            "metadata.name must have at most 48 characters, because pods are called NAME-worker-INDEX-ATTEMPT",
            field_path=".metadata.name",
        ),
        *(_fixed_once_placed(name) for name in ("workers", "gpusPerWorker", "training", "sharing", "memory", "gpu")),
        *(_fixed_once_placed(name, is_optional=True) for name in ("model", "template")),
    )

    api_version: str = "carpool.dev/v1alpha1"
    kind: str = "GpuTrainingJob"
    metadata: ObjectMeta
    spec: Annotated[JobSpec, field("What is asked for.")]
    status: Annotated[JobStatus, field("What Carpool knows.")] = JobStatus()
