"""Predictions, computed off the event loop, each input once. How many models are traced at once, the tracer limits."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import structlog
from carpool_core.clock import Clock
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import JobSpec, ModelSource, Training
from carpool_core.resources.prediction import Prediction
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_name
from carpool_predictor.features import Abstention
from carpool_predictor.predict import Job, model_version, predict, prepare
from carpool_predictor.tracing.source import Tracer, features_of, input_digest

from carpool_operator.observations import Mark
from carpool_operator.prediction import MOST_TOLD, TRANSIENT


class TraceQueue:
    """Traces models, and knows how many stand before each.

    Args:
        tracer: What traces; it limits itself to `at_once`.
        at_once: How many models it traces at the same time.
        moved: Told the digests whose place in the queue has changed.
    """

    def __init__(self, tracer: Tracer, at_once: int, moved: Callable[[list[str]], None]) -> None:
        self._tracer, self._at_once, self._moved = tracer, at_once, moved
        self._under_way: dict[str, asyncio.Task[ModelFeatures | Abstention]] = {}

    def ahead(self, digest: str) -> int:
        """How many traces must end before that of this input begins, at most one more than `MOST_TOLD`."""
        order = list(self._under_way)
        place = order.index(digest) if digest in self._under_way else len(order)
        return min(MOST_TOLD + 1, max(0, place - self._at_once + 1))

    async def trace(self, digest: str, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Trace a model, or wait for the trace of an equal one that is under way."""
        if digest not in self._under_way:
            task = asyncio.create_task(self._tracer.trace(model, training), name=f"trace {digest}")
            self._under_way[digest] = task
            task.add_done_callback(lambda _: self._ended(digest))
        return await asyncio.shield(self._under_way[digest])

    def _ended(self, digest: str) -> None:
        del self._under_way[digest]
        self._moved(list(self._under_way)[: self._at_once + MOST_TOLD])

    async def close(self) -> None:
        """Stop tracing."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_KEPT = 512
"""Results that are kept; jobs of the same model and training share one."""

V = TypeVar("V")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 600.0, 6 * 3600.0
"""A trace that times out takes minutes from those that wait: tries are ten minutes apart, then ever farther."""

Marks = dict[str, Mark]
"""For each product what a prediction is calibrated from."""

Input = tuple[str, tuple[str, ...], tuple[tuple[str, Mark], ...]]
"""Digest of model and training, the products, and how much was known of them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """How predictions come by what was learned."""

    calibration: Callable[[], Calibration | None] = lambda: None
    """What was learned; None: predictions are as shipped."""
    marks: Callable[[JobSpec, tuple[str, ...], float | None], Marks] = lambda _spec, _products, _size: {}
    """How much a prediction of a job, of that size in MiB, would be calibrated from."""
    is_strict: bool = False
    """Whether jobs run alone where nothing was measured, be what was learned readable at the moment or not."""


AS_SHIPPED = Learned()


