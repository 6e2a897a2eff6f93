"""The end of the demo: the table, predicted beside observed, and the picture."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from typing import NamedTuple

from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant
from carpool_core.values import JobState
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from carpool_e2e.demo.scenes import SCENES, Scene, SceneError, Stage, TooLateError

BAR_WIDTH = 48
"""Characters that a GPU's memory is drawn with where there is room for them."""

_LEAST_BAR_WIDTH = 12
_ANY_WIDTH = 1000
"""More than any table needs, in characters."""

_COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "red")


def gpu_bars(nodes: Iterable[GpuNode]) -> RenderableType:
    """Draw each GPU as a bar of its memory with a block for each tenant; idle nodes of one kind share a line.

    The block is as wide as the memory that was reserved, its dark part as wide as the memory that was measured.
    """
    busy: list[RenderableType] = []
    idle: dict[str, int] = defaultdict(int)
    ordered = sorted(nodes, key=lambda n: n.metadata.name)
    names = dict.fromkeys(r.job_name for node in ordered for r in node.spec.reservations)
    colours = dict(zip(names, cycle(_COLOURS), strict=False))
    tables = {node.metadata.name: _rows(node, colours) for node in ordered if node.spec.reservations}
    widths = _widths(row for rows in tables.values() for row in rows)
    for node in ordered:
        if node.metadata.name in tables:
            busy += [_node(node, tables[node.metadata.name], widths), Text()]
        else:
            idle[_inventory(node.status.devices)] += 1
    idle_lines = [
        Text(f"{count} idle {'node' if count == 1 else 'nodes'} with {what}", "dim") for what, count in idle.items()
    ]
    return Group(*busy, *idle_lines)


