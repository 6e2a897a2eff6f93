import sys
from pathlib import Path

from hypothesis import settings

# --import-mode=importlib gives test folders no import path of their own.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "extender")]

# How long an example takes says more about the machine than about the code.
settings.register_profile("carpool", deadline=None)
settings.load_profile("carpool")
