"""A synthetic stack with a known line, and calibrations from jobs on it."""

import math
from collections.abc import Iterable

import numpy as np
from carpool_core.products import find_product
from carpool_core.values import Precision
from carpool_predictor.calibration.document import Calibration, RunMeasurement, RunPrediction, Stack, StackState
from carpool_predictor.calibration.observe import observe
from carpool_predictor.models.memory import shipped

T4 = find_product("Tesla T4")
STACK = Stack(product=T4.name, precision=Precision.FP32, driver="570.1", torch="2.9")
CAPACITY = 80_000.0
SLOPE, INTERCEPT = 1.25, 900.0
"""True line of the synthetic stack; the shipped line differs."""


def job(number: int, rng: np.random.Generator, bound: float = math.inf) -> tuple[RunPrediction, RunMeasurement]:
    """Return a job with noise of 4%; `bound` is relative to its true median."""
    reserved = math.exp(rng.uniform(math.log(500), math.log(30_000)))
    truth = (SLOPE * reserved + INTERCEPT) * math.exp(rng.normal(0, 0.04))
    upper = CAPACITY if bound == math.inf else bound * (SLOPE * reserved + INTERCEPT)
    expected = RunPrediction(model=f"m{number}", reserved_mib=reserved, live_mib=0.8 * reserved, upper_mib=upper)
    return expected, RunMeasurement(peak_mib=truth, capacity_mib=CAPACITY)


def learn(jobs: Iterable[tuple[RunPrediction, RunMeasurement]], calibration: Calibration | None = None) -> Calibration:
    found = calibration or Calibration()
    for expected, measured in jobs:
        found = observe(found, STACK, expected, measured, shipped())
    return found


def state_of(calibration: Calibration) -> StackState:
    state = calibration.state(STACK)
    assert state is not None
    return state
