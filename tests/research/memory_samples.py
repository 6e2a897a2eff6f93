"""Synthetic measurements of memory: a line of the reserved memory with noise."""

import random

from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.values import MIB
from carpool_predictor.features import cost_at
from carpool_research.memory.fit import Sample


def sample(number: int, batch: int, noise: random.Random) -> Sample:
    """Return a measured step of the model with this number, of one of ten families."""
    size = 10 + 9 * number
    step = TracedStep(
        batch_size=batch,
        peak_bytes=size * batch * MIB,
        activation_bytes=0,
        reserved_bytes=int(1.05 * size * batch * MIB),
        flops=1e9 * size * batch,
        bytes_moved=1e8 * batch * (1 + number % 7),
        kernels=100 + number,
    )
    layers = LayerCounts(convolution=number % 5, linear=1 + number % 3)
    features = ModelFeatures(parameters=1, trainable_parameters=1, parameter_bytes=4, steps=[step], layers=layers)
    measured = (1.2 * 1.05 * size * batch + 1500) * noise.gauss(1, 0.03)
    return Sample(f"m{number}", f"f{number % 10}", batch, measured, measured / 2, features, cost_at(features, batch))
