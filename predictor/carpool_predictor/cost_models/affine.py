"""The robust line between simulated and measured memory."""

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 60


class Pair(NamedTuple):
    """Simulated and measured peak of one run, in MiB."""

    simulated_mib: float
    measured_mib: float


def fit_line(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Fit `measured ≈ slope · simulated + intercept` by least absolute relative error.

    Iteratively reweighted least squares; outliers (failed runs that cleaning missed) pull with bounded weight.

    Returns:
        Slope, and intercept in MiB (at least 0).
    """
    weights = [1 / p.measured_mib**2 for p in pairs]
    slope, intercept = 1.0, 0.0
    for _ in range(_ROUNDS):
        total = sum(weights)
        x = sum(w * p.simulated_mib for w, p in zip(weights, pairs, strict=True)) / total
        y = sum(w * p.measured_mib for w, p in zip(weights, pairs, strict=True)) / total
        spread = sum(w * (p.simulated_mib - x) ** 2 for w, p in zip(weights, pairs, strict=True))
        joint = sum(w * (p.simulated_mib - x) * (p.measured_mib - y) for w, p in zip(weights, pairs, strict=True))
        slope = joint / spread if spread else 1.0
        intercept = max(y - slope * x, 0.0)
        errors = (abs(slope * p.simulated_mib + intercept - p.measured_mib) / p.measured_mib for p in pairs)
        weights = [1 / (p.measured_mib**2 * max(e, 1e-4)) for p, e in zip(pairs, errors, strict=True)]
    return slope, intercept
