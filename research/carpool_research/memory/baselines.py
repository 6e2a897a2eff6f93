"""Published memory estimators, on the same rows and splits as ours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from carpool_core.values import MIB
from carpool_predictor.models.memory import correction_of, predict_memory
from numpy.typing import NDArray
from torch import Tensor, nn

from carpool_research.memory.fit import Sample, fit

Floats = NDArray[np.float64]
Estimate = Callable[[Sequence[Sample]], Floats]
Estimator = Callable[[Sequence[Sample], int], Estimate]
"""Fits samples with a seed, and returns a function that estimates peaks in MiB."""

_CONTEXT_MIB = 430
"""CUDA context on an A100; DNNMem adds one for each framework and GPU."""


def _peaks(samples: Sequence[Sample]) -> Floats:
    return np.array([s.measured_mib for s in samples])


def constant(samples: Sequence[Sample], seed: int) -> Estimate:
    """Estimate the median of the training rows."""
    answer = float(np.median(_peaks(samples)))
    return lambda judged: np.full(len(judged), answer)


def simulation(samples: Sequence[Sample], seed: int) -> Estimate:
    """Estimate the peak of live fake tensors, without calibration."""
    return lambda judged: np.array([s.cost.peak_bytes / MIB for s in judged])


def published_fake_tensor(samples: Sequence[Sample], seed: int) -> Estimate:
    """Return the published estimates of PyTorch's FakeTensor mode by GPUMemNet's authors."""
    return lambda judged: np.array([s.fake_tensor_mib for s in judged])


def horus(samples: Sequence[Sample], seed: int) -> Estimate:
    """Horus (TPDS '22): weights, gradients, state, and twice the activations (value and gradient)."""

    def estimate(sample: Sample) -> float:
        constant = 3 * sample.features.parameter_bytes
        return (constant + 2 * (sample.cost.peak_bytes - constant)) / MIB

    return lambda judged: np.array([max(estimate(s), 1.0) for s in judged])


def static_sum(samples: Sequence[Sample], seed: int) -> Estimate:
    """DNNMem (ESEC/FSE '20): tensors by their lifetime in the graph, plus a constant for the CUDA context."""
    return lambda judged: np.array([s.cost.peak_bytes / MIB + _CONTEXT_MIB for s in judged])


def boosting(samples: Sequence[Sample], seed: int) -> Estimate:
    """SchedTune (CCGrid '22): boosted trees on batch, parameters, activations and input."""
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


def perceptrons(samples: Sequence[Sample], seed: int) -> Estimate:
    """GPUMemNet's ensemble of multilayer perceptrons, trained again."""
    return Classifier(samples, seed, tokens=False)


def encoder(samples: Sequence[Sample], seed: int) -> Estimate:
    """GPUMemNet's transformer encoder, trained again."""
    return Classifier(samples, seed, tokens=True)


def ours(samples: Sequence[Sample], seed: int) -> Estimate:
    """Return the median of our own model."""
    model = fit(samples, seed=seed)

    def estimate(sample: Sample) -> float:
        corrected = correction_of(model, sample.features, sample.cost, sample.batch_size)
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
"""All estimators; a contract test checks each."""


CLASS_MIB = 8192
CLASSES = 5
"""Number of classes on a GPU with 40 GiB."""
MEMBERS = 5
EPOCHS = 40
_BATCH = 128
_RATE = 3e-3


def inputs_of(samples: Sequence[Sample]) -> Floats:
    """Return GPUMemNet's inputs, shape (samples, inputs): logarithms of counts and sizes."""
    rows = []
    for sample in samples:
        layers, first = sample.features.layers, sample.features.steps[0]
        counts = [getattr(layers, name) for name in layers.__struct_fields__]
        activations = first.activation_bytes / first.batch_size
        rows.append([*counts, sample.batch_size, sample.features.parameters, activations])
    logarithms: Floats = np.log1p(np.array(rows, dtype=float))
    return logarithms


class _Tokens(nn.Module):
    """A transformer encoder over inputs as tokens."""

    def __init__(self, inputs: int, width: int = 32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(inputs, width) * 0.1)
        self.name = nn.Parameter(torch.randn(inputs, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, classes), of standardized inputs, shape (batch, inputs)."""
        logits: Tensor = self.head(self.encoder(x.unsqueeze(-1) * self.scale + self.name).mean(1))
        return logits


def _perceptron(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


class Classifier:
    """An ensemble of networks of one kind; the constructor fits it.

    Args:
        samples: Measured runs.
        seed: Seed of weights and order; the caller's random state does not change.
        tokens: Whether it is one transformer encoder instead of several perceptrons.
    """

    def __init__(self, samples: Sequence[Sample], seed: int, *, tokens: bool) -> None:
        rows = inputs_of(samples)
        self._mean, self._spread = rows.mean(axis=0), rows.std(axis=0) + 1e-6
        measured = np.array([s.measured_mib for s in samples])
        classes = np.clip(np.ceil(measured / CLASS_MIB) - 1, 0, CLASSES - 1)
        x, y = self._standard(rows), torch.tensor(classes, dtype=torch.long)
        with torch.random.fork_rng(), _one_thread():
            torch.manual_seed(seed)
            self.members = [
                _fitted(_Tokens(rows.shape[1]) if tokens else _perceptron(rows.shape[1]), x, y)
                for _ in range(1 if tokens else MEMBERS)
            ]

    def __call__(self, judged: Sequence[Sample]) -> Floats:
        """Return the middle of each sample's most probable class, in MiB."""
        x = self._standard(inputs_of(judged))
        with torch.no_grad(), _one_thread():
            shares = torch.stack([member(x).softmax(-1) for member in self.members]).mean(0)
        middles: Floats = (shares.argmax(-1).numpy() + 0.5) * CLASS_MIB
        return middles

    def _standard(self, rows: Floats) -> Tensor:
        return torch.tensor((rows - self._mean) / self._spread, dtype=torch.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread, because the order of a sum changes its last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fitted(network: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loss = nn.CrossEntropyLoss()
    network.train()
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(x)), _BATCH):
            optimizer.zero_grad()
            loss(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
        schedule.step()
    return network.eval()
