"""What the package carries, cut short, changed or from the future: a sentence and exit code 2, whatever is asked."""

import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import carpool_predictor
import pytest
from asked_rows import row
from carpool_core.values import Precision
from carpool_predictor.catalog import store
from carpool_predictor.features import MalformedError
from carpool_predictor.models import memory
from carpool_predictor.models.artifacts import SUMS, load, write_sums
from carpool_predictor.rows import MAX_SINGLE_PROCESS

MODELS = ("activity.json", "memory.json", "slowdown.json", "step_time.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shipped = resources.files("carpool_predictor").joinpath("artifacts")
    for name in (*MODELS, SUMS):
        (tmp_path / name).write_bytes(shipped.joinpath(name).read_bytes())
    return tmp_path


def test_what_was_shipped_is_read(folder: Path) -> None:
    assert load("memory.json", memory.read_model, folder) == memory.shipped()
    for name in MODELS:
        assert load(name, len, folder) > 200


def test_a_number_that_was_changed_is_told(folder: Path) -> None:
    path = folder / "memory.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slope": 3.0}))
    memory.read_model(path.read_bytes())  # it makes sense as it is
    with pytest.raises(
        MalformedError, match=r"expected memory.json as it was shipped .* found it changed .* install carpool"
    ):
        load("memory.json", memory.read_model, folder)


def test_a_newer_layout_is_named_before_the_change(folder: Path) -> None:
    path = folder / "memory.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": memory.FORMAT + 1}))
    with pytest.raises(MalformedError, match="upgrade carpool"):
        load("memory.json", memory.read_model, folder)


@pytest.mark.parametrize("name", ["memory.json", SUMS])
def test_what_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(MalformedError, match=f"expected memory.json and {SUMS} in .*{name}.*install carpool again"):
        load("memory.json", memory.read_model, folder)


def test_a_model_without_a_digest_is_refused(folder: Path) -> None:
    shutil.copy(folder / "memory.json", folder / "other.json")
    with pytest.raises(MalformedError, match="SHA-256 none"):
        load("other.json", memory.read_model, folder)


def test_digests_are_those_of_the_files(folder: Path) -> None:
    before = (folder / SUMS).read_bytes()
    assert write_sums(folder / name for name in reversed(MODELS)).read_bytes() == before
    (folder / "memory.json").write_text("{}")
    assert write_sums([folder / name for name in MODELS]).read_bytes() != before


RUN = "from carpool_core.cli import main; main()"
FILES = ("artifacts/memory.json", "artifacts/activity.json", "artifacts/step_time.json", store.FILES[Precision.FP32])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (own,) = carpool_predictor.__path__
    copy = tmp_path_factory.mktemp("installed") / "carpool_predictor"
    shutil.copytree(own, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def ask(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", RUN, "predict", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("rows", [0, 1, MAX_SINGLE_PROCESS + 1])
def test_a_file_that_is_cut_short_is_a_sentence(file: str, rows: int, package: Path, tmp_path: Path) -> None:
    """Regression: of many rows, answered by several processes, each of these ended with a traceback, exit code 1."""
    asked, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    asked.write_text((json.dumps(row()) + "\n") * rows)
    out.write_text("answers of an hour")
    arguments = ("--rows", str(asked), "--out", str(out)) if rows else ("timm/vgg11_bn", "--gpu", "A30")
    path = package / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    try:
        done = ask(package, *arguments)
    finally:
        path.write_bytes(content)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert out.read_text() == "answers of an hour"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"slope": 3.0}, "found it changed", id="tampered with"),
        pytest.param({"format": 99}, "upgrade carpool", id="newer"),
    ],
)
def test_a_model_that_was_changed_or_is_newer_is_a_sentence(change: dict[str, float], word: str, package: Path) -> None:
    path = package / "artifacts/memory.json"
    content = path.read_bytes()
    path.write_text(json.dumps(json.loads(content) | change))
    try:
        done = ask(package, "timm/vgg11_bn", "--gpu", "A30")
    finally:
        path.write_bytes(content)
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
