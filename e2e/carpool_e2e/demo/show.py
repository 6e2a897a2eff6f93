"""The end of the demo: the table, predicted beside observed, and the picture."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobState
from rich.console import Console, Group
from rich.text import Text

from carpool_e2e.demo import picture
from carpool_e2e.demo.scenes import SCENES, Scene
from carpool_e2e.demo.stage import SceneError, Stage, TooLateError

_WHAT_IS_SEEN = Text(
    "Seen: what the agents measured of simulated GPUs, on which each container uses what its command line says; "
    "what the command line says was chosen near the prediction, not derived from it.",
    "dim",
)

_FEW_OF_JOBS = (
    "custom-columns=NAME:.metadata.name,STATE:.status.state,NODE:.status.summary.node,MODE:.status.summary.mode,"
    "PREDMEM:.status.summary.predictedMemory,OBSMEM:.status.summary.observedMemory"
)
_FEW_OF_NODES = (
    "custom-columns=NAME:.metadata.name,GPUS:.status.summary.gpus,MEMORY:.status.summary.memory,"
    "TENANTS:.status.summary.tenants"
)


async def play(stage: Stage) -> None:
    """Play all scenes and the end; leaves `gpus.svg` in the stage's folder.

    Raises:
        SceneError: Something did not go as it should, or something was late that no busy machine accounts for; what
            was late is told at the end.
    """
    late = await play_scenes(stage, SCENES)
    headline(stage.console, "What is there now")
    await _measured(stage)
    _as_kubectl_shows_it(stage)
    _draw(stage, await stage.jobs(), await stage.gpu_nodes())
    if excused := [one.sentence for one in late if one.is_excused]:
        stage.console.print(f"Late, but on a busy machine: {'; '.join(excused)}")
    if unexcused := [one.sentence for one in late if not one.is_excused]:
        raise SceneError("; ".join(unexcused))


class Late(NamedTuple):
    """Something that was late."""

    sentence: str
    is_excused: bool
    """Whether the machine had more to do than it has processors for."""


async def play_scenes(stage: Stage, scenes: Sequence[Scene]) -> list[Late]:
    """Play scenes one after the other.

    Returns:
        What was late: that is no reason to show nothing more.

    Raises:
        SceneError: Something did not go as it should.
    """
    late = []
    for scene in scenes:
        headline(stage.console, scene.__doc__ or scene.__name__)
        try:
            await scene(stage)
        except TooLateError as error:
            one = _late(error)
            late.append(one)
            outlook = "" if one.is_excused else ", and fails at its end"
            stage.console.print(f"[bold red]Too late:[/bold red] {one.sentence}. The demo goes on{outlook}.")
    return late


def headline(console: Console, text: str) -> None:
    """Print what a scene is about, within a line where there is room for it, else below one."""
    title = Text(text, "bold cyan", justify="center")
    if len(text) + 4 <= console.width:
        console.rule(title)
    else:
        console.rule()
        console.print(title)


def _as_kubectl_shows_it(stage: Stage) -> None:
    """Show kubectl's own tables, of fewer columns where its lines would be broken: nobody could read those."""
    everything = ("get", "gtj,gpn", "-o", "wide")
    output = stage.run(*everything, show=False)
    if max(map(len, output.splitlines()), default=0) <= stage.console.width:
        stage.tell(everything, output, lines=60)
    else:
        stage.run("get", "gtj", "-o", _FEW_OF_JOBS)
        stage.run("get", "gpn", "-o", _FEW_OF_NODES)


def _late(error: TooLateError) -> Late:
    """Say what was late, and how busy the machine is."""
    minute, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    is_busy = minute > processors
    busy = "the machine was busy" if is_busy else "the machine was not busy"
    return Late(f"{error} ({busy}: load average {minute:.1f} on {processors} processors)", is_busy)


def _draw(stage: Stage, jobs: list[GpuTrainingJob], nodes: list[GpuNode]) -> None:
    """Show the comparison and the GPUs, and leave the picture."""
    compared, drawn = picture.jobs(jobs), picture.gpus(nodes)
    stage.console.print(compared, _WHAT_IS_SEEN, drawn)
    path = stage.out / "gpus.svg"
    path.write_text(picture.to_svg(Group(drawn, Text(), compared, _WHAT_IS_SEEN), title="Carpool"), encoding="utf-8")
    stage.console.print(f"picture: {os.path.relpath(path)}")


async def _measured(stage: Stage, patience_s: float = 15) -> None:
    """Wait until something was measured of every job that runs: agents look every second and smooth what they see."""
    for job in await stage.jobs():
        if job.status.state is JobState.RUNNING:
            await stage.until(
                "measured", job.metadata.name, lambda seen: seen.status.observed is not None, within_s=patience_s
            )
