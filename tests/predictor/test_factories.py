"""Factories such as `my_train.py:build_model`: messages of failing ones, and features of valid ones."""

import sys
from pathlib import Path

import pytest
from carpool_core.resources.job import Training
from carpool_predictor.cli import graph, predict, read_features
from carpool_predictor.features import Sample
from carpool_predictor.tracing.process import FactoryModel, TraceRequest, answer
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

class Misfit(nn.Sequential):
    def forward(self, x):
        return self[0](x)

def misfit():
    return Misfit(nn.Linear(9, 9))

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels, self.words = nn.Linear(6, 4), nn.Embedding(9, 4)

    def forward(self, image, ids):
        return self.pixels(image).unsqueeze(1) + self.words(ids)

def several():
    return Several()

not_a_function = 3
model = nn.Linear(8, 8)
"""


def line_of(text: str) -> int:
    """Return the number of a line of `SOURCE`."""
    return next(number for number, line in enumerate(SOURCE.splitlines(), start=1) if text in line)


RAISES, FORWARD, DYNAMIC = line_of("no such"), line_of("return self[0]"), line_of("x[x > 0]")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_train.py"
    path.write_text(SOURCE.replace("nn.LazyLinear(10)", "nn.Linear(8 * 30 * 30, 10)"))
    return path


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget imports of a test's files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("neighbour", "broken", "my_train"):
        sys.modules.pop(name, None)


def ask(source: Path, function: str, shape: list[int]) -> TraceRequest:
    return TraceRequest(
        factory=FactoryModel(path=str(source), function=function, inputs=[Sample(tuple(shape))]),
        training=Training(batch_size=4),
    )


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        pytest.param("raises", "TraceFailed", [f"line {RAISES}, in raises: RuntimeError: no such"], id="raises"),
        pytest.param("misfit", "TraceFailed", ["[2, 8] failed at", f"line {FORWARD}, in forward: Runt"], id="misfit"),
        pytest.param("needs_arguments", "FactoryFailed", ["found needs_arguments(width)"], id="arguments"),
        pytest.param("returns_none", "FactoryFailed", ["returned NoneType", "expected an nn.Module"], id="no module"),
        pytest.param("dynamic", "DataDependentGraph", ["on the data", f"line {DYNAMIC}, in forward"], id="shapes"),
        pytest.param("model", "FactoryFailed", ["found model in", "name a function that builds it"], id="a model"),
        pytest.param("not_a_function", "FactoryFailed", ["no function 'not_a_function'"], id="not callable"),
    ],
)
def test_a_failing_factory_is_an_abstention(function: str, reason: str, words: list[str], source: Path) -> None:
    reply = answer(ask(source, function, [8]))
    assert reply.abstention is not None
    assert reply.abstention.reason == reason
    assert all(word in reply.abstention.message for word in words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(
            "\nimport a_module.that_does_not_exist\n",
            ["line 2", "No module named 'a_module'", "install what provides a_module", "PYTHONPATH"],
            id="does not exist",
        ),
        pytest.param("from . import layers\n", ["line 1", "without a leading dot"], id="relative"),
        pytest.param("import neighbour\n", ["at neighbour.py, line 1", "ZeroDivisionError"], id="in another file"),
        pytest.param("import sys\nsys.exit('no GPU')", ["line 2", "no GPU", "__name__"], id="it ends the process"),
        pytest.param("def build(:\n", ["SyntaxError", "line 1"], id="no Python"),
    ],
)
def test_a_file_that_cannot_be_imported_is_an_abstention(content: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("1 / 0\n")
    path = tmp_path / "broken.py"
    path.write_text(content)
    reply = answer(ask(path, "build", [8]))
    assert reply.abstention is not None
    assert reply.abstention.reason == "TraceFailed"
    assert f"{path} failed on import" in reply.abstention.message
    assert all(word in reply.abstention.message for word in words)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param("def build(:\n", "import: SyntaxError", id="no line was run"),
        pytest.param(
            "import importlib\nimportlib.import_module('does_not_exist')\n",
            "import at broken.py, line 2, in",
            id="frozen",
        ),
        pytest.param("exec('1 / 0')\n", "import at broken.py, line 1, in", id="text"),
    ],
)
def test_code_without_a_file_is_not_the_users_line(
    content: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: from the file's own folder, `<frozen importlib._bootstrap>, line 241` was named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(content)
    reply = answer(ask(Path("broken.py"), "build", [8]))
    assert reply.abstention is not None
    assert f"broken.py failed on {place}" in reply.abstention.message


def test_the_command_reports_a_failing_factory_without_traceback(source: Path) -> None:
    result = CliRunner().invoke(
        predict, [f"{source}:raises", "--input", "8", "--batch-size", "4", "--trace-timeout", "900"]
    )
    assert result.exit_code == 2
    assert "no prediction (TraceFailed)" in result.stderr
    assert "no such checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


def test_features_of_a_factory_can_be_predicted(source: Path, tmp_path: Path) -> None:
    arguments = ["--input", "3,32,32", "--batch-size", "64", "--trace-timeout", "900"]
    printed = CliRunner().invoke(graph, [f"{source}:fine", *arguments])
    block = tmp_path / "features.yaml"
    block.write_text(printed.stdout)
    assert read_features(block).layers.convolution == 1
    assert "tracing" not in printed.stderr, "progress is for terminals"
    result = CliRunner().invoke(predict, [str(block), "--batch-size", "64", "--gpu", "A30"])
    assert result.exit_code == 0, result.stderr
    assert "largest batch" in result.output


def test_a_model_of_several_inputs_takes_one_shape_for_each(source: Path) -> None:
    command = [f"{source}:several", "--input", "6", "--input", "tokens:5", "--batch-size", "4"]
    result = CliRunner().invoke(graph, command)
    assert result.exit_code == 0, result.output
    assert "convolution" not in result.output
    assert "embedding: 1" in result.output


def test_a_catalog_model_takes_one_input_at_most() -> None:
    result = CliRunner().invoke(predict, ["timm/resnet18", "--input", "3,64,64", "--input", "4"])
    assert "several --input are for a model of your own" in result.output
    assert result.exit_code == 2
