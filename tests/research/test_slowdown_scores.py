"""Scores of slowdowns, limits and published rules on Lucid's pairs."""

import numpy as np
import pytest
from carpool_predictor.models.slowdown import MeanValueAnalysis
from carpool_research.slowdown import fit, lucid
from carpool_research.slowdown.candidates import hidden_host


def test_lucid_is_scored_in_both_directions(tmp_path):
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(
        "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label\nA,D,32,0,9,40,1,1,0\nB,D,32,0,9,60,1,1,0\n"
    )
    (folder / "colocate_rtx3090.csv").write_text(
        "model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2\n"
        "A,D,1,32,0,0.8,B,D,1,32,0,1.25\n"
    )
    pairs = lucid.read(tmp_path)
    assert pairs.busy.tolist() == [[0.4, 0.6], [0.6, 0.4]]
    assert pairs.slowdown.tolist() == [1.25, 1.0]
    none = lucid.score(lucid.BASELINES["no slowdown"](pairs), pairs)
    assert (none.error, none.found_percent) == (0.125, 0.0)
    assert none.speed_error == pytest.approx((0.2 + 0.25) / 2)  # not clipped: the second job ran faster than alone
    assert lucid.missed(lucid.BASELINES["no slowdown"](pairs), pairs) == {"A": 1}
    high = lucid.score(np.full(2, 1.25), pairs)
    assert (high.found_percent, high.right_percent) == (100.0, 50.0)


def test_hidden_host_time_shortens_the_steps_of_the_mean_value_analysis():
    busy = np.random.default_rng(0).uniform(0.1, 1.0, (20, 4))
    assert hidden_host(busy, 1.5, 1.0)[1] == pytest.approx(MeanValueAnalysis(busy, 1.5).slowdowns())
    assert hidden_host(np.array([[0.4, 0.6]]), 1.0, 2.0)[1][0, 0] == pytest.approx((1 - 0.16 + (0.4 * 1.6) ** 2) ** 0.5)


def test_the_standard_error_of_a_score_depends_on_the_number_of_jobs():
    """Pairs of one job are dependent, so that more pairs of the same jobs do not lower the error."""

    def world(jobs: int, pairs: int) -> lucid.Pairs:
        bad = np.arange(jobs) % 2 == 0  # every second job is slowed by any neighbour
        one, other = np.divmod(np.arange(jobs * pairs), pairs)
        slowdown, names = np.where(bad[one], 1.3, 1.0), [f"job-{i}" for i in range(max(jobs, pairs))]
        of = [(names[i], names[j]) for i, j in zip(one, other, strict=True)]
        return lucid.Pairs(*[np.zeros((len(of), 2))] * 4, slowdown, slowdown, of, of)

    def error(jobs: int, pairs: int) -> float:
        of = world(jobs, pairs)
        return lucid.deviation(np.ones(len(of.slowdown)), of).error

    # A mean of 0 and 0.3, half each, has a standard error of 0.15 / sqrt(jobs), whatever the number of their pairs.
    assert error(9, 9) == pytest.approx(0.15 / 3, rel=0.15)
    assert error(36, 36) == pytest.approx(0.15 / 6, rel=0.15)
    half = world(36, 36)
    predicted = np.where([int(one.removeprefix("job-")) % 4 == 0 for one, _ in half.jobs], 1.3, 1.0)
    # Of 18 slow jobs 9 are found: 50 ± 50 / sqrt(18).
    assert lucid.deviation(predicted, half).found_percent == pytest.approx(50 / 18**0.5, rel=0.15)
    perfect = lucid.deviation(world(16, 16).slowdown, world(16, 16))
    assert perfect == lucid.Deviation(0.0, 0.0, 0.0)


def test_limits_and_rules_are_scored_by_pairs():
    measured = np.array([(1.0, 1.0), (1.3, 1.0), (1.0, 1.1), (1.0, 1.4)]).ravel()
    predicted = np.array([(1.0, 1.0), (1.1, 1.0), (1.0, 1.3), (1.5, 1.5)]).ravel()
    found = fit.admitted(fit.within(predicted, 1.2), measured, 1.2)
    assert (found.admitted_percent, found.beyond_percent, found.missed_percent) == (50.0, 50.0, 50.0)
    assert fit.admitted(fit.within(predicted, 9.0), measured, 9.0) == fit.Admitted(100.0, 0.0, 0.0)
    rule = fit.admitted(np.array([False, True, True, True]), measured, 1.2)
    assert rule == fit.Admitted(75.0, pytest.approx(200 / 3), 50.0)
