"""`GpuTrainingJob`: users write its spec, the operator its status."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from carpool_core.resources.features import Adapter, ModelFeatures, Parallelism
from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.prediction import Interval, MemoryPrediction, Prediction
from carpool_core.resources.schema import ATOMIC, ATOMIC_MAP, MEMORY_RULES, QUANTITY, Resource, Rule, field
from carpool_core.resources.template import GPU_AMOUNT_RULE, TEMPLATE
from carpool_core.values import (
    CrossEntropy,
    GpuUuid,
    JobState,
    NodeName,
    Optimizer,
    PodUid,
    Precision,
    ProbeMode,
    Quantization,
    RequestedMode,
    SharingMode,
    Tenancy,
    WhenSlowed,
)

MAX_FAMILY = 128
"""Characters of a family's name."""


class CatalogModel(Resource, frozen=True, kw_only=True):
    """A published architecture by name. Weights are never downloaded."""

    name: Annotated[
        str,
        field(
            "`timm/NAME`, `torchvision/NAME`, `transformers/NAME`, where transformers takes a model of the "
            "Hugging Face hub, such as transformers/bert-base-uncased, or a configuration class. `@key=value,…` "
            "changes values of the configuration, such as "
            "transformers/LlamaConfig@hidden_size=1024,num_hidden_layers=8, or arguments of torchvision's builder, "
            "such as aux_loss=true; attn_implementation=eager keeps the scores of attention, which the fused kernel "
            "does not.",
            max_length=4096,
            rules=[
                Rule(
                    r"""self.matches("^(timm/[A-Za-z0-9._-]+"""
                    r"""|(torchvision/|transformers/([A-Za-z0-9._-]+/)?)[A-Za-z0-9._-]+(@[a-z0-9_]+=[A-Za-z0-9._-]+"""
                    r"""(,[a-z0-9_]+=[A-Za-z0-9._-]+)*)?)$")""",
                    "expected timm/NAME, torchvision/NAME or transformers/NAME, such as "
                    "timm/resnet50; for any other model give spec.model.features as `carpool graph` prints them",
                    "'expected timm/NAME, torchvision/NAME or transformers/NAME, such as "
                    "timm/resnet50, found ' + self + "
                    "'; for any other model give spec.model.features as `carpool graph` prints them'",
                )
            ],
        ),
    ]
    input: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]],
            field(
                "Shape of one sample without the batch: [3, 224, 224] for images, [2048] for texts of 2,048 tokens; "
                "the model's default when left out.",
                schema=ATOMIC,
                min_length=1,
                max_length=4,
            ),
        ]
        | None
    ) = None
    num_classes: (
        Annotated[int, field("Outputs of the classifier; the model's default when left out.", ge=1, le=1_000_000)]
        | None
    ) = None


