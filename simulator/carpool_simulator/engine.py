"""The event loop of a simulation: arrivals, the scheduler's queue, true slowdowns, out of memory, recovery."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from carpool_core.durations import measured_step_time, remaining_s
from carpool_core.moves import MAX_MOVES, SETTLED_S, Member, must_move
from carpool_core.products import find_product
from carpool_core.resources.job import RunPolicy
from carpool_core.resources.node import Device, Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode, WhenSlowed
from carpool_extender.cache.cluster import GpuBackoff
from carpool_extender.cache.peaks import margins
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import FilterRunner, filter_rows
from carpool_extender.queue.scheduling_queue import Admitted, Claim, QueuedJobInfo, SchedulingQueue
from carpool_predictor.models.slowdown import TenantActivity

from carpool_simulator import truth
from carpool_simulator.cluster_model import ClusterModel, Physics, moment
from carpool_simulator.information import InformationModel, Run, Stage, Steps
from carpool_simulator.power import Power, Spent, power_of
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Workload


@dataclass(slots=True, eq=False)
class Running:
    """A job that has its GPUs."""

    job: SimJob
    stage: Stage
    claims: tuple[Claim, ...]
    """Node and GPUs of each worker."""
    gpus: list["Gpu"]
    started_s: float
    left_s: float
    """Work that is left, in seconds alone."""
    since_s: float
    predicted_end_s: float
    slowdown: float = 1.0
    version: int = 0
    """Raised when its speed changes; an end that was scheduled under another version is void."""
    ended: bool = False
    alone_s: float = 0.0
    """Time for which it had its GPUs alone, in seconds."""
    is_alone: bool = False

    @property
    def knows_solo(self) -> bool:
        """Whether its step time alone was measured."""
        return self.alone_s >= SETTLED_S

    def advance(self, now_s: float) -> None:
        """Count its work until now at its present speed."""
        span_s = now_s - self.since_s
        self.left_s -= span_s / self.slowdown
        self.alone_s += span_s if self.is_alone else 0.0
        self.since_s = now_s

    def expect_end(self, now_s: float) -> None:
        """Let the measured step time replace the predicted end after twenty steps."""
        steps = self.job.steps
        if steps is None:
            return
        left = math.ceil(steps * self.left_s / self.job.work_s)
        step_s = self.job.work_s / steps * self.slowdown
        if (found := measured_step_time(None, steps - left, step_s, 0.0)) is not None:
            self.predicted_end_s = now_s + remaining_s(found, left).upper

    def uid_on(self, gpu: GpuUuid) -> PodUid:
        """Return the UID of the worker that has a GPU."""
        return self.reserved_on(gpu).pod_uid

    def reserved_on(self, gpu: GpuUuid) -> Reservation:
        """Return the reservation of the worker that has a GPU."""
        return next(held for _, held in self.claims if gpu in held.gpu_uuids)

    @property
    def nodes(self) -> set[str]:
        """Names of its nodes."""
        return {node for node, _ in self.claims}

    def as_member(self, now_s: float, *, knows_solo: bool) -> Member:
        """Return what is known of its slowdown; with `knows_solo` an earlier run showed its step time alone."""
        limit = self.claims[0].reservation.tenant.max_slowdown
        slowdown = self.slowdown if knows_solo or self.knows_solo else None
        return Member(slowdown, limit, now_s - self.started_s, self.job.name)

    def checkpoint_age_s(self, now_s: float) -> float | None:
        """Return the time since its last checkpoint, in seconds; None before the first."""
        written, age_s = divmod(now_s - self.started_s, CHECKPOINT_S)
        return age_s if written else None

    def as_run(self) -> Run:
        """Return what is measured of it."""
        first = self.gpus[0]
        gpu = first.device.uuid
        others = [one for one in first.tenants if one is not self]
        return Run(
            job=self.job,
            uid=self.claims[0].reservation.pod_uid,
            capacity_mib=min(gpu.device.memory_mib for gpu in self.gpus),
            mode=first.mode,
            together=[one.activity() for one in (self, *others)],
            steps=Steps(
                sample=" ".join(one.uid_on(gpu) for one in (self, *others)),
                step_s=self.slowdown,
                solo_s=1.0 if self.knows_solo else None,
                profiles=[one.reserved_on(gpu).tenant for one in (self, *others)],
            ),
        )

    def activity(self) -> TenantActivity:
        """Return the activity that a monitor measures."""
        truth = self.job.truth
        return TenantActivity(truth.util / self.slowdown, truth.sm / self.slowdown, truth.dram)

    def available_mib(self) -> int:
        """Return how much memory it could have on the GPU where it had least."""
        limits = [held.memory_limit_mib for _, held in self.claims if held.memory_limit_mib is not None]
        left = [
            gpu.device.memory_mib
            - gpu.device.reserved_mib
            - sum(one.job.truth.memory_mib for one in gpu.tenants if one is not self)
            for gpu in self.gpus
        ]
        return max(1, min([*limits, *left]))


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU and its use so far."""

    device: Device
    node: str
    power: Power
    tenants: list[Running] = field(default_factory=list)
    mode: SharingMode = SharingMode.EXCLUSIVE
    since_s: float = 0.0
    util: float = 0.0
    sm: float = 0.0
    util_s: float = 0.0
    """Integral of utilization over time, in seconds."""
    energy_j: float = 0.0
    in_use_s: float = 0.0
    """Time with tenants, in seconds."""
    used: float = 0.0
    """Share of its memory that tenants take at present."""
    used_s: float = 0.0
    """Integral of that over time, in seconds."""

    def usable_mib(self, fragmented: float) -> float:
        """Return how much memory its tenants can have together, if several tenants lose this share of it."""
        whole = self.device.memory_mib - self.device.reserved_mib
        return whole * (1.0 - fragmented) if len(self.tenants) > 1 else whole

    def account(self, now_s: float) -> None:
        """Add the time since the last change to the integrals."""
        span = now_s - self.since_s
        self.util_s += span * self.util
        in_use_s = span if self.used > 0 else 0.0
        self.in_use_s += in_use_s
        self.used_s += span * self.used
        self.energy_j += Spent(span, in_use_s, span * self.sm).energy_j(self.power)
        self.since_s = now_s

    def load(self, physics: Physics) -> None:
        """Compute utilization, SM activity and memory in use from the present tenants."""
        usable_mib = max(1, self.device.memory_mib - self.device.reserved_mib)
        self.used = min(1.0, sum(max(1, t.job.truth.memory_mib) for t in self.tenants) / usable_mib)
        truths, slowdowns = [t.job.truth for t in self.tenants], [t.slowdown for t in self.tenants]
        self.util = physics.utilization(self.mode, truths, slowdowns) if truths else 0.0
        self.sm = truth.sm_activity(self.mode, truths, slowdowns, self.util)


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that succeeded."""

    job: SimJob
    start_s: float
    """Start of the attempt that succeeded."""
    end_s: float
    gpus: tuple[str, ...]
    ooms: int
    ran_s: float
    """Time for which it did the work that counts: without attempts that were lost."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a moved job, in seconds."""

    left_s: float
    """Work that is left, alone."""
    ran_s: float = 0.0
    """Time in which the rest was done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run."""

    finished: list[Finished]
    gpus: list[Gpu]
    ooms: int
    makespan_s: float
    """End of the last job."""
    span_s: float
    """Length of the run, over which the integrals are."""
    unplaced: int
    """Jobs that no GPU ever took, or that ran out of memory until they were given up."""
    utilization: list[tuple[float, float]]
    """Time in seconds and mean utilization of all GPUs from then on."""


