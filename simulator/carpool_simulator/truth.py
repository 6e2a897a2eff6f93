"""Simulated workloads: true behaviour of jobs, their predictions, and the GPUs."""

import csv
import itertools
import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from carpool_core.resources.node import Device
from carpool_core.resources.prediction import Prediction
from carpool_core.values import SharingMode
from carpool_predictor.models import slowdown
from carpool_predictor.predict import PredictionContext
from numpy.typing import NDArray

from carpool_simulator.power import Power


@dataclass(frozen=True, slots=True)
class Truth:
    """Measured behaviour of a job alone on a GPU; it never comes from a model that decides."""

    kind: str
    """Model, dataset and batch size; jobs of one kind are equal."""
    memory_mib: int
    """Peak memory on each of its GPUs."""
    util: float
    """Share of time in which some kernel runs (nvidia-smi), 0..1."""
    sm: float
    """Mean share of SMs with work, 0..1."""
    dram: float
    """Share of memory cycles in use, 0..1."""
    product: str
    """GPU product on which it was measured, by NVML's name."""
    model: str = ""
    """The model alone: kinds of one model differ in batch size and precision."""


@dataclass(frozen=True, slots=True)
class SimJob:
    """One job of a workload."""

    name: str
    arrival_s: float
    """Time of submission, in seconds after the start."""
    work_s: float
    """Length alone, in seconds."""
    gpus: int
    """GPUs of one worker."""
    truth: Truth
    prediction: Prediction | None
    """Output of the shipped predictor; None if it abstained."""
    workers: int = 1
    """Number of workers, which start together."""
    asked: PredictionContext | None = None
    """Input of the predictor, for strategies that learn; None if nothing can be learned."""
    steps: int | None = None
    """Declared steps of its training; None if it declares none."""
    step_s: float = 0.0
    """True time of a step alone, in seconds; 0 if unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Measured slowdowns of pairs, one of each of the two jobs."""

    busy: NDArray[np.float64]
    """(slowdowns, 2) Activity alone of the slowed job and of the other one, 0..1."""
    slowdowns: NDArray[np.float64]
    """(slowdowns,) At least 1."""
    jobs: Sequence[tuple[Hashable, Hashable]] = ()
    """(slowdowns,) The slowed job and the other one; empty if a simulated pair may be any measured one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs and the cluster that runs them."""

    name: str
    title: str
    jobs: Sequence[SimJob]
    """Ascending by arrival."""
    nodes: Mapping[str, Sequence[Device]]
    assumptions: Sequence[str]
    """Assumptions where the published text is silent."""
    power: Power | None = None
    """Power of each GPU; that of its product if None."""
    fragmented: float = 0.0
    """Share of a shared GPU's memory that is lost to fragmentation, 0..1."""
    until_s: float = math.inf
    """End of the simulation, in seconds after the start."""
    notes: Sequence[str] = ()
    """Remarks on the input, printed before anything runs."""
    shown: Sequence[str] = ()
    """Names of the figures in its table; the default ones if empty."""


Draw = Callable[[Path, int], Workload]
"""Draws a workload from the folder of measurements and a seed."""


class WorkloadError(ValueError):
    """A trace, a cluster file or a data folder is unusable; the message says what to do."""


def utilization(tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
    """Return the share of time in which some tenant's kernel runs, 0..1.

    The GPU idles while all tenants idle, independently and as often as alone: slowdown stretches kernels, not pauses.
    Utilization is at most the work that is done, the sum of utilization over slowdown.
    """
    idle = math.prod(1.0 - one.util for one in tenants)
    done = sum(one.util / factor for one, factor in zip(tenants, slowdowns, strict=True))
    return min(1.0 - idle, done)


def sm_activity(mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float], busy: float) -> float:
    """Return the share of SMs with work, 0..1; `busy` is the utilization of the GPU, 0..1.

    Under time-slicing one kernel runs at a time: the busy time counts, with the SMs that its owner uses meanwhile.
    Otherwise kernels run at the same time, and their activities add up.
    """
    active = sum(one.sm / factor for one, factor in zip(tenants, slowdowns, strict=True))
    if mode is SharingMode.TIME_SLICING and active:
        active *= busy / sum(one.util / factor for one, factor in zip(tenants, slowdowns, strict=True))
    return min(1.0, active)


