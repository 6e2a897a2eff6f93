"""Prediction worker: computes predictions outside of the event loop, each input once, and traces models in order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import structlog
from cachetools import LRUCache
from carpool_core.clock import Clock
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import JobSpec, ModelSource, Training
from carpool_core.resources.prediction import Prediction
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_key
from carpool_predictor.features import Abstention
from carpool_predictor.predict import PredictionContext, model_version, predict, prepare
from carpool_predictor.tracing.source import Tracer, features_of, input_digest

from carpool_operator.prediction import MAX_REPORTED_POSITION, TRANSIENT
from carpool_operator.snapshot import CalibrationKey

_CACHE_SIZE = 512
"""Results that are kept; jobs with the same model and training share one."""

_FIRST_RETRY_S, _MAX_RETRY_S = 600.0, 6 * 3600.0
"""A trace that times out delays the others by minutes, so its retries are ten minutes apart, then doubling."""

CalibrationKeys = dict[str, CalibrationKey]
"""Calibration key by product."""

_Input = tuple[str, tuple[str, ...], tuple[tuple[str, CalibrationKey], ...]]
"""Digest of model and training, products, and calibration keys."""


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Access to the calibration."""

    calibration: Callable[[], Calibration | None] = lambda: None
    """Returns the calibration; None: predictions are uncalibrated."""
    keys: Callable[[JobSpec, tuple[str, ...], float | None], CalibrationKeys] = lambda _spec, _products, _size: {}
    """Returns the calibration keys of a job with that simulated allocator size in MiB."""
    is_strict: bool = False
    """Whether jobs run alone on products without measurements, even while the calibration cannot be read."""


class _Failure(NamedTuple):
    """Transient failures of an input."""

    tries: int
    at: float
    abstention: Abstention | None


