"""The predicted slowdown that limits are compared with: the median, or an upper quantile that few exceed."""

import math

import pytest
from carpool_core.settings import SettingsError, load
from carpool_core.values import RequestedMode, SharingMode
from carpool_extender.framework.diagnosis import explain_gpus
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation, filter_nodes, place_on_node
from carpool_extender.settings import ExtenderSettings
from carpool_extender.testing import cluster, gpu_node, pod_request, prediction, tenant
from carpool_predictor.models.slowdown import shipped
from evaluations import evaluate
from hypothesis import given
from hypothesis import strategies as st

MEDIAN, UPPER = (
    SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(quantile=quantile)) for quantile in Quantile
)
HALF_BUSY = f"{math.exp(shipped().mps_factor * 0.5):.2f}"
"""Upper end of a slowdown of 1 behind MPS beside a job that is busy for half of the time."""
SHARED = (SharingMode.TIME_SLICING, SharingMode.MPS)


def beside(mode=SharingMode.MPS, sm=0.3, util=50.0, **more):
    return cluster(gpu_node("a", 1, [tenant("x", ["GPU-a-0"], mode, prediction=prediction(sm=sm, util=util), **more)]))


def asks(sm=0.3, util=50.0, **more):
    return pod_request(prediction=prediction(sm=sm, util=util), **more)


def test_upper_quantile_lets_fewer_share_and_names_the_expected_slowdown():
    snapshot = beside(max_slowdown=1.2).snapshot()
    assert filter_nodes(CachedEvaluation(asks(max_slowdown=5.0), MEDIAN, snapshot), ["a"]).fits == ["a"]
    refused = filter_nodes(CachedEvaluation(asks(max_slowdown=5.0), UPPER, snapshot), ["a"]).refused
    assert refused == {"a": f"NoGpuFits: 1 GPU: could slow default/x to {HALF_BUSY} of 1.20, expected 1.00"}
    refused = filter_nodes(evaluate(beside(max_slowdown=9.0), asks(max_slowdown=1.1), UPPER), ["a"]).refused
    assert refused == {"a": f"NoGpuFits: 1 GPU: could run {HALF_BUSY} times as long there, expected 1.00, accepts 1.10"}


@pytest.mark.parametrize("rules", [MEDIAN, UPPER], ids=list(Quantile))
def test_upper_ends_count_for_a_moved_job(rules):
    snapshot = beside(max_slowdown=1.2).snapshot()
    assert filter_nodes(CachedEvaluation(asks(max_slowdown=5.0, moves=1), rules, snapshot), ["a"]).fits == []


@pytest.mark.parametrize("rules", [MEDIAN, UPPER], ids=list(Quantile))
def test_both_quantiles_are_named_whichever_decides(rules):
    snapshot = beside(max_slowdown=3.0).snapshot()
    chosen = place_on_node(CachedEvaluation(asks(max_slowdown=2.0), rules, snapshot), "a")
    assert f"expected slowdown 1.00 of 2.00 (90% chance of less than {HALF_BUSY}); " in chosen.reason
    assert chosen.expected_slowdown == 1.0
    (answer,) = explain_gpus(CachedEvaluation(asks(max_slowdown=2.0), rules, snapshot).evaluation, ["a"])
    assert f"expected slowdown 1.00 (90% chance of less than {HALF_BUSY}); beside default/x " in answer.text


def test_alone_there_is_no_upper_quantile():
    (answer,) = explain_gpus(evaluate(gpu_node("a", 1), asks(), UPPER).evaluation, ["a"])
    assert answer.text.endswith("expected slowdown 1.00; tenant 1 of at most 8")


shares = st.floats(0.0, 1.0, width=32)


@given(st.sampled_from(SHARED), shares, shares, st.lists(st.tuples(shares, shares), min_size=1, max_size=4))
def test_upper_quantile_admits_no_more_than_the_median(mode, sm, util, tenants):
    held = [
        tenant(f"t{i}", ["GPU-a-0"], mode, prediction=prediction(memory_mib=100, sm=one, util=100 * busy))
        for i, (one, busy) in enumerate(tenants)
    ]
    snapshot = cluster(gpu_node("a", 1, held)).snapshot()
    wants = pod_request(
        mode=RequestedMode(mode.value), prediction=prediction(memory_mib=100, sm=sm, util=100 * util), max_slowdown=1.5
    )
    likely, sure = (CachedEvaluation(wants, rules, snapshot).evaluation.results for rules in (MEDIAN, UPPER))
    assert sure.slowdown_margin[0] <= likely.slowdown_margin[0]
    assert sure.added_slowdown[0] == likely.added_slowdown[0]


def test_quantile_is_a_setting():
    assert load(ExtenderSettings, {}).conditions.quantile is Quantile.MEDIAN
    upper = load(ExtenderSettings, {"CARPOOL_SLOWDOWN_QUANTILE": "upper"})
    assert upper.conditions == AdmissionLimits(quantile=Quantile.UPPER)
    with pytest.raises(SettingsError, match="CARPOOL_SLOWDOWN_QUANTILE: expected median or upper, found 'mean'"):
        load(ExtenderSettings, {"CARPOOL_SLOWDOWN_QUANTILE": "mean"})
    assert shipped().level == 0.9
