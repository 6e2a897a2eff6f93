"""What a decision is told of simulated jobs: nothing, the shipped prediction, or the truth."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from carpool_core.demand import Demand
from carpool_core.durations import duration_bucket, duration_s
from carpool_core.products import find_product
from carpool_core.resources.node import Tenant, TenantProfile
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, JobUid, PodUid, RequestedMode, SharingMode, Tenancy
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.queue.order import QueueKey, QueueOrder
from carpool_predictor.calibration.document import Calibration, RunMeasurement, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.models.memory import shipped
from carpool_predictor.models.slowdown import TenantActivity, is_saturated, solo_activity
from carpool_predictor.predict import PredictionContext, ProductAnswer, run_prediction_of, summarize

from carpool_simulator.strategy import ANY_SLOWDOWN, Knowledge, Piece, Strategy
from carpool_simulator.truth import SimJob, Truth


class Learner:
    """Holds the calibration of one simulated cluster.

    Args:
        is_strict: Whether jobs run alone where nothing was measured on such a stack.
        steady_s: Age at which a peak is taken for the job's, in seconds.
    """

    def __init__(self, *, is_strict: bool, steady_s: float) -> None:
        self._is_strict, self._steady_s = is_strict, steady_s
        self._calibration = Calibration()
        self._told: dict[str, Prediction] = {}
        self._shipped: dict[str, ProductAnswer] = {}
        self.version = 0
        """Grows whenever something was learned."""

    def predict(self, job: SimJob, asked: PredictionContext) -> Prediction:
        """Predict a job with all that is known by now."""
        found = self._told.get(job.truth.kind)
        if found is None:
            product = find_product(job.truth.product)
            known = asked.calibrated(self._calibration, product, job.truth.model)
            before = self._shipped.get(job.truth.kind)
            if before is None:
                before = self._shipped[job.truth.kind] = asked.on(product)
            found = summarize(asked, [known.on(product, is_strict=self._is_strict, before=before)])
            self._told[job.truth.kind] = found
        return found

    def saw(
        self,
        job: SimJob,
        uid: str,
        *,
        counted_mib: int,
        capacity_mib: int,
        age_s: float | None,
        solo_activity: TenantActivity,
        at_least: bool,
    ) -> None:
        """Take in what a job was measured to use.

        Args:
            job: The job.
            uid: Names its run.
            counted_mib: The bound that its placement counted with; 0 where it counted with none.
            capacity_mib: Memory of its GPU.
            age_s: For how long it has run, in seconds; None where it has ended.
            solo_activity: What it would do on a GPU of its own, estimated from what all tenants do together.
            at_least: Whether that is the least that it would do.
        """
        measured = RunMeasurement(
            peak_mib=job.truth.memory_mib,
            capacity_mib=capacity_mib,
            ended=age_s is None,
            steady=age_s is None or age_s >= self._steady_s,
            sample=uid,
            util=solo_activity.util,
            sm_active=solo_activity.sm,
            at_least=at_least,
        )
        self._observe(job, measured, counted_mib)

    def starved(self, job: SimJob, uid: str, *, counted_mib: int, capacity_mib: int, had_mib: int) -> None:
        """Take in that a job died of memory.

        Args:
            job: The job.
            uid: Names its run.
            counted_mib: The bound that its placement counted with; 0 where it counted with none.
            capacity_mib: Memory of its GPU.
            had_mib: What there was for it.
        """
        self._observe(
            job,
            RunMeasurement(peak_mib=had_mib, capacity_mib=capacity_mib, out_of_memory=True, sample=uid),
            counted_mib,
        )

    def _observe(self, job: SimJob, measured: RunMeasurement, counted_mib: int) -> None:
        if job.asked is None:
            return
        product = find_product(job.truth.product)
        stack = Stack(product=product.name, precision=job.asked.training.precision)
        expected = run_prediction_of(job.asked, job.truth.model, counted_mib, product)
        after = observe(self._calibration, stack, expected, measured, shipped())
        if after is not self._calibration:
            self._calibration = after
            self._told.clear()
            self.version += 1


def exactly(truth: Truth, like: Prediction | None, *, by_utilization: bool = False) -> Prediction:
    """Write the truth as a prediction without an error, for the product that another one is for."""
    product = like.products[0].product if like is not None and like.products else ""
    return prediction_of(
        product or truth.product,
        upper_mib=truth.memory_mib,
        util=truth.util,
        sm=truth.util if by_utilization else truth.sm,
        dram=truth.dram,
    )


def prediction_of(
    product: str,
    *,
    upper_mib: int,
    util: float,
    sm: float,
    dram: float,
    step_s: float = 1.0,
    unenforced_mib: int = 0,
    trusted: bool = True,
) -> Prediction:
    """Return a prediction for one product with no spread; memory in MiB, activity 0..1, time of a step in seconds."""

    def point(value: float) -> Interval:
        return Interval(median=value, lower=value, upper=value)

    one = ProductPrediction(
        product=product,
        memory=MemoryPrediction(
            median_mib=upper_mib,
            upper_mib=upper_mib,
            upper_unenforced_mib=unenforced_mib,
            coverage=0.95,
            trusted=trusted,
        ),
        activity=ActivityPrediction(
            gpu_util_percent=point(100 * util), sm_active_ratio=point(sm), dram_active_ratio=point(dram)
        ),
        step_time_seconds=point(step_s),
    )
    return Prediction(outcome="Predicted", reason="Simulated", products=[one])


NAMESPACE = "simulation"
RAISED = 1.5
"""Factor to the bound of a job that died of memory once where nothing is learned; after two deaths it is alone."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a job is on its way."""

    attempt: int = 0
    """Times that it died of memory."""
    profiling: bool = False
    """Whether it runs for a minute only, alone, so that it becomes known."""
    restarts: int = 0
    """Times that its GPU failed."""

    def raised(self) -> "Stage":
        """Return the stage after it died of memory."""
        return Stage(self.attempt + 1, restarts=self.restarts)

    def restarted(self) -> "Stage":
        """Return the stage after its GPU failed: what it was, from the beginning."""
        return Stage(self.attempt, self.profiling, self.restarts + 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, of which something is measured."""

    job: SimJob
    uid: str
    capacity_mib: int
    """Memory of its GPU."""
    mode: SharingMode
    together: Sequence[TenantActivity]
    """What it is measured to do, and after it its neighbours."""


class Knower:
    """Tells a strategy what it may know.

    Args:
        strategy: What it is told.
        usable_mib: Memory of the largest GPU.
        seed: Draws the errors of ablations.
    """

    def __init__(self, strategy: Strategy, usable_mib: int, seed: int) -> None:
        self._strategy, self._usable_mib, self._seed = strategy, usable_mib, seed
        self._applicants: dict[object, PodRequest] = {}
        self._counted: dict[str, int] = {}
        self._learner = Learner(is_strict=strategy.strict, steady_s=strategy.steady_s) if strategy.learns else None

    @property
    def informers(self) -> bool:
        """Whether reservations say what a monitor sees, because nothing was promised."""
        return self._strategy.knowledge is Knowledge.NOTHING

    def saw(self, run: Run, *, age_s: float | None) -> None:
        """Learn from what a run was measured to use.

        Args:
            run: The run.
            age_s: For how long it has run, in seconds; None where it has ended.
        """
        if self._learner is not None:
            counted = self._counted.get(run.job.name, 0)
            self._learner.saw(
                run.job,
                run.uid,
                counted_mib=counted,
                capacity_mib=run.capacity_mib,
                age_s=age_s,
                solo_activity=solo_activity(run.mode, run.together)[0],
                at_least=is_saturated(run.mode, run.together),
            )

    def starved(self, run: Run, had_mib: int) -> None:
        """Learn from a job that died of memory, of which it had so much."""
        if self._learner is not None:
            counted = self._counted.get(run.job.name, 0)
            self._learner.starved(run.job, run.uid, counted_mib=counted, capacity_mib=run.capacity_mib, had_mib=had_mib)

    def alike(self, job: SimJob, stage: Stage) -> object:
        """Return a key that jobs share for which the same decision would be made."""
        own = job.name if self._strategy.error else ""
        return (job.truth.kind, job.gpus, job.workers, stage.attempt, stage.profiling, own)

    def order(self, *, is_decreasing: bool) -> QueueOrder:
        """Return how the queue is sorted: by `came_s` alone where that is no time of arrival."""
        has_its_own = is_decreasing or Piece.DURATIONS in self._strategy.told
        return QueueOrder.ARRIVAL if has_its_own else self._strategy.order

    def ticket(self, job: SimJob, urgency: int, number: int, *, is_decreasing: bool) -> QueueKey:
        """Return what a job is sorted by.

        Args:
            job: The job.
            urgency: The least comes first.
            number: Nobody else's.
            is_decreasing: Whether the policy starts with the job of the largest utilization.
        """
        if Piece.DURATIONS in self._strategy.told:
            return QueueKey(urgency, -job.work_s, 0, number)
        if is_decreasing:
            predicted = self._prediction(job)
            util = 1.0 if predicted is None else predicted.products[0].activity.gpu_util_percent.median
            return QueueKey(urgency, -util, 0, number)
        is_sorted = self._strategy.order is not QueueOrder.ARRIVAL
        return QueueKey(urgency, job.arrival_s, self._rung(job) if is_sorted else 0, number)

    def _rung(self, job: SimJob) -> int:
        steps = self._steps(job)
        # The queue predicts durations also where the placement policy uses no predictions.
        blind = self._strategy.knowledge is Knowledge.NOTHING
        prediction = job.prediction if blind else self._prediction(job)
        return duration_bucket(None if steps is None else duration_s(steps, prediction, lambda _: True))

    def _steps(self, job: SimJob) -> int | None:
        """Return how many steps a job says it has: None where it is silent, others than it has where it errs."""
        silent, error = self._strategy.silent_share, self._strategy.steps_error
        if job.steps is None or not (silent or error):
            return job.steps
        draw = random.Random(f"{self._seed}/{job.name}/steps")  # noqa: S311  # a simulation, no secret
        if draw.random() < silent:
            return None
        return max(1, round(job.steps * math.exp(draw.gauss(0.0, error))))

    def pod_request(self, job: SimJob, stage: Stage) -> PodRequest:
        """Return what asks for a GPU."""
        version = 0 if self._learner is None else self._learner.version
        key = (self.alike(job, stage), version)
        found = self._applicants.get(key)
        if found is None:
            settles = self._strategy.settles and not stage.attempt
            found = self._applicants[key] = PodRequest(self._demand(job, stage), may_use_measured_peak=settles)
        told = found.demand.prediction
        is_counted = told is not None and told.products[0].memory.trusted
        self._counted[job.name] = told.products[0].memory.upper_mib if told is not None and is_counted else 0
        return found

    def _demand(self, job: SimJob, stage: Stage) -> Demand:
        blind = self._strategy.knowledge is Knowledge.NOTHING
        solo_activity = stage.attempt > (0 if blind else 1) or stage.profiling
        mode = RequestedMode.EXCLUSIVE if solo_activity else RequestedMode.AUTO
        prediction = None if solo_activity else self._prediction(job)
        if not self._is_learned(job):  # whoever learns has the death of the last attempt in its next prediction
            prediction = self._raised(prediction, stage.attempt)
        if not solo_activity and self._strategy.mode is SharingMode.TIME_SLICING:
            mode = RequestedMode.TIME_SLICING if self._may_share(prediction, stage) else RequestedMode.AUTO
        return Demand(
            job_uid=JobUid(job.truth.kind),
            job_name=job.name,
            namespace=NAMESPACE,
            gpus=job.gpus,
            mode=mode,
            max_slowdown=ANY_SLOWDOWN if Piece.SLOWDOWNS in self._strategy.told else self._strategy.max_slowdown,
            tenancy=Tenancy.NAMESPACE,
            product=None,
            min_memory_mib=0,
            min_compute_capability=None,
            memory_limit_mib=0 if blind and not solo_activity else None,
            prediction=prediction,
        )

    def _may_share(self, prediction: Prediction | None, stage: Stage) -> bool:
        """Whether a job's GPU may have others at any time: what `Auto` answers of a device without MPS."""
        memory = None if prediction is None else prediction.products[0].memory
        if self._strategy.knowledge is Knowledge.NOTHING or (memory is not None and memory.trusted):
            return True
        return self._strategy.settles and not stage.attempt and (memory is None or not memory.learned_runs)

    def _is_learned(self, job: SimJob) -> bool:
        return self._learner is not None and job.asked is not None

    def _raised(self, found: Prediction | None, attempt: int) -> Prediction | None:
        """Raise the floor of a job that died of memory; beyond every GPU it is unknown, and gets one of its own."""
        if found is None or not attempt:
            return found
        one = found.products[0]
        upper = round(one.memory.upper_mib * RAISED**attempt)
        if upper > self._usable_mib:
            return None
        memory = msgspec.structs.replace(one.memory, upper_mib=upper)
        return msgspec.structs.replace(found, products=[msgspec.structs.replace(one, memory=memory)])

    def _prediction(self, job: SimJob) -> Prediction | None:
        return self._corrected(job, self._foretold(job))

    def _corrected(self, job: SimJob, found: Prediction | None) -> Prediction | None:
        """Put the truth in the place of what is to be known as it is."""
        told, truth = self._strategy.told, job.truth
        if found is None and Piece.MEMORY in told:
            found = job.prediction
        if found is None or not told & {Piece.MEMORY, Piece.ACTIVITY}:
            return found
        one, true = found.products[0], exactly(truth, found, by_utilization=self._strategy.by_utilization).products[0]
        if Piece.MEMORY in told:
            one = msgspec.structs.replace(one, memory=true.memory)
        if Piece.ACTIVITY in told:
            one = msgspec.structs.replace(one, activity=true.activity)
        return msgspec.structs.replace(found, products=[one])

    def _foretold(self, job: SimJob) -> Prediction | None:
        strategy = self._strategy
        if strategy.knowledge is Knowledge.NOTHING or strategy.abstain:
            return None
        if strategy.knowledge is Knowledge.TRUTH:
            return exactly(job.truth, job.prediction, by_utilization=strategy.by_utilization)
        found = job.prediction
        if self._learner is not None and job.asked is not None:
            found = self._learner.predict(job, job.asked)
        if found is None:
            return None
        # An error of the predictor's is none any more where the very job was measured; no bound is made to fit by one.
        memory = found.products[0].memory
        is_told = memory.learned_runs > 0 or memory.upper_mib > self._usable_mib
        return found if is_told else self._with_error(job, found)

    def _with_error(self, job: SimJob, found: Prediction) -> Prediction:
        draw = random.Random(f"{self._seed}/{job.name}")  # noqa: S311  # a simulation, no secret
        error = self._strategy.error
        memory, busy, pace = (math.exp(draw.gauss(0.0, error)) for _ in range(3))
        one = found.products[0]
        activity = one.activity
        sm = (
            activity.gpu_util_percent.median / 100 if self._strategy.by_utilization else activity.sm_active_ratio.median
        )
        return prediction_of(
            one.product,
            upper_mib=min(self._usable_mib, round(one.memory.upper_mib * memory)),
            unenforced_mib=min(self._usable_mib, round(one.memory.upper_unenforced_mib * memory)),
            trusted=one.memory.trusted,
            util=min(1.0, busy * activity.gpu_util_percent.median / 100),
            sm=min(1.0, busy * sm),
            dram=min(1.0, busy * activity.dram_active_ratio.median),
            step_s=pace * one.step_time_seconds.median,
        )

    def profile(self, truth: Truth, promised: TenantProfile, slowdown: float) -> TenantProfile:
        """Return what the reservation of a running tenant says: where nothing is promised, what a monitor sees."""
        if self._strategy.knowledge is not Knowledge.NOTHING:
            return promised
        active = truth.util if self._strategy.by_utilization else truth.sm
        return msgspec.structs.replace(
            promised, memory_mib=truth.memory_mib, gpu_util_percent=100 * truth.util, sm_active_ratio=active / slowdown
        )

    def measured(self, truth: Truth, uid: PodUid, gpu: GpuUuid, slowdown: float) -> Tenant | None:
        """Return what the node's agent reports of a tenant, to a strategy that goes by it."""
        if self._strategy.knowledge is not Knowledge.PREDICTED or not self._strategy.measure:
            return None
        active = truth.util if self._strategy.by_utilization else truth.sm
        seen = Tenant(pod_uid=uid, gpu_uuid=gpu, memory_mib=truth.memory_mib, peak_memory_mib=truth.memory_mib)
        if Piece.ACTIVITY in self._strategy.told:
            return seen
        return msgspec.structs.replace(
            seen, gpu_util_percent=100 * truth.util / slowdown, sm_active_ratio=active / slowdown
        )
