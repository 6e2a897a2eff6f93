"""Traces models on fake tensors. `python -m carpool_predictor.trace` does it in a process that its caller can limit.

Protocol: one `TraceRequest` as JSON on stdin; one `TraceReply` as JSON on stdout, exit code 0 with features or an
abstention. Whatever the model prints goes to stderr.
"""

import os
import resource
import sys

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import ModelSource, Training
from carpool_core.values import MIB

from carpool_predictor.abstention import Abstention, TraceError


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
    training: Training
    memory_mib: int | None = None
    """Limit on the process's own writable memory, in MiB; none when left out."""


class TraceReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer; exactly one field is set."""

    features: ModelFeatures | None = None
    abstention: Abstention | None = None


def limit_memory(memory_mib: int) -> None:
    """Limit writable private memory (RLIMIT_DATA): mapped libraries, several GB with CUDA's, do not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, memory_mib * MIB))


def answer(request: TraceRequest) -> TraceReply:
    """Trace the requested model; every failure that has a reason is an abstention."""
    out_of_memory = Abstention(
        reason="TraceOutOfMemory",
        message=f"tracing the model took more than {request.memory_mib or 0:,} MiB of memory; raise the limit, or give "
        "spec.model.features as `carpool graph` prints them on a larger machine",
    )
    try:
        # Imported under the limit, so that a machine without PyTorch gets an answer as well.
        from carpool_predictor.tracing import trace_request

        return TraceReply(features=trace_request(request))
    except ModuleNotFoundError as e:
        return TraceReply(abstention=torch_missing(str(e)))
    except TraceError as e:
        return TraceReply(abstention=out_of_memory if _is_out_of_memory(e.__cause__) else e.as_abstention())
    except (MemoryError, RuntimeError) as e:
        if _is_out_of_memory(e):
            return TraceReply(abstention=out_of_memory)
        raise


def _is_out_of_memory(error: BaseException | None) -> bool:
    return (
        isinstance(error, MemoryError)
        or "allocate memory" in str(error)
        or "not enough memory" in str(error)
        or "bad_alloc" in str(error)
    )


def torch_missing(detail: str = "") -> Abstention:
    """Say that this installation cannot trace."""
    found = f" ({detail})" if detail else ""
    return Abstention(
        reason="TorchMissing",
        message=f"computing a model's features needs PyTorch{found}: install carpool[trace] here, or give "
        "spec.model.features as `carpool graph` prints them elsewhere",
    )


def main() -> int:
    """Answer the one request on stdin."""
    reply_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TraceRequest)
    if request.memory_mib is not None:
        limit_memory(request.memory_mib)
    with os.fdopen(reply_fd, "wb") as reply:
        reply.write(msgspec.json.encode(answer(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