CHECKPOINT_S = 600.0
"""Time between two checkpoints of a job, in seconds; assumed."""
RESTART_S = 60.0
"""Time that a moved job needs to begin again, in seconds; assumed."""
LOADED_S = 60.0
"""Time until a job has taken its memory, in seconds: it loads, and allocates in its first step."""


class Monitors:
    """Reports tenants to the cluster model, as far as a strategy may see them."""

    def __init__(self, information: InformationModel, model: ClusterModel, gpus: Iterable[Gpu]) -> None:
        self._information, self._model = information, model
        self._on_node: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            self._on_node.setdefault(gpu.node, []).append(gpu)

    def report(self, nodes: Iterable[str], now_s: float) -> None:
        """Report the tenants of some nodes as they are now."""
        for node in nodes:
            running_of, tenants = {}, []
            for gpu in self._on_node[node]:
                for running in gpu.tenants:
                    uid = running.uid_on(gpu.device.uuid)
                    running_of[uid] = running
                    tenant = self._information.measured(
                        running.job.truth, uid, gpu.device.uuid, running.slowdown, knows_solo=running.knows_solo
                    )
                    if tenant is not None and now_s >= running.started_s + LOADED_S:
                        settled = now_s >= running.started_s + SETTLED_S
                        tenants.append(msgspec.structs.replace(tenant, settled=settled))
            self._model.report(node, tenants, self._measured_reservations(node, running_of))

    def _measured_reservations(self, node: str, running_of: Mapping[PodUid, Running]) -> dict[PodUid, Reservation]:
        """Return the reservations of a node with measured profiles, for strategies without predictions; else none."""
        if not self._information.is_blind:
            return {}
        return {
            r.pod_uid: msgspec.structs.replace(
                r, tenant=self._information.profile(one.job.truth, r.tenant, one.slowdown)
            )
            for r in self._model.reservations(node)
            if (one := running_of.get(r.pod_uid)) is not None
        }


