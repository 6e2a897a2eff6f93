"""The event loop: arrivals, placements by the extender's own decisions, true slowdowns, out-of-memory, recovery."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec
import numpy as np
from carpool_core.clock import rfc3339
from carpool_core.products import find_product
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_extender import ledger
from carpool_extender.cluster import Cluster
from carpool_extender.decide import Place, best_place, reservation
from carpool_extender.measured import SETTLED_S
from carpool_extender.policies import find_policy
from carpool_extender.rules import Rules
from carpool_extender.simulation.knowing import Knower, Stage
from carpool_extender.simulation.strategy import Strategy
from carpool_extender.simulation.workload import SimJob, Truth, Workload
from carpool_extender.view import Bools

SLOTS = 8
OOM_AFTER_S = 60.0
"""Seconds until a job that has too little memory dies: it loads, and allocates in its first step."""
_START = datetime(2026, 1, 1, tzinfo=UTC)


class Physics(Protocol):
    """What truly happens on a GPU."""

    def slowdowns(self, mode: SharingMode, tenants: list[Truth]) -> list[float]:
        """Return each tenant's true slowdown."""
        ...


@dataclass(slots=True)
class Running:
    """A job that has its GPUs."""

    job: SimJob
    stage: Stage
    places: list[tuple[str, Place]]
    """Node and place of each worker."""
    gpus: list["Gpu"]
    started_s: float
    left_s: float
    """Work that is left, in seconds alone."""
    since_s: float
    slowdown: float = 1.0
    version: int = 0
    """Raised whenever its speed changes; an end that was foreseen under another version is void."""

    def uid_on(self, gpu: GpuUuid) -> PodUid:
        """Return the UID of the worker that has a GPU."""
        for worker, (_, place) in enumerate(self.places):
            if gpu in place.gpu_uuids:
                return _uid(self.job, self.stage, worker)
        raise AssertionError(f"{self.job.name} has no worker on {gpu}")


@dataclass(slots=True)
class Gpu:
    """One GPU and what it did."""

    device: Device
    node: str
    tenants: list[Running] = field(default_factory=list)
    mode: SharingMode = SharingMode.EXCLUSIVE
    closed_until_s: float = 0.0
    since_s: float = 0.0
    util: float = 0.0
    sm: float = 0.0
    util_s: float = 0.0
    """Integral of utilization over time, in seconds."""
    energy_j: float = 0.0
    power: tuple[float, float] = (0.0, 0.0)
    """Limit and idle power, in W."""

    def account(self, now_s: float) -> None:
        """Add up what happened since the last change."""
        span = now_s - self.since_s
        limit, idle = self.power
        self.util_s += span * self.util
        self.energy_j += span * (idle + (limit - idle) * self.sm)
        self.since_s = now_s


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
    makespan_s: float
    unplaced: int
    """Jobs that no GPU ever took."""
    utilization: list[tuple[float, float]]
    """Time in seconds and mean utilization of all GPUs from then on."""


