"""Builds the models that GPUMemNet's layer lists stand for: `gpumemnet/[('linear', 1173, 2753031), …]`.

A list says of each layer its kind, the elements that it puts out for one sample, and its parameters; nothing of how
layers join. What `notation` solves for decides that: a 3 × 3 convolution that reads what a 1 × 1 one before it
read stands beside a shortcut, and their outputs are summed after the next convolution; one that reads the channels of
the layer before and of what that one read follows a concatenation. A size that falls is a pool, or a stride where the
size is that of a stride. Sums without a convolution in the shortcut leave no trace in a list, and are left out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from carpool_predictor.catalog.layer_lists import invalid
from carpool_predictor.catalog.notation import NORMALIZATION, Convolution, Layer, NotationError, Place, shape_of

_SAME: dict[str, Callable[[], nn.Module]] = {
    **{
        name: getattr(nn, name)
        for name in (
            "ReLU", "LeakyReLU", "PReLU", "ELU", "SELU", "GELU", "Tanh", "SiLU", "Softplus", "Mish", "Sigmoid",
            "Identity",
        )
    },
    "Softmax": lambda: nn.Softmax(1),
    "softmax": lambda: nn.Softmax(1),
    "dropout": nn.Dropout,
}  # fmt: skip


class _Plan(NamedTuple):
    """What happens before a layer runs."""

    adds: bool = False
    """The shortcut's output is added."""
    concatenates: bool = False
    """What the convolution before read is put in front."""
    returns: bool = False
    """The layer reads what the convolution before read; that one's output waits as the shortcut."""
    keeps: bool = False
    """What the layer reads is what the convolution before read, from now on."""


class Listed(nn.Module):
    """Runs layers in order, joined as planned."""

    def __init__(self, steps: Sequence[tuple[_Plan, nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(module for _, module in steps)
        self._plans = [plan for plan, _ in steps]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of a batch."""
        before = shortcut = x
        for plan, layer in zip(self._plans, self.layers, strict=True):
            if plan.adds:
                x = x + shortcut
            if plan.concatenates:
                x = torch.cat([before, x], 1)
            if plan.returns:
                shortcut, x = x, before
            if plan.keeps:
                before = x
            x = layer(x)
        return x


def build_listed(layers: Sequence[Layer], shape: Sequence[int]) -> nn.Module:
    """Build the model.

    Raises:
        TraceError: A layer's numbers fit no shape; the message names the layer.
    """
    builder = _Builder(shape)
    for index, layer in enumerate(layers):
        try:
            builder.add(layer)
        except NotationError as e:
            raise invalid(f"layer {index} {layer}: {e}") from e
    return Listed(builder.steps)


class _Builder:
    def __init__(self, shape: Sequence[int]) -> None:
        self.steps: list[tuple[_Plan, nn.Module]] = []
        self._channels, self._size = shape[0], shape[1] if len(shape) > 1 else 1
        self._is_image = len(shape) > 1
        self._read = self._read_size = self._taps = 0
        """Channels and size of what the convolution before read, and its taps; 0 where there is none."""
        self._beside = 0
        """Convolutions since the shortcut, which is added after two; 0 where none waits."""

    def add(self, layer: Layer) -> None:
        kind, outputs, parameters = layer
        if kind == "conv2d":
            self._convolution(outputs, parameters)
        elif kind == "adaptive_avg_pool2d":
            self._pool(outputs)
        elif kind == "linear":
            self._linear(outputs, parameters)
        else:
            _expect("outputs", self._channels * self._size**2, outputs)
            if kind in NORMALIZATION:
                _expect("parameters", 2 * self._channels, parameters)
                norm = nn.BatchNorm2d if self._is_image else nn.BatchNorm1d
                self.steps.append((_Plan(), norm(self._channels)))
            else:
                self.steps.append((_Plan(), _SAME[kind]()))

    def _sum(self) -> _Plan:
        """Plan the addition of a shortcut whose branch is over."""
        is_over = self._beside >= 2
        if is_over:
            self._beside = 0
        return _Plan(adds=is_over)

    def _convolution(self, outputs: int, parameters: int) -> None:
        if not self._is_image:
            raise NotationError("expected samples [channels, size, size] before a convolution, found features")
        plan, branch = self._sum(), self._beside + (self._beside > 0)
        found = shape_of(Place(self._size, self._channels, self._read), outputs, parameters)
        if self._taps == 1 and found.taps != 1 and found.reads == self._read:
            plan, branch, self._size = _Plan(returns=True), 1, self._read_size
        elif found.reads != self._channels:
            if not self._read or found.reads != self._channels + self._read:
                raise NotationError(f"it reads {found.reads} channels, and no layer before it puts out so many")
            _expect("size of what is concatenated", self._size, self._read_size)
            plan = plan._replace(concatenates=True)
        plan, stride = self._shrink(plan, found)
        kernel, padding = (1, 0) if found.taps == 1 else (3, 1)
        convolution = nn.Conv2d(found.reads, found.channels, kernel, stride=stride, padding=padding)
        self.steps.append((plan._replace(keeps=True), convolution))
        self._read, self._read_size, self._taps, self._beside = found.reads, self._size, found.taps, branch
        self._channels, self._size = found.channels, found.size

    def _shrink(self, plan: _Plan, found: Convolution) -> tuple[_Plan, int]:
        """Plan how the size falls to that of a convolution; return what is left to plan, and its stride."""
        if found.size == self._size:
            return plan, 1
        if (self._size + 1) // 2 == found.size and (plan.returns or found.taps == 1 or self._size % 2):
            return plan, 2
        kernel = self._size // found.size
        _expect("size", self._size // kernel, found.size)
        self.steps.append((plan, nn.AvgPool2d(kernel) if self._taps == 1 else nn.MaxPool2d(kernel)))
        self._size = found.size
        return _Plan(), 1

    def _pool(self, outputs: int) -> None:
        plan = self._sum()
        if self._read and outputs == self._channels + self._read:
            plan = plan._replace(concatenates=True)
        else:
            _expect("outputs", self._channels, outputs)
        self.steps.append((plan, nn.AdaptiveAvgPool2d(1)))
        self._channels, self._size = outputs, 1

    def _linear(self, outputs: int, parameters: int) -> None:
        inputs = self._channels * self._size**2
        _expect("parameters", outputs * (inputs + 1), parameters)
        if self._is_image:
            self.steps.append((self._sum(), nn.Flatten()))
        self.steps.append((_Plan(), nn.Linear(inputs, outputs)))
        self._channels, self._size, self._is_image = outputs, 1, False


def _expect(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise NotationError(f"expected {expected:,} {what}, found {found:,}")