class GraphLayer(Resource, frozen=True, kw_only=True):
    """One layer of an inline model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(self.kind in ['Linear', 'Conv2d']) || (has(self.out) && dyn(self.out) != null)",
            "a Linear or Conv2d layer needs `out`: the number of its output features or channels",
        ),
        Rule(
            "!(self.kind in ['Conv2d', 'MaxPool2d', 'AvgPool2d']) || (has(self.kernel) && dyn(self.kernel) != null)",
            "a Conv2d, MaxPool2d or AvgPool2d layer needs `kernel`: its kernel size",
        ),
    )

    kind: Annotated[
        str,
        field(
            "Name of the torch.nn layer.",
            schema={
                "enum": [
                    "Linear",
                    "Conv2d",
                    "BatchNorm2d",
                    "LayerNorm",
                    "ReLU",
                    "GELU",
                    "Tanh",
                    "MaxPool2d",
                    "AvgPool2d",
                    "Flatten",
                    "Dropout",
                ]
            },
        ),
    ]
    out: Annotated[int, field("Output features or channels (Linear, Conv2d).", ge=1, le=1_000_000)] | None = None
    kernel: Annotated[int, field("Kernel size (Conv2d and pools).", ge=1, le=1024)] | None = None
    stride: Annotated[int, field("Stride (Conv2d and pools).", ge=1, le=1024)] | None = None
    padding: Annotated[int, field("Padding (Conv2d).", ge=0, le=1024)] | None = None


class GraphModel(Resource, frozen=True, kw_only=True):
    """A model described layer by layer."""

    input: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]],
        field("Shape of one sample without the batch, such as [1, 28, 28].", schema=ATOMIC, min_length=1, max_length=4),
    ]
    layers: Annotated[list[GraphLayer], field("Layers, in order.", schema=ATOMIC, min_length=1, max_length=2048)]


_GIVEN = "[{}].filter(given, given != '')".format(
    ", ".join(f"has(self.{one}) && self.{one} != null ? '{one}' : ''" for one in ("features", "catalog", "graph"))
)
"""CEL: names of the given model sources."""


class ModelSource(Resource, frozen=True, kw_only=True):
    """Source of the model's graph: exactly one of the three. The model is unknown when all are left out."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"{_GIVEN}.size() == 1",
            "give exactly one of features, catalog and graph; leave out spec.model if the model is unknown",
        ),
    )

    features: Annotated[
        ModelFeatures | None, field("The training step in numbers, as `carpool graph` prints them.")
    ] = None
    catalog: Annotated[
        CatalogModel | None, field("A published architecture by its name in timm, torchvision or transformers.")
    ] = None
    graph: Annotated[GraphModel | None, field("The model described layer by layer.")] = None

    @property
    def family(self) -> str:
        """Name of the architecture, whose jobs count together where slowdowns are learned; else a digest."""
        if self.catalog is not None and len(name := self.catalog.name.partition("@")[0]) <= MAX_FAMILY:
            return name
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]


class Neighbour(Resource, frozen=True, kw_only=True):
    """Another job on the same GPU."""

    namespace: Annotated[str, field("Its namespace.")]
    job: Annotated[str, field("Its name.")]
    gpu_uuid: Annotated[GpuUuid, field("The GPU that both use.")]


class WorkerPlacement(Resource, frozen=True, kw_only=True):
    """Placement of a worker, with the reason."""

    worker: Annotated[int, field("Index of the worker.", ge=0)]
    pod: Annotated[str, field("Name of the worker's pod.")]
    pod_uid: Annotated[PodUid, field("UID of the pod.")]
    node: Annotated[NodeName, field("Node of the pod.")]
    gpu_uuids: Annotated[list[GpuUuid], field("UUIDs of its GPUs.", schema=ATOMIC)]
    product: Annotated[str, field("Product of the GPUs.")]
    mode: Annotated[SharingMode, field("How the GPUs are shared.")]
    memory_limit_mib: Annotated[int, field("Memory limit on each GPU, in MiB.", ge=0)] | None = None
    thread_percentage: Annotated[int, field("MPS active thread percentage.", ge=1, le=100)] | None = None
    mig_profile: Annotated[str | None, field("MIG profile.")] = None
    provisional: Annotated[
        bool, field("Whether placement counts this memory only until the worker's own peak is measured.")
    ] = False
    measured_mib: (
        Annotated[int, field("Memory that placement counts since the peak was measured, in MiB; absent before.", ge=1)]
        | None
    ) = None
    expected_slowdown: Annotated[float, field("Predicted step time on these GPUs over step time alone.", ge=1)] = 1.0
    neighbours: Annotated[list[Neighbour], field("Jobs that share its GPUs.", schema=ATOMIC)] = []
    reason: Annotated[str, field("Reason for these GPUs, this mode and these limits.", max_length=4096)] = ""

    def bound_mib(self, predicted: MemoryPrediction | None) -> int | None:
        """Return the memory on each GPU that placement counted until it was measured, in MiB; None if unknown."""
        if self.memory_limit_mib is not None or predicted is None:
            return self.memory_limit_mib
        return predicted.bound_mib(self.mode)

    def counted_mib(self, predicted: MemoryPrediction | None) -> int | None:
        """Return the memory on each GPU that placement counts, in MiB; None if unknown.

        Since the worker took more than was measured, its bound counts again, and `provisional` is false.
        """
        return self.measured_mib if self.measured_mib and self.provisional else self.bound_mib(predicted)


