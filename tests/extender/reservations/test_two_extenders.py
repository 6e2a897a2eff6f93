"""Random histories with two extenders and faults: no bound pod without reservation, no GPU over-committed, no leak."""

import os

import pytest
from two_extenders import play

HISTORIES = int(os.environ.get("CARPOOL_HISTORIES", "60"))
"""Number of histories; the release check runs 10,000."""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_two_extenders_keep_every_promise(seed):
    violations, _ = play(seed)
    assert violations == []
