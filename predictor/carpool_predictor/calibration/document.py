"""The calibration document: observations, line, bound and coverage of each stack.

Pure data of at most `MAX_STACKS` times `MAX_RUNS` rows of about 100 bytes, so that it fits into a ConfigMap. `observe`
writes it; `model_for` and `run_history` predict with it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.job import Training
from carpool_core.values import CrossEntropy, Precision
from msgspec import Meta

from carpool_predictor.calibration.colocation import (
    MAX_PAIRS,
    MAX_SOLO,
    MeasuredSteps,
    PairRecord,
    SoloRecord,
    add,
    usable,
)
from carpool_predictor.models.artifacts import decode
from carpool_predictor.models.memory import ELSEWHERE_FACTOR, STRATA, MemoryModel, is_calibrated

FORMAT = 3
"""Version of the document's layout; another one is refused."""
MAX_RUNS = 128
"""Observations kept of a stack."""
MAX_STACKS = 32
"""Stacks kept; the least recently observed one is dropped first."""
MIN_JOBS = 3
"""Different jobs (models or sizes) of a stack from which its own line is used."""
MAX_SAMPLES = 256
"""Names of samples kept, so that none counts twice."""
SIMULATED = "simulated"
"""Driver in the stacks of simulated GPUs, which are calibrated apart from hardware."""
MISS_RATE = 0.05
"""Share of jobs that may exceed the bound."""
HALF_WIDTH_JOBS = 5.0
"""Jobs after which half of the extra width of an uncalibrated stack is gone."""
MAX_WIDENING = math.log(2.0)
"""Largest logarithm of the factor by which missed bounds widen the next ones."""
WINDOW = 100
"""Last outcomes over which coverage is computed."""
AGREEING_NAMESPACES = 3
"""Namespaces in which a model has to run out of all memory of a GPU before this excludes the product for all others."""

_MEBIBYTES = Annotated[float, Meta(ge=0, le=2**30)]
_POSITIVE = Annotated[float, Meta(gt=0, le=2**40)]
_RATIO = Annotated[float, Meta(ge=0, le=1)]
_FACTOR = Annotated[float, Meta(ge=0, le=1000)]
_NAME = Annotated[str, Meta(max_length=128)]
_STRATUM = Annotated[int, Meta(ge=0, lt=STRATA)]


def is_plain(training: Training) -> bool:
    """Whether a training has no technique that was checked only against published cases.

    These are division among GPUs, torch.compile, offloaded activations, varying lengths, and chunked or fused losses.
    """
    stores_logits = training.cross_entropy in (CrossEntropy.FULL, CrossEntropy.NATIVE)
    others = (training.parallelism, training.compile, training.activation_offloading, training.varying_lengths)
    return stores_logits and not any(others)


