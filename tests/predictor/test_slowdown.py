"""The slowdown model, and activity alone from activity together."""

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import (
    DEPTH,
    SATURATION,
    MeanValueAnalysis,
    TenantActivity,
    fair_share,
    is_saturated,
    shipped,
    slowdowns,
    solo_activity,
    upper_end,
    upper_factor,
)
from carpool_research.slowdown.fit import exact_slowdowns
from hypothesis import given
from hypothesis import strategies as st

SHARED = [SharingMode.TIME_SLICING, SharingMode.MPS]
ratios = st.floats(0, 1, allow_nan=False, width=32)
tenants = st.lists(st.tuples(ratios, ratios, ratios), min_size=1, max_size=8)


def of(mode, profiles, present=None):
    """Slowdowns of one GPU's tenants, given as (util, sm, dram)."""
    columns = np.array(profiles, dtype=float).reshape(len(profiles), 3).T[:, None, :]
    mask = np.ones((1, len(profiles)), dtype=bool) if present is None else np.array([present])
    return slowdowns(mode, *columns, mask)[0]


@pytest.mark.parametrize(
    ("mode", "profiles", "expected"),
    [
        pytest.param(SharingMode.TIME_SLICING, [(1, 1, 1)] * 3, [3, 3, 3], id="full tenants share evenly"),
        pytest.param(SharingMode.TIME_SLICING, [(0.5, 0, 0)] * 2, [1.177, 1.177], id="two halves do not add"),
        pytest.param(SharingMode.TIME_SLICING, [(0.9, 0, 0), (0, 0, 0)], [1, 1], id="an idle neighbour costs nothing"),
        pytest.param(
            SharingMode.TIME_SLICING, [(1, 0, 0), (0.25, 0, 0)], [1.125, 1.25], id="the busier one loses less"
        ),
        pytest.param(SharingMode.MPS, [(1, 1, 0)] * 2, [2, 2], id="two full tenants halve each other"),
        pytest.param(SharingMode.MPS, [(0.9, 0.4, 0.2)] * 2, [1, 1], id="below saturation they do not meet"),
        pytest.param(SharingMode.MPS, [(1, 0.1, 0.7)] * 2, [1.6, 1.6], id="memory-bound tenants meet at the DRAM"),
        pytest.param(SharingMode.MPS, [(0.5, 0.2, 0), (1, 1, 0)], [1.2, 1.2], id="the host's part does not stretch"),
        pytest.param(SharingMode.EXCLUSIVE, [(1, 1, 1)] * 2, [1, 1], id="exclusive"),
        pytest.param(SharingMode.MIG, [(1, 1, 1)] * 2, [1, 1], id="instances"),
    ],
)
def test_known_cases(mode, profiles, expected):
    assert of(mode, profiles) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("mode", list(SharingMode))
@given(profile=st.tuples(ratios, ratios, ratios))
def test_a_single_tenant_is_not_slowed(mode, profile):
    assert of(mode, [profile]) == pytest.approx([1.0])


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants)
def test_slowdowns_lie_between_one_and_the_number_of_tenants(mode, profiles):
    result = of(mode, profiles)
    assert (result >= 1.0).all()
    assert (result <= len(profiles) + 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, newcomer=st.tuples(ratios, ratios, ratios))
def test_an_additional_tenant_speeds_no_tenant_up(mode, profiles, newcomer):
    assert (of(mode, [*profiles, newcomer])[:-1] >= of(mode, profiles) - 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, which=st.integers(0, 7), more=st.tuples(ratios, ratios, ratios))
def test_a_busier_tenant_slows_all_tenants_more(mode, profiles, which, more):
    which %= len(profiles)
    busier = list(profiles)
    busier[which] = tuple(max(a, b) for a, b in zip(profiles[which], more, strict=True))
    assert (of(mode, busier) >= of(mode, profiles) - 1e-9).all()


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, seed=st.randoms(use_true_random=False))
def test_the_order_of_tenants_does_not_matter(mode, profiles, seed):
    order = list(range(len(profiles)))
    seed.shuffle(order)
    assert of(mode, [profiles[i] for i in order]) == pytest.approx(of(mode, profiles)[order])


@pytest.mark.parametrize(
    ("busy", "slowdown"),
    [((0.4, 0.5), 1.0), ((0.9, 0.3), 0.9 / 0.7), ((0.3, 0.9), 1.0), ((0.8, 0.7), 1.6), ((1.0, 0.1, 0.9), 1 / 0.45)],
)
def test_a_fair_share_is_an_equal_division_of_what_small_demands_leave(
    busy: tuple[float, ...], slowdown: float
) -> None:
    assert fair_share(np.array([busy]))[0, 0] == pytest.approx(slowdown)


@given(busy=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4))
def test_with_exponent_one_groups_equal_the_markov_chain(busy):
    assert MeanValueAnalysis(np.array([busy]), 1.0).slowdowns()[0] == pytest.approx(exact_slowdowns(busy), rel=1e-6)


def recursion(busy, k, away=()):
    """Return slowdowns of present tenants by position, by direct recursion of the arrival theorem."""
    found = {}
    for i in (i for i in range(len(busy)) if i not in away):
        others = recursion(busy, k, (*away, i)).items()
        found[i] = 1.0 + busy[i] * sum((busy[j] ** k + s - 1.0) / s for j, s in others)
    return found


@pytest.mark.parametrize("k", [1.0, 1.5, 2.0])
@given(busy=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=DEPTH + 1))
def test_groups_compose_by_the_arrival_theorem(busy, k):
    expected = list(recursion(busy, k).values())
    assert MeanValueAnalysis(np.array([busy]), k).slowdowns()[0] == pytest.approx(expected, rel=1e-9)


