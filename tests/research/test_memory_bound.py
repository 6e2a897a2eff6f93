"""Strata, their factors and the level that counts families: on data made to measure."""

import math

import numpy as np
import pytest
from carpool_research.memory.fit import (
    SHARES,
    Bound,
    Floats,
    conformal_quantile,
    family_level,
    fit_bound,
    ranks_in_strata,
)

COVERAGE = 0.95
FAMILIES = 60
ROWS = 60


def wild_and_calm(seed: int) -> tuple[Floats, Floats, list[str]]:
    """Rows of one telling column and one that tells nothing: where the first is above 2, scores have a long tail."""
    rng = np.random.default_rng(seed)
    rows = rng.normal([1.0, 0.0], size=(FAMILIES * ROWS, 2))
    tail = rng.exponential(0.3, len(rows)) * (rows[:, 0] > 2) * (rng.random(len(rows)) < 0.4)
    return rows, rng.normal(0, 0.02, len(rows)) + tail, [f"f{i // ROWS}" for i in range(len(rows))]


def folds() -> list[frozenset[str]]:
    return [frozenset(f"f{i}" for i in range(k, FAMILIES, 5)) for k in range(5)]


@pytest.fixture(scope="module", name="bound")
def fitted() -> Bound:
    pytest.importorskip("sklearn")
    rows, scores, families = wild_and_calm(1)
    return fit_bound(rows, scores, families, folds(), COVERAGE)


def test_likelier_steps_have_larger_factors(bound: Bound) -> None:
    calm, usual, wild = bound.factors
    assert 1 <= calm <= usual <= wild
    assert calm < 1.1 < 1.3 < wild
    assert bound.risk.stratum([4.0, 0.0]) == 2
    assert bound.risk.stratum([-2.0, 0.0]) == 0


def test_the_bound_holds_for_families_that_it_never_saw(bound: Bound) -> None:
    rows, scores, _ = wild_and_calm(2)
    factors = np.array([bound.factors[bound.risk.stratum(row)] for row in rows.tolist()])
    assert np.mean(scores <= np.log(factors)) >= COVERAGE
    assert np.median(factors) == bound.factors[0]


def test_rows_are_dealt_into_strata_by_their_shares(bound: Bound) -> None:
    found = np.bincount(bound.strata) / (FAMILIES * ROWS)
    assert np.cumsum(found)[:-1] == pytest.approx(SHARES, abs=0.01)


def test_where_nothing_exceeds_its_median_by_much_all_steps_share_a_factor() -> None:
    rows, _, families = wild_and_calm(3)
    bound = fit_bound(rows, np.zeros(len(rows)), families, folds(), COVERAGE)
    assert set(bound.factors) == {1.0}
    assert bound.risk.weights == [0.0, 0.0]


def test_a_row_is_ranked_among_other_families_of_its_stratum() -> None:
    scores = np.array([0.1, 0.2, 0.9, 0.15, 5.0])
    families = np.array(["a", "b", "c", "d", "a"])
    ranks = ranks_in_strata(scores, np.array([0, 0, 0, 0, 1]), families)
    assert ranks.tolist() == [0, 2 / 4, 3 / 4, 1 / 4, 0]


def test_every_family_counts_as_one_and_the_next_as_above_all() -> None:
    """A family of a hundred rows weighs as much as one of one; half of two families and a next are 0.75 of the two."""
    families = np.array(["large"] * 100 + ["small"])
    ranks = np.array([i / 100 for i in range(100)] + [0.05])
    assert family_level(ranks, families, 0.5) == 0.49
    assert family_level(ranks, families, 0.99) == 0.99


def test_the_conformal_quantile_counts_the_unseen_score() -> None:
    assert conformal_quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert conformal_quantile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert conformal_quantile([], 0.9) == 0.0
    assert math.isclose(conformal_quantile([0.25], 0.1), 0.25)


def test_the_conformal_quantile_at_its_ends() -> None:
    """Regression: at 0 it was the largest."""
    assert conformal_quantile([3.0, 1.0, 2.0], 0.0) == 1.0
    assert conformal_quantile([3.0, 1.0, 2.0], 1.0) == 3.0
    for level in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            conformal_quantile([1.0], level)
