"""The event loop: arrivals, placements by the extender's own decisions, true slowdowns, out-of-memory, recovery."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.job import RunPolicy
from carpool_core.resources.node import Device, Reservation, Tenant
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_extender.cache.gpu_table import MODES
from carpool_extender.cache.peaks import margins
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.cache.usage import SETTLED_S
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import Placement
from carpool_predictor.models.slowdown import TenantActivity

from carpool_simulator import truth
from carpool_simulator.cluster_model import Board
from carpool_simulator.information import Knower, Run, Stage
from carpool_simulator.power import Power, Spent, power_of
from carpool_simulator.strategy import Knowledge, Piece, Strategy
from carpool_simulator.truth import Failure, SimJob, Truth, Workload
from carpool_simulator.waiting import Entry, Waiting


class Physics(Protocol):
    """What truly happens on a GPU."""

    def slowdowns(self, mode: SharingMode, tenants: list[Truth]) -> list[float]:
        """Return each tenant's true slowdown."""
        ...

    def utilization(self, mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
        """Return the share of time in which the GPU is truly busy, 0..1."""
        ...


@dataclass(slots=True, eq=False)
class Running:
    """A job that has its GPUs."""

    job: SimJob
    stage: Stage
    places: list[tuple[str, Placement]]
    """Node and place of each worker."""
    gpus: list["Gpu"]
    started_s: float
    left_s: float
    """Work that is left, in seconds alone."""
    since_s: float
    slowdown: float = 1.0
    version: int = 0
    """Raised whenever its speed changes; an end that was foreseen under another version is void."""
    ended: bool = False
    measured: dict[GpuUuid, tuple[float, PodUid, Tenant | None]] = field(default_factory=dict)
    """What was measured of it on each GPU last: at which slowdown, of which worker, and what."""

    def uid_on(self, gpu: GpuUuid) -> PodUid:
        """Return the UID of the worker that has a GPU."""
        for worker, (_, place) in enumerate(self.places):
            if gpu in place.gpu_uuids:
                return uid_of(self.job, self.stage, worker)
        raise AssertionError(f"{self.job.name} has no worker on {gpu}")

    @property
    def nodes(self) -> set[str]:
        """Names of its nodes."""
        return {node for node, _ in self.places}

    def as_run(self) -> Run:
        """Return what is measured of it."""
        first = self.gpus[0]
        others = [one for one in first.tenants if one is not self]
        return Run(
            job=self.job,
            uid=str(uid_of(self.job, self.stage, 0)),
            capacity_mib=min(gpu.device.memory_mib for gpu in self.gpus),
            mode=first.mode,
            together=[one.seen() for one in (self, *others)],
        )

    def seen(self) -> TenantActivity:
        """Return what a monitor sees it do."""
        truth = self.job.truth
        return TenantActivity(truth.util / self.slowdown, truth.sm / self.slowdown, truth.dram)

    def had_mib(self) -> int:
        """Return how much memory there was for it where it had least."""
        limits = [place.memory_limit_mib for _, place in self.places if place.memory_limit_mib is not None]
        left = [
            gpu.device.memory_mib
            - gpu.device.reserved_mib
            - sum(one.job.truth.memory_mib for one in gpu.tenants if one is not self)
            for gpu in self.gpus
        ]
        return max(1, min([*limits, *left]))


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU and what it did."""

    device: Device
    node: str
    power: Power
    tenants: list[Running] = field(default_factory=list)
    mode: SharingMode = SharingMode.EXCLUSIVE
    closed_until_s: float = 0.0
    failures: int = 0
    """Failures that it has not recovered from."""
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
        """Return how much memory its tenants can truly have together, where so large a share is lost to several."""
        whole = self.device.memory_mib - self.device.reserved_mib
        return whole * (1.0 - fragmented) if len(self.tenants) > 1 else whole

    def account(self, now_s: float) -> None:
        """Add up what happened since the last change."""
        span = now_s - self.since_s
        self.util_s += span * self.util
        in_use_s = span if self.used > 0 else 0.0
        self.in_use_s += in_use_s
        self.used_s += span * self.used
        self.energy_j += Spent(span, in_use_s, span * self.sm).energy_j(self.power)
        self.since_s = now_s

    def load(self, physics: Physics) -> None:
        """Work out utilization, SM activity and memory in use from the tenants as they truly are now."""
        usable_mib = max(1, self.device.memory_mib - self.device.reserved_mib)
        self.used = min(1.0, sum(max(1, t.job.truth.memory_mib) for t in self.tenants) / usable_mib)
        truths, slowdowns = [t.job.truth for t in self.tenants], [t.slowdown for t in self.tenants]
        self.util = physics.utilization(self.mode, truths, slowdowns) if truths else 0.0
        self.sm = truth.sm_activity(self.mode, truths, slowdowns, self.util)


@dataclass(frozen=True, slots=True)
class Finished:
    """One job's way."""

    job: SimJob
    start_s: float
    """Start of the attempt that succeeded."""
    end_s: float
    gpus: tuple[str, ...]
    ooms: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    finished: list[Finished]
    gpus: list[Gpu]
    ooms: int
    killed: int
    """Times that a job died with its GPU."""
    makespan_s: float
    """When the last job ended."""
    span_s: float
    """How long was watched, over which everything was added up."""
    unplaced: int
    """Jobs that no GPU ever took, or that died of memory until they were given up."""
    utilization: list[tuple[float, float]]
    """Time in seconds and mean utilization of all GPUs from then on."""


def uid_of(job: SimJob, stage: Stage, worker: int) -> PodUid:
    """Return the UID of one worker's pod."""
    profile = "-profile" if stage.profiling else ""
    return PodUid(f"{job.name}-{worker}-{stage.attempt}-{stage.restarts}{profile}")


LOADED_S = 60.0
"""Time until a job has taken its memory, in seconds: it loads, and allocates in its first step."""


class Monitors:
    """Reports tenants as a strategy gets to see them.

    Args:
        knower: What may be seen.
        board: Where it is written.
        gpus: All GPUs.
    """

    def __init__(self, knower: Knower, board: Board, gpus: Iterable[Gpu]) -> None:
        self._knower, self._board = knower, board
        self._on_node: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            self._on_node.setdefault(gpu.node, []).append(gpu)

    def report(self, nodes: Iterable[str], now_s: float) -> None:
        """Write down what is now seen of the tenants of some nodes."""
        for node in nodes:
            seen, tenants = {}, []
            for gpu in self._on_node[node]:
                for running in gpu.tenants:
                    uid, tenant = self._measured(running, gpu.device.uuid)
                    seen[uid] = running
                    if tenant is not None and now_s >= running.started_s + LOADED_S:
                        tenants.append(tenant)
            self._board.report(node, tenants, self._as_seen(node, seen), now_s)

    def _measured(self, running: Running, gpu: GpuUuid) -> tuple[PodUid, Tenant | None]:
        """Return who a tenant of a GPU is and what is measured of it: the same for as long as its speed is."""
        known = running.measured.get(gpu)
        if known is None or known[0] != running.slowdown:
            uid = running.uid_on(gpu)
            tenant = self._knower.measured(running.job.truth, uid, gpu, running.slowdown)
            known = running.measured[gpu] = (running.slowdown, uid, tenant)
        return known[1:]

    def _as_seen(self, node: str, seen: Mapping[PodUid, Running]) -> dict[PodUid, Reservation]:
        """Return the reservations of a node as a monitor without promises has them; none where there are promises."""
        if not self._knower.informers:
            return {}
        return {
            r.pod_uid: msgspec.structs.replace(r, tenant=self._knower.profile(one.job.truth, r.tenant, one.slowdown))
            for r in self._board.reservations(node)
            if (one := seen.get(r.pod_uid)) is not None
        }


SLOTS = 8
DEATHS = RunPolicy().backoff_limit + 1
"""Times that a job dies of memory before it is given up, as the operator gives it up: where GPUs differ, it may get one
that is too small for it again and again."""
WORTH_TELLING = 0.01
"""A curve of utilization gets a new point where it moves by this much, or once a minute."""
CURVE_EVERY_S = 60.0


class Simulation:
    """One run of one strategy on one workload; `run` may be called once."""

    def __init__(self, workload: Workload, strategy: Strategy, physics: Physics, seed: int = 0) -> None:
        self._strategy, self._physics = strategy, physics
        self._now_s = self._left_s = 0.0
        policy = find_policy(strategy.policy)
        devices = [(name, device) for name, many in workload.nodes.items() for device in many]
        self._largest_mib = max(d.memory_mib - d.reserved_mib for _, d in devices)
        self._knower = Knower(strategy, self._largest_mib, seed)
        self._board = board_of(workload, strategy, SchedulerConfig(policy, SLOTS, strategy.conditions), physics)
        self._gpus: dict[GpuUuid, Gpu] = {}
        for name, device in devices:
            power = workload.power or power_of(find_product(device.product))
            self._gpus[device.uuid] = Gpu(device, name, power)
        self._monitors = Monitors(self._knower, self._board, self._gpus.values())
        self._jobs, self._until_s = len(workload.jobs), workload.until_s
        self._fragmented = workload.fragmented
        self._waiting = Waiting(self._knower.order(is_decreasing=policy.decreasing), in_order=strategy.in_order)
        self._freed = 0
        self._closed: set[GpuUuid] = set()
        self._total_util = 0.0
        self._decreasing = policy.decreasing
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._finished: list[Finished] = []
        self._ooms: dict[str, int] = {}
        self._killed = self._hopeless = 0
        self._curve: list[tuple[float, float]] = []
        for job in workload.jobs:
            self._at(job.arrival_s, self._arrival(job))
        for failure in workload.failures:
            self._at(failure.at_s, self._failure(failure))

    def run(self, watch: Callable[[float], None] = lambda _: None) -> Outcome:
        """Run until every job has ended or nothing can happen any more.

        Args:
            watch: Told how many of the jobs have ended, 0..1, at each hundredth.
        """
        told = 0
        while self._events and not self._is_over() and self._events[0][0] <= self._until_s:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[2]()
            self._waiting.place(self._freed, self._start)
            self._draw_curve()
            if 100 * len(self._finished) >= (told + 1) * self._jobs:
                told = 100 * len(self._finished) // self._jobs
                watch(told / 100)
        # Beside a job that no GPU can hold, failures and looks are played on after the last job has left: not counted.
        span_s = self._until_s if self._until_s < math.inf else self._left_s
        for gpu in self._gpus.values():
            gpu.account(span_s)
        return Outcome(
            finished=self._finished,
            gpus=list(self._gpus.values()),
            ooms=sum(self._ooms.values()),
            killed=self._killed,
            makespan_s=max((one.end_s for one in self._finished), default=0.0),
            span_s=span_s,
            unplaced=len(self._waiting) + self._hopeless,
            utilization=[(at_s, mean) for at_s, mean in self._curve if at_s <= span_s],
        )

    def _is_over(self) -> bool:
        return len(self._finished) + self._hopeless >= self._jobs

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._count), what))

    def _arrival(self, job: SimJob) -> Callable[[], None]:
        is_too_wide = job.gpus * job.workers > len(self._gpus)
        is_known_too_large = self._strategy.knowledge is Knowledge.TRUTH and job.truth.memory_mib > self._largest_mib
        if is_too_wide or is_known_too_large:  # who knows less places it, and lets it die as often as the operator does
            return self._count_as_hopeless
        stage = Stage(profiling=self._strategy.profile_s > 0)
        return lambda: self._enqueue(job, stage)

    def _count_as_hopeless(self) -> None:
        """Keep a job out of the queue that nobody could start, or that died too often: it would never end."""
        self._hopeless += 1

    def _enqueue(self, job: SimJob, stage: Stage) -> None:
        urgency = 0 if stage.attempt or stage.restarts else 1
        ticket = self._knower.ticket(job, urgency, next(self._count), is_decreasing=self._decreasing)
        self._waiting.add((urgency, self._knower.alike(job, stage)), Entry(ticket, job, stage))

    def _start(self, entry: Entry) -> bool:
        """Place all workers of a job, or none."""
        job, stage = entry.job, entry.stage
        pod_request = self._knower.pod_request(job, stage)
        taken: list[tuple[str, GpuUuid]] = []
        running = Running(job, stage, [], [], self._now_s, job.work_s, self._now_s)
        for worker in range(job.workers):
            found = self._board.best(pod_request, [*self._closed, *(uuid for _, uuid in taken)])
            if found is None:
                for number, (node, _) in enumerate(running.places):
                    self._board.release(node, uid_of(job, stage, number), self._now_s)
                return False
            node, place = found
            self._board.reserve(node, place, pod_request, uid_of(job, stage, worker), self._now_s)
            running.places.append(found)
            taken += [(node, uuid) for uuid in place.gpu_uuids]
        running.gpus = [self._gpus[uuid] for _, uuid in taken]
        self._begin(running)
        return True

    def _begin(self, running: Running) -> None:
        shut_s = self._strategy.settle_s
        if running.stage.profiling:
            running.left_s = self._strategy.profile_s
        mode = running.places[0][1].mode
        if any(gpu.mode is not mode for gpu in running.gpus):  # those in use are in it already
            running.left_s += self._strategy.mode_change_s
        for gpu in running.gpus:
            gpu.mode = mode
            gpu.tenants.append(running)
            if shut_s:
                gpu.closed_until_s = self._now_s + shut_s
                self._closed.add(gpu.device.uuid)
        if shut_s:
            self._at(self._now_s + shut_s, self._open)
        if self._is_short_of_memory(running):
            self._at(self._now_s + LOADED_S, lambda: self._die(running))
        self._update(running.gpus)
        if self._strategy.measure:
            for age_s in (LOADED_S, SETTLED_S):
                self._at(self._now_s + age_s, partial(self._look, running, age_s))
            if self._strategy.learns:
                steady_s = self._strategy.steady_s
                self._at(self._now_s + steady_s, partial(self._look, running, steady_s))
            if self._strategy.settles:
                for still_s, by in margins(self._strategy.steady_s):
                    self._at(self._now_s + LOADED_S + still_s, partial(self._settle, running, by))
        elif self._knower.informers:
            self._monitors.report(running.nodes, self._now_s)

    def _open(self) -> None:
        """Let GPUs take others again whose monitors have seen the newcomer."""
        self._closed = {uuid for uuid in self._closed if self._gpus[uuid].closed_until_s > self._now_s}
        self._freed += 1

    def _look(self, running: Running, age_s: float) -> None:
        """Let the agents report a tenant that has all its memory, or is old enough for its measure to count."""
        if not running.ended:
            if self._strategy.learns and age_s >= SETTLED_S:
                self._knower.saw(running.as_run(), age_s=age_s)
            self._monitors.report(running.nodes, self._now_s)
            self._freed += 1

    def _settle(self, running: Running, by: float) -> None:
        """Let a tenant count with its peak, which was complete after the first minute and has stood still since."""
        for worker, (node, _) in enumerate(() if running.ended else running.places):
            uid = uid_of(running.job, running.stage, worker)
            self._freed += self._board.use_measured_peak(node, uid, by, self._now_s)

    def _is_short_of_memory(self, newcomer: Running) -> bool:
        """Whether it meets its MPS limit, or the end of the GPU's memory; who allocates last dies."""
        limit = newcomer.places[0][1].memory_limit_mib
        if limit is not None and newcomer.job.truth.memory_mib > limit:
            return True
        return any(
            sum(tenant.job.truth.memory_mib for tenant in gpu.tenants) > gpu.usable_mib(self._fragmented)
            for gpu in newcomer.gpus
        )

    def _die(self, running: Running) -> None:
        if running.ended:
            return
        self._ooms[running.job.name] = self._ooms.get(running.job.name, 0) + 1
        self._knower.starved(running.as_run(), running.had_mib())
        self._leave(running)
        stage = running.stage.raised()
        if stage.attempt < DEATHS:
            self._enqueue(running.job, stage)
        else:
            self._count_as_hopeless()

    def _failure(self, failure: Failure) -> Callable[[], None]:
        def fail() -> None:
            gpu = self._gpus[failure.gpu]
            gpu.failures += 1
            self._board.set_health(failure.gpu, gpu.node, DeviceHealth.UNHEALTHY, self._now_s)
            for running in list(gpu.tenants):
                self._killed += 1
                self._leave(running)
                self._enqueue(running.job, running.stage.restarted())
            self._at(self._now_s + failure.lasts_s, recover)

        def recover() -> None:
            gpu = self._gpus[failure.gpu]
            gpu.failures -= 1
            if not gpu.failures:
                self._board.set_health(failure.gpu, gpu.node, DeviceHealth.HEALTHY, self._now_s)
                self._freed += 1

        return fail

    def _leave(self, running: Running) -> None:
        running.version += 1
        running.ended = True
        self._left_s = self._now_s
        self._freed += 1
        for gpu in running.gpus:
            gpu.tenants.remove(running)
        self._update(running.gpus)
        is_reported = self._strategy.measure or self._knower.informers
        for worker, (node, _) in enumerate(running.places):
            uid = uid_of(running.job, running.stage, worker)
            self._board.release(node, uid, self._now_s, is_shown=not is_reported)
        if is_reported:
            self._monitors.report(running.nodes, self._now_s)

    def _update(self, gpus: list[Gpu]) -> None:
        """Give everybody on these GPUs the speed that is now true."""
        touched = {id(t): t for gpu in gpus for t in gpu.tenants}
        for running in touched.values():
            running.left_s -= (self._now_s - running.since_s) / running.slowdown
            running.since_s = self._now_s
        for running in touched.values():
            running.slowdown = max(self._slowdown_on(gpu, running) for gpu in running.gpus)
            running.version += 1
            self._foresee(running)
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

    def _foresee(self, running: Running) -> None:
        version = running.version
        end_s = self._now_s + max(0.0, running.left_s) * running.slowdown
        self._at(end_s, lambda: self._finish(running) if running.version == version else None)

    def _finish(self, running: Running) -> None:
        running.left_s = 0.0
        if self._strategy.learns:
            self._knower.saw(running.as_run(), age_s=None)
        self._leave(running)
        if running.stage.profiling:
            self._enqueue(running.job, Stage())
            return
        uuids = tuple(str(gpu.device.uuid) for gpu in running.gpus)
        ooms = self._ooms.get(running.job.name, 0)
        self._finished.append(Finished(running.job, running.started_s, self._now_s, uuids, ooms))

    def _draw_curve(self) -> None:
        mean = self._total_util / len(self._gpus)
        if self._curve:
            then_s, last = self._curve[-1]
            if abs(mean - last) < WORTH_TELLING and self._now_s - then_s < CURVE_EVERY_S:
                return
        self._curve.append((self._now_s, mean))


