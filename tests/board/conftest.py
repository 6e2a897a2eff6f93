import sys
from pathlib import Path

# --import-mode=importlib gives test folders no import path of their own; the world is shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))
