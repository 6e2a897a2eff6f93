"""Activity of a training step from the GPU's specification. No constant is fitted, so that intervals are wide.

    compute     = flops / (peak rate * VECTOR or TENSOR)
    memory      = bytes / (bandwidth * BANDWIDTH)
    gpu time    = compute + memory + KERNEL_S * kernels
    step        = max(gpu time, LAUNCH_S * kernels) + STEP_GAP_S
    gpu_util    = gpu time / step
    sm_active   = gpu_util * fill,   fill = bytes per kernel / (bytes per kernel + FILL_BYTES_PER_SM * SMs)
    occupancy   = sm_active * OCCUPANCY
    dram_active = bytes / bandwidth / step

Kernels run one after the other, each bound by compute or memory. A step lies between the larger and the sum of the two;
the sum is nearer to published rates of ResNet-50. Launches overlap with the GPU's work, so that the longer one decides.
"""

from dataclasses import dataclass

from carpool_core.products import GpuProduct
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor.features import StepCost

VECTOR = 0.7
"""Share of the peak FP32 rate that convolutions and matrix products reach in training."""
TENSOR = 0.4
"""Share of the peak tensor-core rate that they reach; common sizes do not fill the cores."""
TF32_SHARE = 0.5
"""TF32 tensor cores run at half the 16-bit rate (NVIDIA A100 datasheet); PyTorch uses them for FP32 convolutions."""
BANDWIDTH = 0.75
"""Share of the peak bandwidth that element-wise kernels reach."""
KERNEL_S = 3e-6
"""GPU time of an empty kernel, in seconds."""
LAUNCH_S = 10e-6
"""CPU time of one operator of an eager step with its share of autograd; 7 to 30 us, by host."""
STEP_GAP_S = 5e-4
"""Time between steps for reading the loss and copying the next batch. Data loading is not in the graph."""
FILL_BYTES_PER_SM = 48 * 1024
"""Bytes per SM that a kernel moves when half of the SMs have work: 1,024 threads with twelve FP32 numbers each."""
OCCUPANCY = (0.3, 0.07, 0.55)
"""Occupancy per SM activity: about the median, 5% and 95% of GPUMemNet's networks."""
SPREAD_RATIO = 0.35
"""Half width of the intervals, as a ratio."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Median activity of a job alone on a GPU; ratios of time."""

    gpu_util: float
    sm_active: float
    dram_active: float


def matrix_rate(product: GpuProduct, precision: Precision, *, convolutional: bool) -> float:
    """Return the FLOP/s that matrix products reach in training in a precision."""
    vector, tensor = product.fp32_tflops * VECTOR, tensor_tflops(product, precision, convolutional=convolutional)
    return 1e12 * (max(vector, tensor) if precision in (Precision.FP32, Precision.TF32) else tensor or vector)


def tensor_tflops(product: GpuProduct, precision: Precision, *, convolutional: bool) -> float:
    """Return the rate that tensor cores reach in a precision, in TFLOP/s; 0 if they are not used."""
    major = int(product.compute_capability.split(".")[0])
    reached = product.tensor_tflops * TENSOR
    if precision in (Precision.FP32, Precision.TF32):
        # PyTorch uses TF32 for convolutions, from Ampere on, and for other products on demand.
        return reached * TF32_SHARE if (convolutional or precision is Precision.TF32) and major >= 8 else 0.0
    # Before Ampere there is no BF16 arithmetic: it goes through FP32.
    return reached if major >= 8 or precision is Precision.FP16_MIXED else 0.0


def activity_on(cost: StepCost, product: GpuProduct, precision: Precision, *, convolutional: bool) -> Activity:
    """Return the median activity of a step alone on a GPU."""
    bandwidth = product.memory_bandwidth_gb_s * 1e9
    compute_s = cost.flops / matrix_rate(product, precision, convolutional=convolutional)
    memory_s = cost.bytes_moved / (bandwidth * BANDWIDTH)
    gpu_s = compute_s + memory_s + KERNEL_S * cost.kernels
    step_s = max(gpu_s, LAUNCH_S * cost.kernels) + STEP_GAP_S
    busy = gpu_s / step_s
    per_kernel = cost.bytes_moved / cost.kernels
    fill = per_kernel / (per_kernel + FILL_BYTES_PER_SM * product.sm_count)
    return Activity(gpu_util=busy, sm_active=busy * fill, dram_active=cost.bytes_moved / bandwidth / step_s)


def intervals(activity: Activity) -> ActivityPrediction:
    """Return the activity with its intervals."""
    sm_active = _around(activity.sm_active, 1.0)
    middle, low, high = OCCUPANCY
    return ActivityPrediction(
        gpu_util_percent=_around(activity.gpu_util, 100.0),
        sm_active_ratio=sm_active,
        dram_active_ratio=_around(activity.dram_active, 1.0),
        sm_occupancy_ratio=Interval(
            median=round(sm_active.median * middle, 4),
            lower=round(sm_active.lower * low, 4),
            upper=round(sm_active.upper * high, 4),
        ),
    )


def _around(ratio: float, unit: float) -> Interval:
    median = min(max(ratio, 0.0), 1.0)
    return Interval(
        median=round(median * unit, 4),
        lower=round(max(median - SPREAD_RATIO, 0.0) * unit, 4),
        upper=round(min(median + SPREAD_RATIO, 1.0) * unit, 4),
    )