class TraceQueue:
    """Traces models in the order of their requests, each input once.

    Args:
        tracer: Traces one model; it limits itself to `concurrency`.
        concurrency: Models that it traces at the same time.
        moved: Receives the digests whose position has changed.
    """

    def __init__(self, tracer: Tracer, concurrency: int, moved: Callable[[list[str]], None]) -> None:
        self._tracer, self._concurrency, self._moved = tracer, concurrency, moved
        self._tasks: dict[str, asyncio.Task[ModelFeatures | Abstention]] = {}

    def ahead(self, digest: str) -> int:
        """Return how many traces must end before this one begins, at most `MAX_REPORTED_POSITION` + 1."""
        order = list(self._tasks)
        position = order.index(digest) if digest in self._tasks else len(order)
        return min(MAX_REPORTED_POSITION + 1, max(0, position - self._concurrency + 1))

    async def trace(self, digest: str, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Trace a model, or wait for the running trace of the same input."""
        if digest not in self._tasks:
            task = asyncio.create_task(self._tracer.trace(model, training), name=f"trace {digest}")
            self._tasks[digest] = task
            task.add_done_callback(lambda _: self._ended(digest))
        return await asyncio.shield(self._tasks[digest])

    def _ended(self, digest: str) -> None:
        del self._tasks[digest]
        self._moved(list(self._tasks)[: self._concurrency + MAX_REPORTED_POSITION])

    async def close(self) -> None:
        """Cancel all traces."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def known_products(names: tuple[str, ...]) -> list[GpuProduct]:
    """Return the products that the predictor supports; for others the scheduler assumes the worst case."""
    found = []
    for name in names:
        try:
            found.append(find_product(name))
        except UnknownProductError:
            continue
    return found


def _input(digest: str, products: tuple[str, ...], keys: CalibrationKeys) -> _Input:
    return digest, products, tuple(sorted(keys.items()))


class PredictionWorker:
    """Computes predictions in the background and enqueues the jobs that wait for them.

    Args:
        tracer: Traces models.
        clock: The clock.
        enqueue: Receives the key of a job whose prediction or position has changed.
        observe_seconds: Receives the duration of each prediction.
        traces: Models that are traced at the same time.
        source: Access to the calibration.
    """

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        *,
        enqueue: Callable[[str], None],
        observe_seconds: Callable[[float], None],
        traces: int = 1,
        source: CalibrationSource | None = None,
    ) -> None:
        self._tracer, self._clock = tracer, clock
        self._enqueue, self._observe_seconds = enqueue, observe_seconds
        self._source = source or CalibrationSource()
        self._trace_queue = TraceQueue(tracer, traces, self._moved)
        self._results: LRUCache[_Input, Prediction] = LRUCache(_CACHE_SIZE)
        self._features: LRUCache[str, ModelFeatures | Abstention] = LRUCache(_CACHE_SIZE)
        self._sizes_mib: LRUCache[str, float] = LRUCache(_CACHE_SIZE)
        self._failures: LRUCache[str, _Failure] = LRUCache(_CACHE_SIZE)
        self._ready: dict[str, tuple[_Input, Prediction]] = {}
        self._waiting: dict[_Input, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._log = structlog.get_logger()

    def calibration_keys(self, spec: JobSpec, digest: str, products: tuple[str, ...]) -> CalibrationKeys:
        """Return the calibration keys of a prediction made now; empty before the job's size is known."""
        return self._source.keys(spec, products, self._sizes_mib.get(digest))

    def get(
        self, key: str, digest: str, products: tuple[str, ...], keys: CalibrationKeys | None = None
    ) -> Prediction | None:
        """Return the prediction that a job, or another with the same input, requested; None before it is computed."""
        wanted = _input(digest, products, keys or {})
        requested, ready = self._ready.get(key, (None, None))
        # The job's own result is newer than the calibration keys of its request.
        is_own = requested is not None and requested[:2] == wanted[:2]
        return ready if is_own else self._results.get(wanted)

    def retry_in_s(self, digest: str) -> float:
        """Return the seconds until a transient failure may be tried again; 0: now."""
        failure = self._failures.get(digest)
        if failure is None:
            return 0.0
        pause_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failure.tries - 1, 10))
        return max(0.0, failure.at + pause_s - self._clock.monotonic())

    def ahead(self, digest: str) -> int:
        """Return how many models are traced before that of this input; see `TraceQueue.ahead`."""
        return self._trace_queue.ahead(digest)

    def _moved(self, digests: list[str]) -> None:
        """Enqueue the jobs whose position in the trace queue has changed, so that their status reports it."""
        for (digest, _, _), keys in self._waiting.items():
            if digest in digests:
                for key in keys:
                    self._enqueue(key)

    def forget(self, key: str) -> None:
        """Drop a job's result, because its status holds it or the job is gone."""
        self._ready.pop(key, None)

    def request(self, key: str, spec: JobSpec, digest: str, products: tuple[str, ...]) -> None:
        """Compute a prediction, keep it for the job until it is forgotten, and enqueue the job."""
        wanted = _input(digest, products, self.calibration_keys(spec, digest, products))
        if wanted in self._waiting:
            self._waiting[wanted].add(key)
            return
        self._waiting[wanted] = {key}
        task = asyncio.create_task(self._compute(spec, wanted), name=f"predict {key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until no prediction is being computed."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Cancel all predictions."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._trace_queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, spec: JobSpec, wanted: _Input) -> None:
        digest, products, _ = wanted
        began = self._clock.monotonic()
        try:
            result, keys = await self._predict(spec, digest, products)
        except Exception as error:
            # A defect of the predictor must not block a job: the job runs alone, and its status gives the reason.
            self._log.exception("prediction failed", digest=digest)
            message = f"the predictor failed with {type(error).__name__}: {error}; this is a defect, please report it"
            result = Prediction(outcome="Abstained", reason="PredictorFailed", message=message[:4096])
            keys = self.calibration_keys(spec, digest, products)
        self._observe_seconds(self._clock.monotonic() - began)
        version = result.model_version or model_version()
        result = msgspec.structs.replace(result, input_digest=digest, model_version=version)
        if result.reason in TRANSIENT:
            self._failed(digest, None)
        self._results[_input(digest, products, keys)] = result
        for key in self._waiting.pop(wanted, ()):
            # Kept per job, too: a burst evicts results before their jobs are reconciled.
            self._ready[key] = (wanted, result)
            self._enqueue(key)

    def _failed(self, digest: str, abstention: Abstention | None) -> None:
        known = self._failures.get(digest)
        tries = 1 if known is None else known.tries + 1
        earlier = None if known is None else known.abstention
        self._failures[digest] = _Failure(tries, self._clock.monotonic(), abstention or earlier)

    async def _predict(
        self, spec: JobSpec, digest: str, products: tuple[str, ...]
    ) -> tuple[Prediction, CalibrationKeys]:
        """Return a prediction and the calibration keys that it was made from."""
        features = await self._features_of(spec, digest)
        if isinstance(job := prepare(features, spec.training), PredictionContext):
            self._sizes_mib[digest] = job.reserved_mib
        # Both at the same time: the calibration may change while the prediction waits for the thread.
        calibration, keys = self._source.calibration(), self.calibration_keys(spec, digest, products)

        def compute() -> Prediction:
            return predict(
                features,
                spec.training,
                known_products(products),
                calibration,
                model_key(spec.model),
                is_strict=self._source.is_strict,
            )

        return await asyncio.get_running_loop().run_in_executor(self._thread, compute), keys

    async def prepare(self, spec: JobSpec) -> PredictionContext | Abstention:
        """Return the predictor's input for a job. A transient failure is returned again until its retry is due."""
        digest = input_digest(spec.model, spec.training)
        failure = self._failures.get(digest)
        known = None if failure is None else failure.abstention
        if known is not None and self.retry_in_s(digest) > 0 and digest not in self._features:
            return known
        found = prepare(await self._features_of(spec, digest), spec.training)
        if isinstance(found, Abstention) and found.reason in TRANSIENT:
            self._failed(digest, found)
        return found

    async def _features_of(self, spec: JobSpec, digest: str) -> ModelFeatures | Abstention:
        model = spec.model
        if model is None or model.features is not None:
            return await features_of(model, spec.training, self._tracer)
        known = self._features.get(digest)
        if known is None:
            known = await self._trace_queue.trace(digest, model, spec.training)
            if isinstance(known, ModelFeatures) or known.reason not in TRANSIENT:
                self._features[digest] = known
        return known
