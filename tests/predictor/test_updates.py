"""A step under another optimizer: put together, it is what a trace with that optimizer finds, to the byte."""

from collections.abc import Callable

import pytest
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision

pytest.importorskip("torch")

from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.features import ModelRecord
from carpool_predictor.tracing import models
from carpool_predictor.tracing.step import fake_mode, meta_mode
from torch import Tensor, nn


class Partly(nn.Module):
    """Has a layer that nobody calls, so that it gets no gradient, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 512)
        self.unused = nn.Linear(512, 512)
        self.frozen = nn.Linear(512, 512)
        self.out = nn.Linear(512, 10)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.used(x).relu()))


def convolutions() -> nn.Module:
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


RECIPES = {
    "partly": Recipe("partly", Partly, (64,)),
    "convolutions": Recipe("convolutions", convolutions, (3, 32, 32)),
    "mostly weights": Recipe("mostly weights", lambda: nn.Linear(4096, 1024), (4096,)),
}


def traced(recipe: Recipe, training: Training, others: tuple[Optimizer, ...], mode: models.TensorMode) -> ModelRecord:
    return models._record(recipe, training, (4, 8), mode, others)


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_comes_to_what_is_traced(name: str, precision: Precision, optimizer: Optimizer) -> None:
    training = Training(batch_size=8, optimizer=Optimizer.SGD_MOMENTUM, precision=precision)
    put_together = traced(RECIPES[name], training, (optimizer,), meta_mode())
    other = Training(batch_size=8, optimizer=optimizer, precision=precision)
    assert [step.traced(optimizer) for step in put_together.steps] == [
        step.traced() for step in traced(RECIPES[name], other, (), meta_mode()).steps
    ]


@pytest.mark.parametrize("make", [fake_mode, meta_mode])
def test_optimizers_are_told_apart(make: Callable[[], models.TensorMode]) -> None:
    training = Training(batch_size=8, optimizer=Optimizer.SGD_MOMENTUM)
    (step, _) = traced(RECIPES["mostly weights"], training, tuple(Optimizer), make()).steps
    peaks = {optimizer: update.peak_bytes for optimizer, update in step.updates.items()}
    assert peaks[Optimizer.SGD] < peaks[Optimizer.SGD_MOMENTUM] < peaks[Optimizer.RMSPROP] < peaks[Optimizer.ADAM]
    assert peaks[Optimizer.SGD_MOMENTUM] == step.peak_bytes


def test_features_are_those_of_the_optimizer() -> None:
    record = traced(RECIPES["convolutions"], Training(batch_size=8), (Optimizer.ADAGRAD,), meta_mode())
    assert record.features().optimizer is Optimizer.ADAMW
    assert record.features(Optimizer.ADAMW) == record.features()
    assert record.features(Optimizer.ADAGRAD).optimizer is Optimizer.ADAGRAD
    with pytest.raises(KeyError):
        record.features(Optimizer.SGD)
