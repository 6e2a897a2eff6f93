"""The end of the demo: the table, predicted beside observed, and the picture."""

from carpool_core import picture
from rich.console import Group

from carpool_e2e.demo.scenes import SCENES
from carpool_e2e.demo.stage import Stage


async def play(stage: Stage) -> None:
    """Play all scenes and the end; leaves `gpus.svg` in the stage's folder.

    Raises:
        SceneError: Something did not go as it should.
    """
    for scene in SCENES:
        stage.console.rule(f"[bold cyan]{scene.__doc__}")
        await scene(stage)
    stage.console.rule("[bold cyan]What is there now")
    stage.run("get", "gtj,gpn", "-o", "wide", lines=60)
    stage.console.print(picture.jobs(await stage.jobs()))
    drawn = picture.gpus(await stage.gpu_nodes())
    stage.console.print(drawn)
    path = stage.out / "gpus.svg"
    path.write_text(picture.to_svg(Group(drawn, picture.jobs(await stage.jobs())), title="Carpool"), encoding="utf-8")
    stage.console.print(f"picture: {path}")
