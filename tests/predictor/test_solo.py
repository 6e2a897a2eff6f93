"""What tenants would do alone, from what they do together: back through the slowdown model."""

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import SATURATION, TenantActivity, is_saturated, slowdowns, solo_activity


@pytest.mark.parametrize("mode", [SharingMode.MPS, SharingMode.TIME_SLICING])
@pytest.mark.parametrize("busy", [(0.5,), (0.3, 0.4), (0.6, 0.3), (0.2, 0.3, 0.2), (0.7, 0.5)])
def test_what_is_slowed_down_is_found_again(mode: SharingMode, busy: tuple[float, ...]) -> None:
    util, sm = np.array([busy]), 0.9 * np.array([busy])
    dram = np.full(util.shape, 0.1)
    by = slowdowns(mode, util, sm, dram, np.ones(util.shape, np.bool_))[0]
    together = [TenantActivity(u / s, a / s, 0.1) for u, a, s in zip(util[0], sm[0], by, strict=True)]
    for found, u, a in zip(solo_activity(mode, together), util[0], sm[0], strict=True):
        assert found.util == pytest.approx(u, abs=0.03)
        assert found.sm == pytest.approx(a, abs=0.03)


@pytest.mark.parametrize("mode", list(SharingMode))
def test_nobody_does_more_than_all_or_less_than_what_was_seen(mode: SharingMode) -> None:
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
def test_a_gpu_is_used_up_by_what_its_tenants_share(
    mode: SharingMode, together: list[tuple[float, float]], expected: bool
) -> None:
    assert is_saturated(mode, [TenantActivity(util, sm, 0.1) for util, sm in together]) is expected
