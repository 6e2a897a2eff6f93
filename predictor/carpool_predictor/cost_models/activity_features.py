"""Physics as features: what the roofline says of a step on a GPU, without units, so that it carries over.

A forest that saw one GPU product knows no other; but it knows steps by how long the GPU computes against how long the
CPU launches, by their arithmetic intensity against the product's ridge, and by how much work a kernel has for each SM.
On another product these features change as its specification says. Nor does any of them grow as a model gets deeper: a
network of twice as many equal layers keeps a GPU as busy, and one with more kernels than any that was measured is known
by its kernels.
"""

import math

from carpool_core.products import GpuProduct
from carpool_core.resources.features import ModelFeatures
from carpool_core.values import Precision

from carpool_predictor.cost_models.roofline import BANDWIDTH, KERNEL_S, LAUNCH_S, STEP_GAP_S, matrix_rate
from carpool_predictor.features.interpolation import StepCost
from carpool_predictor.features.step_work import StepWork

NAMES = (
    "log_gpu_over_launch", "busy", "compute_share", "log_intensity_over_ridge", "log_flops_per_kernel_per_sm",
    "log_bytes_per_kernel_per_sm", "log_weights_over_bytes", "gap_share", "log_bytes_per_sample_per_kernel",
    "log_batch_size", "elementwise_per_product", "normalization_per_product", "convolution_share",
)  # fmt: skip
"""Names of the features, in order."""

_TINY = 1e-12


def work_of_features(features: ModelFeatures, cost: StepCost, batch_size: int) -> StepWork:
    """Return the step at the batch size that `cost` is of."""
    return StepWork(
        batch_size=batch_size,
        parameter_bytes=float(features.parameter_bytes),
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        kernels=cost.kernels,
        layers=features.layers,
    )


def features_of(work: StepWork, product: GpuProduct, precision: Precision) -> tuple[float, ...]:
    """Return the features of one step on a GPU product, in the order of `NAMES`."""
    layers = work.layers
    # Recurrent layers and embeddings multiply matrices too.
    products = max(layers.convolution + layers.linear + layers.recurrent + layers.embedding, 1)
    rate = matrix_rate(product, precision, convolutional=layers.convolution > layers.linear)
    bandwidth = product.memory_bandwidth_gb_s * 1e9 * BANDWIDTH
    compute_s, memory_s = work.flops / rate, work.bytes_moved / bandwidth
    gpu_s = compute_s + memory_s + KERNEL_S * work.kernels
    launch_s = LAUNCH_S * work.kernels
    blocks = work.kernels * product.sm_count
    step_s = max(gpu_s, launch_s) + STEP_GAP_S
    return (
        _log(gpu_s / launch_s),
        gpu_s / step_s,
        compute_s / gpu_s,
        _log(work.flops / max(work.bytes_moved, 1.0) / (rate / bandwidth)),
        _log(work.flops / blocks),
        _log(work.bytes_moved / blocks),
        _log(work.parameter_bytes / max(work.bytes_moved, 1.0)),
        STEP_GAP_S / step_s,
        _log(work.bytes_moved / work.batch_size / work.kernels),
        _log(work.batch_size),
        (layers.activation + layers.normalization + layers.other) / products,
        layers.normalization / products,
        layers.convolution / products,
    )


def _log(value: float) -> float:
    return math.log(max(value, _TINY))
