"""How much room first runs need: ranks over families that were held out."""

from pathlib import Path

import numpy as np
import pytest
from carpool_research.memory.fit import FEWEST_ROWS, ROOMS, factor, families_of, held


def many(of: str, rows: int, largest: float) -> tuple[list[str], list[float]]:
    """Rows of one family, evenly up to its largest ratio."""
    return [of] * rows, np.linspace(0.5, largest, rows).tolist()


def test_the_factor_is_a_rank_of_ranks() -> None:
    # Of 39 rows the 38th counts, ⌈0.95 · 40⌉; of 19 families the 18th and the 19th, ⌈0.9 · 20⌉ and ⌈0.95 · 20⌉.
    names, ratios = [], []
    for number in range(19):
        of, values = many(f"family-{number:02}", 39, 1.0 + number / 10)
        names += of
        ratios += values
    families = families_of(names, np.array(ratios))
    second_largest = [sorted(family.ratios)[-2] for family in families]
    assert factor(families, 0.9) == pytest.approx(second_largest[17])
    assert factor(families, 0.95) == pytest.approx(second_largest[18])


def test_of_few_rows_the_largest_counts() -> None:
    families = families_of(*_arrays(*many("small", FEWEST_ROWS, 1.7)))
    assert factor(families, 0.9) == 1.7


def test_families_of_fewer_rows_do_not_count() -> None:
    small, large = many("small", FEWEST_ROWS - 1, 9.0), many("large", FEWEST_ROWS, 1.1)
    families = families_of(small[0] + large[0], np.array(small[1] + large[1]))
    assert [family.name for family in families] == ["large"]
    with pytest.raises(ValueError, match="expected at least one family of 10 rows or more, found none"):
        factor([], 0.9)


def test_families_are_held_where_nearly_all_of_their_rows_are() -> None:
    first, second = many("first", 20, 1.0), many("second", 20, 2.0)
    families = families_of(first[0] + second[0], np.array(first[1] + second[1]))
    assert (held(families, 0.9), held(families, 1.0), held(families, 1.93)) == (0, 1, 2)


def test_what_is_shipped_is_no_less_than_the_card_says_is_needed() -> None:
    card = Path(__file__, "../../../docs/model-cards/memory.md").resolve().read_text(encoding="utf-8")
    for room in ROOMS:
        row = next(line for line in card.splitlines() if line.startswith(f"|{room.where}|"))
        share, _, needs, shipped, _ = (cell.strip() for cell in row.split("|")[2:-1])
        assert (share, shipped) == (f"{100 * room.families:g}%", f"{room.shipped:g}")
        assert float(needs) <= float(shipped) < float(needs) + 0.02, "no more than it is rounded up by"


def _arrays(names: list[str], ratios: list[float]) -> tuple[list[str], np.ndarray]:
    return names, np.array(ratios)
