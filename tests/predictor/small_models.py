"""Small models that trace quickly."""

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from carpool_core.resources.features import ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import MIB
from carpool_predictor.features import Sample
from carpool_predictor.tracing.step import FakeTraining, fake_mode, fake_weights, prepare, weight_dtype
from msgspec.structs import replace
from torch import Tensor, nn


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64), nn.GELU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.Tanh(), nn.Linear(256, 10))


class Attention(nn.Module):
    """Patches, two blocks of attention, a classifier."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 4, stride=4)
        self.blocks = nn.ModuleList(Block(64, dropout) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + y.transpose(1, 2).reshape(batch, tokens, width)
        return x + self.mlp(x)


def fake(build: Callable[[], nn.Module], training: Training, shape: tuple[int, ...] = (3, 32, 32)) -> FakeTraining:
    mode = fake_mode()
    with fake_weights(mode, weight_dtype(training.precision)):
        model = build()
    return prepare(model, mode, training, Sample(shape))


def is_same_step(one: TracedStep, other: TracedStep) -> bool:
    """Whether two steps differ by at most a small segment: Python's garbage collector releases tensors at any time."""
    near = abs(one.reserved_bytes - other.reserved_bytes) <= 2 * MIB
    return near and replace(one, reserved_bytes=0) == replace(other, reserved_bytes=0)


def is_same(one: ModelFeatures, other: ModelFeatures) -> bool:
    """Whether two traces agree, in the sense of `is_same_step`."""
    steps = zip(one.steps, other.steps, strict=True)
    return all(is_same_step(*pair) for pair in steps) and replace(one, steps=[]) == replace(other, steps=[])
