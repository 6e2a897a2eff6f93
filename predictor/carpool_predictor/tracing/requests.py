"""What the process that traces is asked, and what it answers."""

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import ModelSource, Training

from carpool_predictor.features.abstention import Abstention

RAISE_TIMEOUT = "raise the limit (--trace-timeout, or settings.traceTimeoutSeconds of the Helm chart)"
RAISE_MEMORY = "raise the limit (--trace-memory, or settings.traceMemoryMib of the Helm chart)"
"""What can be done where a trace took too much: whoever is told may sit at a command line or look at a job."""


class FactoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """A function in a Python file that returns an nn.Module. Running the user's code is for the command line only."""

    path: str
    function: str
    input: list[int]
    """Shape of one sample."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to trace; exactly one of `model` (its catalog or graph) and `factory`."""

    model: ModelSource | None = None
    factory: FactoryModel | None = None
    family: str | None = None
    """Module, within its library, that defines a catalog model, where that is known: no other needs to be imported."""
    training: Training
    memory_mib: int | None = None
    """Limit on the process's own writable memory, in MiB; none when left out."""


class TraceReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer; exactly one field is set."""

    features: ModelFeatures | None = None
    abstention: Abstention | None = None


def torch_missing(detail: str = "") -> Abstention:
    """Say that this installation cannot trace."""
    found = f" ({detail})" if detail else ""
    return Abstention(
        reason="TorchMissing",
        message=f"computing a model's features needs PyTorch{found}: install carpool[trace] here, or give "
        "spec.model.features as `carpool graph` prints them elsewhere",
    )
