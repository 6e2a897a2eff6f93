"""`python -m carpool_research evaluate` and `train`: their suites, and messages about data that cannot be read."""

import csv
from pathlib import Path

import pytest
from carpool_predictor.models.step_time import shipped
from carpool_research import tables
from carpool_research.__main__ import SUITES, evaluate, train
from carpool_research.slowdown import fit, gavel, lucid
from carpool_research.slowdown.gavel import TABLE
from carpool_research.step_time.data import GPUS, MODELS, ModelRow, operators
from carpool_research.step_time.fit import seconds
from click.testing import CliRunner


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_a_folder_without_measurements_is_refused(suite: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(evaluate, ["--data", str(tmp_path), "--suite", suite, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no such file" in result.stderr.casefold()
    assert "Traceback" not in result.stderr


MEMORY, ACTIVITY, STEPS = (
    "gpumemnet/timm_a100_40gb.csv", "gpumemnet/mlp_a100_40gb.csv", "neusight/e2e_labels_flat.csv",
)  # fmt: skip
MODEL = "timm_model,timm_module,batch_size,max_gpu_memory_mib,faketensor_mib\nr,resnet,8,"
STEP = "gpu,model,mode,seqlen,variant,batch,e2e_ms\nTesla_P4,bert_large,train,512,,"
UNREADABLE = ":2: cannot read the row"


@pytest.mark.parametrize(
    ("suite", "file", "content", "expected"),
    [
        pytest.param("memory", MEMORY, "something,else\n1,2", "column", id="memory, other columns"),
        pytest.param("activity", ACTIVITY, "something,else\n1,2", "column", id="activity, other columns"),
        pytest.param("step-time", STEPS, "something,else\n1,2", "column", id="step-time, other columns"),
        pytest.param("memory", MEMORY, f"{MODEL}many,0", UNREADABLE, id="no number"),
        pytest.param("memory", MEMORY, f"{MODEL}nan,0", UNREADABLE, id="not a peak"),
        pytest.param("memory", MEMORY, f"{MODEL}-1,0", UNREADABLE, id="less than nothing"),
        pytest.param("memory", MEMORY, f"{MODEL}inf,0", UNREADABLE, id="without end"),
        pytest.param("step-time", STEPS, f"{STEP}8,long", UNREADABLE, id="no time"),
        pytest.param("step-time", STEPS, f"{STEP}8,nan", UNREADABLE, id="a time that is no number"),
        pytest.param("step-time", STEPS, f"{STEP}0,3.5", UNREADABLE, id="a batch of nothing"),
    ],
)
def test_invalid_measurements_are_refused_with_their_place(
    suite: str, file: str, content: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    arguments = ["--data", str(tmp_path), "--suite", suite, "--out", str(tmp_path / "out")]
    for more in ["--frozen"], *([[]] if expected == "column" else []):
        result = CliRunner().invoke(evaluate, [*arguments, *more])
        assert result.exit_code == 2
        assert expected in result.stderr.replace("\n", "")
        assert "Traceback" not in result.stderr


TABLES = {gavel.FILE: gavel.COLUMNS, str(lucid.SOLO): lucid.SOLO_COLUMNS, str(lucid.PAIRED): lucid.PAIRED_COLUMNS}
HOLDING = {str(tables.file_of(kind)): f"{','.join(fit.COLUMNS)}\n50,0.4,0.5" for kind in tables.KINDS}
"""Files of the trainings that come first."""


@pytest.mark.parametrize(
    ("file", "columns", "rest", "word"),
    [
        pytest.param(gavel.FILE, ["else"], "1", "lacks the columns bs_a, bs_b", id="other columns"),
        pytest.param(
            lucid.SOLO, list(lucid.SOLO_COLUMNS[1:]), "", "lacks the columns model;",
            id="a column short, of a file that is read last",
        ),
        pytest.param(gavel.FILE, None, f"{TABLE},k80,a,1,1,,,,fast,,", "2: cannot read the row", id="a word"),
        pytest.param(gavel.FILE, None, f"{TABLE},k80,a,1,1,,,,nan,,", "2: cannot read the row", id="nan"),
    ],
)  # fmt: skip
def test_invalid_slowdowns_are_refused(
    file: str | Path, columns: list[str] | None, rest: str, word: str, tmp_path: Path
) -> None:
    """Regression: a missing column was reported eleven minutes later, as the name of an exception."""
    for name, whole in HOLDING.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(whole)
    for name, known in TABLES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        is_wrong = name == str(file)
        lines = [",".join(columns if is_wrong and columns else known), *([rest] if is_wrong else [])]
        path.write_text("\n".join(lines))
    result = CliRunner().invoke(evaluate, ["--data", str(tmp_path), "--suite", "slowdown", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{Path(file).name}" in result.stderr
    assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_training_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpumemnet" / "timm_a100_40gb.csv"
    path.parent.mkdir()
    path.write_text("model,batch_size\nresnet50,8\n")
    out = tmp_path / "artifacts"
    result = CliRunner().invoke(train, ["--data", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 2
    assert "column" in result.stderr
    assert not out.exists()


def test_frozen_evaluates_the_shipped_model_and_writes_nothing(tmp_path: Path) -> None:
    """Steps that equal the shipped model are predicted without error."""
    path = tmp_path / "neusight" / "e2e_labels_flat.csv"
    path.parent.mkdir()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "model", "mode", "seqlen", "batch", "variant", "e2e_ms"])
        for gpu in GPUS:
            row = ModelRow(gpu, "bert_large", True, 2, 1.0, *operators(MODELS["bert_large"], 2, 512, training=True))
            step_ms = 1e3 * seconds(shipped().learned, gpu, row.cost)
            writer.writerow([gpu, "bert_large", "train", 512, 2, "", step_ms])
    out = tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--suite", "step-time", "--frozen", "--out", str(out)]
    result = CliRunner().invoke(evaluate, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.stderr
    found = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in result.output.splitlines() if "│" in line
    }
    assert "suite step-time (1 of 1)" in result.stderr
    assert found["rows"] == "8"
    assert float(found["median error, %"]) == 0
    assert not out.exists()
