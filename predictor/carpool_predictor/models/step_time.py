"""Time of a training step from its FLOPs, bytes and kernels, and the share of a GPU's peaks that kernels reach.

    compute = flops / rate,              rate = FP32 peak * matrix         (tensor cores: roofline.TENSOR of their peak)
    memory  = bytes / (bandwidth * bandwidth utilization)
    step    = compute + memory + kernel_s * kernels                         (form `sum`)
    step    = max(compute, memory) + kernel_s * kernels                     (form `larger`)

On tensor cores `TENSOR_SHARES`, `TENSOR_BANDWIDTH` and `KERNEL_S` replace what was learned. A step takes at least
`LAUNCH_S` for each kernel, because launches overlap with the GPU's work: the longer one decides.

The model learns utilizations of the roofline over all measured GPUs instead of latencies (NeuSight, ASPLOS '25), so
that the specification of a GPU that was not measured is enough.
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
from carpool_predictor.models.artifacts import decode, load
from carpool_predictor.models.memory import DERIVED_FACTOR
from carpool_predictor.models.roofline import KERNEL_S, TENSOR, tensor_tflops

FORMAT = 1
"""Version of the artifact's layout."""
UNMEASURED = 1.6
"""Factor to both ends of the interval where tensor cores compute or the processor limits the step. Assumed."""

TENSOR_SHARES = {"GeForce": 1.0, "Hopper": 0.45, "others": 0.8}
"""Shares of the published peak rate that tensor cores reach, by `tensor_group`.

Clocks of GeForce exceed their published ones. Hopper's peak needs more power than its limit. See decision 84."""
TENSOR_BANDWIDTH = 1.0
"""Share of the peak bandwidth. Fused attention and caches save work that the trace counts."""
LAUNCH_S = 40e-6
"""Processor's time for each kernel, with Python and autograd. Chosen on published step times as the shares are."""

_SHARE = Annotated[float, Meta(gt=0, le=2)]
_SECONDS = Annotated[float, Meta(ge=0, le=1e-3)]
_FACTOR = Annotated[float, Meta(gt=0, le=100)]

Form = Literal["sum", "larger"]


class Utilization(msgspec.Struct, frozen=True, kw_only=True):
    """Learned utilizations."""

    form: Form
    matrix: _SHARE
    """Share of the FP32 peak that matrix products reach."""
    bandwidth: _SHARE
    """Share of the peak bandwidth, for bytes counted without caches."""
    kernel_s: _SECONDS
    """Fixed seconds per kernel."""

    def seconds(self, cost: StepCost, rate: float, bandwidth: float) -> float:
        """Return the seconds of a step, from the reached rate in FLOP/s and the peak bandwidth in bytes/s."""
        compute, memory = cost.flops / rate, cost.bytes_moved / (bandwidth * self.bandwidth)
        work = compute + memory if self.form == "sum" else max(compute, memory)
        return work + self.kernel_s * cost.kernels


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored model."""

    format: int
    version: str
    learned: Utilization
    lower: _FACTOR
    """5% quantile of measured over predicted time on held-out GPUs."""
    upper: _FACTOR
    """95% quantile."""
    provenance: dict[str, str | float | int]
    """Data, rows, seed, versions, and errors on held-out GPUs."""


def read_model(content: bytes) -> StepTimeModel:
    """Return the model of an artifact's content.

    Raises:
        MalformedError: The content is truncated, changed, or of another version.
    """
    model = decode(content, StepTimeModel, "a step-time model", FORMAT)
    if not model.lower <= 1 <= model.upper:
        raise MalformedError(f"expected an interval around the prediction, found {model.lower} to {model.upper} of it")
    return model


@cache
def shipped() -> StepTimeModel:
    """Return the model in the package."""
    return load("step_time.json", read_model)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one step alone on a GPU."""

    seconds: Interval
    inside: bool
    """Whether such steps were measured: FP32 without tensor cores, limited by the GPU."""


def tensor_group(product: GpuProduct) -> str:
    """Return the key in `TENSOR_SHARES`; newer GPUs of data centers count as Hopper."""
    if "GeForce" in product.name:
        return "GeForce"
    return "Hopper" if product.compute_capability.partition(".")[0] in ("9", "10") else "others"


def step_time_on(
    cost: StepCost,
    product: GpuProduct,
    precision: Precision,
    *,
    convolutional: bool,
    share: float | None = None,
    launch_s: float = LAUNCH_S,
) -> StepTime:
    """Predict the time of a step.

    The precision decides whether tensor cores compute. `convolutional` is whether most work is in convolutions, for
    which PyTorch uses TF32 by default. `share` replaces the product's in `TENSOR_SHARES`.
    """
    model = shipped()
    learned = model.learned
    rate = product.fp32_tflops * model.learned.matrix
    tensor = tensor_tflops(product, precision, convolutional=convolutional)
    on_tensor_cores = tensor > (rate if precision in (Precision.FP32, Precision.TF32) else 0.0)
    if on_tensor_cores:
        rate = max(rate, tensor * (share or TENSOR_SHARES[tensor_group(product)]) / TENSOR)
        learned = msgspec.structs.replace(learned, bandwidth=TENSOR_BANDWIDTH, kernel_s=KERNEL_S)
    busy_s = learned.seconds(cost, 1e12 * rate, product.memory_bandwidth_gb_s * 1e9)
    median = max(busy_s, launch_s * cost.kernels)
    inside = not on_tensor_cores and median == busy_s
    wider = (1.0 if inside else UNMEASURED) * (DERIVED_FACTOR if product.is_derived else 1)
    return StepTime(
        Interval(
            median=_short(median),
            lower=_short(median * model.lower / wider),
            upper=_short(median * model.upper * wider),
        ),
        inside,
    )


def _short(seconds: float) -> float:
    return float(f"{max(seconds, math.ulp(0.0)):.6g}")
