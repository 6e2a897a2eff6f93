"""How the errors were counted that came with the goals for Lucid's pairs."""

import numpy as np
import pytest
from carpool_research.slowdown import fit, lucid


def pairs_of(busy, raw, models):
    """Return pairs whose jobs have these profiles; memory and MiB are as utilization is."""
    return lucid.Pairs(busy, busy, busy, busy, np.maximum(1.0, raw), raw, models, models)


@pytest.fixture
def world():
    """Sixty rows of six architectures, with their own profiles and with others."""
    draw = np.random.default_rng(0)
    busy = draw.uniform(0.3, 1.0, (60, 2))
    raw = 1 + busy[:, 0] * busy[:, 1] ** 2 - 0.15 * (np.arange(60) % 2)  # who stands second sometimes gains
    models = [tuple("ABCDEF"[i] for i in draw.integers(0, 6, 2)) for _ in range(60)]
    return pairs_of(busy, raw, models), pairs_of(draw.permutation(busy), raw, models)


def test_ways_to_count_differ_by_what_they_say(world):
    own, either = world
    found = {(str(one.way), one.profiles): one for one in fit.readings(own, either, trees=2)}
    assert len(found) == 24
    second = found["speed of second jobs, as measured", "model, batch, precision"]
    assert second.told.none == pytest.approx(np.abs(1 / own.raw[1::2] - 1).mean())
    assert second.told.rule == pytest.approx(np.abs(np.minimum(1, 1 / own.busy.sum(1)) - 1 / own.raw)[1::2].mean())
    shipped = 1 / (1 + own.busy[:, 0] * own.busy[:, 1] ** 1.5)
    assert second.shipped == pytest.approx(np.abs(shipped - 1 / own.raw)[1::2].mean())
    other = found["speed of second jobs, as measured", "model, batch"]
    assert other.shipped == second.shipped, "what is shipped knows the precision"
    assert found["slowdown of both, at least 1", "model, batch"].told.rule == pytest.approx(
        np.abs(np.maximum(1, either.busy.sum(1)) - own.slowdown).mean()
    )


@pytest.mark.parametrize("planted", [0, 7, 23])
def test_the_way_that_comes_closest_stands_first(world, planted):
    known = fit.readings(*world, trees=2)[planted]
    found = fit.readings(*world, given=known.told, trees=2)
    assert (found[0].way, found[0].profiles, found[0].off) == (known.way, known.profiles, 0.0)
    assert [one.off for one in found] == sorted(one.off for one in found)


def test_a_forest_knows_no_pair_of_the_architecture_that_it_foretells():
    models = [("A", "B"), ("C", "A"), ("C", "B"), ("B", "C")]
    truth = np.array([5.0, 9.0, 1.0, 1.0])  # whoever has seen A, as one or as the other, foretells more than 1 of it
    assert fit.forest(np.ones((4, 2)), truth, models, 20)[0] == 1.0


def test_the_table_starts_with_the_given_errors_and_the_closest_way_to_count(world):
    found = fit.readings(*world, trees=2)
    given, closest, *others = fit.readings_table(found)
    assert (given["no slowdown"], given["it finds"]) == ("0.097", "60%")
    assert (closest["error of"], closest["off"]) == (str(found[0].way), f"{found[0].off:.1%}")
    assert len(others) == fit.SHOWN - 1


def test_given_errors_come_closest_as_errors_of_speed(published):
    first, *_ = fit.readings(lucid.read(published), lucid.read(published, by_precision=False), trees=10)
    assert str(first.way) == "speed of first jobs, as measured"