def _inventory(devices: Sequence[Device]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for device in devices:
        counts[device.product] += 1
    return ", ".join(f"{count} × {product}" for product, count in counts.items()) or "no GPU"


class _Row(NamedTuple):
    """Cells of one GPU."""

    gpu: str
    mode: str
    bar: "_Bar"
    amount: str
    activity: str
    tenants: Text


def _rows(node: GpuNode, colours: Mapping[str, str]) -> list[_Row]:
    measured = {(t.pod_uid, t.gpu_uuid): t for t in node.status.tenants}
    rows = []
    for device in node.status.devices:
        held = [r for r in node.spec.reservations if device.uuid in r.gpu_uuids]
        tenants = [(r, measured.get((r.pod_uid, device.uuid))) for r in held]
        row = _Row(
            str(device.index),
            held[0].mode.value if held else "",
            _bar(device, tenants, colours),
            f"{sum(_counted(device, *one) for one in tenants) / 1024:.1f}/{device.memory_mib / 1024:.1f}",
            _activity(tenants),
            _names(held, colours),
        )
        rows.append(row)
    return rows


def _widths(rows: Iterable[_Row]) -> dict[str, int]:
    """Widths of the columns before and behind the bars, so that the bars of all nodes align."""
    known = [*rows]
    columns = (("mode", "mode"), ("of GiB", "amount"), ("SM", "activity"))
    return {column: max((len(getattr(row, name)) for row in known), default=0) for column, name in columns}


def _node(node: GpuNode, rows: Iterable[_Row], widths: Mapping[str, int]) -> RenderableType:
    table = Table(
        title=f"{node.metadata.name}: {_inventory(node.status.devices)}", title_justify="left", box=None, padding=(0, 1)
    )
    for column in ("GPU", "mode", "memory: reserved, and in use", "of GiB", "SM", "tenants"):
        # Where a terminal is narrow, the bar gives way first, then the names: the widest of what may be wrapped.
        is_whole = column not in ("memory: reserved, and in use", "tenants")
        table.add_column(
            column,
            justify="right" if column in ("of GiB", "SM") else "left",
            no_wrap=is_whole,
            overflow="fold",
            min_width=widths.get(column),
        )
    for row in rows:
        table.add_row(*row)
    return table


def _counted(device: Device, reservation: Reservation, seen: Tenant | None) -> int:
    """Return the memory that decisions count for a tenant, in MiB: what was promised, or measured in its place."""
    memory = reservation.tenant.counted_mib(max(seen.peak_memory_mib, seen.memory_mib) if seen else 0)
    return device.memory_mib if memory is None else min(memory, device.memory_mib)


@dataclass(frozen=True)
class _Bar:
    """A GPU's memory, as wide as there is room for."""

    blocks: Sequence[tuple[float, float, str]]
    """Reserved and used share of the memory of each tenant, and its colour."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_BAR_WIDTH, BAR_WIDTH).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, end, bar = min(BAR_WIDTH, options.max_width), 0.0, Text()
        for reserved, used, colour in self.blocks:
            # Rounding where a block ends, and not how wide it is, keeps all of them within the bar.
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


def _activity(tenants: Sequence[tuple[Reservation, Tenant | None]]) -> str:
    known = [m.sm_active_ratio for _, m in tenants if m is not None and m.sm_active_ratio is not None]
    return f"{100 * min(1.0, sum(known)):.0f}%" if known else ""


def _names(held: Sequence[Reservation], colours: Mapping[str, str]) -> Text:
    names = Text()
    for reservation in held:
        names.append(f"{reservation.job_name} ", colours[reservation.job_name])
    return names


_PLACED = ("job", "state", "placed on", "mode", "slowdown", "restarts")
_COMPARED = ("job", "memory MiB", "bound", "peak seen", "GPU util %", "seen", "step ms", "seen/predicted")
_WHOLE = (*_PLACED[:4], *_COMPARED[1:6], "slowdown", *_COMPARED[6:], "restarts")
_WORDS = ("job", "state", "placed on", "mode")
"""Columns of words; the others are of figures."""


def job_table(items: Iterable[GpuTrainingJob]) -> RenderableType:
    """Tabulate predicted beside observed for every job: in one table, or in two where one is too wide."""
    ordered = sorted(items, key=lambda j: (j.metadata.namespace, j.metadata.name))
    whole = Table(title="predicted beside observed", title_justify="left", box=box.SIMPLE_HEAD)
    for column in _WHOLE:
        whole.add_column(column, justify="left" if column in _WORDS else "right")
    for job in ordered:
        cells = _cells(job)
        whole.add_row(*(cells[column] for column in _WHOLE))
    parts = (_narrow("where the jobs are", _PLACED, ordered), _narrow("predicted beside observed", _COMPARED, ordered))
    return _WholeOrParts(whole, Group(parts[0], Text(), parts[1]))


@dataclass(frozen=True)
class _WholeOrParts:
    """A table, or its parts if the terminal is too narrow for it."""

    whole: Table
    parts: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(max_width=_ANY_WIDTH), self.whole).maximum
        yield self.whole if needed <= options.max_width else self.parts


def _narrow(title: str, columns: Sequence[str], ordered: Sequence[GpuTrainingJob]) -> Table:
    """Tabulate some columns so that only names are ever broken: each word of a header has a line of its own."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        header = column.replace(" ", "\n").replace("/", "/\n")
        is_name = column in ("job", "placed on")
        table.add_column(header, justify="left" if column in _WORDS else "right", no_wrap=not is_name, overflow="fold")
    for job in ordered:
        cells = _cells(job) | {"placed on": _placed_on(job, short=True)}
        table.add_row(*(cells[column] for column in columns))
    return table


def _placed_on(job: GpuTrainingJob, *, short: bool) -> str:
    if not job.status.placement:
        return ""
    placed = job.status.placement[0]
    product = placed.product.removeprefix("Simulated ").removeprefix("NVIDIA ") if short else placed.product
    return f"{placed.node} {product}"


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
        "placed on": _placed_on(job, short=False),
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


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def to_svg(picture: RenderableType, *, title: str, width: int = 190) -> str:
    """Draw a picture as an SVG document."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True)
    console.print(picture)
    return console.export_svg(title=title)


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
            was late is printed at the end.
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
    """Show kubectl's own tables, with fewer columns where its lines would be broken."""
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
    compared, drawn = job_table(jobs), gpu_bars(nodes)
    stage.console.print(compared, _WHAT_IS_SEEN, drawn)
    path = stage.out / "gpus.svg"
    path.write_text(to_svg(Group(drawn, Text(), compared, _WHAT_IS_SEEN), title="Carpool"), encoding="utf-8")
    stage.console.print(f"picture: {os.path.relpath(path)}")


async def _measured(stage: Stage, patience_s: float = 15) -> None:
    """Wait until something was measured of every job that runs: agents look every second and smooth what they see."""
    for job in await stage.jobs():
        if job.status.state is JobState.RUNNING:
            await stage.until(
                "measured", job.metadata.name, lambda seen: seen.status.observed is not None, within_s=patience_s
            )
