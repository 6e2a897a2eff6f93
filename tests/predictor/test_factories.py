"""`my_train.py:build_model`: what is said of factories that cannot be predicted."""

from pathlib import Path

import pytest
from carpool_core.resources.job import Training
from carpool_predictor.commands import graph, predict
from carpool_predictor.requests import FactoryModel, TraceRequest
from carpool_predictor.targets import read_features
from carpool_predictor.trace import answer
from click.testing import CliRunner

SOURCE = """
import torch
from torch import nn

def fine():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))

def raises():
    raise RuntimeError("no such checkpoint")

def needs_arguments(width):
    return nn.Linear(width, 10)

def returns_none():
    return None

class Dynamic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return x[x > 0].sum()

def dynamic():
    return Dynamic()

not_a_function = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_train.py"
    path.write_text(SOURCE.replace("nn.LazyLinear(10)", "nn.Linear(8 * 30 * 30, 10)"))
    return path


def ask(source: Path, function: str, shape: list[int]) -> TraceRequest:
    return TraceRequest(
        factory=FactoryModel(path=str(source), function=function, input=shape), training=Training(batch_size=4)
    )


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        pytest.param("raises", "TraceFailed", ["RuntimeError", "no such checkpoint"], id="raises"),
        pytest.param(
            "needs_arguments", "FactoryFailed", ["without arguments, found needs_arguments(width)"], id="arguments"
        ),
        pytest.param("returns_none", "FactoryFailed", ["returned NoneType", "expected an nn.Module"], id="no module"),
        pytest.param("dynamic", "DataDependentGraph", ["depends on the data"], id="dynamic shapes"),
        pytest.param("absent", "FactoryFailed", ["no function 'absent'"], id="absent"),
        pytest.param("not_a_function", "FactoryFailed", ["no function 'not_a_function'"], id="not callable"),
    ],
)
def test_a_factory_that_cannot_be_predicted_is_an_abstention(
    function: str, reason: str, words: list[str], source: Path
) -> None:
    reply = answer(ask(source, function, [8]))
    assert reply.abstention is not None
    assert reply.abstention.reason == reason
    assert all(word in reply.abstention.message for word in words)


def test_a_file_that_cannot_be_imported_is_an_abstention(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import a_module_that_nobody_has\n")
    reply = answer(ask(path, "build", [8]))
    assert reply.abstention is not None
    assert "a_module_that_nobody_has" in reply.abstention.message


def test_the_command_line_says_it_without_a_traceback(source: Path) -> None:
    result = CliRunner().invoke(
        predict, [f"{source}:raises", "--input", "8", "--batch-size", "4", "--trace-timeout", "900"]
    )
    assert result.exit_code == 2
    assert "no prediction (TraceFailed)" in result.stderr
    assert "no such checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


def test_features_of_a_factory_can_be_predicted_from(source: Path, tmp_path: Path) -> None:
    arguments = ["--input", "3,32,32", "--batch-size", "64", "--trace-timeout", "900"]
    printed = CliRunner().invoke(graph, [f"{source}:fine", *arguments])
    block = tmp_path / "features.yaml"
    block.write_text(printed.stdout)
    assert read_features(block).layers.convolution == 1
    result = CliRunner().invoke(predict, [str(block), "--batch-size", "64", "--gpu", "A30"])
    assert result.exit_code == 0, result.stderr
    assert "largest batch" in result.output
