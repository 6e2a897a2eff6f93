"""A prediction on a pod holds only for the job that it was sealed for, and only from who has the key."""

from pathlib import Path

import pytest
from carpool_core.resources.prediction import Prediction
from carpool_core.sealing import LEAST_BYTES, Sealed, Sealer, sealer_of
from carpool_core.settings import SettingsError
from hypothesis import given
from hypothesis import strategies as st

PREDICTION = Prediction(outcome="Abstained", reason="UnknownModel", message="nothing is known: a < b & “c”")
SEALER = Sealer(b"k" * LEAST_BYTES)
VALUE = SEALER.seal(Sealed(job="job-1", generation=3, prediction=PREDICTION))


def test_what_was_sealed_opens() -> None:
    assert SEALER.open(VALUE, "job-1", 3) == PREDICTION


@pytest.mark.parametrize(("job", "generation"), [("job-2", 3), ("job-1", 2), ("job-1", 4), ("", 3)])
def test_it_holds_for_one_generation_of_one_job(job: str, generation: int) -> None:
    assert SEALER.open(VALUE, job, generation) is None


def test_another_key_opens_nothing() -> None:
    assert Sealer(b"K" * LEAST_BYTES).open(VALUE, "job-1", 3) is None


@given(at=st.integers(0, len(VALUE) - 1), letter=st.characters(codec="utf-8"))
def test_no_letter_of_it_can_be_changed(at: int, letter: str) -> None:
    forged = VALUE[:at] + letter + VALUE[at + 1 :]
    assert SEALER.open(forged, "job-1", 3) == (PREDICTION if forged == VALUE else None)


@given(st.text(st.characters(codec="utf-8")))
def test_whatever_users_write_is_answered_with_nothing(value: str) -> None:
    assert SEALER.open(value, "job-1", 3) is None


def test_sealed_by_another_version_is_as_good_as_nothing() -> None:
    text = '{"job":"job-1"}'
    assert SEALER.open(f"{SEALER._seal(text.encode())} {text}", "job-1", 3) is None


def test_without_a_file_nothing_is_sealed() -> None:
    assert sealer_of(None) is None


def test_line_end_of_a_key_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * LEAST_BYTES + "\n")
    sealer = sealer_of(path)
    assert sealer is not None
    assert sealer.open(VALUE, "job-1", 3) == PREDICTION


def test_a_key_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    with pytest.raises(
        SettingsError, match=r"CARPOOL_PREDICTION_KEY: expected at least 32 bytes in .*, found 6: write"
    ):
        sealer_of(path)


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="CARPOOL_PREDICTION_KEY: expected a file with a key, cannot read"):
        sealer_of(tmp_path / "nothing")
