import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from carpool_e2e.cluster import Cluster

# --import-mode=importlib gives test folders no import path of their own; the machine is for these files only.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from kubectl import Watcher


@pytest.fixture
def watcher(cluster: Cluster) -> Iterator[Watcher]:
    """A cluster in which nothing runs before the test, because each test removes what it made."""
    watcher = Watcher(cluster)
    yield watcher
    for name in ("operator", "extender", "kube-scheduler", "agent-a100", "agent-h100", "kubelet-a100"):
        with suppress(ProcessLookupError):
            cluster[name].resume()
        if not cluster[name].running:
            cluster[name].start()
    watcher.clear()


@pytest.fixture
def once(tmp_path: Path) -> Path:
    """The file by which a sabotaged process knows that it has ended already."""
    return tmp_path / "happened"
