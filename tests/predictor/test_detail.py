"""The closer record of a step agrees with the plain one, on fake tensors as on meta tensors."""

import pytest
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer

pytest.importorskip("torch")

from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.features import ModelRecord
from carpool_predictor.tracing import models
from carpool_predictor.tracing.step import fake_mode, meta_mode

TRAINING = Training(batch_size=8, optimizer=Optimizer.SGD_MOMENTUM)


def recorded(name: str, mode: models.TensorMode) -> ModelRecord:
    return models._record(recipe_of(CatalogModel(name=name)), TRAINING, (4, 8), mode)


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/vit_tiny_patch16_224", "timm/mobilenetv3_small_050"])
def test_meta_tensors_count_as_fake_ones(name: str) -> None:
    assert recorded(name, meta_mode()) == recorded(name, fake_mode())


def test_the_record_holds_the_plain_features() -> None:
    record = recorded("torchvision/resnet18", meta_mode())
    features = models.trace_recipe(recipe_of(CatalogModel(name="torchvision/resnet18")), TRAINING)
    assert [s.peak_bytes for s in record.steps] == [s.peak_bytes for s in features.steps]
    assert [s.flops for s in record.steps] == [s.flops for s in features.steps]
    assert record.layers == features.layers
    assert record.parameters == features.parameters


def test_numbers_of_a_step_contain_each_other() -> None:
    for step in recorded("timm/mobilenetv3_small_050", meta_mode()).steps:
        assert step.activation_bytes <= step.peak_bytes <= step.reserved_bytes
        assert 0 < step.largest_bytes < step.peak_bytes
        assert step.unfolded_max > 0
