"""Runs the scenes of the demo, and shows their results: placement, predicted beside observed, and the GPUs."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from typing import NamedTuple

from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant
from carpool_core.values import JobState
from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from carpool_e2e.demo.scenes import SCENES, Scene, SceneError, Stage, TooLateError

WIDTH = 100
"""Columns of the picture, whose text is then as large as that of a page around it."""
BAR_WIDTH = 48
"""Largest width of a GPU's bar, in characters."""
MIN_BAR_WIDTH = 12

_COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "red")
_BAR = "memory: reserved, and in use"
_GPU_COLUMNS = {"GPU": 3, "mode": 12, _BAR: 0, "of GiB": 11, "SM": 4, "tenants": 0}
"""Columns of a GPU's row with their least width, so that the bars of all nodes align."""


def gpu_bars(nodes: Iterable[GpuNode]) -> RenderableType:
    """Draw each GPU as a bar of its memory with a block for each tenant; idle nodes of one kind share a line.

    The width of a block is the reserved memory, that of its dark part the measured memory.
    """
    ordered = sorted(nodes, key=lambda n: n.metadata.name)
    busy = [node for node in ordered if node.spec.reservations]
    idle = Counter(_inventory(node.status.devices) for node in ordered if not node.spec.reservations)
    jobs = dict.fromkeys(r.job_name for node in busy for r in node.spec.reservations)
    colours = dict(zip(jobs, cycle(_COLOURS), strict=False))
    tables = [one for node in busy for one in (_node(node, colours), Text())]
    lines = [
        Text(f"{count} idle {'node' if count == 1 else 'nodes'} with {what}", "dim") for what, count in idle.items()
    ]
    return Group(*tables, *lines)


def _inventory(devices: Sequence[Device]) -> str:
    counts = Counter(device.product for device in devices)
    return ", ".join(f"{count} × {product}" for product, count in counts.items()) or "no GPU"


def _node(node: GpuNode, colours: Mapping[str, str]) -> Table:
    title = f"{node.metadata.name}: {_inventory(node.status.devices)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column, width in _GPU_COLUMNS.items():
        # A narrow terminal shrinks the bar first, then the tenants.
        table.add_column(
            column,
            justify="right" if column in ("of GiB", "SM") else "left",
            no_wrap=column not in (_BAR, "tenants"),
            overflow="fold",
            min_width=width or None,
        )
    measured = {(t.pod_uid, t.gpu_uuid): t for t in node.status.tenants}
    for device in node.status.devices:
        held = [r for r in node.spec.reservations if device.uuid in r.gpu_uuids]
        tenants = [(r, measured.get((r.pod_uid, device.uuid))) for r in held]
        counted_mib = sum(_counted(device, *one) for one in tenants)
        active = [t.sm_active_ratio for _, t in tenants if t is not None and t.sm_active_ratio is not None]
        table.add_row(
            str(device.index),
            held[0].mode.value if held else "",
            _bar(device, tenants, colours),
            f"{counted_mib / 1024:.1f}/{device.memory_mib / 1024:.1f}",
            f"{100 * min(1.0, sum(active)):.0f}%" if active else "",
            Text(" ").join(Text(r.job_name, colours[r.job_name]) for r in held),
        )
    return table


def _counted(device: Device, reservation: Reservation, seen: Tenant | None) -> int:
    """Return the memory that decisions count for a tenant, in MiB: the reservation, or the measured peak instead."""
    memory = reservation.tenant.counted_mib(max(seen.peak_memory_mib, seen.memory_mib) if seen else 0)
    return device.memory_mib if memory is None else min(memory, device.memory_mib)


@dataclass(frozen=True)
class _Bar:
    """A GPU's memory, as wide as the terminal permits."""

    blocks: Sequence[tuple[float, float, str]]
    """Reserved and used share of the memory by each tenant, and its colour."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(MIN_BAR_WIDTH, BAR_WIDTH).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, end, bar = min(BAR_WIDTH, options.max_width), 0.0, Text()
        for reserved, used, colour in self.blocks:
            # Rounded ends, instead of rounded widths, keep all blocks within the bar.
            end += width * reserved
            block = min(max(1, round(end) - len(bar)), width - len(bar))
            dark = min(round(width * used), block)
            bar.append("█" * dark, colour).append("▒" * (block - dark), colour)
        yield bar.append("·" * (width - len(bar)), "dim")


def _bar(device: Device, tenants: Sequence[tuple[Reservation, Tenant | None]], colours: Mapping[str, str]) -> _Bar:
    whole = max(1, device.memory_mib)
    return _Bar(
        [
            (_counted(device, held, seen) / whole, seen.memory_mib / whole if seen else 0.0, colours[held.job_name])
            for held, seen in tenants
        ]
    )


_PLACED = ("job", "state", "placed on", "mode", "slowdown", "restarts")
_COMPARED = ("job", "memory MiB", "bound", "peak seen", "GPU util %", "seen", "step ms", "seen/predicted")
_TEXT_COLUMNS = ("job", "state", "placed on", "mode")


def job_table(items: Iterable[GpuTrainingJob]) -> RenderableType:
    """Return two tables of all jobs: their placement, and predicted beside observed values."""
    ordered = sorted(items, key=lambda j: (j.metadata.namespace, j.metadata.name))
    return Group(_table("placement", _PLACED, ordered), Text(), _table("predicted beside observed", _COMPARED, ordered))


def _table(title: str, columns: Sequence[str], ordered: Sequence[GpuTrainingJob]) -> Table:
    """Tabulate some columns for 80 characters: each word of a header has its own line, and only names are broken."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        header = column.replace(" ", "\n").replace("/", "/\n")
        is_name = column in ("job", "placed on")
        justify: JustifyMethod = "left" if column in _TEXT_COLUMNS else "right"
        table.add_column(header, justify=justify, no_wrap=not is_name, overflow="fold")
    for job in ordered:
        cells = _cells(job)
        table.add_row(*(cells[column] for column in columns))
    return table


