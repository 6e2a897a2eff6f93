"""Prediction worker: computes predictions outside of the event loop, each input once, and traces models in order."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import NamedTuple

import msgspec
import structlog
from cachetools import LRUCache
from carpool_core.clock import Clock
from carpool_core.products import GpuProduct
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import GpuTrainingJob, JobSpec, ModelSource, Training
from carpool_core.resources.prediction import Prediction
from carpool_predictor.calibration.colocation import job_name, solo_family, solo_name, with_colocations
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_key
from carpool_predictor.calibration.scales import with_step_times
from carpool_predictor.features import Abstention
from carpool_predictor.predict import PredictionContext, model_version, predict, prepare
from carpool_predictor.tracing.source import Tracer, features_of, input_digest

from carpool_operator.prediction import MAX_REPORTED_POSITION, TRANSIENT, known_products
from carpool_operator.snapshot import CalibrationKey

_CACHE_SIZE = 512
"""Results that are kept; jobs with the same model and training share one."""

_FIRST_RETRY_S, _MAX_RETRY_S = 600.0, 6 * 3600.0
"""A trace that times out delays the others by minutes, so its retries are ten minutes apart, then doubling."""

CalibrationKeys = dict[str, CalibrationKey]
"""Calibration key by product."""

_Input = tuple[str, str, tuple[str, ...], tuple[tuple[str, CalibrationKey], ...]]
"""Namespace, digest of model and training, products, and calibration keys."""


class _Failure(NamedTuple):
    """Transient failures of an input."""

    tries: int
    at: float
    abstention: Abstention | None


@dataclass(eq=False, slots=True)
class _Trace:
    """A trace that jobs wait for."""

    model: ModelSource
    training: Training
    result: asyncio.Future[ModelFeatures | Abstention]
    callers: Counter[str] = field(default_factory=Counter)
    """Number of callers that wait for the result, by namespace."""
    task: asyncio.Task[ModelFeatures | Abstention] | None = None
    """None while it waits for its turn."""


class TraceQueue:
    """Traces models, each input once. Namespaces take turns, and each namespace's traces keep their order.

    `moved` receives the digests whose position has changed.
    """

    def __init__(self, tracer: Tracer, concurrency: int, moved: Callable[[list[str]], None]) -> None:
        self._tracer, self._concurrency, self._moved = tracer, concurrency, moved
        self._traces: dict[str, _Trace] = {}
        self._queues: dict[str, dict[str, None]] = {}
        """Digests that wait in each namespace; the namespaces are in the order of their turns."""
        self._running = 0

    def is_waiting(self, digest: str) -> bool:
        """Return whether a trace was requested and has not begun."""
        return digest in self._traces and self._traces[digest].task is None

    def ahead(self, namespace: str, digest: str) -> int:
        """Return how many traces must end before this one begins, at most `MAX_REPORTED_POSITION` + 1."""
        if digest in self._traces and not self.is_waiting(digest):
            return 0
        queues = dict(self._queues)
        queues[namespace] = {**queues.get(namespace, {}), digest: None}
        most = MAX_REPORTED_POSITION + 1
        position = next((n for n, found in enumerate(islice(_in_turns(queues), most)) if found == digest), most)
        return min(most, max(0, position + self._running - self._concurrency + 1))

    async def trace(
        self, namespace: str, digest: str, model: ModelSource, training: Training
    ) -> ModelFeatures | Abstention:
        """Return the features of a model. The trace is cancelled with the last caller that waits for it."""
        trace = self._traces.get(digest)
        if trace is None:
            trace = self._traces[digest] = _Trace(model, training, asyncio.get_running_loop().create_future())
        trace.callers[namespace] += 1
        if trace.task is None:
            self._queues.setdefault(namespace, {})[digest] = None
            self._start_next()
        try:
            return await asyncio.shield(trace.result)
        finally:
            self._leave(namespace, digest, trace)

    def _leave(self, namespace: str, digest: str, trace: _Trace) -> None:
        trace.callers[namespace] -= 1
        if trace.result.done():
            return
        if not trace.callers[namespace] and trace.task is None:
            self._dequeue(namespace, digest)
        if not trace.callers.total():
            del self._traces[digest]
            trace.result.cancel()
            if trace.task is not None:
                trace.task.cancel()
        self._report_moved()

    def _dequeue(self, namespace: str, digest: str) -> None:
        queue = self._queues[namespace]
        queue.pop(digest, None)
        if not queue:
            del self._queues[namespace]

    def _start_next(self) -> None:
        while self._queues and self._running < self._concurrency:
            namespace, queue = next(iter(self._queues.items()))
            digest = next(iter(queue))
            self._queues[namespace] = self._queues.pop(namespace)  # its next turn comes after all others
            for waiting in list(self._queues):
                self._dequeue(waiting, digest)
            trace = self._traces[digest]
            self._running += 1
            trace.task = asyncio.create_task(self._tracer.trace(trace.model, trace.training), name=f"trace {digest}")
            trace.task.add_done_callback(partial(self._ended, digest, trace))

    def _ended(self, digest: str, trace: _Trace, task: asyncio.Task[ModelFeatures | Abstention]) -> None:
        self._running -= 1
        if self._traces.get(digest) is trace:
            del self._traces[digest]
        if not trace.result.done():
            if task.cancelled():
                trace.result.cancel()
            elif (error := task.exception()) is not None:
                trace.result.set_exception(error)
            else:
                trace.result.set_result(task.result())
        self._start_next()
        self._report_moved()

    def _report_moved(self) -> None:
        """Report the digests that were traced or waited near the head of the queue."""
        begun = [digest for digest, trace in self._traces.items() if trace.task is not None]
        self._moved([*begun, *islice(_in_turns(self._queues), MAX_REPORTED_POSITION)])

    async def close(self) -> None:
        """Cancel all traces."""
        self._queues.clear()
        tasks = [trace.task for trace in self._traces.values() if trace.task is not None]
        for future in (*tasks, *(trace.result for trace in self._traces.values())):
            future.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_turns(queues: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield the digests of all queues in round-robin order, each once."""
    found = set[str]()
    for turn in zip_longest(*queues.values()):
        for digest in turn:
            if digest is not None and digest not in found:
                found.add(digest)
                yield digest


