"""Identifiers that must not mix, and the choices that every part of Carpool speaks of."""

import re
from decimal import Decimal
from enum import StrEnum
from typing import NewType

PodUid = NewType("PodUid", str)
"""`metadata.uid` of a pod: the identity that reservations, claims and bindings go by."""

JobUid = NewType("JobUid", str)
"""`metadata.uid` of a GpuTrainingJob."""

GpuUuid = NewType("GpuUuid", str)
"""A GPU as NVML names it, `GPU-…`."""

NodeName = NewType("NodeName", str)
"""`metadata.name` of a Node, and of the GpuNode that describes its GPUs."""

MIB = 1024 * 1024
"""Bytes in a mebibyte, the unit in which NVML-based tools speak of GPU memory."""


class SharingMode(StrEnum):
    """How a GPU is divided among its tenants."""

    EXCLUSIVE = "Exclusive"
    """One tenant; no division."""
    TIME_SLICING = "TimeSlicing"
    """Tenants take turns on the whole GPU; nothing limits their memory."""
    MPS = "MPS"
    """Tenants run side by side through one Multi-Process Service daemon, with memory and thread limits."""
    MIG = "MIG"
    """Each tenant has a hardware instance of its own."""


class RequestedMode(StrEnum):
    """What a job may ask for: a sharing mode, or the scheduler's choice."""

    AUTO = "Auto"
    EXCLUSIVE = "Exclusive"
    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"
    MIG = "MIG"


class Tenancy(StrEnum):
    """With whom a job is willing to share a GPU."""

    NAMESPACE = "Namespace"
    """Only with jobs of its own namespace."""
    CLUSTER = "Cluster"
    """With any job that is also willing. Never behind one MPS server across namespaces."""


class Optimizer(StrEnum):
    """Optimizers whose state the predictor knows."""

    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"


class Precision(StrEnum):
    """Arithmetic of the training step, in the names of PyTorch Lightning."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    BF16 = "bf16-true"


class PartitionState(StrEnum):
    """Where a reservation's share of a GPU stands. Pending → Preparing → Ready; Preparing → Failed; any → gone."""

    PREPARING = "Preparing"
    """The agent has seen the reservation and is running the steps towards it."""
    READY = "Ready"
    """The share exists; the pod may be bound and started."""
    FAILED = "Failed"
    """The steps failed and were undone; the message says why."""


class DeviceHealth(StrEnum):
    """Whether new work may go to a GPU."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class JobState(StrEnum):
    """The one word that the State column shows; computed from conditions, never stored apart from them."""

    PREDICTING = "Predicting"
    SUSPENDED = "Suspended"
    QUEUED = "Queued"
    """Pods exist (or wait for a GPU that could hold them) and are not all placed."""
    UNPLACEABLE = "Unplaceable"
    """No GPU of the cluster could ever hold it; looked at again when the GPUs change."""
    BACKING_OFF = "BackingOff"
    """An attempt ended without success, and the next one waits for its time."""
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
"""What Kubernetes' resource.ParseQuantity accepts, without negative amounts."""


def parse_quantity(quantity: int | str) -> Decimal:
    """Read a quantity such as `500m`, `4` or `12Gi` in the resource's own unit: cores, bytes, pieces.

    Raises:
        ValueError: The text is no quantity.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if not found:
        raise ValueError(f"expected an amount such as 12Gi, 4 or 500m, found {quantity!r}")
    scale = Decimal(f"1e{found['exponent']}") if found["exponent"] else _SUFFIXES[found["suffix"] or ""]
    return Decimal(found["number"]) * scale


def parse_memory_mib(quantity: int | str) -> int:
    """Convert a quantity such as `12Gi` (or a number of bytes) to MiB, rounded down.

    Raises:
        ValueError: The text is no quantity of memory.
    """
    try:
        return int(parse_quantity(quantity) / MIB)
    except ValueError as error:
        raise ValueError(f"expected an amount of memory such as 12Gi or 500Mi, found {quantity!r}") from error
