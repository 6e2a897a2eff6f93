"""What jobs that ran taught: for each stack a line, and how often the bound held. A small versioned document.

It is pure data, and holds at most `MAX_STACKS` times `KEPT` rows of some 100 bytes, so that it fits a ConfigMap.
`observe` makes it; `model_for` and `recalling` predict with it.
"""

import math
from collections.abc import Collection
from typing import Annotated

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.values import Precision
from msgspec import Meta

from carpool_predictor.features import MalformedError
from carpool_predictor.models.memory import ELSEWHERE_FACTOR, STRATA, MemoryModel, is_calibrated

FORMAT = 3
"""Version of the document's layout; another one is refused."""
MAX_RUNS = 128
"""Observations of a stack that are kept, newest last."""
MAX_STACKS = 32
"""Stacks that are kept; the one that was observed longest ago goes."""
MIN_JOBS = 3
"""Different jobs of a stack, of another model or size each, before its own line is used."""
MAX_SAMPLES = 256
"""Samples whose names are kept, so that none counts twice: far more than are ever written at once."""
SIMULATED = "simulated"
"""Driver of the stacks of simulated GPUs: what they teach never stands beside what hardware taught."""
MISS_RATE = 0.05
"""Share of jobs that may exceed the bound."""
DOUBT = 5.0
"""After so many observations half of the extra width of an uncalibrated stack is gone."""
WIDEST = math.log(2.0)
WINDOW = 100
"""Outcomes over which coverage is told."""

_MEBIBYTES = Annotated[float, Meta(ge=0, le=2**30)]
_POSITIVE = Annotated[float, Meta(gt=0, le=2**40)]
_RATIO = Annotated[float, Meta(ge=0, le=1)]
_FACTOR = Annotated[float, Meta(ge=0, le=1000)]
_NAME = Annotated[str, Meta(max_length=128)]
_STRATUM = Annotated[int, Meta(ge=0, lt=STRATA)]