class PredictedSlowdowns:
    """Slowdowns exactly as the shipped model predicts them, for simulations without measured pairs."""

    def slowdowns(self, mode: SharingMode, tenants: Sequence[Truth]) -> list[float]:
        """Return each tenant's slowdown, at least 1."""
        util, sm, dram = np.array([[(one.util, one.sm, one.dram)] for one in tenants]).T
        found: list[float] = slowdown.slowdowns(mode, util, sm, dram)[0].tolist()
        return found

    def utilization(self, _: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
        """Return the share of time in which the GPU is busy, 0..1."""
        return utilization(tenants, slowdowns)


NEIGHBOURS = 8
"""Measured pairs of which a simulated pair is one."""
NEAREST_JOBS = 3
"""Measured jobs of which a simulated job is one."""


class MeasuredPairs:
    """Slowdowns of the tenants of one GPU and its utilization, from Lucid's measurements in a folder.

    The seed draws among equally near pairs. `behind_mps` are measured pairs for MPS; Lucid's if None.
    """

    def __init__(self, folder: Path, seed: int = 0, behind_mps: Pool | None = None) -> None:
        solo = {lucid_kind(row): float(row["gpu_util"]) / 100 for row in read_lucid(folder / "solo_rtx3090.csv")}
        points, found = [], []
        self._exact: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = {}
        for row in read_lucid(folder / "colocate_rtx3090.csv"):
            one, two = lucid_kind(row, "1"), lucid_kind(row, "2")
            if one not in solo or two not in solo:
                continue
            for mine, other, speed in ((one, two, row["speed1"]), (two, one, row["speed2"])):
                factor = max(1.0, 1.0 / max(0.05, float(speed)))
                self._exact[mine, other] = factor
                self._busy[mine, other] = float(row["gpu_util"]) / 100
                points.append((solo[mine], solo[other]))
                found.append(factor)
        self._time_sliced, self._seed = Pool(np.array(points), np.array(found)), seed
        self._behind_mps = behind_mps or self._time_sliced
        self._slowdown_of: dict[tuple[str, str, bool], float] = {}

    def slowdowns(self, mode: SharingMode, tenants: Sequence[Truth]) -> list[float]:
        """Return each tenant's true slowdown, at least 1."""
        if len(tenants) == 1 or mode in (SharingMode.EXCLUSIVE, SharingMode.MIG):
            return [1.0] * len(tenants)
        is_sliced = mode is SharingMode.TIME_SLICING
        busy = [t.util if is_sliced else t.sm for t in tenants]
        pair = {
            (i, j): self._pair(one, other, is_sliced)
            for (i, one), (j, other) in itertools.permutations(enumerate(tenants), 2)
        }
        added = [1.0 + sum(pair[i, j] - 1.0 for j in range(len(tenants)) if j != i) for i in range(len(tenants))]
        load = sum(b / s for b, s in zip(busy, added, strict=True))
        most = max(
            busy[i] / pair[i, j] + busy[j] / pair[j, i]
            if is_sliced and (tenants[i].kind, tenants[j].kind) in self._exact
            else 1.0
            for i, j in pair
        )
        return [s * max(1.0, load / max(1.0, most)) for s in added]

    def utilization(self, mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
        """Return the share of time in which the GPU is busy, 0..1: measured for a pair, otherwise composed.

        A pair is composed too if a worker waits for its gang on another GPU, because it is then slower than measured.
        """
        if len(tenants) == 2 and mode is SharingMode.TIME_SLICING:
            found = self._busy.get((tenants[0].kind, tenants[1].kind))
            if found is not None and list(slowdowns) == self.slowdowns(mode, tenants):
                return found
        return utilization(tenants, slowdowns)

    def _pair(self, one: Truth, other: Truth, is_sliced: bool) -> float:
        key = (one.kind, other.kind, is_sliced)
        found = self._slowdown_of.get(key)
        if found is None:
            found = self._slowdown_of[key] = self._look_up(one, other, is_sliced)
        return found

    def _look_up(self, one: Truth, other: Truth, is_sliced: bool) -> float:
        if is_sliced and (one.kind, other.kind) in self._exact:
            return self._exact[one.kind, other.kind]
        wanted = (one.util, other.util) if is_sliced else (one.sm, other.sm)
        pool = self._time_sliced if is_sliced else self._behind_mps
        if pool.jobs:
            return self._as_measured_jobs(pool, one, other)
        distance = ((pool.busy - wanted) ** 2).sum(axis=1)
        near = np.argpartition(distance, NEIGHBOURS)[:NEIGHBOURS]
        draw = zlib.crc32(f"{self._seed}/{one.kind}/{other.kind}".encode()) % NEIGHBOURS
        return float(np.sort(pool.slowdowns[near])[draw])

    def _as_measured_jobs(self, pool: Pool, one: Truth, other: Truth) -> float:
        """Return the slowdown of the measured jobs that two simulated ones are.

        A job is the same measured one beside all others: of the variance of Gavel's logarithms of slowdowns on a V100
        the two jobs explain 96%, and of slowdowns that are drawn for each pair 29%. Beside a job that it was not
        measured with, a job is as slow as beside the one whose activity is nearest.
        """
        alone = {job: float(busy) for (job, _), (busy, _) in zip(pool.jobs, pool.busy, strict=True)}

        def measured(truth: Truth) -> Hashable:
            near = sorted(alone, key=lambda job: (abs(alone[job] - truth.sm), str(job)))[:NEAREST_JOBS]
            return near[zlib.crc32(f"{self._seed}/{truth.kind}".encode()) % len(near)]

        mine, its = measured(one), measured(other)
        beside = {co_tenant: row for row, (job, co_tenant) in enumerate(pool.jobs) if job == mine}
        found = min(beside, key=lambda job: (job != its, abs(alone[job] - alone[its]), str(job)))
        return float(pool.slowdowns[beside[found]])


def lucid_kind(row: Mapping[str, str], which: str = "") -> str:
    """Return the kind of job in a row of Lucid's; of a row with a pair that of job 1 or 2."""
    return f"lucid/{row['model' + which]}/{row['batchsize' + which]}/{row['amp' + which]}"


def read_lucid(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of Lucid's measurements."""
    if not path.is_file():
        raise WorkloadError(f"expected Lucid's measurements at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def with_fragmentation(workload: Workload, share: float) -> Workload:
    """Return a workload in which GPUs with several tenants lose a share of their memory, 0..1."""
    if not share:
        return workload
    text = f"GPUs with several tenants lose {share:.0%} of their memory to fragmentation, which no decision expects."
    return replace(workload, fragmented=share, assumptions=(*workload.assumptions, text))
