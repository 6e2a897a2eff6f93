"""`python -m carpool_e2e`: the demo, and what belongs to it."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from carpool_core.clock import SystemClock
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from carpool_simulator.progress import provenance
from rich.console import Console

from carpool_e2e import binaries, dashboards, images, processes, release
from carpool_e2e.bench import agent, installation, latency, placement, predictions, probe, throughput
from carpool_e2e.bench.measure import Section, replaced
from carpool_e2e.binaries import CONTROL_PLANE_TOOLS, NODE_TOOLS
from carpool_e2e.cluster import FULL, LOGS, PROJECT, Cluster, running, why_no_kubelets
from carpool_e2e.demo.scenes import SceneError, Stage
from carpool_e2e.demo.show import play
from carpool_e2e.errors import HarnessError

REPORT = PROJECT / "docs" / "benchmarks.md"
SECTIONS: Mapping[str, Callable[[Callable[[str], None], Console], Section]] = {
    "installation": installation.measure,
    "latency": latency.measure,
    "throughput": throughput.measure,
    "placement": lambda report, _: placement.measure(report),
    "predictions": lambda report, _: predictions.measure(report),
    "probe": lambda report, _: probe.measure(report),
    "agent": lambda report, _: agent.measure(report),
}
"""Benchmarks by name, in the order of the report."""

OUT = PROJECT / "out"
"""Where manifests and pictures are left."""

BOARD_PAGES = {"board.png": "/", "board-queue.png": "/queue", "board-job.png": "/jobs/default/small-a"}
"""Picture of the demo → page of the board."""

WIDTH = 220
"""Columns of what is not shown in a terminal, such as a log of CI."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        """Show errors of the harness without a traceback."""
        try:
            return super().invoke(ctx)
        except (HarnessError, SceneError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, help="A real Kubernetes cluster on one machine, without a GPU.")
def main() -> None:
    """Collect the commands."""


@main.command()
@click.option("--keep", is_flag=True, help="Leave the cluster running, and print how to reach it.")
def demo(keep: bool) -> None:
    """Bring up a cluster and play the six scenes."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    with running(FULL, console) as cluster:
        play_on(cluster, console, keep=keep)


def play_on(cluster: Cluster, console: Console, *, keep: bool) -> None:
    """Play the scenes; print how to reach a kept cluster in any case.

    Raises:
        ClickException: Something did not go as it should, or containers cannot start there.
    """
    if keep:
        cluster.slot.keep()
    try:
        if not cluster.kubelets:
            console.print(cluster.kubectl("get", "gpunodes"), highlight=False)
            raise click.ClickException("the scenes start containers, which needs nodes with a kubelet: run as root")
        address = cluster.start_board()
        console.print(f"The board serves GPUs, queue and jobs as web pages at {address} until the cluster ends.")
        asyncio.run(_on_stage(cluster, console))
        draw_board(address, console)
        if not keep:
            console.print("The cluster ends here, and the board with it; `make demo KEEP=1` leaves both running.")
    except SceneError as error:
        logs = cluster.table.logs if keep else os.path.relpath(LOGS / cluster.slot.name)
        raise click.ClickException(f"{error}. The processes' logs are in {logs}.") from error
    finally:
        if keep:
            console.print(how_to_reach(cluster), highlight=False, soft_wrap=True)


async def _on_stage(cluster: Cluster, console: Console) -> None:
    OUT.mkdir(exist_ok=True)
    async with connect(KubeSettings(kubeconfig=str(cluster.kubeconfig))) as api:
        await play(Stage(api, Path(cluster.binaries["kubectl"]), cluster.kubeconfig, console, OUT))


def draw_board(address: str, console: Console) -> None:
    """Leave pictures of the board's pages in `OUT` if the machine has Chromium."""
    if (chromium := shutil.which("chromium")) is None:
        console.print("There is no picture of the board, because this machine lacks the package chromium.")
        return
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,900"]
    for picture, page in BOARD_PAGES.items():
        target = [f"--screenshot={OUT / picture}", address + page]
        subprocess.run([chromium, *options, *target], check=True, capture_output=True)
        console.print(f"picture: {os.path.relpath(OUT / picture)}")