SLOTS = 8
DEATHS = RunPolicy().backoff_limit + 1
"""Times that a job runs out of memory before it is given up, as by the operator."""
CURVE_STEP = 0.01
"""The curve of utilization gets a new point when it moves by this much, or once a minute."""
CURVE_EVERY_S = 60.0


class Simulation:
    """One run of one strategy on one workload; `run` may be called once.

    `information` makes the information model. `closed` are GPUs that take no job at present.
    """

    def __init__(
        self,
        workload: Workload,
        strategy: Strategy,
        physics: Physics,
        information: Callable[..., InformationModel] = InformationModel,
        filter_runner: FilterRunner = filter_rows,
        closed: GpuBackoff | None = None,
    ) -> None:
        self._strategy, self._physics = strategy, physics
        self._now_s = self._left_s = 0.0
        policy = find_policy(strategy.policy)
        devices = [(name, device) for name, many in workload.nodes.items() for device in many]
        self._largest_mib = max(d.memory_mib - d.reserved_mib for _, d in devices)
        self._information = information(strategy, self._largest_mib, is_decreasing=policy.decreasing)
        config = SchedulerConfig(policy, SLOTS, strategy.conditions)
        self._model = ClusterModel(workload.nodes, config, filter_runner, closed)
        self._queue = SchedulingQueue(
            self._model.cluster, self._model.evaluations, order=self._information.order, backfill=not strategy.in_order
        )
        self._gpus: dict[GpuUuid, Gpu] = {}
        for name, device in devices:
            power = workload.power or power_of(find_product(device.product))
            self._gpus[device.uuid] = Gpu(device, name, power)
        self._monitors = Monitors(self._information, self._model, self._gpus.values())
        self._jobs, self._until_s = len(workload.jobs), workload.until_s
        self._fragmented = workload.fragmented
        self._pending: dict[str, tuple[SimJob, Stage, QueuedJobInfo]] = {}
        self._running: dict[PodUid, Running] = {}
        self._learned = 0
        """Version of the predictions of pending jobs."""
        self._total_util = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._finished: list[Finished] = []
        self._ooms: dict[str, int] = {}
        self._hopeless = 0
        self._progress: dict[str, Progress] = {}
        """Progress of moved jobs, by name."""
        self._curve: list[tuple[float, float]] = []
        for job in workload.jobs:
            self._at(job.arrival_s, self._arrival(job))

    def run(self, watch: Callable[[float], None] = lambda _: None) -> Outcome:
        """Run until every job has ended or nothing can happen any more.

        `watch` receives the share of the jobs that have ended, 0..1, at each hundredth.
        """
        shown = 0
        while self._events and not self._is_over() and self._events[0][0] <= self._until_s:
            self._now_s = self._events[0][0]
            moment(self._now_s)  # refuses times after the calendar's end
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[2]()
            self._update_predictions()
            for one in self._queue.admit(self._end_of, self._now_s):
                self._begin(one)
            self._draw_curve()
            if 100 * len(self._finished) >= (shown + 1) * self._jobs:
                shown = 100 * len(self._finished) // self._jobs
                watch(shown / 100)
        span_s = self._until_s if self._until_s < math.inf else self._left_s
        for gpu in self._gpus.values():
            gpu.account(span_s)
        return Outcome(
            finished=self._finished,
            gpus=list(self._gpus.values()),
            ooms=sum(self._ooms.values()),
            makespan_s=max((one.end_s for one in self._finished), default=0.0),
            span_s=span_s,
            unplaced=len(self._queue) + self._hopeless,
            utilization=[(at_s, mean) for at_s, mean in self._curve if at_s <= span_s],
        )

    def _is_over(self) -> bool:
        return len(self._finished) + self._hopeless >= self._jobs

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._count), what))

    def _arrival(self, job: SimJob) -> Callable[[], None]:
        is_too_wide = job.gpus * job.workers > len(self._gpus)
        is_too_large = self._strategy.knowledge is Knowledge.TRUTH and job.truth.memory_mib > self._largest_mib
        if is_too_wide or is_too_large:  # without the truth it is placed, and runs out of memory
            return self._give_up
        return lambda: self._enqueue(job, Stage())

    def _give_up(self) -> None:
        """Count a job that can never start, or that ran out of memory too often, and keep it out of the queue."""
        self._hopeless += 1

    def _enqueue(self, job: SimJob, stage: Stage) -> None:
        info = self._information.queued(job, stage, next(self._count))
        self._pending[info.name] = (job, stage, info)
        self._queue.add(info)

    def _update_predictions(self) -> None:
        """Replace the requests of pending jobs after something was learned."""
        if self._learned == self._information.version:
            return
        self._learned = self._information.version
        for name, (job, stage, info) in self._pending.items():
            newer = self._information.queued(job, stage, info.number)
            if newer.request is not info.request:
                self._pending[name] = (job, stage, newer)
                self._queue.add(newer)

    def _end_of(self, held: Reservation) -> float:
        return self._running[held.pod_uid].predicted_end_s

    def _begin(self, one: Admitted) -> None:
        """Start an admitted job."""
        job, stage, info = self._pending.pop(one.info.name)
        self._information.started(job, info.request)
        gpus, mode = (
            [self._gpus[uuid] for _, held in one.claims for uuid in held.gpu_uuids],
            one.claims[0].reservation.mode,
        )
        work_s = self._work_s(job, stage, mode, gpus)
        running = Running(job, stage, one.claims, gpus, self._now_s, work_s, self._now_s, one.end_s)
        for claim in one.claims:
            self._running[claim.reservation.pod_uid] = running
            self._model.reserve(claim)
        for gpu in gpus:
            gpu.mode = mode
            gpu.tenants.append(running)
        if self._is_short_of_memory(running):
            self._at(self._now_s + LOADED_S, lambda: self._die(running))
        self._update(running.gpus)
        if self._strategy.measure:
            for age_s in (LOADED_S, SETTLED_S):
                self._at(self._now_s + age_s, partial(self._measure, running, age_s))
            if self._strategy.learns:
                steady_s = self._strategy.steady_s
                self._at(self._now_s + steady_s, partial(self._measure, running, steady_s))
            if self._strategy.settles:
                for stable_s, by in margins(self._strategy.steady_s):
                    self._at(self._now_s + LOADED_S + stable_s, partial(self._use_measured_peak, running, by))
        elif self._information.is_blind:
            self._monitors.report(running.nodes, self._now_s)

    def _work_s(self, job: SimJob, _stage: Stage, _mode: SharingMode, _gpus: Sequence[Gpu]) -> float:
        """Return the work of a run that begins on some GPUs, in seconds alone."""
        moved = self._progress.get(job.name)
        return job.work_s if moved is None else moved.left_s + RESTART_S

    def _measure(self, running: Running, age_s: float) -> None:
        """Let the agents report a tenant that has all its memory, or is old enough for its measure to count."""
        if not running.ended:
            if self._strategy.learns and age_s >= SETTLED_S:
                self._information.observe(running.as_run(), age_s=age_s)
            self._monitors.report(running.nodes, self._now_s)

    def _measure_steps(self, running: Running, version: int) -> None:
        """Use the steps of a run whose co-tenants have not changed since a version."""
        if running.version == version and not running.ended:
            running.advance(self._now_s)
            if self._strategy.measure:
                running.expect_end(self._now_s)
            if self._strategy.learns_slowdowns and running.job.asked is not None:
                self._information.observe_steps(running.as_run())
                self._monitors.report(running.nodes, self._now_s)
            self._move_from(running, version)

    def _move_from(self, slowed: Running, version: int) -> None:
        """Let jobs leave the GPUs of a job that is slowed beyond its limit, at once or after its next checkpoint."""
        when = self._strategy.when_slowed
        if when is WhenSlowed.STAY or slowed.ended or slowed.version != version:
            return
        known = self._information.knows_solo
        members = {
            one: one.as_member(self._now_s, knows_solo=known(one.job)) for gpu in slowed.gpus for one in gpu.tenants
        }
        for one, own in members.items():
            others = [member for other, member in members.items() if other is not one]
            if one.stage.moves < MAX_MOVES and must_move(when, own, others, one.checkpoint_age_s(self._now_s)):
                self._move(one)
                return
        if members[slowed].is_slowed:
            to_next_s = CHECKPOINT_S - (self._now_s - slowed.started_s) % CHECKPOINT_S
            self._at(self._now_s + to_next_s + 1.0, partial(self._move_from, slowed, version))

    def _move(self, running: Running) -> None:
        """End a job's attempt; its work since the last checkpoint is lost."""
        running.advance(self._now_s)
        progress = self._progress.get(running.job.name, Progress(running.job.work_s))
        lost_s = running.checkpoint_age_s(self._now_s)
        if lost_s is not None:
            ran_s = self._now_s - lost_s - running.started_s
            progress = Progress(running.left_s + lost_s / running.slowdown, progress.ran_s + ran_s)
        self._progress[running.job.name] = progress
        self._leave(running)
        self._enqueue(running.job, running.stage.moved())

    def _use_measured_peak(self, running: Running, by: float) -> None:
        """Count a tenant with its measured peak, complete after the first minute and stable since."""
        for node, held in () if running.ended else running.claims:
            self._model.use_measured_peak(node, held.pod_uid, by)

    def _is_short_of_memory(self, newcomer: Running) -> bool:
        """Whether it exceeds its MPS limit or the GPU's memory; the job that allocates last dies.

        Strategies without predictions set no limit: their estimates count for the choice of a GPU only.
        """
        limit = newcomer.claims[0].reservation.memory_limit_mib
        if not self._information.is_blind and limit is not None and newcomer.job.truth.memory_mib > limit:
            return True
        return any(
            sum(tenant.job.truth.memory_mib for tenant in gpu.tenants) > gpu.usable_mib(self._fragmented)
            for gpu in newcomer.gpus
        )

    def _die(self, running: Running) -> None:
        if running.ended:
            return
        self._ooms[running.job.name] = self._ooms.get(running.job.name, 0) + 1
        self._progress.pop(running.job.name, None)
        self._information.observe_out_of_memory(running.as_run(), running.available_mib())
        self._leave(running)
        stage = running.stage.raised()
        if stage.attempt < DEATHS:
            self._enqueue(running.job, stage)
        else:
            self._give_up()

    def _leave(self, running: Running) -> None:
        running.version += 1
        running.ended = True
        self._left_s = self._now_s
        for gpu in running.gpus:
            gpu.tenants.remove(running)
        self._update(running.gpus)
        is_reported = self._strategy.measure or self._information.is_blind
        for node, held in running.claims:
            del self._running[held.pod_uid]
            self._model.release(node, held.pod_uid, is_shown=not is_reported)
        if is_reported:
            self._monitors.report(running.nodes, self._now_s)

    def _update(self, gpus: list[Gpu]) -> None:
        """Update the speed of all tenants of some GPUs, and the use of every GPU that they have."""
        touched = {id(t): t for gpu in gpus for t in gpu.tenants}
        for running in touched.values():
            running.advance(self._now_s)
        for running in touched.values():
            running.slowdown = max(self._slowdown_on(gpu, running) for gpu in running.gpus)
            running.is_alone = all(len(gpu.tenants) == 1 for gpu in running.gpus)
            running.version += 1
            self._schedule_end(running)
            ends_by_steps = self._strategy.measure and running.job.steps is not None
            if ends_by_steps or (self._strategy.learns_slowdowns and running.job.asked is not None):
                self._at(self._now_s + SETTLED_S, partial(self._measure_steps, running, running.version))
        for gpu in ({id(g): g for t in touched.values() for g in t.gpus} | {id(g): g for g in gpus}).values():
            gpu.account(self._now_s)
            self._total_util -= gpu.util
            gpu.load(self._physics)
            self._total_util += gpu.util

    def _slowdown_on(self, gpu: Gpu, running: Running) -> float:
        if len(gpu.tenants) == 1:
            return 1.0
        found = self._physics.slowdowns(gpu.mode, [t.job.truth for t in gpu.tenants])
        return found[gpu.tenants.index(running)]

    def _schedule_end(self, running: Running) -> None:
        version = running.version
        end_s = self._now_s + max(0.0, running.left_s) * running.slowdown
        self._at(end_s, lambda: self._finish(running) if running.version == version else None)

    def _finish(self, running: Running) -> None:
        running.left_s = 0.0
        if self._strategy.learns:
            self._information.observe(running.as_run(), age_s=None)
        self._leave(running)
        uuids = tuple(str(gpu.device.uuid) for gpu in running.gpus)
        ooms = self._ooms.get(running.job.name, 0)
        before = self._progress.get(running.job.name)
        ran_s = self._now_s - running.started_s + (0.0 if before is None else before.ran_s)
        self._finished.append(Finished(running.job, running.started_s, self._now_s, uuids, ooms, ran_s))

    def _draw_curve(self) -> None:
        mean = self._total_util / len(self._gpus)
        if self._curve:
            then_s, last = self._curve[-1]
            if abs(mean - last) < CURVE_STEP and self._now_s - then_s < CURVE_EVERY_S:
                return
        self._curve.append((self._now_s, mean))
