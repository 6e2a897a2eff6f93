"""Random histories with two extenders and faults: no bound pod without reservation, no GPU over-committed, no leak.

At the end no extender counts a reservation that is neither written nor claimed."""

import os

import pytest
from two_extenders import play

HISTORIES = int(os.environ.get("CARPOOL_HISTORIES", "12"))
"""Number of histories; set the variable to 10000 for the check before a release."""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_two_extenders_keep_every_promise(seed):
    violations, _ = play(seed)
    assert violations == []
