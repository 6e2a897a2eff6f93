"""Shares of a power limit, out of tables like Zeus'."""

from statistics import fmean

import pytest
from carpool_core.products import PRODUCTS, find_product
from carpool_extender.framework.scores import AWAKE_SHARE, FULL_SHARE
from carpool_research.gpu_power import SCALED, Training, measured, shares_of
from carpool_simulator import profiles
from carpool_simulator.power import MEAN, ZEUS, Power, power_of

CAPABILITIES = {"p100": "6.0", "v100": "7.0", "rtx6000": "7.5", "a40": "8.6"}


def test_power_shares_come_from_a_filling_gpu_and_the_busiest_network():
    filling = [Training(SCALED, one, 10.0 / r, 0.2 + 0.5 * r) for one in ("adam", "sgd") for r in (0.1, 0.5, 1.0)]
    slower = [Training(SCALED, "slow", 90.0 / r, 0.2 + 0.5 * r) for r in (0.2, 1.0)]
    others = [Training("bert", "adam", 7.0, share) for share in (0.8, 1.0)]
    found = shares_of([*filling, *slower, *others])
    assert tuple(found) == pytest.approx((0.2, 0.9))
    assert found.of(250, 20) == Power(20, 50.0, 225.0)


def test_power_shares_equal_zeus_measurements(published):
    each = measured(published)
    rounded = {CAPABILITIES[gpu]: tuple(round(share, 2) for share in shares) for gpu, shares in each.items()}
    assert rounded == ZEUS
    assert tuple(round(fmean(values), 2) for values in zip(*each.values(), strict=True)) == MEAN


def test_decisions_and_simulation_use_power_of_different_gpus(published):
    others = [shares for gpu, shares in measured(published).items() if gpu != "a40"]
    assert tuple(round(fmean(values), 2) for values in zip(*others, strict=True)) == (AWAKE_SHARE, FULL_SHARE)
    assert find_product(profiles.PRODUCT).compute_capability == CAPABILITIES["a40"]  # Philly's GPUs are of it, too


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_power_lies_between_idle_and_the_limit(product):
    asleep_w, awake_w, full_w = power_of(product)
    assert 0 < asleep_w < awake_w < full_w < product.power_limit_w


def test_an_unmeasured_gpu_has_mean_power_shares():
    assert power_of(find_product("NVIDIA GeForce RTX 3090")) == Power(20, 98.0, 301.0)
    assert power_of(find_product("NVIDIA A100-SXM4-40GB")) == Power(50, 92.0, 336.0)
