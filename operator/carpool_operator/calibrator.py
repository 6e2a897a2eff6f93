"""Calibrator: adds observations to the calibration and stores it in a ConfigMap, many per write, each once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import structlog
from cachetools import LRUCache
from carpool_core.clock import Clock
from carpool_core.kube.api import CONFIG_MAPS
from carpool_core.kube.errors import Conflict, KubeError, NotFound, Refused
from carpool_core.kube.events import EventRecorder
from carpool_core.products import GpuProduct
from carpool_core.resources.job import GpuTrainingJob, JobSpec
from carpool_core.values import Precision
from carpool_predictor.calibration.colocation import (
    MeasuredSteps,
    job_name,
    learned_colocations,
    measured_runs,
    solo_family,
    solo_name,
    solo_step_s,
)
from carpool_predictor.calibration.document import MAX_SAMPLES, SIMULATED, Calibration, Stack, is_plain, with_steps
from carpool_predictor.calibration.observe import observe
from carpool_predictor.calibration.run_history import find_history, model_key, retry_before
from carpool_predictor.calibration.scales import step_time_scale
from carpool_predictor.calibration.store import CalibrationStore, StoredCalibration, UnreadableCalibrationError
from carpool_predictor.features import Abstention
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, run_prediction_of
from carpool_predictor.tracing.source import input_digest

from carpool_operator.observations import Observation
from carpool_operator.pods import key_of
from carpool_operator.prediction import TRANSIENT
from carpool_operator.snapshot import CalibrationKey

PAUSE_S = 5.0
"""Seconds between two writes of the ConfigMap."""
REPAIR_POLL_S = 60.0
"""Seconds after which an unreadable document is read again, and a forbidden write is tried again."""
MAX_PENDING = 2048
"""Pending observations; beyond, the oldest is dropped. Its job submits it again at its next reconciliation."""
_MAX_STORED = 8192
"""Keys of stored observations that this process remembers."""
MAX_PER_WRITE = MAX_SAMPLES // 2
"""Observations of one write. After a crash they are submitted again, and the document must still name all of them."""
_MAX_CONFLICTS = 5

_Comparable = tuple[GpuTrainingJob, Observation, PredictionContext, GpuProduct]
"""An ended or running attempt, its measurement, its prediction's input, and the product that it ran on."""

Prepare = Callable[[GpuTrainingJob], Awaitable[PredictionContext | Abstention]]
"""Returns the predictor's input for a job."""


