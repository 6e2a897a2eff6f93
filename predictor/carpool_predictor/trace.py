"""Traces models on fake tensors. `python -m carpool_predictor.trace` does it in a process that its caller can limit.

Protocol: one `TraceRequest` as JSON on stdin; one `TraceReply` as JSON on stdout, exit code 0 with features or an
abstention. Whatever the model prints goes to stderr. With `--whole` everything is imported, whether needed or not.
"""

import os
import resource
import sys
import tempfile
from typing import NoReturn

import msgspec
from carpool_core.values import MIB

from carpool_predictor.features.abstention import Abstention, TraceError
from carpool_predictor.tracing.requests import RAISE_MEMORY, TraceReply, TraceRequest, torch_missing

WHOLE = "--whole"
"""Argument that has everything imported."""
_WORTH_ANOTHER_TRY = frozenset(
    {"DataDependentGraph", "FactoryFailed", "OperatorUnsupported", "TorchMissing", "TraceFailed", "UnknownCatalogModel"}
)
"""Why a lean trace may have failed for being lean: what it left out looks missing, and so may a model's name."""


def limit_memory(memory_mib: int) -> None:
    """Limit writable private memory (RLIMIT_DATA): mapped libraries, several GB with CUDA's, do not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, memory_mib * MIB))


def answer(request: TraceRequest, *, lean: bool = False) -> TraceReply:
    """Trace the requested model; every failure that has a reason is an abstention.

    Args:
        request: What to trace.
        lean: Leave out what a trace does not need, for good: in a process that traces once and ends.
    """
    out_of_memory = Abstention(
        reason="TraceOutOfMemory",
        message=f"tracing the model took more than {request.memory_mib or 0:,} MiB of memory; {RAISE_MEMORY}, or "
        "give spec.model.features as `carpool graph` prints them on a larger machine",
    )
    try:
        # Imported under the limit, so that a machine without PyTorch gets an answer as well.
        if lean:
            _prepare_lean(request)
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


def _prepare_lean(request: TraceRequest) -> None:
    from carpool_predictor.tracing.lean import prepare

    catalog = None if request.model is None else request.model.catalog
    prepare(None if catalog is None else catalog.name, request.family)


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
    lean = WHOLE not in sys.argv
    try:
        reply = answer(request, lean=lean)
    except Exception:
        # What was left out may be to blame, in whatever way; with everything imported it works, or says what is wrong.
        if lean:
            _begin_again(content, reply_fd)
        raise
    if lean and reply.abstention is not None and reply.abstention.reason in _WORTH_ANOTHER_TRY:
        _begin_again(content, reply_fd)
    with os.fdopen(reply_fd, "wb") as out:
        out.write(msgspec.json.encode(reply))
    return 0


def _begin_again(content: bytes, reply_fd: int) -> NoReturn:
    """Become a process that imports everything, and is asked the same."""
    with tempfile.TemporaryFile() as again:
        again.write(content)
        again.seek(0)
        os.dup2(again.fileno(), sys.stdin.fileno())
    os.dup2(reply_fd, sys.stdout.fileno())
    command = [sys.executable, "-W", "ignore", "-m", "carpool_predictor.trace", WHOLE]
    os.execv(command[0], command)  # noqa: S606  (our own module, by our own interpreter)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # PyTorch takes a quarter of a second to be torn down, and the caller waits for the end