class Stack(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The software and hardware that determine a job's memory besides its own tensors."""

    product: _NAME
    precision: Precision
    driver: _NAME = ""
    torch: _NAME = ""
    gpus: Annotated[int, Meta(ge=1)] = 1
    """GPUs of a worker: frameworks add buffers to each GPU, or divide the model among them."""
    plain: bool = True
    """`is_plain` of its jobs' trainings; other jobs are calibrated by their own runs only."""


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of a run that its measurement is compared with."""

    model: _NAME
    """Key of the model; runs of one model count together."""
    reserved_mib: Annotated[float, Meta(gt=0, le=2**30)]
    """Memory that the simulated allocator holds."""
    live_mib: _MEBIBYTES
    """Peak of live tensors in a step; no run that finished a step takes less."""
    context_difference_mib: float = 0.0
    """CUDA context on the stack's product less that on the shipped model's."""
    correction: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Factor of the model's trees to the line."""
    stratum: _STRATUM = 0
    """Stratum of the step by its risk to exceed the median; see `memory.Risk`."""
    upper_mib: _MEBIBYTES
    """The bound that placement used; 0 if it used none."""
    util: _RATIO | None = None
    """Share of time in which its kernels run alone, 0..1, as the shipped model predicts; None if unknown."""
    sm_active: _RATIO | None = None
    """Share of SMs with its work, likewise."""


class RunMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of a run, after its end or while it runs."""

    peak_mib: _MEBIBYTES
    """Peak of its processes; after an out-of-memory death the memory that was available to it."""
    capacity_mib: _MEBIBYTES
    """Memory of the GPU."""
    out_of_memory: bool = False
    complete: bool = True
    """Whether it ran at least a few steps."""
    ended: bool = True
    """False while the job runs. Its end replaces the row, and only then is the bound judged."""
    steady: bool = True
    """Whether the peak has not grown for `carpool_core.resources.node.STEADY_S`, or the run has ended."""
    sample: _NAME = ""
    """Name of the run, such as its job's UID and attempt, which counts once; empty names always count."""
    util: _RATIO | None = None
    """Share of time in which its kernels would run on a GPU alone, 0..1; None if unknown."""
    sm_active: _RATIO | None = None
    """Share of SMs with its work, likewise."""
    at_least: bool = False
    """Whether both activities are lower limits, because the run shared a saturated GPU."""
    namespace: _NAME = ""
    """Namespace of its job; empty if there is only one tenant."""
    ended_at: Annotated[int, Meta(ge=0)] = 0
    """Time of its end, in seconds since 1970; 0 if unknown."""


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
    """One run in the document of a stack."""

    model: _NAME
    reserved_mib: _POSITIVE
    value_mib: _POSITIVE
    """Measured memory over correction."""
    censored: bool
    """Whether the run died of memory, so that `value_mib` is a lower limit."""
    sample: _NAME = ""
    util: _RATIO | None = None
    sm_active: _RATIO | None = None
    steady: bool = True
    util_factor: _FACTOR | None = None
    """Measured activity over activity by the shipped model; None if either is unknown."""
    sm_factor: _FACTOR | None = None
    stratum: _STRATUM = 0
    """Stratum of its step; see `memory.Risk`."""
    namespace: _NAME = ""
    """Namespace of a run that died of memory; empty for all other runs."""
    ended_at: Annotated[int, Meta(ge=0)] = 0
    """Time of a death of memory, in seconds since 1970; 0 if unknown."""


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of one stack."""

    stack: Stack
    rows: Annotated[list[RunRecord], Meta(max_length=MAX_RUNS)] = []
    slope: Annotated[float, Meta(gt=0, le=100)]
    intercept_mib: _MEBIBYTES
    widening: Annotated[float, Meta(ge=0, le=MAX_WIDENING + 1e-9)] = 0.0
    """Logarithm of the factor to the bound."""
    reaches: Annotated[list[Annotated[float, Meta(ge=0, le=100)]], Meta(max_length=STRATA)] = []
    """Logarithm of the bound over the line that holds the observations, by stratum; see `observe.bound_reaches`."""
    outcomes: Annotated[str, Meta(pattern="^[01]*$", max_length=WINDOW)] = ""
    """1 for each bound that held and 0 for each that did not, newest last."""
    seen: int = 0
    """Finished runs counted since the beginning."""
    refused: int = 0
    """Impossible observations since the beginning."""

    @property
    def coverage(self) -> float | None:
        """Share of the last `WINDOW` jobs whose bound held; None before the first."""
        return self.outcomes.count("1") / len(self.outcomes) if self.outcomes else None

    @property
    def jobs(self) -> int:
        """Number of different jobs (models or sizes) whose memory was measured."""
        return len({(row.model, round(row.reserved_mib)) for row in self.rows if not row.censored})

    @property
    def learned_from(self) -> int:
        """Number of different jobs behind the line; 0 while they are fewer than `MIN_JOBS` or not plain."""
        return self.jobs if self.stack.plain and self.jobs >= MIN_JOBS else 0

    @property
    def is_simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        return self.stack.driver == SIMULATED

    def at(self, reserved_mib: float) -> float:
        """Return the line, in MiB."""
        return self.slope * reserved_mib + self.intercept_mib


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The document; newest stack last."""

    format: int = FORMAT
    stacks: Annotated[list[StackState], Meta(max_length=MAX_STACKS)] = []
    counted: Annotated[list[_NAME], Meta(max_length=MAX_SAMPLES)] = []
    """Samples of the last finished runs, counted or refused; newest last."""
    pairs: Annotated[list[PairRecord], Meta(max_length=MAX_PAIRS)] = []
    """Measured slowdowns, newest last."""
    solo: Annotated[list[SoloRecord], Meta(max_length=MAX_SOLO)] = []
    """Measured step times alone, newest last."""

    def state(self, stack: Stack) -> StackState | None:
        """Return the state of a stack, or None."""
        return next((state for state in self.stacks if state.stack == stack), None)

    def best(self, product: str, precision: Precision) -> StackState | None:
        """Return the most observed stack of a product and precision, hardware before simulated GPUs, or None."""
        found = [s for s in self.stacks if s.stack.product == product and s.stack.precision is precision]
        return max(found, key=lambda state: (not state.is_simulated, len(state.rows), state.seen), default=None)

    def for_gpus(self, simulated: Collection[str]) -> "Calibration":
        """Return the calibration without measurements on simulated GPUs, except of these products."""
        stacks = [state for state in self.stacks if not state.is_simulated or state.stack.product in simulated]
        pairs, solo = (
            [one for one in records if not one.simulated or one.product in simulated]
            for records in (self.pairs, self.solo)
        )
        found = msgspec.structs.replace(self, stacks=stacks, pairs=pairs, solo=solo)
        sizes = ((len(one.stacks), len(one.pairs), len(one.solo)) for one in (self, found))
        return self if next(sizes) == next(sizes) else found

    def for_workers(self, gpus: int) -> "Calibration":
        """Return the calibration from runs of workers with this number of GPUs."""
        return msgspec.structs.replace(self, stacks=[state for state in self.stacks if state.stack.gpus == gpus])

    def for_training(self, training: Training) -> "Calibration":
        """Return the calibration from runs of plain trainings, or from runs of all others for one of these."""
        plain = is_plain(training)
        return msgspec.structs.replace(self, stacks=[state for state in self.stacks if state.stack.plain is plain])

    def for_namespace(self, namespace: str) -> "Calibration":
        """Return the calibration without deaths of memory and reported steps that count for other namespaces only.

        A death counts in its own namespace. It counts in every namespace once the same job has died with at least as
        much memory in `AGREEING_NAMESPACES` of them.
        """
        return msgspec.structs.replace(
            self,
            stacks=[_for_namespace(state, namespace) for state in self.stacks],
            pairs=usable(self.pairs, namespace),
            solo=usable(self.solo, namespace),
        )


def with_steps(calibration: Calibration, steps: Iterable[MeasuredSteps]) -> Calibration:
    """Return the calibration with these measured steps; the same object without any."""
    for one in steps:
        if one.pair is not None:
            pairs = add(calibration.pairs, one.pair, MAX_PAIRS)
            calibration = msgspec.structs.replace(calibration, pairs=pairs)
        if one.solo is not None:
            calibration = msgspec.structs.replace(calibration, solo=add(calibration.solo, one.solo, MAX_SOLO))
    return calibration


def _for_namespace(state: StackState, namespace: str) -> StackState:
    deaths = defaultdict[tuple[str, int], list[RunRecord]](list)
    for row in state.rows:
        if row.namespace:
            deaths[row.model, round(row.reserved_mib)].append(row)

    def applies(row: RunRecord) -> bool:
        if row.namespace in ("", namespace):
            return True
        of_job = deaths[row.model, round(row.reserved_mib)]
        return len({one.namespace for one in of_job if one.value_mib >= row.value_mib}) >= AGREEING_NAMESPACES

    rows = [row for row in state.rows if applies(row)]
    return state if len(rows) == len(state.rows) else msgspec.structs.replace(state, rows=rows)


def model_for(calibration: Calibration, product: GpuProduct, precision: Precision, model: MemoryModel) -> MemoryModel:
    """Return the memory model of a stack: the shipped one with the stack's own line, from `MIN_JOBS` jobs on.

    factor(stratum) = max(shipped factor · e^widening, e^reach)
    doubt = 1 + (ELSEWHERE_FACTOR - 1) · h / (h + jobs)

    The doubt, with h = `HALF_WIDTH_JOBS`, is 1 on a stack for which a model was shipped.
    """
    state = calibration.best(product.name, precision)
    if state is None or not state.learned_from:
        return model
    doubt = 1.0
    if not is_calibrated(model, product, precision):
        doubt += (ELSEWHERE_FACTOR - 1) * HALF_WIDTH_JOBS / (HALF_WIDTH_JOBS + state.jobs)
    reaches = [*state.reaches, *[0.0] * len(model.factors)]
    pairs = zip(model.factors, reaches, strict=False)
    factors = [max(own * math.exp(state.widening), math.exp(reach)) for own, reach in pairs]
    return msgspec.structs.replace(
        model,
        product=product.name,
        precision=precision,
        slope=state.slope,
        intercept_mib=state.intercept_mib,
        factors=factors,
        doubt=doubt,
    )


def read_calibration(content: bytes) -> Calibration:
    """Read the document.

    Raises:
        MalformedError: The content is truncated, changed, or of another version.
    """
    return decode(content, Calibration, "a calibration document", FORMAT, "remove it; it will be learned again")


def write_calibration(calibration: Calibration) -> bytes:
    """Return the document as JSON; equal documents give equal bytes."""
    return msgspec.json.encode(calibration)
