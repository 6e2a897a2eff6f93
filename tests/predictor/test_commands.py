"""`carpool predict` and `carpool graph`, mostly from a features file: no PyTorch, no subprocess."""

import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from carpool_core.durations import format_duration
from carpool_core.products import PRODUCTS
from carpool_core.settings import InputError
from carpool_predictor.cli import graph, predict, read_features, waiting, write_features
from click.testing import CliRunner
from job_runs import features
from rich.console import Console


@pytest.fixture
def block(tmp_path: Path) -> str:
    path = tmp_path / "features.yaml"
    path.write_text(write_features(features()))
    return str(path)


def test_a_written_block_reads_back(block: str) -> None:
    assert Path(block).read_text().startswith("features:\n")
    assert read_features(Path(block)) == features()


def test_table_names_every_product(block: str) -> None:
    result = CliRunner().invoke(predict, [block, "--batch-size", "64", "--gpu", "all"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for product in PRODUCTS:
        assert product.name.removeprefix("NVIDIA ").removeprefix("GeForce ") in result.output
    assert all(
        word in result.output for word in ("util %", "worksp", "at most", "max batch", "profile=batch", "1g.5gb")
    )


def test_several_products_are_a_table_of_these(block: str) -> None:
    """Regression: all but the last were ignored."""
    arguments = [block, "--batch-size", "64", "--gpu", "A30", "--gpu", "L40S", "--gpu", "NVIDIA A30"]
    result = CliRunner().invoke(predict, [*arguments, "--json"])
    assert [one["gpu"] for one in json.loads(result.stdout)["products"]] == ["NVIDIA A30", "NVIDIA L40S"]
    table = CliRunner().invoke(predict, arguments).output
    assert "A30 " in table
    assert "L40S " in table
    assert "T4" not in table


def test_one_product_is_shown_line_by_line_with_intervals(block: str) -> None:
    result = CliRunner().invoke(predict, [block, "--batch-size", "64", "--gpu", "A30"], env={"COLUMNS": "80"})
    for line in ("memory at its peak", "at most", "weights", "gradients", "optimizer", "activations", "workspace",
                 "context", "SM occupancy", "largest batch", "on 1g.6gb", "covered by measurements"):  # fmt: skip
        assert line in result.output
    assert re.search(r"GPU utilization +\d+ \(\d+ - \d+\) %", result.output)
    wide = CliRunner().invoke(predict, [block, "--batch-size", "64", "--gpu", "A30"], env={"COLUMNS": "300"})
    assert wide.output.splitlines()[0] == f"{block}, batch 64, adamw, fp32, on NVIDIA A30"


def test_json_has_units_in_its_names(block: str) -> None:
    result = CliRunner().invoke(predict, [block, "--batch-size", "64", "--gpu", "A100-SXM4-40GB", "--json"])
    answer = json.loads(result.output)
    assert (result.exit_code, answer["status"], answer["reason"]) == (0, "ok", "OutsideTraining")
    (product,) = answer["products"]
    assert {"gpu", "memory", "activity", "step_time_s", "largest_batch"} <= set(product)
    assert {"median_mib", "upper_mib", "coverage", "class", "parts"} == set(product["memory"])
    assert {"gpu_util_percent", "sm_active_ratio", "sm_occupancy_ratio", "dram_active_ratio"} == set(
        product["activity"]
    )
    assert {"1g.5gb", "7g.40gb"} <= set(product["mig"])
    parts = ("weights", "gradients", "optimizer", "activations", "workspace", "context", "other")
    assert set(product["memory"]["parts"]) == {f"{name}_mib" for name in parts}
    assert product["memory"]["median_mib"] < product["memory"]["upper_mib"] <= product["memory"]["class"]["upper_mib"]


def test_steps_give_a_duration_with_its_interval(block: str) -> None:
    arguments = [block, "--batch-size", "64", "--steps", "35000", "--gpu"]
    one = CliRunner().invoke(predict, [*arguments, "A30"], env={"COLUMNS": "80"})
    (product,) = json.loads(CliRunner().invoke(predict, [*arguments, "A30", "--json"]).output)["products"]
    step_s, length_s = product["step_time_s"], product["length_s"]
    assert length_s == {end: pytest.approx(35_000 * step_s[end]) for end in ("median", "lower", "upper")}
    ends = f"({format_duration(length_s['lower'])} - {format_duration(length_s['upper'])})"
    assert re.search(rf"35,000 steps +{format_duration(length_s['median'])} {re.escape(ends)}", one.output)
    several = CliRunner().invoke(predict, [*arguments, "all"], env={"COLUMNS": "80"}).output
    assert "duration of 35,000 steps" in several
    row = next(line for line in several.partition("takes")[2].splitlines() if line.strip().startswith("A30 "))
    assert f" {format_duration(length_s['median'])} " in row
    without = [block, "--batch-size", "64", "--gpu", "A30"]
    assert "length_s" not in CliRunner().invoke(predict, [*without, "--json"]).output
    assert not re.search(r"\d steps", CliRunner().invoke(predict, without).output)


def test_json_of_an_abstention_is_json_and_fails(block: str) -> None:
    result = CliRunner().invoke(predict, [block, "--optimizer", "sgd", "--json"])
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert (answer["status"], answer["reason"]) == ("error", "FeaturesMismatch")
    assert "FeaturesMismatch" in result.stderr


def test_graph_prints_a_given_block_again(block: str) -> None:
    result = CliRunner().invoke(graph, [block])
    assert msgspec.yaml.decode(result.output) == msgspec.yaml.decode(Path(block).read_text())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["resnet50"], "did you mean timm/resnet50 or torchvision/resnet50?", id="no library"),
        pytest.param(["resnet-fifty"], "found 'resnet-fifty'\n", id="no library, and no such name"),
        pytest.param(["jax/resnet50"], "expected timm/NAME", id="unknown library"),
        pytest.param(["absent.py:build", "--input", "3"], "no such file", id="no such file"),
        pytest.param([f"{__file__}:build"], "needs --input", id="factory without input"),
        pytest.param(["timm/resnet50", "--input", "3,x"], "--input expects", id="shape in words"),
        pytest.param(["timm/resnet50", "--input", "3,0,4"], "positive sizes", id="empty shape"),
        pytest.param(["timm/resnet50", "--batch-size", "0"], "0 is not in the range", id="batch of 0"),
        pytest.param(["timm/resnet50", "--batch-size", "1000000000"], "not in the range", id="batch of a billion"),
        pytest.param(["timm/resnet50", "--steps", "0"], "0 is not in the range", id="no step"),
        pytest.param(
            ["timm/resnet50", "--gpu", "Voodoo2"],
            "on a cluster, the node agent derives other products",
            id="unknown GPU",
        ),
        pytest.param(["timm/resnet50", "--gpu", "A100"], "ambiguous", id="ambiguous GPU"),
        pytest.param(["timm/resnet50", "--precision", "int4"], "int4", id="unknown precision"),
        pytest.param(["absent.yaml"], "cannot read features", id="no such features"),
        pytest.param(["BLOCK", "--input", "3,224,224"], "expected neither --input nor", id="shape of features"),
        pytest.param(["BLOCK", "--num-classes", "10"], "expected neither --input nor", id="classes of features"),
        pytest.param(["BLOCK", "--out", "a.json"], "--out is for the answers to --rows", id="output of features"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments: list[str], word: str, block: str) -> None:
    result = CliRunner().invoke(predict, [block if one == "BLOCK" else one for one in arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        pytest.param("features: {parameters: -1}", "does not hold features", id="negative"),
        pytest.param("a: [", "cannot read features", id="no YAML"),
        pytest.param("[]", "does not hold features", id="a list"),
        pytest.param("kind: GpuTrainingJob", "carpool what-if", id="a job"),
    ],
)
def test_broken_features_files_are_refused(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=word):
        read_features(path)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_trace_is_shown_on_terminals_only(is_terminal: bool) -> None:
    file = io.StringIO()
    with waiting("tracing timm/resnet50 …", Console(file=file, force_terminal=is_terminal, width=100)):
        pass
    assert ("tracing timm/resnet50 …" in file.getvalue()) is is_terminal