class Attempt(Resource, frozen=True, kw_only=True):
    """One attempt at running the job."""

    number: Annotated[int, field("Number of the attempt, from 1.", ge=1)]
    started_at: Annotated[str, field("When its pods were created, RFC 3339.")] = ""
    ended_at: Annotated[str | None, field("When it ended, RFC 3339.")] = None
    outcome: Annotated[
        str,
        field(
            "Creating, Running (its pods exist, and may wait for a place), Complete, or the reason of the failure, one "
            "CamelCase word."
        ),
    ] = "Running"
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
    doubted: Annotated[
        bool,
        field(
            "Whether its log and its measurements do not both show that GPU memory ran out. Then nothing is learned "
            "from it, and the next attempt runs alone."
        ),
    ] = False


class Observed(Resource, frozen=True, kw_only=True):
    """Measurements of the agents, over all workers."""

    peak_memory_mib: Annotated[int, field("Largest GPU memory of a worker on one GPU, in MiB.", ge=0)] = 0
    gpu_util_percent: Annotated[
        float | None, field("Mean share of time in which some kernel of the job ran, 0..100.")
    ] = None
    sm_active_ratio: Annotated[float | None, field("Mean share of SMs with the job's work, 0..1.")] = None
    step_time_seconds: Annotated[float | None, field("Mean time of a step, where the job reports it, in seconds.")] = (
        None
    )
    step_time_interval: Annotated[
        Interval | None, field("Step time that replaces the predicted one; absent before twenty steps.")
    ] = None
    step_time_ratio: Annotated[
        float | None,
        field(
            "Observed step time over the step time predicted alone: slowdown by neighbours times the error of the "
            "prediction."
        ),
    ] = None
    solo_step_time_seconds: Annotated[
        float | None, field("Mean time of the job's own steps while no co-tenant worked on its GPUs, in seconds.")
    ] = None
    solo_source: Annotated[
        Literal["Run", "EarlierRun"] | None,
        field("Run that soloStepTimeSeconds is from: this one, or an earlier one of the same model and training."),
    ] = None
    slowdown: (
        Annotated[
            float,
            field("Measured slowdown: stepTimeSeconds over soloStepTimeSeconds; absent if it was never alone.", ge=0),
        ]
        | None
    ) = None
    steps: (
        Annotated[int, field("Training steps of this attempt, by its slowest worker; absent without a report.", ge=0)]
        | None
    ) = None
    steps_at: Annotated[str | None, field("Time of `steps`, RFC 3339.")] = None
    expected_end: Annotated[
        str | None,
        field("Expected end by the measured step time, RFC 3339; absent before twenty steps or without steps."),
    ] = None
    latest_end: Annotated[
        str | None, field("The same by the interval's upper end: reservations in time begin then.")
    ] = None
    samples_per_second: Annotated[float, field("Samples of all workers.", ge=0)] | None = None
    data_wait_ratio: Annotated[float | None, field("Mean share of time in which it waited for data, 0..1.")] = None
    checkpoint_ratio: Annotated[float | None, field("Mean share of time in which it waited for checkpoints, 0..1.")] = (
        None
    )
    copy_ratio: Annotated[float | None, field("Mean share of time in which it waited for copies to the GPU, 0..1.")] = (
        None
    )