@given(busy=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=6))
def test_truncation_of_large_groups_changes_little(busy):
    expected = list(MeanValueAnalysis(np.array([busy]), shipped().holding, depth=len(busy)).slowdowns()[0])
    found = MeanValueAnalysis(np.array([busy]), shipped().holding).slowdowns()[0]
    assert (found <= np.array(expected) + 1e-9).all()
    assert found == pytest.approx(expected, rel=0.05)


@given(busy=st.lists(ratios, min_size=1, max_size=4))
def test_time_slicing_never_uses_more_sms_than_exist(busy):
    alone = np.array([busy], float)
    assert (alone ** shipped().holding / MeanValueAnalysis(alone, shipped().holding).slowdowns()).sum() <= 1 + 1e-9


@pytest.mark.parametrize("mode", list(SharingMode))
@given(profiles=tenants)
def test_the_upper_end_is_above_the_median_and_equals_it_without_neighbours(mode, profiles):
    columns = np.array(profiles, float).reshape(len(profiles), 3).T[:, None, :]
    here = np.ones((1, len(profiles)), bool)
    median = of(mode, profiles)
    (upper,) = upper_end(mode, np.array([median]), columns[0], here)
    fair = fair_share(columns[0])[0] if mode is SharingMode.TIME_SLICING else 1.0
    assert upper == pytest.approx(np.maximum(median, fair) * upper_factor(mode, columns[0], here)[0])
    assert (median <= upper).all()
    if len(profiles) == 1 or mode not in SHARED:
        assert upper == pytest.approx(median)


@pytest.mark.parametrize("mode", SHARED)
@given(profiles=tenants, others=st.lists(tenants, max_size=4))
def test_a_gpu_does_not_depend_on_the_rest_of_the_batch(mode, profiles, others):
    rows = [profiles, *others]
    width = max(len(row) for row in rows)
    columns = np.zeros((3, len(rows), width))
    present = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        columns[:, i, : len(row)] = np.array(row).T
        present[i, : len(row)] = True
    result = slowdowns(mode, *columns, present)
    assert result[0, : len(profiles)] == pytest.approx(of(mode, profiles))
    assert (result[~present] == 1).all()


@pytest.mark.parametrize("mode", SHARED)
def test_absent_entries_are_ignored(mode):
    assert of(mode, [(1, 1, 1), (np.nan, 7, -3)], present=[True, False]) == pytest.approx([1, 1])
    pair = of(mode, [(1, 1, 1), (0.5, 0.9, 0)])
    assert of(mode, [(1, 1, 1), (np.nan, 7, -3), (0.5, 0.9, 0)], [True, False, True])[[0, 2]] == pytest.approx(pair)


@pytest.mark.parametrize("mode", SHARED)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_arrays_are_accepted(mode, shape):
    empty = np.zeros(shape)
    assert slowdowns(mode, empty, empty, empty).shape == shape
    assert slowdowns(mode, empty, empty, empty, empty.astype(bool)).shape == shape


@pytest.mark.parametrize("mode", [SharingMode.MPS, SharingMode.TIME_SLICING])
@pytest.mark.parametrize("busy", [(0.5,), (0.3, 0.4), (0.6, 0.3), (0.2, 0.3, 0.2), (0.7, 0.5)])
def test_activity_alone_is_recovered(mode: SharingMode, busy: tuple[float, ...]) -> None:
    util, sm = np.array([busy]), 0.9 * np.array([busy])
    dram = np.full(util.shape, 0.1)
    by = slowdowns(mode, util, sm, dram, np.ones(util.shape, np.bool_))[0]
    together = [TenantActivity(u / s, a / s, 0.1) for u, a, s in zip(util[0], sm[0], by, strict=True)]
    for found, u, a in zip(solo_activity(mode, together), util[0], sm[0], strict=True):
        assert found.util == pytest.approx(u, abs=0.03)
        assert found.sm == pytest.approx(a, abs=0.03)


@pytest.mark.parametrize("mode", list(SharingMode))
def test_activity_alone_lies_between_measured_and_full(mode: SharingMode) -> None:
    for one in solo_activity(mode, [TenantActivity(0.9, 0.9, 0.9)] * 4):
        assert 0.9 <= one.util <= 1
        assert 0.9 <= one.sm <= 1
    assert solo_activity(mode, [TenantActivity(0.4, 0.2, 0.1)]) == [pytest.approx(TenantActivity(0.4, 0.2, 0.1))]


HALF = SATURATION / 2


@pytest.mark.parametrize(
    ("mode", "together", "expected"),
    [
        pytest.param(SharingMode.TIME_SLICING, [(HALF, 0.1), (HALF, 0.1)], True, id="all of its time"),
        pytest.param(SharingMode.TIME_SLICING, [(HALF - 0.01, 0.9), (HALF, 0.9)], False, id="in turns SMs do not add"),
        pytest.param(SharingMode.MPS, [(0.9, HALF - 0.01), (0.9, HALF)], False, id="side by side times do not add up"),
        pytest.param(SharingMode.MPS, [(0.1, HALF), (0.1, HALF)], True, id="all of its SMs"),
        pytest.param(SharingMode.TIME_SLICING, [(1.0, 1.0)], False, id="alone it gets all that it asks for"),
        pytest.param(SharingMode.MIG, [(1.0, 1.0), (1.0, 1.0)], False, id="instances leave each other theirs"),
    ],
)
def test_saturation_depends_on_the_shared_resource(
    mode: SharingMode, together: list[tuple[float, float]], expected: bool
) -> None:
    assert is_saturated(mode, [TenantActivity(util, sm, 0.1) for util, sm in together]) is expected
