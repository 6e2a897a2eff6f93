"""Information that a strategy has about simulated jobs: nothing, the shipped prediction, or the truth."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from carpool_core.demand import Demand
from carpool_core.durations import duration_s
from carpool_core.moves import MAX_MOVES
from carpool_core.products import find_product
from carpool_core.resources.node import Tenant, TenantProfile
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    LearnedColocation,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, JobUid, PodUid, RequestedMode, SharingMode, Tenancy, WhenSlowed
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.queue.order import QueueOrder
from carpool_extender.queue.scheduling_queue import PodRef, QueuedJobInfo
from carpool_predictor.calibration.colocation import (
    PAIR,
    MeasuredSteps,
    Origin,
    SoloRecord,
    job_name,
    learned_colocations,
    pair_record,
    solo_family,
    solo_name,
    solo_step_s,
)
from carpool_predictor.calibration.document import Calibration, RunMeasurement, Stack, is_plain, with_steps
from carpool_predictor.calibration.observe import observe
from carpool_predictor.calibration.scales import with_step_times
from carpool_predictor.models.memory import shipped
from carpool_predictor.models.slowdown import TenantActivity, is_saturated, pair_slowdown, solo_activity
from carpool_predictor.predict import PredictionContext, ProductAnswer, run_prediction_of, summarize

from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Truth


class Learner:
    """Holds the calibration of one simulated cluster.

    If `is_strict`, jobs run alone on a stack of which nothing was measured yet. A measured peak counts as the job's
    from the age of `steady_s` seconds on.
    """

    def __init__(self, *, is_strict: bool, steady_s: float) -> None:
        self._is_strict, self._steady_s = is_strict, steady_s
        self._calibration = Calibration()
        self._predictions: dict[str, Prediction] = {}
        self._shipped: dict[str, ProductAnswer] = {}
        self._colocations: dict[tuple[str, str], list[LearnedColocation]] = {}
        self.version = 0
        """Rises when something is learned."""

    def predict(self, job: SimJob, asked: PredictionContext) -> Prediction:
        """Predict a job with the present calibration."""
        found = self._predictions.get(job.truth.kind)
        if found is None:
            product = find_product(job.truth.product)
            known = asked.calibrated(self._calibration, product, job.truth.model)
            before = self._modelled(job, asked)
            found = summarize(asked, [known.on(product, is_strict=self._is_strict, before=before)])
            self._predictions[job.truth.kind] = found
        return found

    def _modelled(self, job: SimJob, asked: PredictionContext) -> ProductAnswer:
        """Return the shipped model's prediction."""
        if job.truth.kind not in self._shipped:
            self._shipped[job.truth.kind] = asked.on(find_product(job.truth.product))
        return self._shipped[job.truth.kind]

    def observe(self, run: "Run", counted_mib: int, age_s: float | None) -> None:
        """Learn from what a run was measured to use.

        Its placement counted with the bound `counted_mib`; 0 if with none. `age_s` is the time since its start in
        seconds; None if it has ended.
        """
        alone = solo_activity(run.mode, run.together)[0]
        measured = RunMeasurement(
            peak_mib=run.job.truth.memory_mib,
            capacity_mib=run.capacity_mib,
            ended=age_s is None,
            steady=age_s is None or age_s >= self._steady_s,
            sample=run.uid,
            util=alone.util,
            sm_active=alone.sm,
            at_least=is_saturated(run.mode, run.together),
        )
        self._observe(run.job, measured, counted_mib)

    def observe_out_of_memory(self, run: "Run", counted_mib: int, available_mib: int) -> None:
        """Learn from a run that ran out of memory, of which so much was available; arguments as in `observe`."""
        measured = RunMeasurement(
            peak_mib=available_mib, capacity_mib=run.capacity_mib, out_of_memory=True, sample=run.uid
        )
        self._observe(run.job, measured, counted_mib)

    def observe_steps(self, run: "Run") -> None:
        """Learn from the steps of a run since its co-tenants last changed, as the operator does."""
        job, steps = run.job, run.steps
        if job.asked is None or not job.truth.model:
            return
        origin = Origin(NAMESPACE, NAMESPACE, find_product(job.truth.product).name, True)
        name = solo_name(job.truth.kind, job.workers, job.gpus)
        unit_s, solo, solo_s = job.step_s or 1.0, None, solo_step_s(self._calibration.solo, name, origin.product)
        if steps.solo_s is not None:
            solo_s = steps.solo_s * unit_s
            modelled = self._modelled(job, job.asked).prediction.step_time_seconds.median if job.step_s else 0.0
            family = solo_family(job.truth.model, job.workers, job.gpus)
            solo = SoloRecord(name, *origin, solo_s, family=family, predicted_s=modelled)
        pair = None
        if solo_s is not None and job.workers * job.gpus == 1 and len(steps.profiles) == PAIR:
            own, other = steps.profiles
            predicted = pair_slowdown(run.mode, own, other)
            pair = pair_record(steps.sample, origin, run.mode, own, other, steps.step_s * unit_s / solo_s, predicted)
        before, knew = self._calibration, self.knows_solo(job)
        self._calibration = with_steps(before, [MeasuredSteps(pair=pair, solo=solo)])
        if self._calibration.pairs != before.pairs:
            self._colocations.clear()
        if self._calibration.pairs != before.pairs or self.knows_solo(job) != knew:
            self.version += 1

    def knows_solo(self, job: SimJob) -> bool:
        """Whether an earlier run of the same job showed its step time alone."""
        product = find_product(job.truth.product).name
        name = solo_name(job.truth.kind, job.workers, job.gpus)
        return solo_step_s(self._calibration.solo, name, product) is not None

    def with_steps(self, prediction: Prediction, job: SimJob) -> Prediction:
        """Return a job's prediction with what was learned about its step time and its slowdowns beside others."""
        name, products = job_name(job.truth.model, job.truth.kind), []
        for one in prediction.products:
            key = one.product, name
            if key not in self._colocations:
                self._colocations[key] = learned_colocations(self._calibration.pairs, *key)
            products.append(msgspec.structs.replace(one, colocations=self._colocations[key]))
        found = msgspec.structs.replace(prediction, products=products, family=name)
        family = solo_family(job.truth.model, job.workers, job.gpus)
        return with_step_times(found, self._calibration.solo, family, solo_name(job.truth.kind, job.workers, job.gpus))

    def _observe(self, job: SimJob, measured: RunMeasurement, counted_mib: int) -> None:
        if job.asked is None:
            return
        product = find_product(job.truth.product)
        training = job.asked.training
        stack = Stack(product=product.name, precision=training.precision, plain=is_plain(training))
        expected = run_prediction_of(job.asked, job.truth.model, counted_mib, product)
        after = observe(self._calibration, stack, expected, measured, shipped())
        if after is not self._calibration:
            self._calibration = after
            self._predictions.clear()
            self.version += 1


