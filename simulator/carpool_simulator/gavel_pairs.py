"""Slowdowns behind MPS as Gavel (OSDI '20) measured them, for who asks what comes of it where MPS is like that.

Gavel measured no activity. Busy shares are worked out from the steps alone at several batch sizes, as the slowdown
model's card tells, and SM activity from those as of GPUMemNet's trainings. The GPUs are a K80, a P100 and a V100.
"""

from functools import cache
from pathlib import Path

import numpy as np
from carpool_research.tables import DataError

from carpool_simulator.truth import Pool, WorkloadError

HIDING = 1.5
"""How well a host's part of a step hides behind its GPU's: the exponent by which the card works out busy shares."""
ACTIVITY = 1.5
"""SM activity is about utilization to this power, says the card of GPUMemNet's trainings. A number of its own, as no
truth may move with the model that decides."""
ASSUMED = (
    "Slowdown by MPS is Gavel's, whose pairs ran behind it on a K80, a P100 and a V100; how busy they kept the SMs was "
    "worked out from steps at several batch sizes."
)


@cache
def read(data: Path) -> Pool:
    """Read the pairs of jobs that were measured alone at several batch sizes, too.

    Args:
        data: Where `gavel/gavel_throughputs_flat.csv` lies.

    Raises:
        WorkloadError: The file is missing or unusable, or scipy is not installed.
    """
    try:
        from carpool_research.slowdown import gavel  # scipy, which nobody else here needs
    except ImportError as error:
        raise WorkloadError(
            f'expected {error.name} for Gavel\'s pairs, found none; run: pip install "carpool[simulate]"'
        ) from error
    try:
        measured = gavel.read(data)
    except DataError as error:
        raise WorkloadError(str(error)) from error
    busy = gavel.busy_shares(measured, HIDING)
    each = [
        ((mine, other), slowdown)
        for pair in measured.pairs
        for mine, other, slowdown in zip((pair.one, pair.other), (pair.other, pair.one), pair.slowdowns, strict=True)
        if mine in busy and other in busy
    ]
    shares = np.array([[busy[one] for one in jobs] for jobs, _ in each])
    return Pool(shares**ACTIVITY, np.array([slowdown for _, slowdown in each]))