class JobSummary(Resource, frozen=True, kw_only=True):
    """Columns of `kubectl get gtj`, which shows only single values. Computed for people; programs must not read it."""

    node: Annotated[str, field("Nodes of the workers.", max_length=256)] = ""
    gpu: Annotated[str, field("Product of the GPUs, and how many where there are several.", max_length=256)] = ""
    mode: Annotated[str, field("How the GPUs are shared.")] = ""
    predicted_memory: Annotated[str, field("Predicted median of memory on each GPU, with its unit.")] = ""
    memory_bound: Annotated[
        str,
        field("Memory on each GPU that placement counts with: measured, else the job's own limit or predicted bound."),
    ] = ""
    predicted_utilization: Annotated[str, field("Predicted median GPU utilization, with its unit.")] = ""
    observed_memory: Annotated[str, field("Largest memory measured on one GPU, with its unit.")] = ""
    observed_utilization: Annotated[str, field("Mean GPU utilization measured, with its unit.")] = ""
    slowdown: Annotated[str, field("Expected step time beside the neighbours over step time alone.")] = ""
    measured_slowdown: Annotated[str, field("Measured step time over the job's own step time alone.")] = ""
    progress: Annotated[str, field("Steps done of all steps.")] = ""
    expected_end: Annotated[str, field("Expected end by the measured step time, RFC 3339, and its 95% quantile.")] = ""
    step_time: Annotated[
        str, field("Mean step time measured, its 95% quantile, and how many times the one predicted alone it is.")
    ] = ""


class JobStatus(Resource, frozen=True, kw_only=True):
    """State of the job, its prediction, placement and measurements."""

    observed_generation: Annotated[int, field("`metadata.generation` that this status was computed from.", ge=0)] = 0
    state: Annotated[JobState, field("State of the job, computed from the conditions.")] = JobState.PREDICTING
    conditions: Annotated[
        list[Condition],
        field(
            "Predicted, Placed, Running, Suspended, Complete, Failed; from its first anomaly on Stalled, Straggler, "
            "StepTimeDrift, MemoryNearLimit.",
            schema=ATOMIC,
        ),
    ] = []
    prediction: Annotated[Prediction | None, field("Prediction from the model's graph.")] = None
    placement: Annotated[
        list[WorkerPlacement], field("Placement of each worker, of the first 64 if there are more.", schema=ATOMIC)
    ] = []
    omitted_placements: Annotated[int, field("Number of placed workers beyond those in placement.", ge=0)] = 0
    attempts: Annotated[list[Attempt], field("Attempts so far, the latest last, at most ten.", schema=ATOMIC)] = []
    restarts: Annotated[int, field("Failures charged to backoffLimit.", ge=0)] = 0
    moves: Annotated[int, field("Attempts that ended by sharing.whenSlowed.", ge=0)] = 0
    observed: Annotated[Observed | None, field("Measurements.")] = None
    summary: Annotated[JobSummary | None, field("Columns of `kubectl get`.")] = None
    start_time: Annotated[str | None, field("Time when the first worker was bound to a node, RFC 3339.")] = None
    completion_time: Annotated[str | None, field("Time when the job ended, RFC 3339.")] = None


