"""Learns from what attempts showed, and keeps it: many lessons with one write, each of them once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import structlog
from carpool_core.kube.api import CONFIG_MAPS
from carpool_core.kube.errors import Conflict, KubeError, NotFound, Refused
from carpool_core.kube.events import EventRecorder
from carpool_core.products import UnknownProductError, find_product
from carpool_core.resources.job import GpuTrainingJob, JobSpec
from carpool_core.values import Precision
from carpool_predictor.calibration.document import COUNTED, SIMULATED, Calibration, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.calibration.run_history import model_name, recall
from carpool_predictor.calibration.store import CalibrationMap, Kept, UnreadableError
from carpool_predictor.features import Abstention
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import Job, expected_of

from carpool_operator.observations import Lesson, Mark
from carpool_operator.pods import job_key
from carpool_operator.prediction import TRANSIENT

PAUSE_S = 5.0
"""Between two writes of the ConfigMap: a cluster whose jobs end by the dozen writes no more often."""
REPAIRED_S = 60.0
"""How often a document that cannot be read is looked at again, and one that may not be written is tried again."""
MOST_PENDING = 2048
"""Lessons that wait; beyond, the oldest goes. Its job has no mark of it, and tells it again when it is looked at."""
MOST_KNOWN = 8192
"""Lessons that this process remembers to have taken in."""
MOST_AT_ONCE = COUNTED // 2
"""Lessons of one write: after a crash they are told again, and the document must still name all that it has counted."""
_TRIES = 5

Asked = Callable[[JobSpec], Awaitable[Job | Abstention]]
"""Return what the predictor is asked of a job."""


class Learner:
    """Holds the calibration, and what waits to be taken into it.

    Args:
        kept_in: Where it is kept; None where nothing is to be learned.
        asked: Returns what the predictor is asked of a job.
        wake: Asks for a look at a job, once what it showed is kept.
        simulated: Returns the products of which all GPUs are simulated: what those taught serves no others.
        events: Records what is wrong with the ConfigMap.
    """

    def __init__(
        self,
        kept_in: CalibrationMap | None,
        *,
        asked: Asked,
        wake: Callable[[str], None],
        simulated: Callable[[], Collection[str]],
        events: EventRecorder,
    ) -> None:
        self._map, self._asked, self._wake, self._events = kept_in, asked, wake, events
        self._simulated = simulated
        self._kept: Kept | None = None
        self._pending: OrderedDict[str, tuple[GpuTrainingJob, Lesson]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._offered = asyncio.Event()
        self._complaint = ""
        self._pause_s = PAUSE_S
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learn")
        self._log = structlog.get_logger()

    @property
    def is_on(self) -> bool:
        """Whether lessons are taken in: it is set to learn, and what was learned so far can be read."""
        return self._kept is not None

    @property
    def calibration(self) -> Calibration | None:
        """What was learned; None where nothing is to be, or cannot be read."""
        return None if self._kept is None else self._kept.calibration

    @property
    def usable(self) -> Calibration | None:
        """What predictions are to use of it, for the GPUs that there are."""
        return None if self._kept is None else self._kept.calibration.for_gpus(self._simulated())

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be taken in."""
        return not self._pending

    def marks(self, spec: JobSpec, products: tuple[str, ...], size_mib: float | None) -> dict[str, Mark]:
        """Say for each product what a prediction of a job would be calibrated from by now.

        Args:
            spec: The job.
            products: The products.
            size_mib: What the simulated allocator holds; None where that is not known.
        """
        calibration = self.usable
        if calibration is None or size_mib is None:
            return {}
        precision, name = spec.training.precision, model_name(spec.model)
        return {
            product: Mark(
                _jobs(calibration, product, precision).bit_length(),
                recall(calibration, product, precision, name, size_mib),
            )
            for product in products
        }

    def has_learned(self, sample: str) -> bool:
        """Whether an attempt that has ended is in the calibration for good, as far as this process knows."""
        return f"{sample} ended" in self._known

    def offer(self, job: GpuTrainingJob, lesson: Lesson) -> None:
        """Have a lesson taken in, unless it waits already or was taken in; what was dropped may be told again."""
        if self._map is None or lesson.stage in self._known or lesson.stage in self._pending:
            return
        self._pending[lesson.stage] = (job, lesson)
        while len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)
        self._offered.set()

    async def load(self) -> None:
        """Read what was learned before. What cannot be read is told, and left as it is."""
        if self._map is None:
            return
        try:
            self._kept = await self._map.read()
        except UnreadableError as error:
            self._kept = None
            await self._complain(str(error), error.uid)
            self._pause_s = REPAIRED_S
        except KubeError as error:
            # What was read before is still the best there is; without any, jobs run alone where nothing was shipped.
            self._pause_s = PAUSE_S
            then = "predictions are as shipped" if self._kept is None else "predictions go on with what was read before"
            await self._complain(f"what was learned cannot be read: {error}; {then}", "")
        else:
            jobs = sum(state.jobs for state in self._kept.calibration.stacks)
            if self._complaint:
                self._log.info("calibration readable again", jobs=jobs)
            self._complaint = ""

    async def _complain(self, message: str, uid: str) -> None:
        if self._map is None or message == self._complaint:
            return
        self._complaint = message
        self._log.error("calibration not used", why=message)
        if uid:
            await self._events.record(
                kind=CONFIG_MAPS,
                namespace=self._map.namespace,
                name=self._map.name,
                uid=uid,
                type="Warning",
                reason="CalibrationUnreadable",
                message=message,
            )

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Take lessons in for ever; look now and then whether what cannot be read was repaired."""
        while self._map is not None:
            if self._kept is None:
                await sleep(self._pause_s)
                await self.load()
                continue
            await self._offered.wait()
            self._offered.clear()
            pause_s = PAUSE_S
            try:
                await self.flush()
            except KubeError as error:
                # A right that is missing is missing for a while.
                pause_s = REPAIRED_S if isinstance(error, Refused) else PAUSE_S
                self._log.warning("calibration not written", error=str(error), retry_in_s=pause_s)
            except Exception:
                # A defect must not end the operator, which would meet the same lessons again once it is restarted.
                self._log.exception("lessons dropped", lessons=min(len(self._pending), MOST_AT_ONCE))
                for stage in list(self._pending)[:MOST_AT_ONCE]:
                    del self._pending[stage]
            if self._pending:
                self._offered.set()
            await sleep(pause_s)

    async def flush(self) -> None:
        """Take in what waits, the oldest first and `MOST_AT_ONCE` at most, with one write.

        Raises:
            KubeError: It could not be written, or nobody knows whether it was; what waits is kept.
        """
        if self._kept is None:
            await self.load()
        if self._kept is None or self._map is None:
            return
        batch = list(self._pending.items())[:MOST_AT_ONCE]
        known: list[tuple[GpuTrainingJob, Lesson, Job]] = []
        later: set[str] = set()
        for stage, (job, lesson) in batch:
            asked = await self._asked(job.spec)
            if isinstance(asked, Job):
                known.append((job, lesson, asked))
            elif asked.reason in TRANSIENT:
                later.add(stage)
            else:
                self._log.debug("nothing to compare with", job=job.metadata.name, why=asked.reason)
        for _ in range(_TRIES):
            before = self._kept
            if before is None:
                return  # changed under our hands to what cannot be read
            after = await asyncio.get_running_loop().run_in_executor(self._thread, taken, before.calibration, known)
            if after is before.calibration:
                break
            try:
                self._kept = await self._map.write(before, after)
                break
            except NotFound:
                self._kept = Kept()  # somebody removed it, so that it is learned anew
            except Conflict:
                await self.load()
        else:
            raise Conflict(f"the calibration was changed by others {_TRIES} times while it was written")
        for stage, (job, lesson) in batch:
            if stage in later and stage in self._pending:
                self._pending.move_to_end(stage)
                continue
            self._pending.pop(stage, None)
            if all(lesson is not one for _, one, _ in known):
                continue  # nothing to compare it with by now: it was not learned, and its job is not told so
            self._remember(stage)
            if lesson.measured.ended:
                self._wake(job_key(job.metadata.namespace, job.metadata.name))

    def _remember(self, stage: str) -> None:
        self._known[stage] = None
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _jobs(calibration: Calibration, product: str, precision: Precision) -> int:
    state = calibration.best(product, precision)
    return 0 if state is None else state.learned_from


def taken(calibration: Calibration, lessons: list[tuple[GpuTrainingJob, Lesson, Job]]) -> Calibration:
    """Take lessons into a calibration; the same one where none of them says anything new."""
    for job, lesson, asked in lessons:
        stack = Stack(
            product=lesson.product,
            precision=job.spec.training.precision,
            driver=SIMULATED if lesson.simulated else "",
        )
        try:
            product = find_product(lesson.product)
            expected = expected_of(asked, model_name(job.spec.model), lesson.counted_mib, product)
            calibration = observe(calibration, stack, expected, lesson.with_activity(), shipped())
        except UnknownProductError:
            continue  # a product that was never predicted for has no line to set out from
    return calibration
