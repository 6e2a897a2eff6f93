"""Shares of a power limit, out of tables like Zeus'."""

from statistics import fmean

import pytest
from carpool_extender.simulation.power import Power
from carpool_extender.simulation.zeus_power import SCALED, ZEUS, Training, measured, shares_of


def test_watts_of_a_gpu_that_fills_by_and_by_tell_what_it_draws_before_and_the_busiest_network_what_when_full():
    filling = [Training(SCALED, one, 10.0 / r, 0.2 + 0.5 * r) for one in ("adam", "sgd") for r in (0.1, 0.5, 1.0)]
    slower = [Training(SCALED, "slow", 90.0 / r, 0.2 + 0.5 * r) for r in (0.2, 1.0)]
    others = [Training("bert", "adam", 7.0, share) for share in (0.8, 1.0)]
    found = shares_of([*filling, *slower, *others])
    assert tuple(found) == pytest.approx((0.2, 0.9))
    assert found.of(250) == Power(50.0, 225.0)


def test_the_shares_are_what_zeus_measured(published):
    each = measured(published)
    assert len(each) == 4
    assert tuple(round(fmean(values), 2) for values in zip(*each, strict=True)) == ZEUS
