"""What is simulated: jobs as they truly are, what is predicted of them, and the GPUs they run on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from carpool_core.resources.node import Device
from carpool_core.resources.prediction import Prediction
from carpool_core.values import GpuUuid
from carpool_predictor.prediction.estimator import Job
from numpy.typing import NDArray

from carpool_extender.simulation.truth.power import Power


@dataclass(frozen=True, slots=True)
class Truth:
    """What a job does on a GPU of its own, as measured; no deciding model had a part in it."""

    kind: str
    """What it trains, with its batch size: two jobs of one kind are alike."""
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
    """When it is submitted, in seconds after the start."""
    work_s: float
    """How long it runs alone, in seconds."""
    gpus: int
    """GPUs of one worker."""
    truth: Truth
    prediction: Prediction | None
    """What the shipped predictor said; None where it abstained."""
    workers: int = 1
    """A gang: all start together or none does."""
    asked: Job | None = None
    """What the predictor is asked about, for those who learn; None where nothing can be learned."""
    steps: int | None = None
    """Steps of its training, where its user says how many."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Measured slowdowns of pairs, one of each of the two jobs."""

    busy: NDArray[np.float64]
    """(slowdowns, 2) How busy the one that is slowed is alone, and the other, 0..1."""
    slowdowns: NDArray[np.float64]
    """(slowdowns,) At least 1."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A GPU that fails, with all that runs on it."""

    gpu: GpuUuid
    at_s: float
    lasts_s: float
    """Time until it takes jobs again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs and the cluster that runs them."""

    name: str
    title: str
    jobs: Sequence[SimJob]
    """Ascending by arrival."""
    nodes: Mapping[str, Sequence[Device]]
    assumptions: Sequence[str]
    """What the published text leaves open, and what is assumed here."""
    power: Power | None = None
    """What each GPU draws where that is not what is usual of its product."""
    failures: Sequence[Failure] = ()
    fragmented: float = 0.0
    """Share of a GPU's memory that nobody can have where several share it: pieces that their allocators leave, 0..1."""
    behind_mps: Pool | None = None
    """Pairs whose slowdowns tenants of MPS have, by SM activity; where None those that were measured by turns."""
    until_s: float = math.inf
    """When watching ends, whoever runs or waits then, in seconds after the start."""
    notes: Sequence[str] = ()
    """What of the input is odd, and what was made of it; said before anything runs."""
    shown: Sequence[str] = ()
    """Names of the figures that its table shows; the usual ones where there are none."""


Draw = Callable[[Path, int], Workload]
"""Draws a workload from the folder of measurements and a seed."""


class WorkloadError(ValueError):
    """A trace, a cluster file or a data folder is unusable; says what was expected, what was found, what to do."""
