"""Identifiers, enumerations and Kubernetes quantities that every package uses."""

import re
from decimal import Decimal
from enum import StrEnum
from typing import Any, NewType

PodUid = NewType("PodUid", str)
"""`metadata.uid` of a pod: the key of reservations, claims and bindings."""

JobUid = NewType("JobUid", str)
"""`metadata.uid` of a GpuTrainingJob."""

GpuUuid = NewType("GpuUuid", str)
"""NVML's UUID of a GPU, `GPU-…`."""

NodeName = NewType("NodeName", str)
"""`metadata.name` of a Node and of its GpuNode."""

MIB = 1024 * 1024
"""Bytes in a mebibyte, NVML-based tools' unit of GPU memory."""


class SharingMode(StrEnum):
    """How a GPU is divided among its tenants."""

    EXCLUSIVE = "Exclusive"
    """One tenant."""
    TIME_SLICING = "TimeSlicing"
    """Tenants alternate on the whole GPU; nothing limits their memory."""
    MPS = "MPS"
    """Tenants run side by side through one Multi-Process Service daemon, with memory and thread limits."""
    MIG = "MIG"
    """Each tenant has its own hardware instance."""


class RequestedMode(StrEnum):
    """`spec.sharing.mode` of a job: a sharing mode, or the scheduler's choice."""

    AUTO = "Auto"
    EXCLUSIVE = "Exclusive"
    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"
    MIG = "MIG"


class WhenSlowed(StrEnum):
    """Reaction of a job to a job on its GPU that is slowed beyond its limit."""

    STAY = "Stay"
    MOVE_AT_CHECKPOINT = "MoveAtCheckpoint"
    MOVE = "Move"


class ProbeMode(StrEnum):
    """Whether a job's containers get the step probe."""

    AUTO = "Auto"
    OFF = "Off"


class Tenancy(StrEnum):
    """Jobs with which a job may share a GPU."""

    NAMESPACE = "Namespace"
    """Jobs of its own namespace."""
    CLUSTER = "Cluster"
    """Any job that allows it, too. Never through one MPS server across namespaces."""


class Optimizer(StrEnum):
    """Optimizers, as they run on a GPU; those without a suffix update all tensors at once (PyTorch's `foreach`)."""

    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    ADAM_FUSED = "adam-fused"
    ADAMW_FUSED = "adamw-fused"
    """The default of Hugging Face's Trainer."""
    ADAMW_FOR_LOOP = "adamw-for-loop"
    ADAMW_8BIT = "adamw-8bit"
    ADAMW_8BIT_PAGED = "adamw-8bit-paged"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"


class Quantization(StrEnum):
    """Storage of frozen weights, as bitsandbytes lays it out."""

    NF4 = "nf4"
    """4 bits, with an FP32 maximum per block of 64."""
    NF4_DOUBLE = "nf4-double"
    """The same, with the maxima in 8 bits (QLoRA's double quantization)."""
    INT8 = "int8"
    """8 bits, with an FP32 maximum per output (LLM.int8)."""


class CrossEntropy(StrEnum):
    """How a loss over tokens stores its logits."""

    FULL = "full"
    """All at once, with an FP32 copy of 16-bit logits, as the losses of transformers."""
    NATIVE = "native"
    """All at once, in the type of the model's output."""
    CHUNKED = "chunked"
    """In eight chunks: torchtune's chunked output and loss."""
    FUSED = "fused"
    """Never as a whole: Liger, Unsloth and cut cross-entropy."""


class ParallelKind(StrEnum):
    """Parts of a training step that are divided among the GPUs of a job."""

    DDP = "ddp"
    """Samples only; gradients have buckets for their reduction."""
    FSDP = "fsdp"
    """Weights, gradients and optimizer state: PyTorch's `fully_shard`, a block at a time."""
    ZERO_1 = "zero-1"
    """Optimizer state, with DeepSpeed."""
    ZERO_2 = "zero-2"
    """Optimizer state and gradients, with DeepSpeed."""
    ZERO_3 = "zero-3"
    """Optimizer state, gradients and weights, with DeepSpeed."""


class Precision(StrEnum):
    """Arithmetic of the training step, by PyTorch Lightning's names."""

    FP32 = "fp32"
    TF32 = "tf32"
    """FP32 with matrix products on tensor cores (`torch.set_float32_matmul_precision("high")`); Ampere and later."""
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    BF16 = "bf16-true"


class PartitionState(StrEnum):
    """State of a reservation's share of a GPU. (none) → Preparing → Ready or Failed; each may go back to none."""

    PREPARING = "Preparing"
    """The agent runs the steps towards it."""
    READY = "Ready"
    """The share exists; the pod may be bound and started."""
    FAILED = "Failed"
    """The steps failed and were undone; the message has the reason."""


class DeviceHealth(StrEnum):
    """Whether a GPU takes new pods."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class JobState(StrEnum):
    """Value of the State column. It is computed from the conditions and never stored apart from them."""

    PREDICTING = "Predicting"
    SUSPENDED = "Suspended"
    QUEUED = "Queued"
    """The pods exist, or wait for a GPU that could hold them, and not all are placed."""
    UNPLACEABLE = "Unplaceable"
    """No GPU of the cluster could ever hold it; checked again when the GPUs change."""
    BACKING_OFF = "BackingOff"
    """An attempt failed, and the next one waits for the end of its backoff."""
    STARTING = "Starting"
    """Every worker is placed; not every container runs yet."""
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(
    r"\+?(?P<number>[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]{1,2}))?",
    re.ASCII,
)
"""Texts that Kubernetes' resource.ParseQuantity accepts, without negative amounts."""


def pluralize(number: int, noun: str) -> str:
    """Return a number of things: `1 GPU`, `20 nodes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def parse_quantity(quantity: int | str) -> Decimal:
    """Return a quantity such as `500m`, `4` or `12Gi` in the resource's own unit: cores, bytes, pieces.

    Raises:
        ValueError: The text is not a quantity.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if not found:
        raise ValueError(f"expected an amount such as 12Gi, 4 or 500m, found {quantity!r}")
    scale = Decimal(f"1e{found['exponent']}") if found["exponent"] else _SUFFIXES[found["suffix"] or ""]
    return Decimal(found["number"]) * scale


def parse_memory_mib(quantity: int | str) -> int:
    """Return a quantity such as `12Gi` (or a number of bytes) in MiB, rounded down.

    Raises:
        ValueError: The text is not a quantity.
    """
    try:
        return int(parse_quantity(quantity) / MIB)
    except ValueError as error:
        raise ValueError(f"expected an amount of memory such as 12Gi or 500Mi, found {quantity!r}") from error


def without_nulls(value: Any) -> Any:
    """Return a copy of a JSON value without the nulls in its objects: the API server reads them as no values."""
    if isinstance(value, dict):
        return {name: without_nulls(of) for name, of in value.items() if of is not None}
    return [without_nulls(of) for of in value] if isinstance(value, list) else value