class Stack(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """What decides how much memory a job takes beside its own tensors."""

    product: _NAME
    precision: Precision
    driver: _NAME = ""
    torch: _NAME = ""


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a job; kept until it ends."""

    model: _NAME
    """Name or digest of the model; runs of one model count together."""
    reserved_mib: Annotated[float, Meta(gt=0, le=2**30)]
    """What the simulated allocator holds."""
    live_mib: _MEBIBYTES
    """Peak of live tensors in a step: no run that finished a step took less."""
    correction: Annotated[float, Meta(gt=0, le=100)] = 1.0
    stratum: _STRATUM = 0
    """How likely the step is to exceed its median, as `memory.Risk` divides steps."""
    upper_mib: _MEBIBYTES
    """The bound that placement counted with; 0 where it counted with none, which neither holds nor fails."""
    util: _RATIO | None = None
    """Share of time in which its kernels were predicted to run alone, as shipped, 0..1; None: not known."""
    sm_active: _RATIO | None = None
    """Share of SMs with its work, likewise."""


class RunMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a job, once it has ended or while it runs."""

    peak_mib: _MEBIBYTES
    """Peak of its processes; what the GPU had free for it where it ran out of memory."""
    capacity_mib: _MEBIBYTES
    """Memory of the GPU."""
    out_of_memory: bool = False
    complete: bool = True
    """Whether it ran a few steps at least."""
    ended: bool = True
    """False for what a running job shows so far: its end replaces that row, and only then is the bound judged."""
    steady: bool = True
    """Whether the peak has not moved for `observe.STEADY_S`, or will never move again: else it is only a beginning."""
    sample: _NAME = ""
    """Names the run, such as its job's UID and attempt: told again it changes nothing. Empty: always another."""
    util: _RATIO | None = None
    """Share of time in which its kernels would run had it the GPU alone, 0..1; None where that is not known."""
    sm_active: _RATIO | None = None
    """Share of SMs with its work, likewise."""
    at_least: bool = False
    """Whether these two are the least that it would do, because it shared a GPU that was used up."""


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
    """One row of a stack."""

    model: _NAME
    reserved_mib: _POSITIVE
    value_mib: _POSITIVE
    """Measured over correction."""
    censored: bool
    sample: _NAME = ""
    util: _RATIO | None = None
    sm_active: _RATIO | None = None
    steady: bool = True
    util_factor: _FACTOR | None = None
    """Activity measured over activity predicted as shipped; None where either is not known."""
    sm_factor: _FACTOR | None = None
    stratum: _STRATUM = 0
    """How likely its step was to exceed its median, as `memory.Risk` divides steps."""


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of one stack."""

    stack: Stack
    rows: Annotated[list[RunRecord], Meta(max_length=MAX_RUNS)] = []
    slope: Annotated[float, Meta(gt=0, le=100)]
    intercept_mib: _MEBIBYTES
    widening: Annotated[float, Meta(ge=0, le=WIDEST + 1e-9)] = 0.0
    """Logarithm of the factor to the bound."""
    reaches: Annotated[list[Annotated[float, Meta(ge=0, le=100)]], Meta(max_length=STRATA)] = []
    """Logarithm of how far above the line the bound has to lie to hold what was seen, for each stratum of steps."""
    outcomes: Annotated[str, Meta(pattern="^[01]*$", max_length=WINDOW)] = ""
    """Whether the bound held, newest last."""
    seen: int = 0
    """Observations that were taken in, ever."""
    refused: int = 0

    @property
    def coverage(self) -> float | None:
        """Share of the last jobs whose bound held; None before the first."""
        return self.outcomes.count("1") / len(self.outcomes) if self.outcomes else None

    @property
    def jobs(self) -> int:
        """Number of different jobs whose memory was measured: of another model, or of another size."""
        return len({(row.model, round(row.reserved_mib)) for row in self.rows if not row.censored})

    @property
    def learned_from(self) -> int:
        """Number of different jobs that its line was learned from; 0 as long as there are too few for a line."""
        return self.jobs if self.jobs >= MIN_JOBS else 0

    @property
    def is_simulated(self) -> bool:
        """Whether it is a stack of simulated GPUs."""
        return self.stack.driver == SIMULATED

    def at(self, reserved_mib: float) -> float:
        """Return the line, in MiB."""
        return self.slope * reserved_mib + self.intercept_mib


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The document; newest stack last."""

    format: int = FORMAT
    stacks: Annotated[list[StackState], Meta(max_length=MAX_STACKS)] = []
    counted: Annotated[list[_NAME], Meta(max_length=MAX_SAMPLES)] = []
    """Samples of ended jobs that were taken in or refused last, newest last."""

    def state(self, stack: Stack) -> StackState | None:
        """Find a stack."""
        return next((state for state in self.stacks if state.stack == stack), None)

    def best(self, product: str, precision: Precision) -> StackState | None:
        """Find the stack of a product and precision that was seen most; hardware comes before what is simulated.

        Who knows which GPUs there are asks only what `for_gpus` leaves; `carpool predict --calibration` does not.
        """
        found = [s for s in self.stacks if s.stack.product == product and s.stack.precision is precision]
        return max(found, key=lambda state: (not state.is_simulated, len(state.rows), state.seen), default=None)

    def for_gpus(self, simulated: Collection[str]) -> "Calibration":
        """Leave out what simulated GPUs taught of products of which there is hardware, or nothing.

        Args:
            simulated: Products of which all GPUs are simulated.
        """
        stacks = [state for state in self.stacks if not state.is_simulated or state.stack.product in simulated]
        return self if len(stacks) == len(self.stacks) else msgspec.structs.replace(self, stacks=stacks)


class _Version(msgspec.Struct, frozen=True):
    """As much of a document as says whether the rest can be read."""

    format: int = FORMAT


def model_for(calibration: Calibration, product: GpuProduct, precision: Precision, model: MemoryModel) -> MemoryModel:
    """Return the memory model of a stack: the shipped one with the stack's own line, once enough was seen.

    In each stratum the bound lies as far above the line as the shipped one, and no less than what was seen reaches; it
    is widened by what coverage asks for, and on a stack of which nothing was shipped by a doubt that fades.
    """
    state = calibration.best(product.name, precision)
    if state is None or not state.learned_from:
        return model
    doubt = 1.0
    if not is_calibrated(model, product, precision):
        doubt += (ELSEWHERE_FACTOR - 1) * DOUBT / (DOUBT + state.jobs)
    reaches = [*state.reaches, *[0.0] * len(model.factors)]
    pairs = zip(model.factors, reaches, strict=False)
    factors = [max(own * math.exp(state.widening), math.exp(reach)) * doubt for own, reach in pairs]
    return msgspec.structs.replace(
        model,
        product=product.name,
        precision=precision,
        slope=state.slope,
        intercept_mib=state.intercept_mib,
        factors=factors,
    )


def read_calibration(content: bytes) -> Calibration:
    """Read the document.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version != FORMAT:
            advice = "upgrade carpool" if version > FORMAT else "remove it, and let it be learned anew"
            raise MalformedError(f"expected a calibration of format {FORMAT}, found {version}; {advice}")
        return msgspec.json.decode(content, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise MalformedError(f"expected a calibration as `observe` writes it: {e}") from e


def write_calibration(calibration: Calibration) -> bytes:
    """Write the document; equal ones give equal bytes."""
    return msgspec.json.encode(calibration)
