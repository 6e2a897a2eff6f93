"""The demo's scenes, as they happen. How soon is for `make demo` to judge: beside other clusters it says little."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.scenes import SCENES, Scene, Stage, TooLateError
from kubectl import Watcher
from rich.console import Console

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cleared(cluster: Cluster) -> Iterator[Cluster]:
    """The scenes follow each other on one stage, as in the demo."""
    watcher = Watcher(cluster)
    watcher.clear()
    yield cluster
    watcher.clear()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene_of_the_demo(cleared: Cluster, scene: Scene, tmp_path: Path) -> None:
    async def play() -> None:
        async with connect(KubeSettings(kubeconfig=str(cleared.kubeconfig))) as api:
            kubectl = Path(cleared.binaries["kubectl"])
            with contextlib.suppress(TooLateError):
                await scene(Stage(api, kubectl, cleared.kubeconfig, Console(), tmp_path))

    asyncio.run(play())