class Training(Resource, frozen=True, kw_only=True):
    """Properties of the training that memory, speed and duration depend on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.quantization) || has(self.adapter)",
            "quantized weights are frozen, so that quantization needs an adapter to train, such as "
            "adapter: {kind: lora, rank: 8}",
        ),
        Rule(
            "!has(self.parallelism) || !self.parallelism.kind.startsWith('zero') || self.precision != 'bf16-true'",
            "DeepSpeed keeps FP32 copies of 16-bit weights; set precision to bf16-mixed with zero-1, zero-2 and zero-3",
        ),
    )

    batch_size: Annotated[int, field("Samples of one forward and backward pass on one worker.", ge=1, le=1_000_000)] = (
        32
    )
    optimizer: Annotated[
        Optimizer,
        field(
            "Optimizer as it runs, which decides the memory of its state and of its update. Without a suffix it "
            "updates all tensors at once (PyTorch's foreach); -fused and -for-loop are PyTorch's other variants, "
            "-8bit and -paged those of bitsandbytes. The Hugging Face Trainer's default is adamw-fused."
        ),
    ] = Optimizer.ADAMW
    precision: Annotated[Precision, field("Arithmetic of the step.")] = Precision.FP32
    activation_checkpointing: Annotated[bool, field("Whether activations are recomputed instead of kept.")] = False
    gradient_accumulation: Annotated[
        int,
        field(
            "Forward and backward passes of one step, each of batchSize samples, before the optimizer updates the "
            "weights. Above 1 the gradients stay alive between the passes.",
            ge=1,
            le=100_000,
        ),
    ] = 1
    adapter: Annotated[Adapter | None, field("Adapter that is trained instead of the weights, which are frozen.")] = (
        None
    )
    quantization: Annotated[
        Quantization | None,
        field(
            "Storage of the frozen weights of linear layers, but the head's, as by bitsandbytes: nf4 (4 bits), "
            "nf4-double (with double quantization) or int8. Stacked experts are in 4 bits, too, as by its "
            "replace_parameter_4bit. Needs an adapter."
        ),
    ] = None
    cross_entropy: Annotated[
        CrossEntropy,
        field(
            "How a loss over tokens stores its logits. full: all at once, with an FP32 copy of 16-bit logits, as "
            "transformers. native: all at once, in their own type. chunked: in eight chunks, as torchtune. fused: "
            "never as a whole, as Liger, Unsloth and cut cross-entropy."
        ),
    ] = CrossEntropy.FULL
    compile: Annotated[
        bool,
        field("Whether torch.compile fuses the model's operators. Intervals are wider, because fusion is estimated."),
    ] = False
    activation_offloading: Annotated[
        bool, field("Whether activations that the backward pass needs wait in the memory of the host.")
    ] = False
    varying_lengths: Annotated[
        bool,
        field(
            "Whether batches of tokens differ in length, up to the model's input. Free blocks of PyTorch's allocator "
            "then fit no tensor, and it reserves more."
        ),
    ] = False
    parallelism: Annotated[Parallelism | None, field("Division of the model among the job's GPUs.")] = None
    steps: (
        Annotated[
            int,
            field(
                "Steps of the whole training. Times the predicted step time they give the job's duration, by which "
                "the queue may sort jobs. The duration counts as an hour when left out.",
                ge=1,
                le=10**12,
            ),
        ]
        | None
    ) = None


class Sharing(Resource, frozen=True, kw_only=True):
    """Whether and with which jobs the job shares its GPU."""

    mode: Annotated[
        RequestedMode,
        field(
            "How to share a GPU. Auto: the scheduler chooses. Exclusive: alone. TimeSlicing: tenants alternate, and "
            "nothing limits their memory. MPS: side by side through one Multi-Process Service daemon, each with a "
            "memory limit. MIG: a hardware instance of its own; needs gpusPerWorker 1."
        ),
    ] = RequestedMode.AUTO
    max_slowdown: Annotated[
        float,
        field(
            "Largest accepted slowdown: step time beside neighbours over step time alone. 1 accepts none; 1.5 accepts "
            "steps half as long again. The scheduler compares predicted slowdowns with it.",
            ge=1,
            le=10,
        ),
    ] = 1.5
    when_slowed: Annotated[
        WhenSlowed,
        field(
            "What the job does while its own steps or a co-tenant's are measured beyond their maxSlowdown. Stay: "
            "nothing. MoveAtCheckpoint: if it is the slowed job, its attempt ends after its next checkpoint. Move: "
            "likewise. It also ends in the first ten minutes on its GPU, without a checkpoint, if it came last. So it "
            "tries new co-tenants where the step times of both alone are known. Elsewhere it, and every moved job, is "
            "placed by the upper end of the slowdown. Five moves at most; backoffLimit does not count them."
        ),
    ] = WhenSlowed.STAY
    tenancy: Annotated[
        Tenancy,
        field(
            "Jobs with which it may share a GPU. Namespace: jobs of its own namespace or tenancy group. Cluster: also "
            "any other job with tenancy Cluster, but without a common MPS daemon; Auto takes a MIG instance where GPUs "
            "support it."
        ),
    ] = Tenancy.NAMESPACE


class MemoryOverride(Resource, frozen=True, kw_only=True):
    """Explicit memory limit, which overrides the prediction."""

    limit: Annotated[
        int | str | None,
        field(
            "GPU memory of one worker on each of its GPUs, with its unit, such as 12Gi. It replaces the prediction "
            "in placement. MPS enforces it for each process, so a worker of several processes can take more in "
            "all, which the node agent reports.",
            schema=QUANTITY,
            rules=MEMORY_RULES,
        ),
    ] = None


_CAPABILITY_RULES = (
    Rule(
        "self.matches('^[0-9]{1,2}[.][0-9]$')",
        "expected a CUDA compute capability such as 8.0, in quotes",
        "'expected a CUDA compute capability such as 8.0, in quotes, found ' + self",
    ),
)


class GpuSelector(Resource, frozen=True, kw_only=True):
    """GPUs that the job accepts."""

    product: (
        Annotated[
            str,
            field(
                "GPU product by NVML's name or a part of whole words, such as A100-SXM4-40GB; A100 matches any A100.",
                min_length=1,
                max_length=128,
            ),
        ]
        | None
    ) = None
    min_memory: Annotated[
        int | str | None,
        field("Smallest total memory of the GPU, with its unit, such as 40Gi.", schema=QUANTITY, rules=MEMORY_RULES),
    ] = None
    min_compute_capability: (
        Annotated[str, field("Smallest CUDA compute capability, such as 8.0.", max_length=8, rules=_CAPABILITY_RULES)]
        | None
    ) = None


MAX_WORKERS = 1024
"""Largest number of workers of a job."""

_MAX_S = 2**31 - 1


class OnExitCodes(Resource, frozen=True, kw_only=True):
    """Exit codes of a failed pod's containers."""

    container_name: (
        Annotated[
            str,
            field(
                "Container whose exit code is compared; any container and init container when left out.",
                min_length=1,
                max_length=63,
            ),
        ]
        | None
    ) = None
    operator: Annotated[
        Literal["In", "NotIn"],
        field(
            "In: some exit code is one of the values. NotIn: some exit code is none of them. Containers that ended "
            "with 0 are left out of both."
        ),
    ]
    values: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**31 - 1)]],
        field("Exit codes.", schema=ATOMIC, min_length=1, max_length=255),
    ]

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.operator == 'NotIn' || !(0 in self.values)",
            "exit code 0 is no failure: remove it from the values of operator In",
            field_path=".values",
        ),
    )


