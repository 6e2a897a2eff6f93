"""Traces models on fake tensors. `python -m carpool_predictor.trace` does it in a process that its caller can limit.

Protocol: one `TraceRequest` as JSON on stdin; one `TraceReply` as JSON on stdout, exit code 0 with features or an
abstention. Whatever the model prints goes to stderr.
"""

import os
import resource
import sys

import msgspec
from carpool_core.values import MIB

from carpool_predictor.features import Abstention, TraceError
from carpool_predictor.tracing.source import RAISE_MEMORY, TraceReply, TraceRequest, torch_missing


def limit_memory(memory_mib: int) -> None:
    """Limit writable private memory (RLIMIT_DATA): mapped libraries, several GB with CUDA's, do not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, memory_mib * MIB))


def answer(request: TraceRequest) -> TraceReply:
    """Trace the requested model; every failure that has a reason is an abstention."""
    out_of_memory = Abstention(
        reason="TraceOutOfMemory",
        message=f"tracing the model took more than {request.memory_mib or 0:,} MiB of memory; {RAISE_MEMORY}, or "
        "give spec.model.features as `carpool graph` prints them on a larger machine",
    )
    try:
        # Imported under the limit, so that a machine without PyTorch gets an answer as well.
        from carpool_predictor.tracing.models import trace_request

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


def main() -> int:
    """Answer the one request on stdin."""
    reply_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    content = sys.stdin.buffer.read()
    request = msgspec.json.decode(content, type=TraceRequest)
    if request.memory_mib is not None:
        limit_memory(request.memory_mib)
    reply = answer(request)
    with os.fdopen(reply_fd, "wb") as out:
        out.write(msgspec.json.encode(reply))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # PyTorch takes a quarter of a second to be torn down, and the caller waits for the end
