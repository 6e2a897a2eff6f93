import sys
from pathlib import Path

import pytest

# --import-mode=importlib gives test folders no import path of their own; the fixtures are shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key by which predictions are sealed."""
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("k" * 32)
    return path
