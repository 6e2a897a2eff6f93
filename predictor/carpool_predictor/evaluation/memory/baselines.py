"""Published ways to estimate memory, on the same rows and splits as ours. Each says what of the original it keeps."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from carpool_core.values import MIB
from numpy.typing import NDArray

from carpool_predictor.evaluation.memory.fit import Sample, fit
from carpool_predictor.models.memory import correct, predict_memory

Floats = NDArray[np.float64]
Judge = Callable[[Sequence[Sample]], Floats]
Estimator = Callable[[Sequence[Sample], int], Judge]
"""Fits on samples with a seed; what it returns estimates peaks in MiB."""

_CONTEXT_MIB = 430
"""CUDA context on an A100, as DNNMem adds one measured for each framework and GPU."""


def _peaks(samples: Sequence[Sample]) -> Floats:
    return np.array([s.measured_mib for s in samples])


def constant(samples: Sequence[Sample], seed: int) -> Judge:
    """Answer the median of the training rows."""
    answer = float(np.median(_peaks(samples)))
    return lambda judged: np.full(len(judged), answer)


def simulation(samples: Sequence[Sample], seed: int) -> Judge:
    """Answer the peak of live fake tensors, without any calibration."""
    return lambda judged: np.array([s.cost.peak_bytes / MIB for s in judged])


def published_fake_tensor(samples: Sequence[Sample], seed: int) -> Judge:
    """Answer what GPUMemNet's authors got from PyTorch's FakeTensor mode, as published beside the measurements."""
    return lambda judged: np.array([s.fake_tensor_mib for s in judged])


def horus(samples: Sequence[Sample], seed: int) -> Judge:
    """Horus (TPDS '22): weights, gradients and state, and each activation twice: its value and its gradient."""

    def estimate(sample: Sample) -> float:
        constant = 3 * sample.features.parameter_bytes
        return (constant + 2 * (sample.cost.peak_bytes - constant)) / MIB

    return lambda judged: np.array([max(estimate(s), 1.0) for s in judged])


def static_sum(samples: Sequence[Sample], seed: int) -> Judge:
    """DNNMem (ESEC/FSE '20): tensors by their lifetime in the graph, plus a constant for the CUDA context."""
    return lambda judged: np.array([s.cost.peak_bytes / MIB + _CONTEXT_MIB for s in judged])


def boosting(samples: Sequence[Sample], seed: int) -> Judge:
    """SchedTune (CCGrid '22): boosted trees on batch, parameters, activations and input; peaks learned directly."""
    from sklearn.ensemble import GradientBoostingRegressor

    def rows(judged: Sequence[Sample]) -> Floats:
        return np.array(
            [
                (
                    s.batch_size,
                    s.features.parameter_bytes / MIB,
                    (s.cost.peak_bytes - 3 * s.features.parameter_bytes) / MIB,
                    s.cost.flops / 1e9,
                )
                for s in judged
            ]
        )

    boosted = GradientBoostingRegressor(random_state=seed, n_estimators=300, max_depth=4, learning_rate=0.05)
    boosted.fit(rows(samples), np.log(_peaks(samples)))
    return lambda judged: np.exp(boosted.predict(rows(judged)))


def perceptrons(samples: Sequence[Sample], seed: int) -> Judge:
    """GPUMemNet's ensemble of multilayer perceptrons, trained anew."""
    from carpool_predictor.evaluation.memory.networks import Classifier

    return Classifier(samples, seed, tokens=False)


def encoder(samples: Sequence[Sample], seed: int) -> Judge:
    """GPUMemNet's transformer encoder, trained anew."""
    from carpool_predictor.evaluation.memory.networks import Classifier

    return Classifier(samples, seed, tokens=True)


def ours(samples: Sequence[Sample], seed: int) -> Judge:
    """Answer our own median."""
    model = fit(samples, seed=seed)

    def estimate(sample: Sample) -> float:
        corrected = correct(model, sample.features, sample.cost, sample.batch_size)
        return float(
            predict_memory(
                sample.cost, sample.features.layers, model, corrected, calibrated=True, context_difference_mib=0
            ).median_mib
        )

    return lambda judged: np.array([estimate(s) for s in judged])


BASELINES: Mapping[str, Estimator] = {
    "constant": constant,
    "raw simulation": simulation,
    "FakeTensor, as published": published_fake_tensor,
    "Horus' formula": horus,
    "DNNMem-like sum": static_sum,
    "SchedTune-like boosting": boosting,
    "GPUMemNet's MLP ensemble": perceptrons,
    "GPUMemNet's transformer encoder": encoder,
}
"""Every baseline, in the order of the tables."""

ESTIMATORS: Mapping[str, Estimator] = {"ours": ours, **BASELINES}
"""Every estimator behind the one interface; a contract test holds each to it."""
