import asyncio
from io import StringIO
from pathlib import Path

import pytest
from carpool_core.testing.kube import FakeKube
from carpool_e2e.demo.scenes import SCENES
from carpool_e2e.demo.show import headline, play_scenes
from carpool_e2e.demo.stage import SceneError, Stage, TooLateError
from rich.console import Console


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(FakeKube(), Path("kubectl"), Path("kubeconfig"), Console(file=StringIO(), width=400), tmp_path)


def shown(stage: Stage) -> str:
    assert isinstance(stage.console.file, StringIO)
    return stage.console.file.getvalue()


async def late(stage: Stage) -> None:
    """4. Something is late."""
    raise TooLateError("expected a start within 2 s, found 5.7 s")


async def wrong(stage: Stage) -> None:
    """5. Something is wrong."""
    raise SceneError("expected two GPUs, found one")


async def right(stage: Stage) -> None:
    """6. All is as it should be."""
    stage.console.print("as it should be")


def test_after_something_late_the_demo_goes_on_and_keeps_what_was_late_for_its_end(stage: Stage) -> None:
    (sentence,) = asyncio.run(play_scenes(stage, [late, right]))
    assert sentence.startswith("expected a start within 2 s, found 5.7 s (the machine was ")
    assert "load average" in sentence
    assert sentence in shown(stage)
    assert "as it should be" in shown(stage)


def test_after_something_wrong_nothing_more_is_played(stage: Stage) -> None:
    with pytest.raises(SceneError, match="expected two GPUs, found one"):
        asyncio.run(play_scenes(stage, [wrong, right]))
    assert "as it should be" not in shown(stage)


@pytest.mark.parametrize("width", [80, 120])
def test_a_headline_is_whole_at_every_width(width: int) -> None:
    console = Console(file=StringIO(), width=width)
    for scene in SCENES:
        with console.capture() as captured:
            headline(console, str(scene.__doc__))
        shown = captured.get()
        assert [word for word in shown.split() if set(word) != {"─"}] == str(scene.__doc__).split()
        assert max(map(len, shown.splitlines())) <= width
