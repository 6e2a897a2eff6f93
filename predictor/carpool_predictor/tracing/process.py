"""Traces a model in a process of its own, with limits of time and memory, because building a model may run user code.

`multiprocessing`'s fork server imports PyTorch once and forks a process for each trace.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import ModelSource, Training
from carpool_core.values import MIB

from carpool_predictor.features import Abstention, Sample, TraceError

RAISE_TIMEOUT = "raise the limit (--trace-timeout, or settings.traceTimeoutSeconds of the Helm chart)"
RAISE_MEMORY = "raise the limit (--trace-memory, or settings.traceMemoryMib of the Helm chart)"
"""Advice for a trace that exceeded a limit; the reader has either the command line or the chart."""

_MAX_REPLY = 1 << 20
_OUTPUT_TAIL = 2000
_M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt(3)."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a trace computes nothing, and must not take a context on a node's GPU
    "HF_HUB_OFFLINE": "1",
}
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = "carpool_predictor.tracing.models"
_PRELOAD_LIBRARY = {
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "carpool_predictor.catalog.hub_models",
}
"""Modules that build a library's models. The fork server imports those of the first request; later processes import
others themselves."""


class FactoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """A function in a Python file that returns an nn.Module. Only the command line runs a user's code."""

    path: str
    function: str
    inputs: list[Sample]
    """Inputs, in the order in which the model takes them."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to trace; exactly one of `model` (its catalog or graph) and `factory` is set."""

    model: ModelSource | None = None
    factory: FactoryModel | None = None
    training: Training


class TraceReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer; exactly one field is set."""

    features: ModelFeatures | None = None
    abstention: Abstention | None = None


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Limits of one trace."""

    timeout_s: float = 120.0
    """Seconds from the fork to the answer."""
    memory_mib: int = 3072
    """Writable memory of the process, in MiB; PyTorch and timm alone take about 700."""
    concurrency: int = 1
    """Traces that run at the same time; the others wait, and their time does not run."""


def torch_missing(detail: str = "") -> Abstention:
    """Return the abstention of an installation without PyTorch."""
    found = f" ({detail})" if detail else ""
    return Abstention(
        reason="TorchMissing",
        message=f"computing a model's features needs PyTorch{found}: install Carpool's extra trace here, or give "
        "spec.model.features as `carpool graph` prints them elsewhere",
    )


def _out_of_memory(memory_mib: int) -> Abstention:
    return Abstention(
        reason="TraceOutOfMemory",
        message=f"tracing the model took more than {memory_mib:,} MiB of memory; {RAISE_MEMORY}, or give "
        "spec.model.features as `carpool graph` prints them on a larger machine",
    )


def answer(request: TraceRequest, memory_mib: int = 0) -> TraceReply:
    """Trace the requested model in this process, with its memory limit; each expected failure is an abstention."""
    try:
        from carpool_predictor.tracing.models import factory_recipe, model_recipe, trace_recipe

        factory = request.factory
        recipe = (
            model_recipe(request.model)
            if factory is None
            else factory_recipe(factory.path, factory.function, *factory.inputs)
        )
        return TraceReply(features=trace_recipe(recipe, request.training))
    except ModuleNotFoundError as e:
        return TraceReply(abstention=torch_missing(str(e)))
    except TraceError as e:
        out_of_memory = _is_out_of_memory(e.__cause__)
        return TraceReply(abstention=_out_of_memory(memory_mib) if out_of_memory else e.as_abstention())
    except (MemoryError, RuntimeError) as e:
        if _is_out_of_memory(e):
            return TraceReply(abstention=_out_of_memory(memory_mib))
        raise


def _is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, MemoryError) or any(
        text in str(error) for text in ("allocate memory", "not enough memory", "bad_alloc")
    )


