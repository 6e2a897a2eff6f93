import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
from carpool_predictor.features import MalformedError
from carpool_predictor.models import memory
from carpool_predictor.models.artifacts import SUMS, load, write_sums

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
