"""Layer lists in GPUMemNet's notation, against what its data states of each layer."""

import csv
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_predictor.catalog.layer_lists import read_layers, sample_shape
from carpool_predictor.catalog.listed import build_listed
from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.cli import target_of
from carpool_predictor.features import TraceError
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.process import TraceRequest
from carpool_predictor.tracing.step import fake_weights, meta_mode
from torch import nn

MLP = (
    "[('linear', 20, 1300), ('batch_normalization', 20, 40), ('PReLU', 20, 0), ('linear', 10, 210), ('Softmax', 10, 0)]"
)
_UNLISTED = (nn.MaxPool2d, nn.AvgPool2d, nn.Flatten)


def rows(data: Path, kind: str, each: int) -> Iterator[dict[str, str]]:
    with (data / "gpumemnet" / f"{kind}_a100_40gb.csv").open(newline="") as file:
        listed = (row for row in csv.DictReader(file) if row["Activations-Params"] != "[]")
        yield from islice(listed, 0, None, each)


def shape_in(name: str) -> list[int]:
    """Return the shape of a sample that a row's name states."""
    stated = dict(re.findall(r"(?:^|_)(input|input_channels|input_size):(\d+)", name))
    return [int(stated[key]) for key in (["input"] if "input" in stated else ["input_channels", *["input_size"] * 2])]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_real_rows_have_the_activations_and_parameters_that_the_data_states(published: Path, kind: str) -> None:
    architectures = set()
    for row in rows(published, kind, each=37):
        name, layers = row["Filename"], read_layers(row["Activations-Params"])
        shape = sample_shape(layers, None if kind == "mlp" else shape_in(name))
        assert list(shape) == shape_in(name)
        with fake_weights(meta_mode()):
            model = build_listed(layers, shape)
        outputs: list[int] = []
        for layer in model.get_submodule("layers").children():
            if not isinstance(layer, _UNLISTED):
                layer.register_forward_hook(lambda _, __, out, to=outputs: to.append(out[0].numel()))
        model(torch.empty(2, *shape, device="meta"))
        assert outputs == [layer[1] for layer in layers], name
        assert sum(outputs) == int(row["Total Activations"])
        # The data counts no parameter of PReLU, which has one.
        own = sum(p.numel() for p in model.parameters()) - sum(layer[0] == "PReLU" for layer in layers)
        assert own == int(row["Total Parameters"]), name
        architectures.add(name.partition("_arch:")[2].partition("_")[0])
    assert len(architectures) == {"mlp": 4, "cnn": 7}[kind]


def test_a_list_traces_like_any_other_catalog_model() -> None:
    recipe = recipe_of(CatalogModel(name=f"gpumemnet/{MLP}"))
    features = trace_recipe(recipe, Training(batch_size=16))
    assert recipe.input_shape == (64,)
    assert features.parameters == 1300 + 40 + 1 + 210
    assert (features.layers.linear, features.layers.normalization, features.layers.activation) == (2, 1, 2)


def test_the_features_of_a_long_list_can_be_read_again() -> None:
    name = "gpumemnet/[" + "('linear', 64, 4160), ('ReLU', 64, 0), " * 60 + "]"
    features = trace_recipe(recipe_of(CatalogModel(name=name)), Training(batch_size=16))
    assert msgspec.json.decode(msgspec.json.encode(features), type=ModelFeatures).name == "gpumemnet/120 layers"


def test_a_shortcut_is_added_and_what_is_concatenated_is_kept() -> None:
    residual = [("conv2d", 8 * 64, 8 * 4), ("conv2d", 8 * 64, 8 * 28), ("conv2d", 8 * 64, 8 * 73), ("linear", 5, 2565)]
    torch.manual_seed(0)
    model, x = build_listed(residual, (3, 8, 8)), torch.rand(2, 3, 8, 8)
    shortcut, first, second, flatten, last = model.get_submodule("layers").children()
    torch.testing.assert_close(model(x), last(flatten(second(first(x)) + shortcut(x))))

    dense = [("conv2d", 4 * 64, 4 * 28), ("conv2d", 6 * 64, 6 * 64), ("adaptive_avg_pool2d", 13, 0), ("linear", 5, 70)]
    model = build_listed(dense, (3, 8, 8))
    first, second, pool, flatten, last = model.get_submodule("layers").children()
    both = torch.cat([x, first(x)], 1)
    torch.testing.assert_close(model(x), last(flatten(pool(torch.cat([both, second(both)], 1)))))


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        pytest.param("[('lstm', 5, 5)]", [8], "layer 0 .*expected one of .*conv2d.* found 'lstm'", id="unknown kind"),
        pytest.param("[('linear', 5)]", None, r"expected a list such as .*\$\[0\]", id="a number is missing"),
        pytest.param("[('linear', -5, 5)]", None, r"expected a list such as .*>= 1", id="negative"),
        pytest.param("[('linear', 5, 5", None, "expected a list such as .*never closed", id="cut short"),
        pytest.param("[" + "(" * 2000, None, "expected a list such as", id="nested"),
        pytest.param("open('x')", None, "expected a list such as", id="code"),
        pytest.param("[]", None, "at least one layer", id="empty"),
        pytest.param("[('linear', 5, 7)]", None, r"expected outputs × \(inputs \+ 1\)", id="no number of inputs"),
        pytest.param("[('linear', 5, 30)]", [6], "layer 0 .*expected 35 parameters, found 30", id="another input"),
        pytest.param("[('conv2d', 64, 28)]", None, "needs input", id="unknown image"),
        pytest.param("[('conv2d', 64, 28)]", [3, 8, 9], r"expected input .*found \[3, 8, 9\]", id="not square"),
        pytest.param("[('conv2d', 64, 28)]", [3], "expected samples", id="convolution of features"),
        pytest.param("[('conv2d', 64, 55)]", [3, 8, 8], "reads 6 channels", id="concatenation with itself"),
        pytest.param("[('conv2d', 7, 11)]", [3, 8, 8], "no number of channels fits", id="no shape"),
        pytest.param("[('ReLU', 7, 0)]", [8], "layer 0 .*expected 8 outputs, found 7", id="wrong activation"),
    ],
)
def test_a_senseless_list_is_refused_with_what_was_expected(text: str, shape: list[int] | None, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        recipe_of(CatalogModel(name=f"gpumemnet/{text}", input=shape)).build()
    assert caught.value.reason == "LayerListInvalid"


def test_classes_stand_in_the_list_itself() -> None:
    with pytest.raises(TraceError, match="leave numClasses out"):
        recipe_of(CatalogModel(name=f"gpumemnet/{MLP}", num_classes=3))


def test_the_command_line_takes_a_list() -> None:
    asked = target_of(f"gpumemnet/{MLP}", None, None, Training())
    assert isinstance(asked, TraceRequest)
    assert asked.model == ModelSource(catalog=CatalogModel(name=f"gpumemnet/{MLP}"))
