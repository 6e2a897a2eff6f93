"""The document that holds what jobs taught: small, sane, and refused where it is broken."""

import msgspec
import numpy as np
import pytest
from calibration_world import CAPACITY, STACK, job, learn, state_of
from carpool_predictor.calibration.document import (
    MAX_RUNS,
    MAX_STACKS,
    MAX_WIDENING,
    Calibration,
    RunMeasurement,
    RunPrediction,
    read_calibration,
    write_calibration,
)
from carpool_predictor.calibration.observe import observe
from carpool_predictor.features import MalformedError
from carpool_predictor.models.memory import shipped
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1, 1e5), st.floats(0, 1e5), st.booleans()), max_size=40))
@settings(deadline=None)
def test_whatever_is_observed_the_document_stays_sane(rows: list[tuple[int, float, float, bool]]) -> None:
    found = learn(
        (
            RunPrediction(model=f"m{number}", reserved_mib=reserved, live_mib=0.5 * reserved, upper_mib=reserved),
            RunMeasurement(peak_mib=peak, capacity_mib=CAPACITY, out_of_memory=gone),
        )
        for number, reserved, peak, gone in rows
    )
    for state in found.stacks:
        assert state.slope > 0
        assert state.intercept_mib >= 0
        assert 0 <= state.widening <= MAX_WIDENING
        assert state.seen + state.refused == len(rows)
    assert read_calibration(write_calibration(found)) == found


def test_the_document_stays_small() -> None:
    rng = np.random.default_rng(7)
    found = Calibration()
    full = state_of(learn(job(i, rng) for i in range(MAX_RUNS + 10)))
    for number in range(MAX_STACKS + 3):
        stack = msgspec.structs.replace(STACK, driver=str(number))
        held = [*found.stacks, msgspec.structs.replace(full, stack=stack)]
        found = observe(Calibration(stacks=held), stack, *job(0, rng), shipped())
    assert len(full.rows) == MAX_RUNS
    assert len(found.stacks) == MAX_STACKS
    assert found.state(msgspec.structs.replace(STACK, driver="0")) is None
    assert len(write_calibration(found)) < 400_000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param(b'{"format":3,"stacks":[', "expected a calibration", id="truncated"),
        pytest.param(b'{"format":4,"stacks":7}', "found 4; upgrade carpool", id="newer"),
        pytest.param(b'{"format":2}', "found 2; remove it", id="older"),
        pytest.param(b"\x80\x04", "expected a calibration", id="pickle"),
        pytest.param(
            b'{"stacks":[{"stack":{"product":"Tesla T4","precision":"fp32"},"slope":-1,"intercept_mib":0}]}', "slope",
            id="tampered",
        ),
    ],
)  # fmt: skip
def test_a_broken_document_is_refused(content: bytes, word: str) -> None:
    with pytest.raises(MalformedError, match=word):
        read_calibration(content)
