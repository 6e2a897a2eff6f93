"""Where a job's features come from: its spec, or a trace in a subprocess with limits."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.values import MIB

from carpool_predictor.catalog import store
from carpool_predictor.catalog.names import refusal_of
from carpool_predictor.features import Abstention, reason_to_abstain

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


TRACE_COMMAND = (sys.executable, "-W", "ignore", "-m", "carpool_predictor.trace")

_MAX_REPLY = 1 << 20
_STDERR_TAIL = 2000


class Tracer(Protocol):
    """Computes features of a catalog or inline model."""

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Return the features of `model.catalog` or `model.graph` at the job's batch size and one other."""
        ...


async def features_of(model: ModelSource | None, training: Training, tracer: Tracer) -> ModelFeatures | Abstention:
    """Return the features that a job's prediction is computed from, or why there are none."""
    if model is None or (model.features is None and model.catalog is None and model.graph is None):
        return Abstention(
            reason="UnknownModel",
            message="the job does not say what it trains; give spec.model (catalog, graph or features) to let it "
            "share a GPU",
        )
    return model.features if model.features is not None else await tracer.trace(model, training)


def input_digest(model: ModelSource | None, training: Training) -> str:
    """Return a digest of what a prediction is computed from; equal specs have equal digests.

    How many steps there are changes none of them.
    """
    step = msgspec.structs.replace(training, steps=None)
    return "sha256:" + hashlib.sha256(msgspec.json.encode((model, step), order="sorted")).hexdigest()


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """What one trace may take."""

    timeout_s: float = 120.0
    """Seconds from start to answer, PyTorch's import (2 to 15 s) included."""
    memory_mib: int = 3072
    """Writable memory of the subprocess, in MiB; PyTorch and timm alone take about 700."""
    concurrency: int = 1
    """Traces that run at the same time; others wait, and their time does not run."""


def stored(model: CatalogModel, training: Training) -> ModelFeatures | None:
    """Look a catalog model up in the feature store of the package; None where it must be traced."""
    return store.features(model, training)


def untraceable(model: CatalogModel | None) -> Abstention:
    """Say that this installation cannot trace; of a name that the feature store lacks, which names it has."""
    missing = torch_missing()
    if model is None or store.shipped().family(model.name) is not None:
        return missing
    near = store.shipped().nearest(model.name)
    known = f"the nearest that need none are {', '.join(near)}" if near else "no name is near"
    return msgspec.structs.replace(
        missing, message=f"{model.name!r} is none of the models that need no PyTorch; {known}; {missing.message}"
    )


class SubprocessTracer:
    """Answers from the feature store, or traces in `python -m carpool_predictor.trace`, killed when it takes too long.

    Args:
        limits: What one trace may take.
        command: What traces.
        known: Features of catalog models that need no trace.
        seconds: Tells the time, for how long a trace took.
    """

    def __init__(
        self,
        limits: TraceLimits | None = None,
        *,
        command: Sequence[str] = TRACE_COMMAND,
        known: Callable[[CatalogModel, Training], ModelFeatures | None] = stored,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limits = limits or TraceLimits()
        self._known = known
        self._seconds = seconds
        self._command = tuple(command)
        self._turn = asyncio.Semaphore(self._limits.concurrency)

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Trace `model.catalog` or `model.graph`."""
        return await self.run(TraceRequest(model=model, training=training))

    async def run(self, request: TraceRequest) -> ModelFeatures | Abstention:
        """Trace what the request asks for, under this tracer's limits."""
        found, _ = await self.timed(request)
        return found

    async def timed(self, request: TraceRequest) -> tuple[ModelFeatures | Abstention, float]:
        """Return also how long that took, in seconds; the wait for other traces does not count."""
        begin = self._seconds()
        catalog = None if request.model is None else request.model.catalog
        if catalog is not None:
            features = self._known(catalog, request.training)
            if features is not None and reason_to_abstain(features, request.training) is None:
                return features, self._seconds() - begin
        if importlib.util.find_spec("torch") is None:
            return untraceable(catalog), self._seconds() - begin
        if catalog is not None:
            refusal = await asyncio.to_thread(refusal_of, catalog)  # which may read files
            if refusal is not None:
                return refusal, self._seconds() - begin
        request = msgspec.structs.replace(request, memory_mib=self._limits.memory_mib)
        async with self._turn:
            begin = self._seconds()
            return await self._ask(msgspec.json.encode(request)), self._seconds() - begin

    async def _ask(self, request: bytes) -> ModelFeatures | Abstention:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_quiet_environment(os.environ),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                reply, errors, _ = await asyncio.gather(
                    _tail(process.stdout, _MAX_REPLY), _tail(process.stderr, _STDERR_TAIL), _send(process, request)
                )
                code = await process.wait()
        except TimeoutError:
            return Abstention(
                reason="TraceTimedOut",
                message=f"tracing the model took longer than {self._limits.timeout_s:g} s; give spec.model.features as "
                f"`carpool graph` prints them, or {RAISE_TIMEOUT}",
            )
        finally:
            # The whole session, because a model's code may have started processes of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return self._read(code, reply, errors)

    def _read(self, code: int, reply: bytes, errors: bytes) -> ModelFeatures | Abstention:
        said = errors.decode(errors="replace").strip()
        if code == -signal.SIGKILL or "bad_alloc" in said or "MemoryError" in said:
            return Abstention(
                reason="TraceOutOfMemory",
                message=f"tracing the model was ended for its memory (limit {self._limits.memory_mib:,} MiB); "
                f"{RAISE_MEMORY}, or give spec.model.features as `carpool graph` prints them on a larger machine",
            )
        try:
            answer = msgspec.json.decode(reply, type=TraceReply)
        except msgspec.DecodeError:
            last = said.splitlines()[-1][:500] if said else "it said nothing"
            return Abstention(reason="TraceFailed", message=f"the tracing process ended with code {code}: {last}")
        return answer.features or answer.abstention or Abstention(reason="TraceFailed", message="empty answer")


async def _send(process: asyncio.subprocess.Process, request: bytes) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; its exit code says more
        process.stdin.write(request)
        await process.stdin.drain()
    process.stdin.close()


async def _tail(stream: asyncio.StreamReader | None, limit: int) -> bytes:
    """Read to the end, keeping the last `limit` bytes: what a model prints must not fill this process."""
    kept = b""
    while stream is not None and (chunk := await stream.read(65536)):
        kept = (kept + chunk)[-limit:]
    return kept


def _quiet_environment(environ: os._Environ[str]) -> dict[str, str]:
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": "",  # a trace computes nothing, and must not take a context on a node's GPU
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(MIB),  # a weight's memory goes back when it turns fake, not into the heap
        "MKL_NUM_THREADS": "1",
    }
