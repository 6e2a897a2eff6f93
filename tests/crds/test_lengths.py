"""Lengths of jobs, and the ladder by which a queue sorts them."""

import math
from fractions import Fraction

import pytest
from carpool_core.durations import (
    ASSUMED_DURATION_S,
    BUCKET_FACTOR,
    DURATION_BUCKETS,
    FIRST_BOUND_S,
    duration_bucket,
    duration_s,
    durations_s,
    format_duration,
)
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from hypothesis import given
from hypothesis import strategies as st

_LENGTHS = st.floats(min_value=0.0, max_value=1e9)


def _exactly(value: float) -> Interval:
    return Interval(median=value, lower=value, upper=value)


def _of(product: str, step_s: float) -> ProductPrediction:
    return ProductPrediction(
        product=product,
        memory=MemoryPrediction(median_mib=1000, upper_mib=1024, coverage=0.95),
        activity=ActivityPrediction(
            gpu_util_percent=_exactly(50), sm_active_ratio=_exactly(0.5), dram_active_ratio=_exactly(0.5)
        ),
        step_time_seconds=_exactly(step_s),
    )


_TOLD = Prediction(outcome="Predicted", reason="ByFeatures", products=[_of("A100", 0.1), _of("T4", 0.3)])


@pytest.mark.parametrize(
    ("steps", "prediction", "product", "expected"),
    [
        pytest.param(1000, _TOLD, "A100", 100.0, id="on the product that it asks for"),
        pytest.param(1000, _TOLD, "", 200.0, id="the mean of those that it may run on"),
        pytest.param(None, _TOLD, "", None, id="nobody said how many steps"),
        pytest.param(1000, None, "", None, id="nothing predicted"),
        pytest.param(1000, _TOLD, "H100", None, id="nothing predicted of what it may run on"),
        pytest.param(1000, Prediction(outcome="Abstained", reason="NoModel"), "", None, id="abstained"),
    ],
)
def test_a_job_takes_its_steps_by_the_time_of_one(
    steps: int | None, prediction: Prediction | None, product: str, expected: float | None
) -> None:
    found = duration_s(steps, prediction, lambda name: product in name)

    assert found == (None if expected is None else pytest.approx(expected))


def test_a_job_takes_as_long_on_each_product_as_is_predicted_of_it() -> None:
    assert durations_s(1000, _TOLD, lambda _: True) == pytest.approx({"A100": 100.0, "T4": 300.0})
    assert durations_s(1000, _TOLD, lambda name: name == "T4") == pytest.approx({"T4": 300.0})
    assert durations_s(None, _TOLD, lambda _: True) == {}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4e-4, "0.4 ms"),
        (0.041, "41 ms"),
        (1.24, "1.2 s"),
        (89.0, "89 s"),
        (1440.0, "24 min"),
        (24_480.0, "6.8 h"),
        (36 * 3600.0, "1.5 d"),
        (1e11, "1,157,407 d"),
    ],
)
def test_length_is_told_in_a_unit_that_people_use(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


@given(_LENGTHS, _LENGTHS)
def test_the_longer_a_job_the_higher_its_rung(one_s: float, other_s: float) -> None:
    low, high = sorted((one_s, other_s))

    assert 0 <= duration_bucket(low) <= duration_bucket(high) < DURATION_BUCKETS


@given(st.floats(min_value=FIRST_BOUND_S, max_value=86_400.0))
def test_jobs_of_one_rung_differ_by_less_than_its_step(seconds: float) -> None:
    assert duration_bucket(1.001 * BUCKET_FACTOR * seconds) > duration_bucket(seconds)
    assert duration_bucket(0.999 * BUCKET_FACTOR * BUCKET_FACTOR * seconds) <= duration_bucket(seconds) + 2


@pytest.mark.parametrize("number", range(1, DURATION_BUCKETS))
def test_a_rung_begins_exactly_at_its_bound(number: int) -> None:
    """Regression: a logarithm rounded down left jobs of just that length one rung too low."""
    exact = Fraction(FIRST_BOUND_S) * Fraction(BUCKET_FACTOR) ** (number - 1)
    bound = float(exact)
    assert Fraction(bound) == exact
    assert duration_bucket(bound) == number
    assert duration_bucket(math.nextafter(bound, 0.0)) == number - 1
    assert duration_bucket(math.nextafter(bound, math.inf)) == number


def test_the_last_rung_has_no_end_and_the_first_no_beginning() -> None:
    assert (duration_bucket(0.0), duration_bucket(1e300), duration_bucket(math.inf)) == (
        0,
        DURATION_BUCKETS - 1,
        DURATION_BUCKETS - 1,
    )


def test_an_unknown_length_lies_in_the_middle() -> None:
    assert duration_bucket(None) == duration_bucket(ASSUMED_DURATION_S)
    assert DURATION_BUCKETS / 3 < duration_bucket(None) < DURATION_BUCKETS / 2