def how_to_reach(cluster: Cluster) -> str:
    """Return the commands to use a kept cluster."""
    folder = Path(cluster.binaries["kubectl"]).parent
    ports = cluster.plane.ports
    served = "board" in cluster.table.processes
    board = f"The board is at http://127.0.0.1:{ports.board}." if served else "`carpool board` serves web pages."
    return (
        f"The cluster stays up. To use it:\n"
        f"  export KUBECONFIG={cluster.kubeconfig}\n"
        f'  export PATH="{folder}:{Path(sys.executable).parent}:$PATH"\n'
        f"{board}\n"
        f"A process that was killed is started again by its script in {cluster.table.scripts}, such as\n"
        f"  {cluster.table.script('operator')}\n"
        f"Metrics: operator http://127.0.0.1:{ports.operator_metrics}/metrics, "
        f"extender http://127.0.0.1:{ports.extender_metrics}/metrics\n"
        f"Logs are in {cluster.table.logs}. `make demo-clean` takes the cluster down."
    )


@main.command()
def clean() -> None:
    """Remove every cluster that no running process holds."""
    removed = len(processes.clean())
    click.echo(f"clusters removed, with their logs: {removed}" if removed else "no cluster to remove")
    kept = ["manifests and pictures", *(["logs of clusters that ended by themselves"] if LOGS.exists() else [])]
    folders = {OUT: ", ".join(kept), binaries.cache_root(os.environ): "the cluster's binaries"}
    for folder, what in folders.items():
        if folder.exists():
            click.echo(f"kept {folder}: {what}")


@main.command()
@click.option("--vendor", is_flag=True, help="Get NVIDIA's programs for `pytest -m vendor`, too.")
def prepare(vendor: bool) -> None:
    """Get everything that the tests need: system packages, binaries and images."""
    console = Console()
    kubelets = not why_no_kubelets()
    needs = binaries.FOR_CONTROL_PLANE + binaries.FOR_BROWSER + binaries.FOR_COPIES
    binaries.install_packages(needs + (binaries.FOR_NODES if kubelets else ()), console)
    wanted = CONTROL_PLANE_TOOLS | (NODE_TOOLS if kubelets else set()) | ({"nvidia-ctk"} if vendor else set())
    binaries.ensure(wanted | {"prometheus", "promtool"}, console=console)
    if kubelets:
        images.ensure(console)


@main.command("dashboards")
def draw_dashboards() -> None:
    """Run jobs on a cluster that Prometheus scrapes, and draw the Grafana dashboards into docs/images."""
    with (
        running(FULL, Console()) as cluster,
        tempfile.TemporaryDirectory() as folder,
        dashboards.prometheus(cluster, Path(folder)) as address,
    ):
        for picture in dashboards.play(cluster, address):
            click.echo(f"picture: {os.path.relpath(picture)}")


ARCHITECTURES = click.option(
    "--arch", "architectures", type=click.Choice([*images.ARCHITECTURES]), multiple=True, default=[images.NATIVE],
    show_default=True, help="Architecture of the images; give it twice for both.",
)  # fmt: skip


TRACE = click.option("--trace", is_flag=True, help="Build the operator with PyTorch, too: the tag VERSION-trace.")


@main.command("images")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="OCI archive to write.")
@click.option("--commit", default="", help="Commit that `carpool --version` names in the images.")
@ARCHITECTURES
@TRACE
def build_images(out: Path, commit: str, architectures: tuple[str, ...], trace: bool) -> None:
    """Build the images of operator, extender and agent without Docker."""
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(images.ensure(Console(), commit, architectures, trace=trace), out)
    for image in images.listed(out):
        click.echo(f"{image.name}  {image.architecture}  {image.digest}  {image.size_mb:.0f} MB")


@main.command("release")
@click.option("--version", required=True, help="Version of the release, such as 0.2.0.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Empty folder to fill.")
@click.option("--commit", default="", help="Commit that `carpool --version` names.")
@ARCHITECTURES
@TRACE
def build_release(version: str, out: Path, commit: str, architectures: tuple[str, ...], trace: bool) -> None:
    """Build wheel, chart, images, their SBOMs and notes, and check them from an empty folder."""
    release.build(version, out, commit, architectures, Console(), trace=trace)
    for file in sorted(out.iterdir()):
        click.echo(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


@main.command()
@click.option("--only", type=click.Choice([*SECTIONS]), help="Measure one section.")
def bench(only: str | None) -> None:
    """Measure Carpool's speed and memory, from installation to a node agent, and write docs/benchmarks.md."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for name in [only] if only else SECTIONS:
        console.rule(name)
        made, load = provenance(SystemClock()), os.getloadavg()[0]
        section = SECTIONS[name](lambda line: console.print(line, highlight=False, markup=False), console)
        lines = section.lines(f"on {made.when} UTC, version {made.version}, with a load of {load:.1f} before")
        REPORT.write_text(replaced(REPORT.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    processes.as_by_ctrl_c()
    main()
