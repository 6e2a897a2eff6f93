"""Features of a model's training step, traced on fake tensors: `spec.model.features` and the predictor's input."""

from typing import Annotated, ClassVar, Literal

from carpool_core.resources.schema import ATOMIC, Resource, Rule, field
from carpool_core.values import CrossEntropy, Optimizer, ParallelKind, Precision, Quantization

_MAX_BYTES = 2**50
"""1 PiB: larger numbers are a wrong unit."""


ALL_LINEAR = "all-linear"
"""Every linear layer but the last one, which is the head; the name that `peft` uses."""


class Adapter(Resource, frozen=True, kw_only=True):
    """Trainable low-rank matrices beside frozen layers, computed as `peft` does."""

    kind: Annotated[Literal["lora"], field("Kind of the adapter.")] = "lora"
    rank: Annotated[int, field("Rank of the matrices.", ge=1, le=4096)] = 8
    targets: Annotated[
        list[Annotated[str, field("Name of a layer, or the last parts of one.", min_length=1, max_length=253)]],
        field(
            "Linear layers that get an adapter, by name or the last parts of it, such as q_proj; all-linear, and none "
            "here, are every linear layer but the head.",
            schema=ATOMIC,
            max_length=64,
        ),
    ] = []
    dropout: Annotated[float, field("Dropout before the matrices; above 0 its masks are kept.", ge=0, lt=1)] = 0.0


class Parallelism(Resource, frozen=True, kw_only=True):
    """Division of one model among several GPUs; memory and work are those of each of them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.cpuOffload) || !self.cpuOffload || self.kind != 'ddp'",
            "ddp keeps all state on each GPU; choose fsdp, zero-1, zero-2 or zero-3 with cpuOffload",
        ),
    )

    kind: Annotated[ParallelKind, field("What is divided: ddp (samples only), fsdp, zero-1, zero-2 or zero-3.")] = (
        ParallelKind.DDP
    )
    gpus: Annotated[int, field("GPUs among which state is divided, all of the job unless it has replicas.", ge=1)] = 1
    cpu_offload: Annotated[
        bool,
        field(
            "Whether what is divided, but the gathered weights, is in the memory of the host, where the optimizer runs."
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        field("GPUs that divide each layer. Activations count as if they were whole.", ge=1, le=1024),
    ] = 1


class LayerCounts(Resource, frozen=True, kw_only=True):
    """Leaf modules by kind, as HotCloud '20 counts them.

    A recurrent module counts once for each layer and direction, and as two linear layers each time.
    """

    convolution: Annotated[int, field("Convolution layers.", ge=0, le=1_000_000)] = 0
    linear: Annotated[int, field("Fully connected layers.", ge=0, le=1_000_000)] = 0
    activation: Annotated[int, field("Activation layers.", ge=0, le=1_000_000)] = 0
    normalization: Annotated[int, field("Normalization layers.", ge=0, le=1_000_000)] = 0
    recurrent: Annotated[int, field("Recurrent layers.", ge=0, le=1_000_000)] = 0
    embedding: Annotated[int, field("Embedding layers.", ge=0, le=1_000_000)] = 0
    other: Annotated[int, field("All other leaf layers.", ge=0, le=1_000_000)] = 0


class TracedStep(Resource, frozen=True, kw_only=True):
    """One training step (forward, backward, optimizer) on fake tensors at one batch size."""

    batch_size: Annotated[int, field("Samples in the step.", ge=1, le=1_000_000)]
    peak_bytes: Annotated[int, field("Peak of all live tensor storage, in bytes.", ge=1, le=_MAX_BYTES)]
    activation_bytes: Annotated[
        int, field("Activations and temporaries alive at the peak, in bytes.", ge=0, le=_MAX_BYTES)
    ]
    reserved_bytes: Annotated[
        int,
        field(
            "Memory that PyTorch's caching allocator reserves for the step, in bytes; 0 if unknown.",
            ge=0,
            le=_MAX_BYTES,
        ),
    ] = 0
    unfolded_bytes: Annotated[
        int,
        field(
            "Largest unfolded input of a convolution of the step, in bytes, which bounds its workspace; 0 without "
            "convolutions.",
            ge=0,
            le=_MAX_BYTES,
        ),
    ] = 0
    largest_bytes: Annotated[
        int, field("Largest single tensor of the step, in bytes; 0 if unknown.", ge=0, le=_MAX_BYTES)
    ] = 0
    flops: Annotated[float, field("Floating-point operations of the step.", ge=0, le=9e18)]
    bytes_moved: Annotated[float, field("Bytes read and written by all operators, without caches.", ge=0, le=1e18)]
    kernels: Annotated[int, field("Operators that launch work on a GPU.", ge=1, le=100_000_000)]


class ModelFeatures(Resource, frozen=True, kw_only=True):
    """Numbers of a model's training step. `carpool graph` prints this block."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            # The API server converts a whole step at each access to one of its fields, so each is read once.
            "[self.steps.map(s, s.batchSize)].all(sizes, sizes.isSorted() && "
            "sizes.all(one, sizes.filter(other, other == one).size() == 1))",
            "steps must be in ascending order of batchSize, each batchSize once; "
            "take the block from `carpool graph` unchanged",
        ),
        Rule(
            "self.steps.all(s, s.activationBytes <= s.peakBytes)",
            "activationBytes is a part of peakBytes, so it cannot be larger; "
            "take the block from `carpool graph` unchanged",
        ),
        Rule(
            "self.trainableParameters <= self.parameters",
            "trainableParameters cannot exceed parameters; take the block from `carpool graph` unchanged",
        ),
    )

    name: Annotated[str, field("Name of the model, for people.", max_length=253)] = ""
    parameters: Annotated[int, field("Number of parameters.", ge=0, le=10**13)]
    trainable_parameters: Annotated[int, field("Number of parameters with gradients.", ge=0, le=10**13)]
    parameter_bytes: Annotated[int, field("Size of parameters and buffers, in bytes.", ge=0, le=_MAX_BYTES)]
    trainable_bytes: Annotated[
        int, field("Size of the parameters with gradients, in bytes; 0 if unknown.", ge=0, le=_MAX_BYTES)
    ] = 0
    layers: Annotated[LayerCounts, field("Leaf layers by kind.")] = LayerCounts()
    optimizer: Annotated[Optimizer, field("Optimizer of the traced steps.")] = Optimizer.ADAMW
    precision: Annotated[Precision, field("Precision of the traced steps.")] = Precision.FP32
    activation_checkpointing: Annotated[bool, field("Whether activations were checkpointed.")] = False
    gradient_accumulation: Annotated[int, field("Backward passes of a traced step.", ge=1, le=100_000)] = 1
    adapter: Annotated[Adapter | None, field("Adapter of the traced steps.")] = None
    quantization: Annotated[Quantization | None, field("Storage of the frozen weights.")] = None
    cross_entropy: Annotated[CrossEntropy, field("How the loss stored its logits.")] = CrossEntropy.FULL
    compile: Annotated[bool, field("Whether the steps are those of a compiled model.")] = False
    activation_offloading: Annotated[bool, field("Whether kept activations were on the host.")] = False
    varying_lengths: Annotated[bool, field("Whether reserved memory is that of batches of many lengths.")] = False
    parallelism: Annotated[Parallelism | None, field("Division among several GPUs.")] = None
    steps: Annotated[
        list[TracedStep],
        field(
            "Traced steps at one or more batch sizes, ascending. Other batch sizes are interpolated.",
            schema=ATOMIC,
            min_length=1,
            max_length=8,
        ),
    ]
