"""What a simulation keeps of jobs and GPUs while it runs, and what comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from carpool_core.resources.node import Device, Tenant
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_predictor.cost_models.solo import Activity

from carpool_extender.framework.selection import Placement
from carpool_extender.simulation.engine.knowing import Run, Stage
from carpool_extender.simulation.truth import overlap
from carpool_extender.simulation.truth.power import Power, Spent
from carpool_extender.simulation.truth.workload import SimJob, Truth


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

    def seen(self) -> Activity:
        """Return what a monitor sees it do."""
        truth = self.job.truth
        return Activity(truth.util / self.slowdown, truth.sm / self.slowdown, truth.dram)

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
        self.sm = overlap.sm_activity(self.mode, truths, slowdowns, self.util)


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