def _child(request: TraceRequest, memory_mib: int, reply: Connection, output: Connection) -> None:
    """Trace in the forked process; everything that the model prints goes to `output`."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.environ |= _ENVIRONMENT
    warnings.simplefilter("ignore")
    # A weight's memory returns to the system when the weight becomes fake, instead of staying in the heap.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    # RLIMIT_DATA limits writable private memory; mapped libraries, several GB with CUDA's, do not count.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, memory_mib * MIB))
    reply.send_bytes(msgspec.json.encode(answer(request, memory_mib)))


class TraceProcess:
    """One forked process that traces one model."""

    def __init__(self, request: TraceRequest, limits: TraceLimits) -> None:
        self._limits = limits
        catalog = None if request.model is None else request.model.catalog
        library = None if catalog is None else _PRELOAD_LIBRARY.get(catalog.name.partition("/")[0])
        # Has no effect once the fork server runs.
        _CONTEXT.set_forkserver_preload([_PRELOAD] if library is None else [_PRELOAD, library])
        self._reply, self._child_reply = _CONTEXT.Pipe(duplex=False)
        self._output, self._child_output = _CONTEXT.Pipe(duplex=False)
        arguments = (request, limits.memory_mib, self._child_reply, self._child_output)
        self._process = _CONTEXT.Process(target=_child, args=arguments)
        self._killed = False

    def answer(self) -> ModelFeatures | Abstention:
        """Start the process and return its answer; blocks until the answer, the end of the process or the timeout."""
        try:
            self._process.start()  # the first start waits until the fork server has imported PyTorch
        except (OSError, EOFError) as e:
            return Abstention(reason="TraceFailed", message=f"the tracing process could not be started: {e}")
        finally:
            self._child_reply.close()
            self._child_output.close()
        try:
            return self._outcome()
        finally:
            self.kill()
            self._process.join()
            self._reply.close()
            self._output.close()

    def kill(self) -> None:
        """End the process and all processes that the model's code started. Any thread may call this."""
        self._killed = True
        if self._process.pid is not None:
            for kill in (os.killpg, os.kill):  # the process may not lead its own group yet
                with suppress(ProcessLookupError):
                    kill(self._process.pid, signal.SIGKILL)

    def _outcome(self) -> ModelFeatures | Abstention:
        deadline = time.monotonic() + self._limits.timeout_s
        printed = b""
        sources: list[Connection | int] = [self._reply, self._output, self._process.sentinel]
        while not self._killed:
            ready = wait(sources, max(deadline - time.monotonic(), 0.0))
            if self._output in ready:
                chunk = os.read(self._output.fileno(), 65536)
                printed = (printed + chunk)[-_OUTPUT_TAIL:]
                if not chunk:
                    sources.remove(self._output)
            elif self._reply in ready:
                try:
                    reply = msgspec.json.decode(self._reply.recv_bytes(_MAX_REPLY), type=TraceReply)
                except EOFError:
                    sources.remove(self._reply)
                else:
                    return reply.features or reply.abstention or self._failed(printed)
            elif ready:
                return self._failed(printed)
            else:
                return Abstention(
                    reason="TraceTimedOut",
                    message=f"tracing the model took longer than {self._limits.timeout_s:g} s; give "
                    f"spec.model.features as `carpool graph` prints them, or {RAISE_TIMEOUT}",
                )
        return self._failed(printed)

    def _failed(self, printed: bytes) -> Abstention:
        """Return the reason why the process ended without an answer."""
        self._process.join()
        text, code = printed.decode(errors="replace").strip(), self._process.exitcode
        if code == -signal.SIGKILL or "bad_alloc" in text or "MemoryError" in text:
            return Abstention(
                reason="TraceOutOfMemory",
                message=f"tracing the model was ended for its memory (limit {self._limits.memory_mib:,} MiB); "
                f"{RAISE_MEMORY}, or give spec.model.features as `carpool graph` prints them on a larger machine",
            )
        last = text.splitlines()[-1][:500] if text else "it printed nothing"
        return Abstention(reason="TraceFailed", message=f"the tracing process ended with code {code}: {last}")
