"""How the errors were counted that came with the goals for Lucid's pairs."""

import numpy as np
import pytest
from carpool_research.slowdown import fit, lucid


def test_a_profile_of_either_precision_is_the_last_one(tmp_path):
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(
        "model,batchsize,amp,gpu_util,gmem_util,gmem,label\nA,32,0,40,10,100,1\nA,32,1,20,5,50,0\nA,64,0,80,20,200,2\n"
    )
    (folder / "colocate_rtx3090.csv").write_text(
        "model1,batchsize1,amp1,speed1,model2,batchsize2,amp2,speed2\nA,32,0,1,A,64,0,1\n"
    )
    own, either = lucid.read(tmp_path), lucid.read(tmp_path, by_precision=False)
    assert (own.busy[0].tolist(), own.memory[0].tolist(), own.mib[0].tolist()) == ([0.4, 0.8], [0.1, 0.2], [100, 200])
    assert (either.busy[0].tolist(), either.mib[0].tolist()) == ([0.2, 0.8], [50, 200])
    assert either.jobs == own.jobs


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


def test_how_far_a_way_is_off_is_the_mean_of_all_figures():
    given = fit.Told(0.1, 0.2, 0.3, 0.5, 60.0)
    assert fit.Told(0.1, 0.1, 0.6, 0.5, 60.0).distance(given) == pytest.approx((0.5 + 1.0) / 5)


def test_a_forest_knows_no_pair_of_the_architecture_that_it_foretells():
    models = [("A", "B"), ("C", "A"), ("C", "B"), ("B", "C")]
    truth = np.array([5.0, 9.0, 1.0, 1.0])  # whoever has seen A, as one or as the other, foretells more than 1 of it
    assert fit.forest(np.ones((4, 2)), truth, models, 20)[0] == 1.0


def test_of_a_forest_its_error_and_what_it_explains_and_finds_is_told(monkeypatch):
    monkeypatch.setattr(fit, "forest", lambda features, *_: np.array([1.5, 1.0, 1.1, 1.3])[: len(features)])
    pairs = pairs_of(np.full((4, 2), 0.5), np.array([1.3, 1.2, 1.0, 1.1]), [("A", "B"), ("B", "A")] * 2)
    told = next(one.told for one in fit.readings(pairs, pairs) if str(one.way) == "slowdown of both, as measured")
    assert told.forest == pytest.approx((0.2 + 0.2 + 0.1 + 0.2) / 4)
    assert told.r2 == pytest.approx(1 - (0.04 + 0.04 + 0.01 + 0.04) / (0.0225 + 0.0025 + 0.0225 + 0.0025))
    assert told.found_percent == 50.0


def test_the_table_starts_with_the_given_errors_and_the_closest_way_to_count(world):
    found = fit.readings(*world, trees=2)
    given, closest, *others = fit.readings_table(found)
    assert (given["no slowdown"], given["it finds"]) == ("0.097", "60%")
    assert (closest["error of"], closest["off"]) == (str(found[0].way), f"{found[0].off:.1%}")
    assert len(others) == fit.SHOWN - 1


def test_given_errors_come_closest_as_errors_of_speed(published):
    first, *_ = fit.readings(lucid.read(published), lucid.read(published, by_precision=False), trees=10)
    assert str(first.way) == "speed of first jobs, as measured"