SLACK = 1e-6
"""Room for rounding when a slowdown meets its limit."""


class Foreseeing(Board):
    """Decides with true slowdowns. Whoever asks must say no limit of its own, or the predicted ones count as well.

    Args:
        workload: What is simulated.
        rules: The site's.
        physics: The truth.
        limit: Slowdown that everybody accepts.
    """

    def __init__(self, workload: Workload, rules: SchedulerConfig, physics: Physics, limit: float) -> None:
        super().__init__(workload.nodes, rules)
        self._physics, self._limit = physics, limit
        self._truths: Mapping[str, Truth] = {job.truth.kind: job.truth for job in workload.jobs}

    def best(self, pod_request: PodRequest, shut: Iterable[GpuUuid] = ()) -> tuple[str, Placement] | None:
        """Decide where a worker goes; as `Board.best`, among the GPUs on which the least is truly lost."""
        evaluation, closed = self._evaluation_cache.of(pod_request).evaluation, set(shut)
        newcomer = self._truths[pod_request.demand.job_uid]
        lost: dict[GpuUuid, float] = {}
        for row in np.flatnonzero(evaluation.ok).tolist():
            uuid, mode = evaluation.snapshot.gpus.uuid[row], MODES[int(evaluation.results.mode[row])]
            if uuid in closed or mode is None:
                continue
            there = self._truly_on(evaluation.snapshot.node_names[int(evaluation.snapshot.gpus.node[row])], uuid)
            after = self._physics.slowdowns(mode, [*there, newcomer])
            if max(after) <= self._limit + SLACK:
                lost[uuid] = sum(after) - sum(self._physics.slowdowns(mode, there)) if there else after[0]
        if not lost:
            return None
        most = min(lost.values()) + self._rules.policy.tolerance
        return super().best(pod_request, [uuid for uuid in self._rows if lost.get(uuid, np.inf) > most])

    def _truly_on(self, node: str, uuid: GpuUuid) -> list[Truth]:
        return [self._truths[r.job_uid] for r in self.reservations(node) if uuid in r.gpu_uuids]


def board_of(workload: Workload, strategy: Strategy, rules: SchedulerConfig, physics: Physics) -> Board:
    """Return what a strategy decides on."""
    if Piece.SLOWDOWNS in strategy.told:
        return Foreseeing(workload, rules, physics, strategy.max_slowdown)
    return Board(workload.nodes, rules)
