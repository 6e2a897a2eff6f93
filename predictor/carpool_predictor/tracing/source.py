"""Gets a job's features from its spec, the feature store, or a trace in a process with limits."""

import asyncio
import hashlib
import importlib.util
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training

from carpool_predictor.catalog import store
from carpool_predictor.catalog.names import refusal_of
from carpool_predictor.features import Abstention, reason_to_abstain
from carpool_predictor.tracing.process import TraceLimits, TraceProcess, TraceRequest, torch_missing


class Tracer(Protocol):
    """Computes features of a catalog or inline model."""

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Return the features of `model.catalog` or `model.graph` at the job's batch size and one other."""
        ...

    async def lookup(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention | None:
        """Return the answer that needs no trace; None if the model has to be traced."""
        ...


class StartedTrace(Protocol):
    """A process that traces one model."""

    def answer(self) -> ModelFeatures | Abstention:
        """Block until the trace ends and return its result."""
        ...

    def kill(self) -> None:
        """End the trace; any thread may call this."""
        ...


async def features_of(model: ModelSource | None, training: Training, tracer: Tracer) -> ModelFeatures | Abstention:
    """Return the features that a job's prediction is computed from, or the reason why there are none."""
    if model is None or (model.features is None and model.catalog is None and model.graph is None):
        return Abstention(
            reason="UnknownModel",
            message="the job does not say what it trains; give spec.model (catalog, graph or features) to let it "
            "share a GPU",
        )
    return model.features if model.features is not None else await tracer.trace(model, training)


def input_digest(model: ModelSource | None, training: Training) -> str:
    """Return a digest of a prediction's inputs; equal specs have equal digests. The number of steps has no part."""
    step = msgspec.structs.replace(training, steps=None)
    return "sha256:" + hashlib.sha256(msgspec.json.encode((model, step), order="sorted")).hexdigest()


def untraceable(model: CatalogModel | None) -> Abstention:
    """Return the abstention of an installation without PyTorch, with near names that the feature store has."""
    missing = torch_missing()
    if model is None or store.shipped().family(model.name) is not None:
        return missing
    near = store.shipped().nearest(model.name)
    nearest = f"the nearest that need none are {', '.join(near)}" if near else "no name is near"
    return msgspec.structs.replace(
        missing, message=f"{model.name!r} is none of the models that need no PyTorch; {nearest}; {missing.message}"
    )


class SubprocessTracer:
    """Answers from the feature store, or traces in a process that is killed at its limits."""

    def __init__(
        self,
        limits: TraceLimits | None = None,
        *,
        start: Callable[[TraceRequest, TraceLimits], StartedTrace] = TraceProcess,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limits = limits or TraceLimits()
        self._start, self._seconds = start, seconds
        self._slots = asyncio.Semaphore(self._limits.concurrency)

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Trace `model.catalog` or `model.graph`."""
        return await self.run(TraceRequest(model=model, training=training))

    async def run(self, request: TraceRequest) -> ModelFeatures | Abstention:
        """Trace the requested model under this tracer's limits."""
        found, _ = await self.timed(request)
        return found

    async def lookup(self, model: ModelSource | None, training: Training) -> ModelFeatures | Abstention | None:
        """Return stored features, or why the model cannot be traced; None if it has to be traced."""
        catalog = None if model is None else model.catalog
        has_torch = importlib.util.find_spec("torch") is not None
        if catalog is not None:
            features = store.features(catalog, training, any_classifier=not has_torch)
            if features is not None and reason_to_abstain(features, training) is None:
                return features
        if not has_torch:
            return untraceable(catalog)
        return None if catalog is None else await asyncio.to_thread(refusal_of, catalog)  # reads the library's files

    async def timed(self, request: TraceRequest) -> tuple[ModelFeatures | Abstention, float]:
        """Return the result and its duration in seconds, without the wait for other traces."""
        begin = self._seconds()
        found = await self.lookup(request.model, request.training)
        if found is not None:
            return found, self._seconds() - begin
        async with self._slots:
            begin = self._seconds()
            process = self._start(request, self._limits)
            try:
                return await asyncio.to_thread(process.answer), self._seconds() - begin
            except asyncio.CancelledError:
                process.kill()
                raise