def _cells(job: GpuTrainingJob) -> dict[str, str]:
    """Return the cells of a job, by column."""
    status = job.status
    placed = status.placement[0] if status.placement else None
    products = status.prediction.products if status.prediction else []
    product = next((p for p in products if placed and p.product in placed.product), None)
    seen = status.observed
    return {
        "job": job.metadata.name,
        "state": status.state.value,
        "placed on": f"{placed.node} {_short(placed.product)}" if placed else "",
        "mode": placed.mode.value if placed else "",
        "memory MiB": _number(product.memory.median_mib if product else None, ",.0f"),
        "bound": _number(placed.bound_mib(product.memory if product else None) if placed else None, ",.0f"),
        "peak seen": f"{seen.peak_memory_mib:,}" if seen else "",
        "GPU util %": f"{product.activity.gpu_util_percent.median:.0f}" if product else "",
        "seen": _number(seen.gpu_util_percent if seen else None, ".0f"),
        "slowdown": f"{placed.expected_slowdown:.2f}" if placed else "",
        "step ms": _number(
            seen.step_time_seconds * 1000 if seen and seen.step_time_seconds is not None else None, ",.0f"
        ),
        "seen/predicted": _number(seen.step_time_ratio if seen else None, ".2f"),
        "restarts": str(status.restarts),
    }


def _short(product: str) -> str:
    return product.removeprefix("Simulated ").removeprefix("NVIDIA ")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def to_svg(picture: RenderableType, *, title: str) -> str:
    """Draw a picture as an SVG document."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(picture)
    return console.export_svg(title=title)


_SEEN = Text(
    "Seen: measurements of the agents on simulated GPUs. Each container uses memory and activity as on its command "
    "line, whose values are near the prediction, but not derived from it.",
    "dim",
)


async def play(stage: Stage) -> None:
    """Play all scenes and show their results; writes `gpus.svg` into the stage's folder.

    Raises:
        SceneError: A scene failed, or was late on a machine that is not busy.
    """
    late = await play_scenes(stage, SCENES)
    headline(stage.console, "Results")
    await _measured(stage)
    stage.run("get", "gtj,gpn", lines=60)
    _draw(stage, await stage.jobs(), await stage.gpu_nodes())
    if excused := [one.sentence for one in late if one.is_excused]:
        stage.console.print(f"Late, but on a busy machine: {'; '.join(excused)}")
    if unexcused := [one.sentence for one in late if not one.is_excused]:
        raise SceneError("; ".join(unexcused))


class Late(NamedTuple):
    """A scene that was late."""

    sentence: str
    is_excused: bool
    """Whether the machine's load exceeded its processors."""


async def play_scenes(stage: Stage, scenes: Sequence[Scene]) -> list[Late]:
    """Play scenes one after the other, also after a late one; return the late ones.

    Raises:
        SceneError: A scene failed.
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
    """Print the title of a scene, within a rule if it fits, otherwise below one."""
    title = Text(text, "bold cyan", justify="center")
    if len(text) + 4 <= console.width:
        console.rule(title)
    else:
        console.rule()
        console.print(title)


def _late(error: TooLateError) -> Late:
    """Return the late scene with the load of the machine."""
    minute, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    is_busy = minute > processors
    busy = "the machine was busy" if is_busy else "the machine was not busy"
    return Late(f"{error} ({busy}: load average {minute:.1f} on {processors} processors)", is_busy)


def _draw(stage: Stage, jobs: list[GpuTrainingJob], nodes: list[GpuNode]) -> None:
    """Show the comparison and the GPUs, and write the picture."""
    compared, drawn = job_table(jobs), gpu_bars(nodes)
    stage.console.print(compared, _SEEN, drawn)
    path = stage.out / "gpus.svg"
    path.write_text(to_svg(Group(drawn, Text(), compared, _SEEN), title="Carpool"), encoding="utf-8")
    stage.console.print(f"picture: {os.path.relpath(path)}")


async def _measured(stage: Stage) -> None:
    """Wait for a measurement of every running job: agents measure each second and smooth the values."""
    for job in await stage.jobs():
        if job.status.state is JobState.RUNNING:
            await stage.until("measured", job.metadata.name, lambda j: j.status.observed is not None, within_s=15)
