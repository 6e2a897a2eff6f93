"""Models are built without their weights, and do not notice."""

import pytest
import torch
from carpool_predictor.tracing.step import fake_mode, fake_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4))


def test_weights_turn_fake_and_stay_tied() -> None:
    mode = fake_mode()
    with fake_weights(mode):
        model = Tied()
    assert isinstance(model.mask, FakeTensor)
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is model.embedding.weight
    assert [p.numel() for p in model.parameters()] == [800]


class AsksForNumbers(nn.Module):
    """Builds as timm's transformers do: a schedule out of a tensor, an initialiser that looks at its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3)))


def test_constructors_may_ask_tensors_for_numbers() -> None:
    with fake_weights(fake_mode()):
        model = AsksForNumbers()
    assert model.blocks[2].p == pytest.approx(0.1)
    assert isinstance(model.position, FakeTensor)


def test_after_building_pytorch_is_as_before() -> None:
    before = dict(vars(nn.init))
    with fake_weights(fake_mode()):
        pass
    assert dict(vars(nn.init)) == before
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)