def learner_of(strategy: Strategy) -> Learner:
    """Return a learner that knows nothing."""
    return Learner(is_strict=strategy.strict, steady_s=strategy.steady_s)


def exactly(truth: Truth, like: Prediction | None) -> Prediction:
    """Return the truth as a prediction without error, for the product of another prediction."""
    product = like.products[0].product if like is not None and like.products else ""
    return prediction_of(
        product or truth.product,
        upper_mib=truth.memory_mib,
        util=truth.util,
        sm=truth.sm,
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
"""Factor to the memory bound after a first death where nothing is learned; after two deaths a job runs alone."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Progress of a job."""

    attempt: int = 0
    """Times that it ran out of memory."""
    restarts: int = 0
    """Times that it began again for another reason."""
    moves: int = 0
    """Times that it left a GPU on which a job was slowed beyond its limit."""

    def raised(self) -> "Stage":
        """Return the stage after it ran out of memory."""
        return Stage(self.attempt + 1, self.restarts, self.moves)

    def moved(self) -> "Stage":
        """Return the stage after it left its GPU."""
        return Stage(self.attempt, self.restarts, self.moves + 1)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a run as its probe reports them; times are in units of a step alone."""

    sample: str
    """Name of the run and of its co-tenant."""
    step_s: float
    solo_s: float | None
    """Step time alone; None if it was not measured."""
    profiles: Sequence[TenantProfile]
    """Profiles in the reservations of all tenants of its GPU, its own first."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, as it is measured."""

    job: SimJob
    uid: str
    capacity_mib: int
    """Memory of its GPU."""
    mode: SharingMode
    together: Sequence[TenantActivity]
    """Its measured activity, followed by that of its co-tenants."""
    steps: Steps


class InformationModel:
    """Returns what a strategy may know of jobs: nothing, predictions, or the truth.

    `usable_mib` is the memory of the largest GPU. If `is_decreasing`, the policy starts the job with the largest
    predicted utilization first. `learner` is what earlier simulations taught; by default nothing.
    """

    def __init__(
        self, strategy: Strategy, usable_mib: int, *, is_decreasing: bool = False, learner: Learner | None = None
    ) -> None:
        self._strategy, self._usable_mib = strategy, usable_mib
        self._is_decreasing = is_decreasing
        self._requests: dict[object, PodRequest] = {}
        self._counted: dict[str, int] = {}
        self._learner = (learner or learner_of(strategy)) if strategy.learns else None

    @property
    def is_blind(self) -> bool:
        """Whether reservations contain what a monitor measures, because nothing is predicted."""
        return self._strategy.knowledge is Knowledge.NOTHING

    @property
    def version(self) -> int:
        """Rises when predictions may have changed."""
        return 0 if self._learner is None else self._learner.version

    def observe(self, run: Run, *, age_s: float | None) -> None:
        """Learn from what a run was measured to use, so many seconds after its start; None after its end."""
        if self._learner is not None:
            self._learner.observe(run, self._counted.get(run.job.name, 0), age_s)

    def observe_steps(self, run: Run) -> None:
        """Learn from the steps of a run since its co-tenants last changed."""
        if self._learner is not None and self._strategy.learns_slowdowns:
            self._learner.observe_steps(run)

    def knows_solo(self, job: SimJob) -> bool:
        """Whether an earlier run of the same job showed its step time alone."""
        return self._learner is not None and self._learner.knows_solo(job)

    def observe_out_of_memory(self, run: Run, available_mib: int) -> None:
        """Learn from a run that ran out of memory, of which so much was available."""
        if self._learner is not None:
            self._learner.observe_out_of_memory(run, self._counted.get(run.job.name, 0), available_mib)

    def started(self, job: SimJob, request: PodRequest) -> None:
        """Remember the memory bound that a job was placed with."""
        found = request.demand.prediction
        is_counted = found is not None and found.products[0].memory.trusted
        self._counted[job.name] = found.products[0].memory.upper_mib if found is not None and is_counted else 0

    @property
    def order(self) -> QueueOrder:
        """Order of the queue: by `arrived_s` alone where that is no time of arrival."""
        return QueueOrder.ARRIVAL if self._is_decreasing else self._strategy.order

    def queued(self, job: SimJob, stage: Stage, number: int) -> QueuedJobInfo:
        """Return a job's entry of the queue, with a unique number."""
        arrived_s = job.arrival_s
        if self._is_decreasing:
            predicted = self._prediction(job)
            arrived_s = -(1.0 if predicted is None else predicted.products[0].activity.gpu_util_percent.median)
        pod = f"{job.name}-{stage.attempt}-{stage.restarts}-{stage.moves}"
        return QueuedJobInfo(
            job=JobUid(job.name),
            name=job.name,
            priority=0 if stage == Stage() else 1,
            arrived_s=arrived_s,
            number=number,
            request=self.pod_request(job, stage),
            pods=tuple(PodRef(PodUid(f"{pod}-{n}"), f"{pod}-{n}") for n in range(job.workers)),
            duration_s=self._duration_s(job, stage),
        )

    def _duration_s(self, job: SimJob, _stage: Stage) -> float | None:
        """Return the predicted length of a job alone, in seconds; None if it declares no steps."""
        strategy = self._strategy
        if job.steps is None:
            return None
        if strategy.knowledge is Knowledge.TRUTH:
            return job.work_s
        # The queue predicts durations also where the placement policy uses no predictions.
        prediction = job.prediction if self.is_blind else self._prediction(job)
        return duration_s(job.steps, prediction, lambda _: True)

    def pod_request(self, job: SimJob, stage: Stage) -> PodRequest:
        """Return the request of each worker; jobs for which the same decision would be made share it."""
        key = (self._kind(job), job.gpus, job.workers, stage.attempt, stage.moves, self._is_alone(stage), self.version)
        found = self._requests.get(key)
        if found is None:
            may = self._strategy.settles and not stage.attempt
            demand = self._demand(job, stage)
            found = self._requests[key] = PodRequest(demand, workers=job.workers, may_use_measured_peak=may)
        return found

    def _kind(self, job: SimJob) -> str:
        """Return a key; jobs with one key have one prediction."""
        return job.truth.kind

    def _demand(self, job: SimJob, stage: Stage) -> Demand:
        is_alone = self._is_alone(stage)
        mode = RequestedMode.EXCLUSIVE if is_alone else RequestedMode.AUTO
        prediction = None if is_alone else self._prediction(job)
        if not self._is_learned(job):  # else the next prediction contains the death
            prediction = self._raised(prediction, stage.attempt)
        if not is_alone and self._strategy.mode is SharingMode.TIME_SLICING:
            mode = RequestedMode.TIME_SLICING if self._may_share(prediction, stage) else RequestedMode.AUTO
        return Demand(
            job_uid=JobUid(job.truth.kind),
            job_name=job.name,
            namespace=NAMESPACE,
            gpus=job.gpus,
            mode=mode,
            max_slowdown=self._strategy.max_slowdown,
            tenancy=Tenancy.NAMESPACE,
            product=None,
            min_memory_mib=0,
            min_compute_capability=None,
            memory_limit_mib=self._estimated_mib(job) if self.is_blind and not is_alone else None,
            prediction=prediction,
            moves=stage.moves,
            tries=self._strategy.when_slowed is WhenSlowed.MOVE and stage.moves < MAX_MOVES,
        )

    def _is_alone(self, stage: Stage) -> bool:
        """Whether a job gets whole GPUs."""
        return stage.attempt > (0 if self.is_blind else 1)

    def _estimated_mib(self, _job: SimJob) -> int:
        """Return the memory that a strategy without predictions counts for an incoming job: none."""
        return 0

    def _may_share(self, prediction: Prediction | None, stage: Stage) -> bool:
        """Whether `Auto` lets a job share a device without MPS."""
        memory = None if prediction is None else prediction.products[0].memory
        if self._strategy.knowledge is Knowledge.NOTHING or (memory is not None and memory.trusted):
            return True
        return self._strategy.settles and not stage.attempt and (memory is None or not memory.learned_runs)

    def _is_learned(self, job: SimJob) -> bool:
        return self._learner is not None and job.asked is not None

    def _raised(self, found: Prediction | None, attempt: int) -> Prediction | None:
        """Raise the bound of a job that ran out of memory; beyond every GPU it is unknown, and the job runs alone."""
        if found is None or not attempt:
            return found
        one = found.products[0]
        upper = round(one.memory.upper_mib * RAISED**attempt)
        if upper > self._usable_mib:
            return None
        memory = msgspec.structs.replace(one.memory, upper_mib=upper)
        return msgspec.structs.replace(found, products=[msgspec.structs.replace(one, memory=memory)])

    def _prediction(self, job: SimJob) -> Prediction | None:
        """Return the prediction that decisions use; None if there is none."""
        found = self._uncorrected(job)
        if found is None or self._learner is None or not self._strategy.learns_slowdowns:
            return found
        return self._learner.with_steps(found, job)

    def _uncorrected(self, job: SimJob) -> Prediction | None:
        """Return the prediction without what was learned from steps."""
        if self._strategy.knowledge is Knowledge.NOTHING:
            return None
        if self._strategy.knowledge is Knowledge.TRUTH:
            return exactly(job.truth, job.prediction)
        found = job.prediction
        if self._learner is not None and job.asked is not None:
            found = self._learner.predict(job, job.asked)
        if found is None:
            return None
        one = found.products[0]
        if one.memory.learned_runs > 0 or one.memory.upper_mib > self._usable_mib:
            return found  # measured, or larger than every GPU, which no error may change
        memory, busy, pace = self._errors(job)
        util, sm = self._activity(job, one.activity)
        return prediction_of(
            one.product,
            upper_mib=min(self._usable_mib, round(one.memory.upper_mib * memory)),
            unenforced_mib=min(self._usable_mib, round(one.memory.upper_unenforced_mib * memory)),
            trusted=one.memory.trusted,
            util=min(1.0, busy * util),
            sm=min(1.0, busy * sm),
            dram=min(1.0, busy * one.activity.dram_active_ratio.median),
            step_s=pace * one.step_time_seconds.median,
        )

    def _activity(self, _job: SimJob, predicted: ActivityPrediction) -> tuple[float, float]:
        """Return the utilization and the SM activity alone by which decisions are made, 0..1."""
        return predicted.gpu_util_percent.median / 100, predicted.sm_active_ratio.median

    def _errors(self, job: SimJob) -> tuple[float, float, float]:
        """Return the factors of memory, activity and step time by which a prediction is wrong."""
        return 1.0, 1.0, 1.0

    def profile(self, truth: Truth, promised: TenantProfile, slowdown: float) -> TenantProfile:
        """Return the profile in a running tenant's reservation: measured, if nothing was predicted."""
        if self._strategy.knowledge is not Knowledge.NOTHING:
            return promised
        return msgspec.structs.replace(
            promised,
            memory_mib=truth.memory_mib,
            gpu_util_percent=100 * truth.util,
            sm_active_ratio=truth.sm / slowdown,
        )

    def measured(
        self, truth: Truth, uid: PodUid, gpu: GpuUuid, slowdown: float, *, knows_solo: bool = False
    ) -> Tenant | None:
        """Return the node agent's report of a tenant; None if the strategy does not use it.

        With `knows_solo` its step time alone was measured.
        """
        if self._strategy.knowledge is not Knowledge.PREDICTED or not self._strategy.measure:
            return None
        tenant = Tenant(pod_uid=uid, gpu_uuid=gpu, memory_mib=truth.memory_mib, peak_memory_mib=truth.memory_mib)
        return msgspec.structs.replace(
            tenant,
            gpu_util_percent=100 * truth.util / slowdown,
            sm_active_ratio=truth.sm / slowdown,
            step_time_seconds=slowdown if self._strategy.learns_slowdowns else None,
            solo_step_time_seconds=1.0 if knows_solo and self._strategy.learns_slowdowns else None,
        )
