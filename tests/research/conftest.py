import sys
from pathlib import Path

import pytest
from carpool_simulator.testing import write_lucid

# --import-mode=importlib gives test folders no import path of their own.
sys.path[:0] = [str(Path(__file__).parent.parent / "extender")]


@pytest.fixture
def data(tmp_path):
    """A folder of measurements in the form of Lucid's, with synthetic numbers."""
    write_lucid(tmp_path)
    return tmp_path
