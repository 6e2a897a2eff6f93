"""Shares of a power limit, out of tables like Zeus'."""

from statistics import fmean

import pytest
from carpool_core.products import PRODUCTS, find_product
from carpool_extender.framework.scores import AWAKE_SHARE, FULL_SHARE
from carpool_research.gpu_power import SCALED, Training, measured, shares_of
from carpool_simulator import profiles
from carpool_simulator.power import MEAN, ZEUS, Power, power_of

CAPABILITIES = {"p100": "6.0", "v100": "7.0", "rtx6000": "7.5", "a40": "8.6"}


def test_watts_of_a_gpu_that_fills_by_and_by_tell_what_it_draws_before_and_the_busiest_network_what_when_full():
    filling = [Training(SCALED, one, 10.0 / r, 0.2 + 0.5 * r) for one in ("adam", "sgd") for r in (0.1, 0.5, 1.0)]
    slower = [Training(SCALED, "slow", 90.0 / r, 0.2 + 0.5 * r) for r in (0.2, 1.0)]
    others = [Training("bert", "adam", 7.0, share) for share in (0.8, 1.0)]
    found = shares_of([*filling, *slower, *others])
    assert tuple(found) == pytest.approx((0.2, 0.9))
    assert found.of(250, 20) == Power(20, 50.0, 225.0)


def test_the_shares_are_what_zeus_measured(published):
    each = measured(published)
    rounded = {CAPABILITIES[gpu]: tuple(round(share, 2) for share in shares) for gpu, shares in each.items()}
    assert rounded == ZEUS
    assert tuple(round(fmean(values), 2) for values in zip(*each.values(), strict=True)) == MEAN


def test_what_decides_goes_by_gpus_that_simulated_ones_do_not_draw_by(published):
    others = [shares for gpu, shares in measured(published).items() if gpu != "a40"]
    assert tuple(round(fmean(values), 2) for values in zip(*others, strict=True)) == (AWAKE_SHARE, FULL_SHARE)
    assert find_product(profiles.PRODUCT).compute_capability == CAPABILITIES["a40"]  # Philly's GPUs are of it, too


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_a_gpu_with_a_job_draws_more_than_one_asleep_and_none_more_than_its_limit(product):
    asleep_w, awake_w, full_w = power_of(product)
    assert 0 < asleep_w < awake_w < full_w < product.power_limit_w


def test_a_gpu_draws_by_the_one_of_its_kind_that_was_measured_else_by_their_mean():
    assert power_of(find_product("NVIDIA GeForce RTX 3090")) == Power(20, 98.0, 301.0)
    assert power_of(find_product("NVIDIA A100-SXM4-40GB")) == Power(50, 92.0, 336.0)
