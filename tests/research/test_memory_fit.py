"""Cleaning, fit and artifact of the memory model, on data made to measure and on the published rows."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from carpool_predictor.features import MalformedError
from carpool_predictor.models.memory import Pair, correction_of, fit_line, read_model, shipped
from carpool_research.memory.fit import (
    FILE,
    VERSION,
    Estimate,
    Floats,
    Row,
    Sample,
    clean,
    export,
    fit,
    out_of_fold,
    read_rows,
)
from memory_samples import sample


def test_line_is_found_through_outliers() -> None:
    rng = random.Random(7)  # noqa: S311
    pairs = [Pair(x, (1.1 * x + 1800) * rng.gauss(1, 0.02)) for x in range(200, 20000, 100)]
    pairs += [Pair(x, 3 * x + 9000) for x in range(200, 20000, 1500)]
    slope, intercept = fit_line(pairs)
    assert slope == pytest.approx(1.1, rel=0.02)
    assert intercept == pytest.approx(1800, rel=0.05)


def runs(model: str, *peaks: float) -> list[Row]:
    return [Row(model, "f", 8 * 2**i, peak) for i, peak in enumerate(peaks)]


@pytest.mark.parametrize(
    ("peaks", "kept"),
    [
        pytest.param((2000, 3000, 5000), 3, id="healthy"),
        pytest.param((13867, 20353, 33625, 5863, 5863), 3, id="died from 64 on (deit3_huge)"),
        pytest.param((15859, 15879), 0, id="dead from the start, and not quite equal (samvit_base_patch16)"),
        pytest.param((17819, 25799, 29755, 31503), 2, id="no room for 32 (resnetrs420)"),
        pytest.param((14000, 27000, 40363), 2, id="at the GPU's capacity: censored (resnet200d)"),
        pytest.param((5000,), 0, id="one run is not enough"),
    ],
)
def test_cleaning_drops_dead_runs(peaks: tuple[float, ...], kept: int) -> None:
    assert clean(runs("m", *peaks)) == runs("m", *peaks)[:kept]


@pytest.fixture(scope="module")
def made() -> list[Sample]:
    rng = random.Random(3)  # noqa: S311
    return [sample(number, batch, rng) for number in range(40) for batch in (8, 16, 32)]


@pytest.mark.filterwarnings("ignore")
def test_the_fit_is_reproducible_and_recovers_the_line(made: list[Sample]) -> None:
    fitted = fit(made, seed=5)
    assert msgspec.json.encode(fitted) == msgspec.json.encode(fit(made, seed=5))
    assert fitted.slope == pytest.approx(1.2, rel=0.03)
    assert all(1 <= factor < 1.2 for factor in fitted.factors)
    assert all(correction_of(fitted, s.features, s.cost, s.batch_size).inside for s in made)


@pytest.mark.filterwarnings("ignore")
def test_exported_trees_answer_as_scikit_learn_does() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 3))
    boosted = ensemble.GradientBoostingRegressor(n_estimators=20, max_depth=3, random_state=0)
    boosted.fit(rows, rows[:, 0] * rows[:, 1] + rng.normal(size=300) / 10)
    forest = export(boosted)
    forest.check(3)
    assert [forest.predict(row) for row in rows.tolist()] == pytest.approx(boosted.predict(rows), abs=1e-5)


def test_out_of_fold_scores_hold_families_out(made: list[Sample]) -> None:
    seen: list[frozenset[str]] = []

    def fitted(samples: Sequence[Sample]) -> Estimate:
        families = frozenset(s.family for s in samples)
        seen.append(families)

        def judge(judged: Sequence[Sample]) -> Floats:
            assert not families & {s.family for s in judged}
            return np.log([s.measured_mib for s in judged])

        return judge

    assert np.allclose(out_of_fold(made, fitted, 1), 0)
    assert len(seen) > 1


def test_published_rows_are_cleaned_as_the_card_says(published: Path) -> None:
    rows = read_rows(published / FILE)
    assert len(rows) == shipped().provenance["rows"]
    assert len(clean(rows)) == shipped().provenance["rows_after_cleaning"]


def test_the_card_belongs_to_the_shipped_model() -> None:
    card = Path(__file__).parents[2].joinpath("docs/model-cards/memory.md").read_text()
    model = shipped()
    assert f"{model.slope} · reserved + {model.intercept_mib} MiB" in card
    assert f"({', '.join(map(str, model.factors))}, by the step's stratum)" in card
    assert model.version in card


def test_other_numbers_have_another_version() -> None:
    """Where this fails, the artifact has changed: raise `train.VERSION`, build it, write its digest here."""
    numbers = msgspec.json.encode(msgspec.structs.replace(shipped(), version="", provenance={}))
    assert (shipped().version, hashlib.sha256(numbers).hexdigest()[:16]) == (VERSION, "9f169058493a09ec")


def replaced(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old.encode(), new.encode())


def with_stratum(edge: float, factor: float) -> Callable[[bytes], bytes]:
    """Put another stratum before the first."""
    return lambda text: replaced('"factors":[', f'"factors":[{factor},')(
        replaced('"edges":[', f'"edges":[{edge},')(text)
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "expected a memory model", id="cut short"),
        pytest.param(replaced('"format":5', '"format":6,"more":1'), "upgrade carpool", id="newer"),
        pytest.param(lambda _: b'{"format":3,"factors":{"matrix":1.1}}', "found 3; install carpool", id="older"),
        pytest.param(replaced("log kernels", "kernels"), "other columns", id="other columns"),
        pytest.param(replaced('"edges":[', '"edges":[-9.5,'), "strata", id="a stratum too many"),
        pytest.param(with_stratum(9.5, 1.0), "edges of strata to ascend", id="edges that fall"),
        pytest.param(with_stratum(-9.5, 9.5), "than that of calmer steps", id="factors that fall"),
        pytest.param(replaced('"factors":[1.', '"factors":[0.'), "factors", id="a bound below the median"),
        pytest.param(replaced('"hull":[[', '"hull":[[99,0],['), "other columns", id="a column too many"),
        pytest.param(replaced('"hull":[[', '"hull":[[9'), "ends before it begins", id="a hull inside out"),
        pytest.param(lambda text: b"{}", "missing required field", id="empty"),
    ],
)
def test_a_wrong_artifact_is_refused(change: Callable[[bytes], bytes], word: str) -> None:
    with pytest.raises(MalformedError, match=word):
        read_model(change(msgspec.json.encode(shipped())))
