"""Which rounds of a benchmark count."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from carpool_e2e.bench.measure import CALM, are_enough, least_disturbed, played, share_stolen, stolen_and_asked


@dataclass(frozen=True)
class Played:
    stolen: float
    took_s: float = 1.0


def test_those_count_in_which_the_least_was_stolen_however_long_they_took() -> None:
    rounds = [Played(0.1 * (n % 3), 0.001 * n) for n in range(1, 8)]
    found = least_disturbed(rounds, 5)
    assert len(found) == 5
    assert max(one.stolen for one in found) <= min(one.stolen for one in rounds if one not in found)
    assert least_disturbed(rounds[:2], 5) == [rounds[0], rounds[1]]


def test_rounds_are_played_again_until_enough_were_calm_or_there_were_too_many() -> None:
    calm, bad = Played(CALM), Played(CALM + 0.01)
    assert not are_enough([calm, bad, calm], wanted=3, most=5)
    assert are_enough([calm, bad, calm, calm], wanted=3, most=5)
    assert are_enough([bad] * 5, wanted=3, most=5)


def test_a_round_follows_the_other_until_there_are_enough() -> None:
    stolen = iter([0.0, 0.3, 0.0, 0.0, 0.0])
    assert [one.stolen for one in played(lambda: Played(next(stolen)), wanted=3, most=5)] == [0.0, 0.3, 0.0, 0.0]


def test_stolen_time_is_a_part_of_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 4 40 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n", encoding="ascii")
    assert stolen_and_asked(tmp_path) == (40, 200)
    assert share_stolen((30, 160), (40, 200)) == pytest.approx(0.25)
    assert share_stolen((40, 200), (40, 200)) == 0