class _Recent(Generic[V]):
    """The latest few values, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[object, V] = OrderedDict()

    def get(self, key: object) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: object, value: V) -> None:
        self._values[key] = value
        while len(self._values) > self._limit:
            self._values.popitem(last=False)


def _input(digest: str, products: tuple[str, ...], marks: Marks) -> Input:
    return digest, products, tuple(sorted(marks.items()))


def known_products(names: tuple[str, ...]) -> list[GpuProduct]:
    """Return the products that the predictor knows among some names."""
    found = []
    for name in names:
        try:
            found.append(find_product(name))
        except UnknownProductError:
            continue  # the prediction then says nothing of it, and the scheduler counts with the worst
    return found


class Predictions:
    """Computes predictions in the background and wakes the jobs that wait for them."""

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        *,
        wake: Callable[[str], None],
        took: Callable[[float], None],
        traces_at_once: int = 1,
        learned: Learned = AS_SHIPPED,
    ) -> None:
        self._tracer, self._clock, self._wake, self._took = tracer, clock, wake, took
        self._learned = learned
        self._sizes: _Recent[float] = _Recent(_KEPT)
        self._queue = TraceQueue(tracer, traces_at_once, self._moved)
        self._results: _Recent[Prediction] = _Recent(_KEPT)
        self._features: _Recent[ModelFeatures | Abstention] = _Recent(_KEPT)
        self._tries: _Recent[tuple[int, float]] = _Recent(_KEPT)
        self._failed: _Recent[Abstention] = _Recent(_KEPT)
        self._ready: dict[str, tuple[Input, Prediction]] = {}
        self._waiting: dict[Input, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._log = structlog.get_logger()

    def marks(self, spec: JobSpec, digest: str, products: tuple[str, ...]) -> Marks:
        """Say how much a prediction of a job would be calibrated from by now; empty where nobody knows."""
        return self._learned.marks(spec, products, self._sizes.get(digest))

    def get(self, key: str, digest: str, products: tuple[str, ...], marks: Marks | None = None) -> Prediction | None:
        """Return the prediction that a job asked for, once it was computed, or that another like it asked for."""
        asked = _input(digest, products, marks or {})
        wanted, ready = self._ready.get(key, (None, None))
        # What a job asked for is newer than what was known when it asked.
        return ready if wanted is not None and wanted[:2] == asked[:2] else self._results.get(asked)

    def retry_in(self, digest: str) -> float:
        """Seconds until an input may be tried again that was abstained from for the moment; 0: now."""
        tries, at = self._tries.get(digest) or (0, 0.0)
        pause_s = 0.0 if not tries else min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(tries - 1, 10))
        return max(0.0, at + pause_s - self._clock.monotonic())

    def ahead(self, digest: str) -> int:
        """How many models are traced before that of this input; see `TraceQueue.ahead`."""
        return self._queue.ahead(digest)

    def _moved(self, digests: list[str]) -> None:
        """Wake the jobs whose models have come nearer to being traced, so that they say so."""
        for (digest, _, _), keys in self._waiting.items():
            if digest in digests:
                for key in keys:
                    self._wake(key)

    def forget(self, key: str) -> None:
        """Drop what was kept for a job, because its status holds it now or the job is gone."""
        self._ready.pop(key, None)

    def request(self, key: str, spec: JobSpec, digest: str, products: tuple[str, ...]) -> None:
        """Have a prediction computed, keep it for the job `key` until it is forgotten, and wake the job."""
        wanted = _input(digest, products, self.marks(spec, digest, products))
        if wanted in self._waiting:
            self._waiting[wanted].add(key)
            return
        self._waiting[wanted] = {key}
        task = asyncio.create_task(self._compute(spec, wanted), name=f"predict {key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until nothing is being computed."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Stop computing."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, spec: JobSpec, wanted: Input) -> None:
        digest, products, _ = wanted
        began = self._clock.monotonic()
        try:
            result, marks = await self._predict(spec, digest, products)
        except Exception as error:
            # A defect of the predictor must not keep a job from running: it runs alone, and says why.
            self._log.exception("prediction failed", digest=digest)
            message = f"the predictor failed with {type(error).__name__}: {error}; this is a defect, please report it"
            result = Prediction(outcome="Abstained", reason="PredictorFailed", message=message[:4096])
            marks = self.marks(spec, digest, products)
        self._took(self._clock.monotonic() - began)
        version = result.model_version or model_version()
        result = msgspec.structs.replace(result, input_digest=digest, model_version=version)
        if result.reason in TRANSIENT:
            self._tried(digest)
        self._results.put(_input(digest, products, marks), result)
        for key in self._waiting.pop(wanted, ()):
            # For each job: in a burst, recent results are overwritten before their jobs have their turn.
            self._ready[key] = (wanted, result)
            self._wake(key)

    def _tried(self, digest: str) -> None:
        tries, _ = self._tries.get(digest) or (0, 0.0)
        self._tries.put(digest, (tries + 1, self._clock.monotonic()))

    async def _predict(self, spec: JobSpec, digest: str, products: tuple[str, ...]) -> tuple[Prediction, Marks]:
        """Predict, and say how much the answer was calibrated from."""
        features = await self._features_of(spec, digest)
        if isinstance(job := prepare(features, spec.training), Job):
            self._sizes.put(digest, job.reserved_mib)
        # Together, as more may be learned while the prediction waits for its turn.
        calibration, marks = self._learned.calibration(), self.marks(spec, digest, products)

        def compute() -> Prediction:
            return predict(
                features,
                spec.training,
                known_products(products),
                calibration,
                model_name(spec.model),
                is_strict=self._learned.is_strict,
            )

        return await asyncio.get_running_loop().run_in_executor(self._thread, compute), marks

    async def asked(self, spec: JobSpec) -> Job | Abstention:
        """Return what the predictor is asked of a job, whatever was learned; what failed a moment ago waits."""
        digest = input_digest(spec.model, spec.training)
        failed = self._failed.get(digest)
        if failed is not None and self.retry_in(digest) > 0 and self._features.get(digest) is None:
            return failed
        found = prepare(await self._features_of(spec, digest), spec.training)
        if isinstance(found, Abstention) and found.reason in TRANSIENT:
            self._failed.put(digest, found)
            self._tried(digest)
        return found

    async def _features_of(self, spec: JobSpec, digest: str) -> ModelFeatures | Abstention:
        model = spec.model
        if model is None or model.features is not None:
            return await features_of(model, spec.training, self._tracer)
        known = self._features.get(digest)
        if known is None:
            known = await self._queue.trace(digest, model, spec.training)
            if isinstance(known, ModelFeatures) or known.reason not in TRANSIENT:
                self._features.put(digest, known)
        return known
