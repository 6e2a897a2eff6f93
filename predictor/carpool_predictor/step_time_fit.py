"""Step time on a GPU that was never measured: each kernel's utilization of the roofline, never its latency.

    product   = max(flops / (peak · M) · (1 + W / waves), bytes / (bandwidth · B)) + O
    pass      = bytes / (bandwidth · B) + O
    step      = sum of all kernels

Four numbers are learned over all GPUs: M and B, the utilizations that large kernels reach; W, how much a kernel loses
that fills few waves of thread blocks (tiles of 128 × 128, one for each SM); O, seconds that a kernel takes in any case.
Everything else comes from the GPU's specification. Needs the extra `train`.
"""

import math
from collections.abc import Callable, Sequence

import lightgbm
import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_predictor.neusight import GPUS, MeasuredGpu, ModelRow

TILE = 128
_START = (0.8, 0.8, 0.1, 5e-6)
_TREES = {
    "objective": "l1", "learning_rate": 0.1, "num_leaves": 7, "min_data_in_leaf": 3, "num_threads": 1,
    "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip

Matrix = NDArray[np.float64]


class Utilization(msgspec.Struct, frozen=True, kw_only=True):
    """What is learned."""

    products: float
    """M."""
    bandwidth: float
    """B."""
    waves: float
    """W."""
    kernel_s: float
    """O."""

    def step_time_s(self, row: ModelRow, gpu: MeasuredGpu) -> float:
        """Predict a step, in seconds."""
        rate, bandwidth = gpu.fp32_tflops * 1e12 * self.products, gpu.memory_bandwidth_gb_s * 1e9 * self.bandwidth
        total = 0.0
        for product in row.products:
            tiles = product.batch * math.ceil(product.rows / TILE) * math.ceil(product.columns / TILE)
            compute_s = product.flops / rate * (1 + self.waves * gpu.sm_count / tiles)
            total += product.times * (max(compute_s, product.bytes / bandwidth) + self.kernel_s)
        for each in row.passes:
            total += each.times * (each.bytes / bandwidth + self.kernel_s)
        return total


ROOFLINE = Utilization(products=1.0, bandwidth=1.0, waves=0.0, kernel_s=0.0)
"""The plain roofline: every kernel runs at a peak."""


def fit(rows: Sequence[ModelRow]) -> Utilization:
    """Learn from measured steps, by their logarithms and without minding outliers."""

    def errors(logs: Matrix) -> list[float]:
        model = _model(logs)
        return [math.log(model.step_time_s(row, GPUS[row.gpu]) / row.time_s) for row in rows]

    return _model(least_squares(errors, np.log(_START), loss="soft_l1", f_scale=0.1).x)


def _model(logs: Matrix) -> Utilization:
    products, bandwidth, waves, kernel_s = (float(value) for value in np.exp(logs))
    return Utilization(products=products, bandwidth=bandwidth, waves=waves, kernel_s=kernel_s)


Predictor = Callable[[Sequence[ModelRow], Sequence[ModelRow]], Matrix]
"""Predicts the second rows' times, in seconds, having seen the first."""


def by_utilization(known: Sequence[ModelRow], asked: Sequence[ModelRow]) -> Matrix:
    """Predict by what was learned of utilization."""
    model = fit(known)
    return np.array([model.step_time_s(row, GPUS[row.gpu]) for row in asked])


def by_roofline(known: Sequence[ModelRow], asked: Sequence[ModelRow]) -> Matrix:
    """Predict by the plain roofline; nothing is learned."""
    return np.array([ROOFLINE.step_time_s(row, GPUS[row.gpu]) for row in asked])


def by_latency(known: Sequence[ModelRow], asked: Sequence[ModelRow]) -> Matrix:
    """Predict raw latency by boosted trees on FLOPs, bytes and the GPU's specification, as Habitat's kind does."""
    x, y = _raw(known), np.log([row.time_s for row in known])
    booster = lightgbm.train(_TREES, lightgbm.Dataset(x, y, params={"verbosity": -1}), num_boost_round=200)
    predicted: Matrix = np.exp(booster.predict(_raw(asked)))
    return predicted


def by_constant(known: Sequence[ModelRow], asked: Sequence[ModelRow]) -> Matrix:
    """Predict the median of what is known."""
    return np.full(len(asked), float(np.median([row.time_s for row in known])))


PREDICTORS: dict[str, Predictor] = {
    "utilization (ours)": by_utilization,
    "plain roofline": by_roofline,
    "raw latency, boosted trees": by_latency,
    "constant": by_constant,
}


def _raw(rows: Sequence[ModelRow]) -> Matrix:
    return np.array(
        [
            (
                math.log(sum(p.times * p.flops for p in row.products)),
                math.log(sum(p.times * p.bytes for p in row.products) + sum(p.times * p.bytes for p in row.passes)),
                float(row.training),
                GPUS[row.gpu].fp32_tflops,
                GPUS[row.gpu].memory_bandwidth_gb_s,
                GPUS[row.gpu].sm_count,
            )
            for row in rows
        ]
    )


def gpus_held_out(rows: Sequence[ModelRow], predictor: Predictor) -> Matrix:
    """Predict each GPU's steps from those of all other GPUs, in seconds."""
    predicted = np.zeros(len(rows))
    for gpu in sorted({row.gpu for row in rows}):
        held = [i for i, row in enumerate(rows) if row.gpu == gpu]
        predicted[held] = predictor([row for row in rows if row.gpu != gpu], [rows[i] for i in held])
    return predicted