class Simulation:
    """One run of one strategy on one workload; `run` may be called once."""

    def __init__(self, workload: Workload, strategy: Strategy, physics: Physics, seed: int = 0) -> None:
        self._strategy, self._physics = strategy, physics
        self._now_s = 0.0
        policy = find_policy(strategy.policy)
        self._rules = Rules(policy, SLOTS, strategy.conditions)
        largest = max(d.memory_mib - d.reserved_mib for devices in workload.nodes.values() for d in devices)
        self._knower = Knower(strategy, largest, seed)
        self._cluster = Cluster(SLOTS)
        self._gpus: dict[GpuUuid, Gpu] = {}
        self._specs: dict[str, GpuNodeSpec] = {}
        self._devices = {name: list(devices) for name, devices in workload.nodes.items()}
        for name, devices in self._devices.items():
            self._specs[name] = GpuNodeSpec()
            for device in devices:
                product = find_product(device.product)
                powers = (workload.power_limit_w or product.power_limit_w, product.idle_power_w)
                self._gpus[device.uuid] = Gpu(device, name, power=powers)
            self._show(name)
        self._rows = {uuid: row for row, uuid in enumerate(self._cluster.view().columns.uuid) if uuid in self._gpus}
        self._queue: list[tuple[int, float, int, SimJob, Stage]] = []
        self._total_util = 0.0
        self._decreasing = policy.decreasing
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._finished: list[Finished] = []
        self._ooms: dict[str, int] = {}
        self._curve: list[tuple[float, float]] = []
        for job in workload.jobs:
            self._at(job.arrival_s, self._arrival(job))

    def run(self) -> Outcome:
        """Run until every job has ended or nothing can happen any more."""
        while self._events:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[2]()
            self._place_waiting()
        for gpu in self._gpus.values():
            gpu.account(self._now_s)
        end_s = max((one.end_s for one in self._finished), default=0.0)
        return Outcome(
            finished=self._finished,
            gpus=list(self._gpus.values()),
            ooms=sum(self._ooms.values()),
            makespan_s=end_s,
            unplaced=len(self._queue),
            utilization=self._curve,
        )

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._count), what))

    def _arrival(self, job: SimJob) -> Callable[[], None]:
        stage = Stage(profiling=self._strategy.profile_s > 0)
        return lambda: self._enqueue(job, stage)

    def _enqueue(self, job: SimJob, stage: Stage) -> None:
        urgency = 0 if stage.attempt else 1
        size = -self._knower.size(job) if self._decreasing else job.arrival_s
        self._queue.append((urgency, size, next(self._count), job, stage))
        self._queue.sort(key=lambda entry: entry[:3])

    def _place_waiting(self) -> None:
        refused: set[object] = set()
        left = []
        blocked = False
        for entry in self._queue:
            job, stage = entry[3], entry[4]
            alike = self._knower.alike(job, stage)
            if blocked or alike in refused or not self._start(job, stage):
                refused.add(alike)
                left.append(entry)
                blocked = blocked or self._strategy.in_order
        self._queue = left

    def _start(self, job: SimJob, stage: Stage) -> bool:
        """Place all workers of a job, or none."""
        applicant = self._knower.applicant(job, stage)
        before = dict(self._specs) if job.workers > 1 else {}
        places: list[tuple[str, Place]] = []
        for worker in range(job.workers):
            found = best_place(self._cluster.view(), applicant, self._rules, self._open_rows(places))
            if found is None:
                self._roll_back(before, places)
                return False
            node, place = found
            moment = _START + timedelta(seconds=self._now_s)
            uid = _uid(job, stage, worker)
            wanted = reservation(place, applicant, uid, str(uid), now=moment, deadline=moment)
            self._reserve(node, wanted)
            places.append((node, place))
        self._begin(job, stage, places)
        return True

    def _open_rows(self, taken: list[tuple[str, Place]]) -> Bools | None:
        """GPUs that may be taken: not those whose monitor waits, nor those that other workers of the job have."""
        if not (self._strategy.settle_s or taken):
            return None
        rows = np.ones(len(self._cluster.view().columns.alive), np.bool_)
        own = {uuid for _, place in taken for uuid in place.gpu_uuids}
        shut = [u for u, gpu in self._gpus.items() if gpu.closed_until_s > self._now_s or u in own]
        rows[[self._rows[uuid] for uuid in shut]] = False
        return rows

    def _reserve(self, node: str, wanted: Reservation) -> None:
        """Write into the ledger, which refuses what would break a promise."""
        spec = ledger.reserve(self._specs[node], wanted, ledger.capacity_of(self._object(node), SLOTS))
        if isinstance(spec, ledger.Rejected):
            raise AssertionError(f"the ledger refused what was decided on {node}: {spec.reason}")
        self._specs[node] = spec
        self._show(node)

    def _roll_back(self, before: dict[str, GpuNodeSpec], places: list[tuple[str, Place]]) -> None:
        for node, _ in places:
            self._specs[node] = before[node]
            self._show(node)

    def _object(self, node: str) -> GpuNode:
        status = GpuNodeStatus(
            devices=self._devices[node], tenants=self._tenants(node), heartbeat_time=self._moment(self._now_s)
        )
        return GpuNode(metadata=ObjectMeta(name=node, uid=node), spec=self._specs[node], status=status)

    def _show(self, node: str) -> None:
        self._cluster.apply(self._object(node))

    def _tenants(self, node: str) -> list[Tenant]:
        found = []
        for device in self._devices[node]:
            for running in self._gpus[device.uuid].tenants:
                uid = running.uid_on(device.uuid)
                tenant = self._knower.measured(running.job.truth, uid, device.uuid, running.slowdown)
                if tenant is not None:
                    found.append(tenant)
        return found

    def _moment(self, seconds: float) -> str:
        return rfc3339(_START + timedelta(seconds=seconds))

    def _begin(self, job: SimJob, stage: Stage, places: list[tuple[str, Place]]) -> None:
        gpus = [self._gpus[uuid] for _, place in places for uuid in place.gpu_uuids]
        work_s = self._strategy.profile_s if stage.profiling else job.work_s
        running = Running(job, stage, places, gpus, self._now_s, work_s, self._now_s)
        shut_s = self._strategy.settle_s
        for gpu in gpus:
            gpu.mode = places[0][1].mode
            gpu.tenants.append(running)
            if shut_s:
                gpu.closed_until_s = self._now_s + shut_s
        if shut_s:
            self._at(self._now_s + shut_s, lambda: None)
        if self._is_short_of_memory(running):
            self._at(self._now_s + OOM_AFTER_S, lambda: self._die(running))
        self._update(gpus)
        if self._strategy.measure:
            self._at(self._now_s + SETTLED_S, lambda: self._look(running))

    def _look(self, running: Running) -> None:
        """Let the agents report a tenant that is old enough for its measure to count."""
        for node in {node for node, _ in running.places}:
            self._refresh(node)

    def _is_short_of_memory(self, newcomer: Running) -> bool:
        """Whether it meets its MPS limit, or the end of the GPU's memory; who allocates last dies."""
        limit = newcomer.places[0][1].memory_limit_mib
        if limit is not None and newcomer.job.truth.memory_mib > limit:
            return True
        return any(
            sum(tenant.job.truth.memory_mib for tenant in gpu.tenants) > gpu.device.memory_mib - gpu.device.reserved_mib
            for gpu in newcomer.gpus
        )

    def _die(self, running: Running) -> None:
        if running.left_s <= 0 or running not in running.gpus[0].tenants:
            return
        self._ooms[running.job.name] = self._ooms.get(running.job.name, 0) + 1
        self._leave(running)
        self._enqueue(running.job, Stage(running.stage.attempt + 1))

    def _leave(self, running: Running) -> None:
        running.version += 1
        for worker, (node, _) in enumerate(running.places):
            uid = _uid(running.job, running.stage, worker)
            self._specs[node] = ledger.release(self._specs[node], uid)
        for gpu in running.gpus:
            gpu.tenants.remove(running)
        self._update(running.gpus)
        for node in {node for node, _ in running.places}:
            self._refresh(node)

    def _refresh(self, node: str) -> None:
        """Write down what is now seen of a node's tenants."""
        spec = self._specs[node]
        seen = {}
        for device in self._devices[node]:
            for running in self._gpus[device.uuid].tenants:
                seen[running.uid_on(device.uuid)] = running
        held = [
            msgspec.structs.replace(
                r, tenant=self._knower.profile(seen[r.pod_uid].job.truth, r.tenant, seen[r.pod_uid].slowdown)
            )
            if r.pod_uid in seen
            else r
            for r in spec.reservations
        ]
        self._specs[node] = msgspec.structs.replace(spec, reservations=held)
        self._show(node)

    def _update(self, gpus: list[Gpu]) -> None:
        """Give everybody on these GPUs the speed that is now true."""
        touched = {id(t): t for gpu in gpus for t in gpu.tenants}
        for running in touched.values():
            running.left_s -= (self._now_s - running.since_s) / running.slowdown
            running.since_s = self._now_s
        for gpu in gpus:
            gpu.account(self._now_s)
        for running in touched.values():
            running.slowdown = max(self._slowdown_on(gpu, running) for gpu in running.gpus)
            running.version += 1
            self._foresee(running)
        others = {id(g): g for t in touched.values() for g in t.gpus} | {id(g): g for g in gpus}
        for gpu in others.values():
            self._measure(gpu)
        if self._curve and self._curve[-1][0] == self._now_s:
            self._curve.pop()
        self._curve.append((self._now_s, self._total_util / len(self._gpus)))

    def _slowdown_on(self, gpu: Gpu, running: Running) -> float:
        found = self._physics.slowdowns(gpu.mode, [t.job.truth for t in gpu.tenants])
        return found[gpu.tenants.index(running)]

    def _foresee(self, running: Running) -> None:
        version = running.version
        end_s = self._now_s + max(0.0, running.left_s) * running.slowdown
        self._at(end_s, lambda: self._finish(running) if running.version == version else None)

    def _finish(self, running: Running) -> None:
        running.left_s = 0.0
        self._leave(running)
        if running.stage.profiling:
            self._enqueue(running.job, Stage())
            return
        uuids = tuple(str(gpu.device.uuid) for gpu in running.gpus)
        ooms = self._ooms.get(running.job.name, 0)
        self._finished.append(Finished(running.job, running.started_s, self._now_s, uuids, ooms))

    def _measure(self, gpu: Gpu) -> None:
        gpu.account(self._now_s)
        self._total_util -= gpu.util
        gpu.util = min(1.0, sum(t.job.truth.util / t.slowdown for t in gpu.tenants))
        self._total_util += gpu.util
        gpu.sm = min(1.0, sum(t.job.truth.sm / t.slowdown for t in gpu.tenants))


def _uid(job: SimJob, stage: Stage, worker: int) -> PodUid:
    return PodUid(f"{job.name}-{worker}-{stage.attempt}{'-profile' if stage.profiling else ''}")
