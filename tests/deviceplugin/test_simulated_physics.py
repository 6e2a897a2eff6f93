"""How simulated neighbours slow each other down."""

import pytest
from carpool_simulated.physics import Activity, contention, dynamic_power_w
from hypothesis import given
from hypothesis import strategies as st

FULL = Activity(1.0, 1.0, 0.5)
HALF = Activity(0.5, 0.25, 0.1)
SMALL = Activity(0.2, 0.05, 0.02)

ratios = st.floats(0, 1)
activities = st.builds(Activity, ratios, ratios, ratios)


@pytest.mark.parametrize(
    ("mode", "mine", "others", "threads", "low", "high"),
    [
        ("Exclusive", FULL, [], 1.0, 1.0, 1.0),
        ("TimeSlicing", FULL, [], 1.0, 1.0, 1.0),
        ("TimeSlicing", FULL, [FULL], 1.0, 2.0, 2.1),
        ("TimeSlicing", FULL, [FULL, FULL], 1.0, 3.0, 3.1),
        ("TimeSlicing", HALF, [HALF], 1.0, 1.2, 1.4),
        ("TimeSlicing", HALF, [SMALL], 1.0, 1.05, 1.2),
        ("MPS", HALF, [HALF], 1.0, 1.0, 1.02),
        ("MPS", FULL, [FULL], 1.0, 2.0, 2.2),
        ("MPS", FULL, [], 0.5, 2.0, 2.0),
        ("MPS", HALF, [], 0.5, 1.0, 1.0),
    ],
)
def test_table(mode, mine, others, threads, low, high) -> None:
    assert low <= round(contention(mode, mine, others, threads), 9) <= high


@given(st.sampled_from(["Exclusive", "TimeSlicing", "MPS"]), activities, st.lists(activities, max_size=6), activities)
def test_a_further_neighbour_never_helps(mode, mine, others, another) -> None:
    before = contention(mode, mine, others)
    after = contention(mode, mine, [*others, another])
    assert 1 <= before <= after + 1e-6


@given(activities, st.floats(1, 100), st.floats(1, 500))
def test_power_stays_under_the_limit(activity, idle_w, more_w) -> None:
    assert 0 <= dynamic_power_w(activity, idle_w=idle_w, limit_w=idle_w + more_w) <= more_w + 1e-9