class Calibrator:
    """Holds the calibration and the pending observations.

    Args:
        store: The ConfigMap; None if learning is off.
        simulated: Returns the products of which all GPUs are simulated; their observations serve no hardware.
        find_products: Returns the products with these names; those that cannot be described are left out.
    """

    def __init__(
        self,
        store: CalibrationStore | None,
        clock: Clock,
        *,
        prepare: Prepare,
        enqueue: Callable[[str], None],
        simulated: Callable[[], Collection[str]],
        find_products: Callable[[Iterable[str]], list[GpuProduct]],
        events: EventRecorder,
    ) -> None:
        self._store, self._clock, self._prepare, self._enqueue = store, clock, prepare, enqueue
        self._simulated, self._find_products, self._events = simulated, find_products, events
        self._kept: StoredCalibration | None = None
        self._pending: OrderedDict[str, tuple[GpuTrainingJob, Observation | MeasuredSteps]] = OrderedDict()
        self._stored: LRUCache[str, None] = LRUCache(_MAX_STORED)
        self._submitted = asyncio.Event()
        self._error = ""
        self._pause_s = PAUSE_S
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calibrate")
        self._log = structlog.get_logger()

    @property
    def is_on(self) -> bool:
        """Whether observations are learned: learning is on and the ConfigMap is readable."""
        return self._kept is not None

    @property
    def calibration(self) -> Calibration | None:
        """The calibration; None if learning is off or the ConfigMap cannot be read."""
        return None if self._kept is None else self._kept.calibration

    def usable(self, namespace: str, gpus: int = 1) -> Calibration | None:
        """Return what predictions of a namespace's jobs use; `gpus` is the number of GPUs of a worker."""
        if self._kept is None:
            return None
        return self._kept.calibration.for_gpus(self._simulated()).for_workers(gpus).for_namespace(namespace)

    @property
    def is_settled(self) -> bool:
        """Whether no observation is pending."""
        return not self._pending

    def keys(
        self, namespace: str, spec: JobSpec, products: tuple[str, ...], size_mib: float | None
    ) -> dict[str, CalibrationKey]:
        """Return the calibration key of a prediction of a job, by product; empty if its size is unknown.

        `size_mib` is the simulated size of the allocator in MiB.
        """
        calibration = self.usable(namespace, spec.gpus_per_worker)
        if calibration is None or size_mib is None:
            return {}
        calibration = calibration.for_training(spec.training)
        precision, name = spec.training.precision, model_key(spec.model)
        digest = input_digest(spec.model, spec.training)
        same = "" if spec.model is None else job_name(spec.model.family, digest)
        solo = solo_name(digest, spec.workers, spec.gpus_per_worker)
        family = "" if spec.model is None else solo_family(spec.model.family, spec.workers, spec.gpus_per_worker)
        gpus, now = self._find_products(products), self._clock.now().timestamp()
        return {
            gpu.name: CalibrationKey(
                _jobs(calibration, gpu.name, precision).bit_length(),
                find_history(
                    calibration, gpu.name, precision, name, size_mib, retry_before=retry_before(gpu, gpus, now)
                ),
                measured_runs(learned_colocations(calibration.pairs, gpu.name, same)),
                step_time_scale(calibration.solo, gpu.name, family, solo),
            )
            for gpu in gpus
        }

    def has_learned(self, sample: str) -> bool:
        """Return whether this process has stored the observation of an ended attempt."""
        return f"{sample} ended" in self._stored

    def solo_step_s(self, namespace: str, name: str, product: str) -> float | None:
        """Return the step time alone of an earlier run (see `solo_name`); None if none was measured."""
        found = self.usable(namespace)
        return None if found is None else solo_step_s(found.solo, name, product)

    def submit(self, job: GpuTrainingJob, observation: Observation | MeasuredSteps) -> None:
        """Add an observation to the pending ones, unless it is pending or stored."""
        if self._store is None or observation.key in self._stored or observation.key in self._pending:
            return
        self._pending[observation.key] = (job, observation)
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
        self._submitted.set()

    async def load(self) -> None:
        """Read the ConfigMap. An unreadable one is reported and left as it is."""
        if self._store is None:
            return
        try:
            self._kept = await self._store.read()
        except UnreadableCalibrationError as error:
            self._kept = None
            await self._report(str(error), error.uid)
            self._pause_s = REPAIR_POLL_S
        except KubeError as error:
            # The calibration that was read before stays in use.
            self._pause_s = PAUSE_S
            then = (
                "predictions are uncalibrated" if self._kept is None else "predictions use the last one that was read"
            )
            await self._report(f"the calibration cannot be read: {error}; {then}", "")
        else:
            jobs = sum(state.jobs for state in self._kept.calibration.stacks)
            if self._error:
                self._log.info("calibration readable again", jobs=jobs)
            self._error = ""

    async def _report(self, message: str, uid: str) -> None:
        if self._store is None or message == self._error:
            return
        self._error = message
        self._log.error("calibration not used", why=message)
        if uid:
            await self._events.record(
                kind=CONFIG_MAPS,
                namespace=self._store.namespace,
                name=self._store.name,
                uid=uid,
                type="Warning",
                reason="CalibrationUnreadable",
                message=message,
            )

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Store observations until cancelled; poll an unreadable ConfigMap for its repair."""
        while self._store is not None:
            if self._kept is None:
                await sleep(self._pause_s)
                await self.load()
                continue
            await self._submitted.wait()
            self._submitted.clear()
            pause_s = PAUSE_S
            try:
                await self.flush()
            except KubeError as error:
                # Missing rights stay missing for a while.
                pause_s = REPAIR_POLL_S if isinstance(error, Refused) else PAUSE_S
                self._log.warning("calibration not written", error=str(error), retry_in_s=pause_s)
            except Exception:
                # A defect must not end the operator, which would meet the same observations after its restart.
                self._log.exception("observations dropped", observations=min(len(self._pending), MAX_PER_WRITE))
                for key in list(self._pending)[:MAX_PER_WRITE]:
                    del self._pending[key]
            if self._pending:
                self._submitted.set()
            await sleep(pause_s)

    async def flush(self) -> None:
        """Store the oldest `MAX_PER_WRITE` pending observations with one write.

        Raises:
            KubeError: The write failed, or its result is unknown; the observations stay pending.
        """
        if self._kept is None:
            await self.load()
        if self._kept is None:
            return
        batch = list(self._pending.items())[:MAX_PER_WRITE]
        comparable: list[_Comparable] = []
        postponed: set[str] = set()
        steps: list[MeasuredSteps] = []
        for key, (job, observation) in batch:
            if isinstance(observation, MeasuredSteps):
                steps.append(observation)
                continue
            expected = await self._prepare(job)
            if isinstance(expected, PredictionContext):
                # Without a prediction for this product there is nothing to correct.
                products = self._find_products([observation.product])
                comparable += [(job, observation, expected, product) for product in products]
            elif expected.reason in TRANSIENT:
                postponed.add(key)
            else:
                self._log.debug("observation without prediction", job=job.metadata.name, why=expected.reason)
        if not await self._write(comparable, steps):
            return
        learned = {observation.key for _, observation, *_ in comparable}
        for key, (job, observation) in batch:
            if key in postponed and key in self._pending:
                self._pending.move_to_end(key)
                continue
            self._pending.pop(key, None)
            if isinstance(observation, MeasuredSteps):
                self._stored[key] = None
                continue
            if key not in learned:
                continue
            self._stored[key] = None
            if observation.measured.ended:
                self._enqueue(key_of(job))

    async def _write(self, observations: list[_Comparable], steps: list[MeasuredSteps]) -> bool:
        """Write the calibration with these observations; return False if it has become unreadable."""
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_CONFLICTS):
            before = self._kept
            if before is None or self._store is None:
                return False
            after = await loop.run_in_executor(self._thread, with_observations, before.calibration, observations)
            after = with_steps(after, steps)
            if after is before.calibration:
                return True
            try:
                self._kept = await self._store.write(before, after)
            except NotFound:
                self._kept = StoredCalibration()  # the ConfigMap was deleted: begin with an empty one
            except Conflict:
                await self.load()
            else:
                return True
        raise Conflict(f"others changed the calibration {_MAX_CONFLICTS} times while it was written")

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _jobs(calibration: Calibration, product: str, precision: Precision) -> int:
    state = calibration.best(product, precision)
    return 0 if state is None else state.learned_from


def with_observations(calibration: Calibration, observations: list[_Comparable]) -> Calibration:
    """Return the calibration with these observations; the same object if none of them is new."""
    for job, observation, expected_input, product in observations:
        stack = Stack(
            product=observation.product,
            precision=job.spec.training.precision,
            driver=SIMULATED if observation.simulated else "",
            gpus=job.spec.gpus_per_worker,
            plain=is_plain(job.spec.training),
        )
        expected = run_prediction_of(expected_input, model_key(job.spec.model), observation.counted_mib, product)
        calibration = observe(calibration, stack, expected, observation.with_activity(), shipped())
    return calibration