def _input(key: str, digest: str, products: tuple[str, ...], keys: CalibrationKeys) -> _Input:
    return _namespace(key), digest, products, tuple(sorted(keys.items()))


def _namespace(key: str) -> str:
    return key.rpartition("/")[0]


@dataclass(slots=True)
class _Computation:
    """A prediction that is being computed."""

    task: asyncio.Task[None]
    keys: set[str]
    """Keys of the jobs that wait for it."""


class _Request(NamedTuple):
    """The prediction that a job waits for."""

    input: _Input
    since: float
    """Monotonic time in seconds since when the job has waited for this digest."""


class PredictionWorker:
    """Computes predictions in the background and enqueues the jobs that wait for them.

    Args:
        calibration: Returns the calibration for a namespace; None: predictions are uncalibrated.
        calibration_keys: Returns the calibration keys of a job in a namespace, with that simulated allocator size in
            MiB.
        find_products: Returns the products with these names; those that cannot be described are left out.
        is_strict: Whether jobs run alone on products without measurements, even while the calibration cannot be read.
    """

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        *,
        enqueue: Callable[[str], None],
        observe_seconds: Callable[[float], None],
        traces: int = 1,
        calibration: Callable[[str, int], Calibration | None] = lambda _namespace, _gpus: None,
        calibration_keys: Callable[[str, JobSpec, tuple[str, ...], float | None], CalibrationKeys] = lambda *_: {},
        find_products: Callable[[Iterable[str]], list[GpuProduct]] = known_products,
        is_strict: bool = False,
    ) -> None:
        self._tracer, self._clock = tracer, clock
        self._enqueue, self._observe_seconds = enqueue, observe_seconds
        self._calibration, self._keys, self._is_strict = calibration, calibration_keys, is_strict
        self._find_products = find_products
        self._trace_queue = TraceQueue(tracer, traces, self._moved)
        self._results: LRUCache[_Input, Prediction] = LRUCache(_CACHE_SIZE)
        self._features: LRUCache[str, ModelFeatures | Abstention] = LRUCache(_CACHE_SIZE)
        self._sizes_mib: LRUCache[str, float] = LRUCache(_CACHE_SIZE)
        self._failures: LRUCache[str, _Failure] = LRUCache(_CACHE_SIZE)
        self._ready: dict[str, tuple[_Input, Prediction]] = {}
        self._requests: dict[str, _Request] = {}
        self._computations: dict[_Input, _Computation] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._log = structlog.get_logger()

    def calibration_keys(self, key: str, spec: JobSpec, digest: str, products: tuple[str, ...]) -> CalibrationKeys:
        """Return the calibration keys of a prediction made now; empty before the job's size is known."""
        return self._keys(_namespace(key), spec, products, self._sizes_mib.get(digest))

    def get(
        self, key: str, digest: str, products: tuple[str, ...], keys: CalibrationKeys | None = None
    ) -> Prediction | None:
        """Return the prediction that a job, or another with the same input, requested; None before it is computed."""
        wanted = _input(key, digest, products, keys or {})
        requested, ready = self._ready.get(key, (None, None))
        # The job's own result is newer than the calibration keys of its request.
        is_own = requested is not None and requested[:3] == wanted[:3]
        return ready if is_own else self._results.get(wanted)

    def retry_in_s(self, digest: str) -> float:
        """Return the seconds until a transient failure may be tried again; 0: now."""
        failure = self._failures.get(digest)
        if failure is None:
            return 0.0
        pause_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failure.tries - 1, 10))
        return max(0.0, failure.at + pause_s - self._clock.monotonic())

    def ahead(self, key: str, digest: str) -> int:
        """Return how many models are traced before that of this input; see `TraceQueue.ahead`."""
        return self._trace_queue.ahead(_namespace(key), digest)

    def trace_waited_s(self, key: str) -> float:
        """Return for how many seconds the trace of a job's model has waited for its turn; 0 once it has begun."""
        request = self._requests.get(key)
        if request is None or not self._trace_queue.is_waiting(request.input[1]):
            return 0.0
        return self._clock.monotonic() - request.since

    def _moved(self, digests: list[str]) -> None:
        """Enqueue the jobs whose position in the trace queue has changed, so that their status reports it."""
        for (_, digest, _, _), computation in self._computations.items():
            if digest in digests:
                for key in computation.keys:
                    self._enqueue(key)

    def forget(self, key: str) -> None:
        """Drop a job's result and request, because its status holds the result or the job is gone."""
        self._ready.pop(key, None)
        request = self._requests.pop(key, None)
        if request is not None:
            self._leave(request.input, key)

    def request(self, key: str, spec: JobSpec, digest: str, products: tuple[str, ...]) -> None:
        """Compute a prediction, keep it for the job until it is forgotten, and enqueue the job.

        An earlier request of the job for another input is cancelled, unless other jobs wait for its result.
        """
        wanted = _input(key, digest, products, self.calibration_keys(key, spec, digest, products))
        before = self._requests.get(key)
        if before is not None and before.input == wanted:
            return
        since = before.since if before is not None and before.input[1] == digest else self._clock.monotonic()
        self._requests[key] = _Request(wanted, since)
        if wanted in self._computations:
            self._computations[wanted].keys.add(key)
        else:
            task = asyncio.create_task(self._compute(spec, wanted), name=f"predict {key}")
            self._computations[wanted] = _Computation(task, {key})
        if before is not None:
            self._leave(before.input, key)

    def _leave(self, wanted: _Input, key: str) -> None:
        """Remove a job from those that wait for a computation; cancel it without others."""
        computation = self._computations[wanted]
        computation.keys.discard(key)
        if not computation.keys:
            del self._computations[wanted]
            computation.task.cancel()

    async def idle(self) -> None:
        """Wait until no prediction is being computed."""
        while self._computations:
            await asyncio.gather(*(one.task for one in self._computations.values()), return_exceptions=True)

    async def close(self) -> None:
        """Cancel all predictions."""
        tasks = [computation.task for computation in self._computations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trace_queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, spec: JobSpec, wanted: _Input) -> None:
        namespace, digest, products, _ = wanted
        began = self._clock.monotonic()
        try:
            result, keys = await self._predict(namespace, spec, digest, products)
        except Exception as error:
            # A defect of the predictor must not block a job: the job runs alone, and its status gives the reason.
            self._log.exception("prediction failed", digest=digest)
            message = f"the predictor failed with {type(error).__name__}: {error}; this is a defect, please report it"
            result = Prediction(outcome="Abstained", reason="PredictorFailed", message=message[:4096])
            keys = self._keys(namespace, spec, products, self._sizes_mib.get(digest))
        self._observe_seconds(self._clock.monotonic() - began)
        version = result.model_version or model_version()
        result = msgspec.structs.replace(result, input_digest=digest, model_version=version)
        if result.reason in TRANSIENT:
            self._failed(digest, None)
        self._results[namespace, digest, products, tuple(sorted(keys.items()))] = result
        for key in self._computations.pop(wanted).keys:
            # Kept per job, too: a burst evicts results before their jobs are reconciled.
            self._ready[key] = (wanted, result)
            del self._requests[key]
            self._enqueue(key)

    def _failed(self, digest: str, abstention: Abstention | None) -> None:
        known = self._failures.get(digest)
        tries = 1 if known is None else known.tries + 1
        earlier = None if known is None else known.abstention
        self._failures[digest] = _Failure(tries, self._clock.monotonic(), abstention or earlier)

    async def _predict(
        self, namespace: str, spec: JobSpec, digest: str, products: tuple[str, ...]
    ) -> tuple[Prediction, CalibrationKeys]:
        """Return a prediction and the calibration keys that it was made from."""
        features = await self._features_of(namespace, spec, digest)
        if isinstance(job := prepare(features, spec.training), PredictionContext):
            self._sizes_mib[digest] = job.reserved_mib
        # Both at the same time: the calibration may change while the prediction waits for the thread.
        calibration = self._calibration(namespace, spec.gpus_per_worker)
        keys = self._keys(namespace, spec, products, self._sizes_mib.get(digest))
        compute = partial(
            predict,
            features,
            spec.training,
            self._find_products(products),
            calibration,
            model_key(spec.model),
            is_strict=self._is_strict,
            now=self._clock.now().timestamp(),
        )
        prediction = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
        if spec.model is not None:
            known, solo = calibration or Calibration(), solo_name(digest, spec.workers, spec.gpus_per_worker)
            prediction = with_colocations(prediction, known.pairs, job_name(spec.model.family, digest))
            family = solo_family(spec.model.family, spec.workers, spec.gpus_per_worker)
            prediction = with_step_times(prediction, known.solo, family, solo)
        return prediction, keys

    async def prepare(self, job: GpuTrainingJob) -> PredictionContext | Abstention:
        """Return the predictor's input for a job. A transient failure is returned again until its retry is due."""
        spec = job.spec
        digest = input_digest(spec.model, spec.training)
        failure = self._failures.get(digest)
        known = None if failure is None else failure.abstention
        if known is not None and self.retry_in_s(digest) > 0 and digest not in self._features:
            return known
        found = prepare(await self._features_of(job.metadata.namespace, spec, digest), spec.training)
        if isinstance(found, Abstention) and found.reason in TRANSIENT:
            self._failed(digest, found)
        return found

    async def _features_of(self, namespace: str, spec: JobSpec, digest: str) -> ModelFeatures | Abstention:
        model = spec.model
        if model is None or model.features is not None:
            return await features_of(model, spec.training, self._tracer)
        found = self._features.get(digest) or await self._tracer.lookup(model, spec.training)
        if found is None:
            found = await self._trace_queue.trace(namespace, digest, model, spec.training)
        if isinstance(found, ModelFeatures) or found.reason not in TRANSIENT:
            self._features[digest] = found
        return found
