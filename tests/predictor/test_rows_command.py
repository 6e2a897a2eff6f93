"""`carpool predict --rows` on the command line: files, options, exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from asked_rows import row
from carpool_predictor.cli import predict
from click.testing import CliRunner


def test_the_command_writes_answers_and_says_how_many_are_wrong(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text("\n".join(json.dumps(r) for r in (row("a"), row("b", gpu="Voodoo2"), row("c"))) + "\n\n")
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b", "c"]
    assert result.exit_code == 2
    assert "1 of 3 rows" in result.stderr
    assert "3 rows (1 error, 2 ok)" in result.stderr


def test_the_command_succeeds_where_every_row_makes_sense(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("a")))
    result = CliRunner().invoke(predict, ["--rows", str(rows)])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["id"] == "a"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param([], "found neither", id="nothing"),
        pytest.param(["timm/resnet50", "--rows", "rows.jsonl"], "found both", id="both"),
        pytest.param(["--rows", "absent.jsonl"], "cannot read", id="no such file"),
    ],
)
def test_wrong_arguments_are_a_sentence_and_exit_code_2(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(predict, arguments)
    assert result.exit_code == 2
    assert word in result.stderr


@pytest.mark.parametrize("link", [None, Path.symlink_to, Path.hardlink_to])
def test_rows_are_never_overwritten_by_their_answers(link: Callable[[Path, Path], None] | None, tmp_path: Path) -> None:
    """Regression: the file was emptied before it was read, and nothing was said."""
    rows = out = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("a")))
    if link is not None:
        out = tmp_path / "out.jsonl"
        link(out, rows)
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert result.exit_code == 2
    assert "expected another file" in result.stderr
    assert rows.read_text() == json.dumps(row("a"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_told(content: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    result = CliRunner().invoke(predict, ["--rows", str(rows)])
    assert result.exit_code == 2
    assert result.stderr == f"Error: expected rows in {rows}, one JSON object a line, found none\n"


def test_a_file_without_rows_leaves_earlier_answers_as_they_are(tmp_path: Path) -> None:
    """Regression: they were emptied before anybody had looked for rows."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text("\n")
    out.write_text("answers of an hour")
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert (result.exit_code, out.read_text()) == (2, "answers of an hour")


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(["--gpu", "T4"], id="GPU"),
        pytest.param(["--json"], id="JSON"),
        pytest.param(["--batch-size", "32"], id="batch size, even the default"),
        pytest.param(["--input", "3,224,224"], id="shape"),
        pytest.param(["--activation-checkpointing"], id="checkpointing"),
    ],
)
def test_options_that_rows_say_themselves_are_refused(ignored: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("a")))
    result = CliRunner().invoke(predict, ["--rows", str(rows), *ignored])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"expected no {ignored[0]} beside --rows" in result.stderr


def test_a_malformed_calibration_is_refused_before_any_row(tmp_path: Path) -> None:
    rows, learned = tmp_path / "rows.jsonl", tmp_path / "learned.json"
    rows.write_text(json.dumps(row("a")))
    learned.write_text("{")
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--calibration", str(learned)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected a calibration" in result.stderr
