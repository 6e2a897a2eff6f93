"""Shipped artifacts that are cut, changed or newer are refused with a sentence and exit code 2."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import carpool_predictor
import msgspec
import pytest
from asked_rows import row
from carpool_core.values import Precision
from carpool_predictor.catalog import store
from carpool_predictor.features import MalformedError
from carpool_predictor.models import activity, memory, slowdown, step_time

MODELS = (activity, memory, slowdown, step_time)


def test_shipped_artifacts_load() -> None:
    for module in MODELS:
        assert module.shipped().version


def changed(module: Any, **fields: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(module.shipped()), **fields})


NEGATIVE = {"form": "sum", "matrix": -1.0, "bandwidth": 1.0, "kernel_s": 0.0}


@pytest.mark.parametrize(
    ("module", "content", "message"),
    [
        pytest.param(activity, changed(activity)[:-100], "expected an activity model", id="activity, truncated"),
        pytest.param(activity, b"\x80\x04\x95", "expected an activity model", id="activity, pickle"),
        pytest.param(activity, changed(activity, format=3), "format 2, found 3; upgrade carpool", id="activity, newer"),
        pytest.param(activity, changed(activity, features=["a"]), "this version's features", id="activity, features"),
        pytest.param(activity, changed(activity, low=[0.0]), "hull lacks features", id="activity, hull"),
        pytest.param(step_time, changed(step_time)[:-9], "expected a step-time model", id="step time, truncated"),
        pytest.param(step_time, b"\x80\x04\x95", "expected a step-time model", id="step time, pickle"),
        pytest.param(step_time, changed(step_time, format=2), "found 2; upgrade carpool", id="step time, newer"),
        pytest.param(step_time, changed(step_time, lower=1.5), "interval around the prediction", id="interval"),
        pytest.param(step_time, changed(step_time, surprise=1), "surprise", id="unknown field"),
        pytest.param(step_time, changed(step_time, learned=NEGATIVE), "matrix", id="negative utilization"),
    ],
)
def test_a_broken_artifact_is_refused(module: Any, content: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        module.read_model(content)


FILES = ("artifacts/memory.json", "artifacts/activity.json", "artifacts/step_time.json", store.FILES[Precision.FP32])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (own,) = carpool_predictor.__path__
    copy = tmp_path_factory.mktemp("installed") / "carpool_predictor"
    shutil.copytree(own, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


MEMORY = "artifacts/memory.json"
CASES = [
    *(pytest.param(file, lambda content: content[: len(content) // 2], rows, "", id=f"{file}, cut, rows: {rows}")
      for file, rows in zip(FILES, (False, True, True, True), strict=True)),
    pytest.param(MEMORY, lambda c: json.dumps(json.loads(c) | {"format": 99}).encode(), True, "upgrade carpool",
                 id="newer"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "with_rows", "word"), CASES)
def test_a_broken_installation_is_a_sentence_with_exit_code_2(
    file: str, change: Callable[[bytes], bytes], with_rows: bool, word: str, package: Path, tmp_path: Path
) -> None:
    """Regression: with rows, each of these ended with a traceback and exit code 1."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text(json.dumps(row()) + "\n")
    out.write_text("earlier answers")
    arguments = ["--rows", str(rows), "--out", str(out)] if with_rows else ["timm/vgg11_bn", "--gpu", "A30"]
    path = package / file
    content = path.read_bytes()
    path.write_bytes(change(content))
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", "from carpool_core.cli import main; main()", "predict", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_bytes(content)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("Error: ")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert out.read_text() == "earlier answers"
