"""Time of a training step: its FLOPs, bytes and kernels at that share of a GPU's peaks which kernels reach.

    compute = flops / rate,              rate = FP32 peak * matrix         (tensor cores: roofline.TENSOR of their peak)
    memory  = bytes / (bandwidth * bandwidth utilization)
    step    = compute + memory + kernel_s * kernels                         (form `sum`)
    step    = max(compute, memory) + kernel_s * kernels                     (form `larger`)

The utilizations are learned over all measured GPUs (NeuSight's idea: utilization of the roofline, never latency), so
that a GPU that nobody measured has a prediction, from its specification. Without NumPy: microseconds.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.prediction import Interval
from carpool_core.values import Precision
from msgspec import Meta

from carpool_predictor.features import MalformedError, StepCost
from carpool_predictor.models.artifacts import load
from carpool_predictor.models.roofline import TENSOR, TF32_SHARE

FORMAT = 1
"""Version of the artifact's layout; another one is refused."""
UNMEASURED = 1.6
"""Factor to both ends of the interval where tensor cores compute: no measured step used them. Assumed."""

_SHARE = Annotated[float, Meta(gt=0, le=2)]
_SECONDS = Annotated[float, Meta(ge=0, le=1e-3)]
_FACTOR = Annotated[float, Meta(gt=0, le=100)]

Form = Literal["sum", "larger"]


class Utilization(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned."""

    form: Form
    matrix: _SHARE
    """Share of the FP32 peak that matrix products reach."""
    bandwidth: _SHARE
    """Share of the bandwidth, of what operators read and write without any cache."""
    kernel_s: _SECONDS
    """Seconds that a kernel takes in any case."""

    def seconds(self, cost: StepCost, rate: float, bandwidth: float) -> float:
        """Return a step's time, from FLOP/s at the rate that is reached and bytes/s at the peak."""
        compute, memory = cost.flops / rate, cost.bytes_moved / (bandwidth * self.bandwidth)
        work = compute + memory if self.form == "sum" else max(compute, memory)
        return work + self.kernel_s * cost.kernels


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored model."""

    format: int
    version: str
    learned: Utilization
    lower: _FACTOR
    """5% quantile of measured over predicted, GPUs held out."""
    upper: _FACTOR
    """95% quantile."""
    provenance: dict[str, str | float | int]
    """Data, rows, seed, versions and the figures on GPUs that no number saw."""


def read_model(content: bytes) -> StepTimeModel:
    """Read an artifact.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        model = msgspec.json.decode(content, type=StepTimeModel)
    except msgspec.DecodeError as e:
        raise MalformedError(f"expected a step-time model: {e}") from e
    if model.format != FORMAT:
        raise MalformedError(f"expected a step-time model of format {FORMAT}, found {model.format}; upgrade carpool")
    if not model.lower <= 1 <= model.upper:
        raise MalformedError(f"expected an interval around the prediction, found {model.lower} to {model.upper} of it")
    return model


@cache
def shipped() -> StepTimeModel:
    """Return the model that the package carries."""
    return load("step_time.json", read_model)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one step alone on a GPU."""

    seconds: Interval
    inside: bool
    """Whether what computes (FP32, without tensor cores) was measured."""


def step_time_on(cost: StepCost, product: GpuProduct, precision: Precision, *, convolutional: bool) -> StepTime:
    """Predict a step.

    Args:
        cost: FLOPs, bytes and kernels of the step.
        product: The GPU.
        precision: Decides whether tensor cores compute.
        convolutional: Whether most work is in convolutions, for which PyTorch uses TF32 by itself.
    """
    model = shipped()
    vector = product.fp32_tflops * model.learned.matrix
    tensor = _tensor_tflops(product, precision, convolutional=convolutional)
    rate, bandwidth = 1e12 * max(vector, tensor), product.memory_bandwidth_gb_s * 1e9
    median = model.learned.seconds(cost, rate, bandwidth)
    inside = tensor <= vector
    wider = 1.0 if inside else UNMEASURED
    return StepTime(
        Interval(
            median=_short(median),
            lower=_short(median * model.lower / wider),
            upper=_short(median * model.upper * wider),
        ),
        inside,
    )


def _tensor_tflops(product: GpuProduct, precision: Precision, *, convolutional: bool) -> float:
    """Return what tensor cores reach in a precision, in TFLOP/s; 0 where they play no part."""
    major = int(product.compute_capability.split(".")[0])
    reached = product.tensor_tflops * TENSOR
    if precision is Precision.FP32:
        return reached * TF32_SHARE if convolutional and major >= 8 else 0.0
    # Before Ampere there is no BF16 arithmetic: it goes through FP32.
    return reached if major >= 8 or precision is Precision.FP16_MIXED else 0.0


def _short(seconds: float) -> float:
    return float(f"{max(seconds, math.ulp(0.0)):.6g}")
