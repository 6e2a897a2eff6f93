"""What finished jobs taught: for each stack a line, and how often the bound held. A small versioned document.

It is pure data, and holds at most `MAX_STACKS` times `KEPT` rows of some 60 bytes, so that it fits a ConfigMap.
`observe` makes it; `model_for` predicts with it.
"""

import math
from typing import Annotated

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.values import Precision
from msgspec import Meta

from carpool_predictor.memory import ELSEWHERE_FACTOR, MemoryModel, is_calibrated
from carpool_predictor.trees import MalformedError

FORMAT = 1
"""Version of the document's layout; another one is refused."""
KEPT = 64
"""Observations of a stack that are kept, newest last."""
MAX_STACKS = 32
"""Stacks that are kept; the one that was observed longest ago goes."""
FEWEST = 3
"""Observations before a stack's own line is used."""
DOUBT = 5.0
"""After so many observations half of the extra width of an uncalibrated stack is gone."""
WIDEST = math.log(2.0)
WINDOW = 100
"""Outcomes over which coverage is told."""

_MEBIBYTES = Annotated[float, Meta(ge=0, le=2**30)]
_POSITIVE = Annotated[float, Meta(gt=0, le=2**40)]


class Stack(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """What decides how much memory a job takes beside its own tensors."""

    product: str
    precision: Precision
    driver: str = ""
    torch: str = ""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a job; kept until it ends."""

    model: str
    """Name or digest of the model; runs of one model count together."""
    reserved_mib: Annotated[float, Meta(gt=0, le=2**30)]
    """What the simulated allocator holds."""
    live_mib: _MEBIBYTES
    """Peak of live tensors in a step: no run that finished a step took less."""
    correction: Annotated[float, Meta(gt=0, le=100)] = 1.0
    upper_mib: _MEBIBYTES
    """The bound that placement counted with."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a job."""

    peak_mib: _MEBIBYTES
    """Peak of its processes; what the GPU had free for it where it ran out of memory."""
    capacity_mib: _MEBIBYTES
    """Memory of the GPU."""
    out_of_memory: bool = False
    complete: bool = True
    """Whether it ran a few steps at least."""


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """One row of a stack."""

    model: str
    reserved_mib: _POSITIVE
    value_mib: _POSITIVE
    """Measured over correction."""
    censored: bool


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of one stack."""

    stack: Stack
    rows: list[Observed] = []
    slope: Annotated[float, Meta(gt=0, le=100)]
    intercept_mib: _MEBIBYTES
    widening: Annotated[float, Meta(ge=0, le=WIDEST + 1e-9)] = 0.0
    """Logarithm of the factor to the bound."""
    outcomes: Annotated[str, Meta(pattern="^[01]*$", max_length=WINDOW)] = ""
    """Whether the bound held, newest last."""
    seen: int = 0
    """Observations that were taken in, ever."""
    refused: int = 0

    @property
    def coverage(self) -> float | None:
        """Share of the last jobs whose bound held; None before the first."""
        return self.outcomes.count("1") / len(self.outcomes) if self.outcomes else None

    def at(self, reserved_mib: float) -> float:
        """Return the line, in MiB."""
        return self.slope * reserved_mib + self.intercept_mib


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The document; newest stack last."""

    format: int = FORMAT
    stacks: list[StackState] = []

    def state(self, stack: Stack) -> StackState | None:
        """Find a stack."""
        return next((state for state in self.stacks if state.stack == stack), None)

    def best(self, product: str, precision: Precision) -> StackState | None:
        """Find the stack of a product and precision that was seen most, whatever its driver and PyTorch."""
        found = [s for s in self.stacks if s.stack.product == product and s.stack.precision is precision]
        return max(found, key=lambda state: state.seen, default=None)


def model_for(calibration: Calibration, product: GpuProduct, precision: Precision, model: MemoryModel) -> MemoryModel:
    """Return the memory model of a stack: the shipped one with the stack's own line, once enough was seen."""
    state = calibration.best(product.name, precision)
    if state is None or len(state.rows) < FEWEST:
        return model
    doubt = 1.0
    if not is_calibrated(model, product, precision):
        doubt += (ELSEWHERE_FACTOR - 1) * DOUBT / (DOUBT + len(state.rows))
    factor = math.exp(state.widening) * doubt
    return msgspec.structs.replace(
        model,
        product=product.name,
        precision=precision,
        slope=state.slope,
        intercept_mib=state.intercept_mib,
        factors={group: own * factor for group, own in model.factors.items()},
    )


def read_calibration(content: bytes) -> Calibration:
    """Read the document.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        found = msgspec.json.decode(content, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise MalformedError(f"expected a calibration as `observe` writes it: {e}") from e
    if found.format != FORMAT:
        raise MalformedError(f"expected a calibration of format {FORMAT}, found {found.format}; upgrade carpool")
    return found


def write_calibration(calibration: Calibration) -> bytes:
    """Write the document; equal ones give equal bytes."""
    return msgspec.json.encode(calibration)