class OnPodCondition(Resource, frozen=True, kw_only=True):
    """A condition of a failed pod, such as DisruptionTarget."""

    type: Annotated[str, field("Type of the condition.", min_length=1, max_length=316)]
    status: Annotated[Literal["True", "False", "Unknown"], field("Status that it must have.")] = "True"


class PodFailureRule(Resource, frozen=True, kw_only=True):
    """A rule about a failed worker; it matches by exit codes or by conditions."""

    action: Annotated[
        Literal["FailJob", "Ignore", "Count"],
        field(
            "FailJob: the job fails. Ignore: the next attempt does not count as a restart. Count: it counts against "
            "backoffLimit."
        ),
    ]
    on_exit_codes: Annotated[OnExitCodes | None, field("Matches exit codes.")] = None
    on_pod_conditions: Annotated[
        list[OnPodCondition],
        field("Matches a pod that has at least one of these conditions.", schema=ATOMIC, max_length=20),
    ] = []

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.onExitCodes) != (has(self.onPodConditions) && self.onPodConditions.size() > 0)",
            "a rule needs either onExitCodes or onPodConditions, not both",
        ),
    )


class PodFailurePolicy(Resource, frozen=True, kw_only=True):
    """Rules for failures of workers, as in a Job of batch/v1."""

    in_order: Annotated[
        list[PodFailureRule],
        field(
            "Rules in order; the first that matches the worker that failed first decides. Without a match, failures of "
            "its containers count and disruptions do not. A failure that a co-tenant caused matches no rule.",
            schema=ATOMIC,
            min_length=1,
            max_length=20,
        ),
    ] = msgspec.field(name="rules")


