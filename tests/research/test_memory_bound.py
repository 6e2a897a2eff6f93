"""Strata and factors of the memory bound, and factors of first runs, on synthetic data."""

import math
from pathlib import Path

import numpy as np
import pytest
from carpool_research.memory.fit import (
    FEWEST_ROWS,
    FIRST_RUN_FACTORS,
    Bound,
    Floats,
    conformal_quantile,
    factor,
    families_of,
    fit_bound,
)

COVERAGE = 0.95
FAMILIES = 60
ROWS = 60


def risky_and_calm(seed: int) -> tuple[Floats, Floats, list[str]]:
    """Return rows whose scores have a long tail where the first column exceeds 2; the second is noise."""
    rng = np.random.default_rng(seed)
    rows = rng.normal([1.0, 0.0], size=(FAMILIES * ROWS, 2))
    tail = rng.exponential(0.3, len(rows)) * (rows[:, 0] > 2) * (rng.random(len(rows)) < 0.4)
    return rows, rng.normal(0, 0.02, len(rows)) + tail, [f"f{i // ROWS}" for i in range(len(rows))]


def folds() -> list[frozenset[str]]:
    return [frozenset(f"f{i}" for i in range(k, FAMILIES, 5)) for k in range(5)]


@pytest.fixture(scope="module", name="bound")
def fitted() -> Bound:
    pytest.importorskip("sklearn")
    rows, scores, families = risky_and_calm(1)
    return fit_bound(rows, scores, families, folds(), COVERAGE)


def test_riskier_steps_have_larger_factors(bound: Bound) -> None:
    calm, usual, risky = bound.factors
    assert 1 <= calm <= usual <= risky
    assert calm < 1.1 < 1.3 < risky
    assert bound.risk.stratum([4.0, 0.0]) == 2
    assert bound.risk.stratum([-2.0, 0.0]) == 0


def test_the_bound_holds_for_new_families(bound: Bound) -> None:
    rows, scores, _ = risky_and_calm(2)
    factors = np.array([bound.factors[bound.risk.stratum(row)] for row in rows.tolist()])
    assert np.mean(scores <= np.log(factors)) >= COVERAGE
    assert np.median(factors) == bound.factors[0]


def test_without_risky_steps_all_factors_are_one() -> None:
    rows, _, families = risky_and_calm(3)
    bound = fit_bound(rows, np.zeros(len(rows)), families, folds(), COVERAGE)
    assert set(bound.factors) == {1.0}
    assert bound.risk.weights == [0.0, 0.0]


@pytest.mark.parametrize(("level", "quantile"), [(0.0, 1.0), (0.5, 2.0), (0.9, 3.0), (1.0, 3.0)])
def test_the_conformal_quantile_counts_the_unseen_score(level: float, quantile: float) -> None:
    assert conformal_quantile([3.0, 1.0, 2.0], level) == quantile


def test_the_conformal_quantile_of_no_score_is_zero_and_other_levels_are_refused() -> None:
    assert conformal_quantile([], 0.9) == 0.0
    for level in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            conformal_quantile([1.0], level)


def family_rows(name: str, rows: int, largest: float) -> tuple[list[str], list[float]]:
    """Return rows of one family, evenly up to its largest ratio."""
    return [name] * rows, np.linspace(0.5, largest, rows).tolist()


def test_families_with_too_few_rows_are_omitted() -> None:
    small, large = family_rows("small", FEWEST_ROWS - 1, 9.0), family_rows("large", FEWEST_ROWS, 1.1)
    families = families_of(small[0] + large[0], np.array(small[1] + large[1]))
    assert [family.name for family in families] == ["large"]
    with pytest.raises(ValueError, match="expected at least one family of 10 rows or more, found none"):
        factor([], 0.9)


def test_shipped_first_run_factors_are_those_of_the_card() -> None:
    card = Path(__file__, "../../../docs/model-cards/memory.md").resolve().read_text(encoding="utf-8")
    for room in FIRST_RUN_FACTORS:
        row = next(line for line in card.splitlines() if line.startswith(f"|{room.where}|"))
        share, _, needs, shipped, _ = (cell.strip() for cell in row.split("|")[2:-1])
        assert (share, shipped) == (f"{100 * room.families:g}%", f"{room.shipped:g}")
        assert float(needs) <= float(shipped) < float(needs) + 0.02, "no more than it is rounded up by"
