import sys
from pathlib import Path

# The generator is no part of what is installed: it imports every process, and nothing imports it.
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
# --import-mode=importlib gives test folders no import path of their own.
sys.path.insert(0, str(Path(__file__).parent))