class RunPolicy(Resource, frozen=True, kw_only=True):
    """Retries and time limits."""

    suspend: Annotated[bool, field("True keeps the job without pods.")] = False
    backoff_limit: Annotated[int, field("Restarts after failures before the job counts as failed.", ge=0, le=1000)] = 3
    gang_timeout_seconds: Annotated[
        int,
        field(
            "Seconds from the binding of the first of several workers until all must be bound. Then all of them "
            "release their GPUs, and the job tries again after a pause.",
            ge=1,
            le=_MAX_S,
        ),
    ] = 120
    start_deadline_seconds: Annotated[
        int,
        field(
            "Seconds from the binding of the last worker until every container must have started. Then the job fails "
            "with the kubelet's reason, such as ImagePullBackOff or FailedMount, and its GPUs are free. If the kubelet "
            "gives no reason, the job restarts, which counts against backoffLimit.",
            ge=1,
            le=_MAX_S,
        ),
    ] = 600
    active_deadline_seconds: (
        Annotated[
            int,
            field(
                "Seconds from the binding of the first worker until the job must be complete; unlimited when left out.",
                ge=1,
                le=_MAX_S,
            ),
        ]
        | None
    ) = None
    pod_failure_policy: Annotated[
        PodFailurePolicy | None,
        field("Rules for failures of workers, by exit code or pod condition.", schema=ATOMIC_MAP),
    ] = None
    ttl_seconds_after_finished: (
        Annotated[int, field("Seconds from its end until the job is deleted; never when left out.", ge=0, le=_MAX_S)]
        | None
    ) = None


