"""GPUMemNet's two classifiers (arXiv 2025; itu-rad/GPUMemNet) in PyTorch, trained anew on the rows at hand.

Kept of the original: classes of 8 GiB for CNNs and transformers; counts of layers by kind, parameters, activations and
batch size as inputs; an ensemble of multilayer perceptrons whose probabilities are averaged; a transformer encoder over
tokens. Changed: the original's encoder reads a model's list of layers, which features do not hold; here each input is a
token, with an embedding of its own. The answer in MiB is the middle of the likeliest class.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from carpool_predictor.evaluation.memory.fit import Sample

Floats = NDArray[np.float64]

CLASS_MIB = 8192
CLASSES = 5
"""Of a GPU with 40 GiB."""
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
    """An ensemble of networks of one kind, fitted at once.

    Args:
        samples: Measured runs.
        seed: Seed of weights and order; the caller's own random numbers are left alone.
        tokens: One transformer encoder rather than several perceptrons.
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
        """Return the middle of each sample's likeliest class, in MiB."""
        x = self._standard(inputs_of(judged))
        with torch.no_grad(), _one_thread():
            shares = torch.stack([member(x).softmax(-1) for member in self.members]).mean(0)
        middles: Floats = (shares.argmax(-1).numpy() + 0.5) * CLASS_MIB
        return middles

    def _standard(self, rows: Floats) -> Tensor:
        return torch.tensor((rows - self._mean) / self._spread, dtype=torch.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have PyTorch use one thread: how many share a sum decides its last digits, and after epochs the answers."""
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
