import asyncio
import os
import re
import urllib.request
from io import StringIO
from pathlib import Path

import click
import pytest
from carpool_core.testing.kube import FakeKube
from carpool_e2e import processes
from carpool_e2e.__main__ import draw_board, play_on
from carpool_e2e.binaries import Binaries
from carpool_e2e.chart import Rendered
from carpool_e2e.cluster import PROJECT, Cluster, Shape, why_no_kubelets
from carpool_e2e.controlplane import ControlPlane
from carpool_e2e.demo.scenes import SceneError, Stage, TooLateError
from carpool_e2e.demo.show import play_scenes
from carpool_e2e.processes import ProcessTable
from documents import LAPTOP, Shell, commands
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


@pytest.mark.parametrize(("load", "busy", "outlook"), [(99.0, "busy", ""), (0.0, "not busy", ", and fails at its end")])
def test_after_something_late_the_demo_goes_on_and_a_busy_machine_excuses_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, load: float, busy: str, outlook: str
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    (one,) = asyncio.run(play_scenes(stage, [late, right]))
    sentence = f"expected a start within 2 s, found 5.7 s (the machine was {busy}: load average {load:.1f} on "
    assert one.sentence.startswith(sentence)
    assert one.is_excused is (load > 0)
    assert f"{one.sentence}. The demo goes on{outlook}." in shown(stage)
    assert "as it should be" in shown(stage)


def test_after_something_wrong_nothing_more_is_played(stage: Stage) -> None:
    with pytest.raises(SceneError, match="expected two GPUs, found one"):
        asyncio.run(play_scenes(stage, [wrong, right]))
    assert "as it should be" not in shown(stage)


def test_a_kept_cluster_without_kubelets_says_how_it_is_reached(tmp_path: Path) -> None:
    """Regression: without root nothing was said of the cluster that stayed."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho the nodes\n")
    kubectl.chmod(0o755)
    slot = processes.acquire(tmp_path / "slots")
    plane = ControlPlane(slot.directory, processes.choose(slot.number), {})
    table, found = ProcessTable(slot.directory, ""), Binaries({"kubectl": kubectl})
    cluster = Cluster(slot, Shape(), plane, found, table, Rendered(()))
    console = Console(file=StringIO(), width=80)
    with console.capture() as captured, pytest.raises(click.ClickException, match="run as root"):
        play_on(cluster, console, keep=True)
    assert slot.kept
    messages = captured.get()
    assert "the nodes" in messages
    assert f"export KUBECONFIG={plane.state}/admin.kubeconfig" in messages


def test_a_machine_without_chromium_is_told_why_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    console = Console(file=StringIO(), width=200)
    with console.capture() as captured:
        draw_board("http://127.0.0.1:1", console)
    assert captured.get().startswith("There is no picture of the board, because this machine lacks")


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310 - the demo's own
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_on_a_laptop_work(tmp_path: Path) -> None:
    """In their order, on the cluster that the first one keeps and the last one removes."""
    if reason := why_no_kubelets():
        pytest.skip(reason)
    if [*processes.default_root().glob(f"*/{processes.KEPT}")]:
        pytest.skip("a cluster is kept, which the last command would remove")
    shell = Shell(tmp_path, dict(os.environ))
    (tmp_path / "out").symlink_to(PROJECT / "out")
    board = ""
    try:
        for _, command in commands(LAPTOP):
            done = shell(command)
            if served := re.search(r"^The board is at (http\S+)\.$", done.stdout, re.MULTILINE):
                board = served[1]
                assert answers(board)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            for name, value in re.findall(r'^ +export (\w+)="?(.*?)"?$', done.stdout, re.MULTILINE):
                shell.environment[name] = value.replace("$PATH", os.environ["PATH"])
        assert shell.environment["KUBECONFIG"].startswith(str(processes.default_root()))
        assert board
        assert not answers(board), "it ends with the cluster"
    finally:
        shell.stop()
        processes.clean()