class JobSpec(Resource, frozen=True, kw_only=True):
    """Request of the user."""

    rules: ClassVar[tuple[Rule, ...]] = (
        GPU_AMOUNT_RULE,
        Rule(
            "self.gpusPerWorker == 1 || self.sharing.mode != 'MIG'",
            "a MIG instance is a part of one GPU: set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
        Rule(
            "self.gpusPerWorker == 1 || self.sharing.mode != 'MPS'",
            "each GPU has an MPS daemon of its own and a process reaches only one: "
            "set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
        Rule(
            "!has(self.training.parallelism) || self.training.parallelism.gpus * "
            "self.training.parallelism.tensorParallel <= self.workers * self.gpusPerWorker",
            "training.parallelism needs more GPUs than the job has: gpus times tensorParallel is at most workers times "
            "gpusPerWorker",
            field_path=".training.parallelism",
        ),
    )

    model: Annotated[
        ModelSource | None,
        field("The trained model. When left out, the job runs alone until it was measured.", schema=ATOMIC_MAP),
    ] = None
    training: Annotated[Training, field("Properties of the training.", schema=ATOMIC_MAP)] = Training()
    workers: Annotated[int, field("Number of pods that train together.", ge=1, le=MAX_WORKERS)] = 1
    gpus_per_worker: Annotated[
        int, field("Number of GPUs (or shares of a GPU) of each worker, all on one node.", ge=1, le=16)
    ] = 1
    sharing: Annotated[Sharing, field("Whether and with which jobs it shares a GPU.", schema=ATOMIC_MAP)] = Sharing()
    memory: Annotated[MemoryOverride, field("Memory limit in place of the prediction.", schema=ATOMIC_MAP)] = (
        MemoryOverride()
    )
    gpu: Annotated[GpuSelector, field("GPUs that the job accepts.", schema=ATOMIC_MAP)] = GpuSelector()
    probe: Annotated[
        ProbeMode,
        field(
            "Whether the job's steps are measured inside its containers. Auto: Python loads Carpool's step probe, "
            "unless the template sets PYTHONUSERBASE. Off: nothing is added to the containers."
        ),
    ] = ProbeMode.AUTO
    run_policy: Annotated[RunPolicy, field("Retries and time limits.")] = RunPolicy()
    template: Annotated[
        dict[str, Any],
        field(
            "Pod template of a worker, as in a Job. Carpool adds the GPU request, the scheduler and labels.",
            schema=TEMPLATE,
        ),
    ]


_HAS_ENDED = (
    "this job has ended, so changes have no effect (except runPolicy.ttlSecondsAfterFinished): "
    "delete it and apply it again"
)
_IS_PLACED = "cannot change once the job is placed; only spec.runPolicy can: delete the job and apply it again"
_DECISIVE = dict.fromkeys(("workers", "gpusPerWorker", "training", "sharing", "memory", "gpu", "probe"), False) | {
    "model": True,
    "template": True,
}
"""Fields of the spec that the placement depends on, and whether each may be absent."""
_OF_ATTEMPTS = {
    "runPolicy.suspend": False,
    "runPolicy.backoffLimit": False,
    "runPolicy.gangTimeoutSeconds": False,
    "runPolicy.startDeadlineSeconds": False,
    "runPolicy.activeDeadlineSeconds": True,
    "runPolicy.podFailurePolicy": True,
}
"""Fields that control attempts, and whether each may be absent; an ended job makes no attempts."""


def _same(name: str, *, is_optional: bool) -> str:
    """Return CEL for whether a field of the spec is unchanged."""
    new, old = f"self.spec.{name}", f"oldSelf.spec.{name}"
    same = f"{new} == {old}"
    return f"(has({new}) == has({old}) && (!has({new}) || {same}))" if is_optional else f"({same})"


def _all_same(fields: Mapping[str, bool]) -> str:
    return "(" + " && ".join(_same(name, is_optional=is_optional) for name, is_optional in fields.items()) + ")"


def _first_changed(fields: Mapping[str, bool]) -> str:
    """Return CEL for the name of the first changed field; the last one if all others are unchanged."""
    *others, last = fields
    asked = "".join(f"!{_same(name, is_optional=fields[name])} ? 'spec.{name}' : " for name in others)
    return f"({asked}'spec.{last}')"


_ENDED = "has(oldSelf.status.completionTime)"
_FIXED = Rule(
    # One rule that reads the status once: the API server evaluates it at every write of the status, and converts the
    # whole object at each access to a field. A write of the status cannot change the spec, so it is not compared then.
    "!has(oldSelf.status) || self.status != oldSelf.status || [oldSelf.status].all(was, has(was.completionTime) "
    f"? {_all_same({**_DECISIVE, **_OF_ATTEMPTS})} "
    f": !has(was.placement) || was.placement.size() == 0 || {_all_same(_DECISIVE)})",
    f"spec {_IS_PLACED}",
    f"{_ENDED} ? '{_HAS_ENDED}' : {_first_changed(_DECISIVE)} + ' {_IS_PLACED}'",
    field_path=".spec",
)


class GpuTrainingJob(Resource, frozen=True, kw_only=True):
    """A deep-learning training job that shares GPUs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.metadata.name.size() <= 48",
            "metadata.name must have at most 48 characters, because pods are named NAME-worker-INDEX-ATTEMPT",
            field_path=".metadata.name",
        ),
        _FIXED,
    )

    api_version: str = "carpool.dev/v1alpha1"
    kind: str = "GpuTrainingJob"
    metadata: ObjectMeta
    spec: Annotated[JobSpec, field("Request of the user.")]
    status: Annotated[JobStatus, field("State of the job.", schema=ATOMIC_MAP)] = JobStatus()
