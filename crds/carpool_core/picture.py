"""What a person compares, drawn with rich: the GPUs with their tenants, and predicted beside observed for every job."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import cycle

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant

BAR_WIDTH = 48
"""Characters that a GPU's memory is drawn with."""

_COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "red")


def gpus(nodes: Iterable[GpuNode]) -> RenderableType:
    """Draw each GPU as a bar of its memory with a block for each tenant; idle nodes of one kind share a line.

    The block is as wide as the memory that was reserved, its dark part as wide as the memory that was measured.
    """
    busy: list[RenderableType] = []
    idle: dict[str, int] = defaultdict(int)
    ordered = sorted(nodes, key=lambda n: n.metadata.name)
    names = dict.fromkeys(r.job_name for node in ordered for r in node.spec.reservations)
    colours = dict(zip(names, cycle(_COLOURS), strict=False))
    for node in ordered:
        if node.spec.reservations:
            busy += [_node(node, colours), Text()]
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


def _node(node: GpuNode, colours: Mapping[str, str]) -> RenderableType:
    table = Table(
        title=f"{node.metadata.name}: {_inventory(node.status.devices)}", title_justify="left", box=None, padding=(0, 1)
    )
    for column in ("GPU", "mode", "memory: reserved, and in use", "of GiB", "SM", "tenants"):
        table.add_column(column, no_wrap=True)
    measured = {(t.pod_uid, t.gpu_uuid): t for t in node.status.tenants}
    for device in node.status.devices:
        held = [r for r in node.spec.reservations if device.uuid in r.gpu_uuids]
        tenants = [(r, measured.get((r.pod_uid, device.uuid))) for r in held]
        table.add_row(
            str(device.index),
            held[0].mode.value if held else "",
            _bar(device, tenants, colours),
            f"{sum(_reserved(device, r) for r in held) / 1024:.1f}/{device.memory_mib / 1024:.1f}",
            _activity(tenants),
            _names(held, colours),
        )
    return table


def _reserved(device: Device, reservation: Reservation) -> int:
    memory = reservation.tenant.memory_mib
    return device.memory_mib if memory is None else memory


def _bar(device: Device, tenants: Sequence[tuple[Reservation, Tenant | None]], colours: Mapping[str, str]) -> Text:
    bar = Text()
    for reservation, measured in tenants:
        colour = colours[reservation.job_name]
        width = max(1, round(BAR_WIDTH * _reserved(device, reservation) / max(1, device.memory_mib)))
        used = 0 if measured is None else round(BAR_WIDTH * measured.memory_mib / max(1, device.memory_mib))
        bar.append("█" * min(used, width), colour)
        bar.append("▒" * max(0, width - used), colour)
    bar.append("·" * max(0, BAR_WIDTH - len(bar)), "dim")
    return bar


def _activity(tenants: Sequence[tuple[Reservation, Tenant | None]]) -> str:
    known = [m.sm_active_ratio for _, m in tenants if m is not None and m.sm_active_ratio is not None]
    return f"{100 * min(1.0, sum(known)):.0f}%" if known else ""


def _names(held: Sequence[Reservation], colours: Mapping[str, str]) -> Text:
    names = Text()
    for reservation in held:
        names.append(f"{reservation.job_name} ", colours[reservation.job_name])
    return names


def jobs(items: Iterable[GpuTrainingJob]) -> RenderableType:
    """Tabulate predicted beside observed for every job."""
    table = Table(title="predicted beside observed", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("job", "state", "placed on", "mode"):
        table.add_column(column)
    for column in (
        "memory MiB", "bound", "peak seen", "GPU util %", "seen", "slowdown", "step ms", "seen/predicted", "restarts",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for job in sorted(items, key=lambda j: (j.metadata.namespace, j.metadata.name)):
        table.add_row(*_job_row(job))
    return table


def _job_row(job: GpuTrainingJob) -> list[str]:
    status = job.status
    placed = status.placement[0] if status.placement else None
    product = next(
        (
            p
            for p in (status.prediction.products if status.prediction else [])
            if placed and p.product in placed.product
        ),
        None,
    )
    seen = status.observed
    return [
        job.metadata.name,
        status.state.value,
        f"{placed.node} {placed.product}" if placed else "",
        placed.mode.value if placed else "",
        _number(product.memory.median_mib if product else None, ",.0f"),
        _number(product.memory.upper_mib if product else placed.memory_limit_mib if placed else None, ",.0f"),
        f"{seen.peak_memory_mib:,}" if seen else "",
        f"{product.activity.gpu_util_percent.median:.0f}" if product else "",
        _number(seen.gpu_util_percent if seen else None, ".0f"),
        f"{placed.expected_slowdown:.2f}" if placed else "",
        _number(seen.step_time_seconds * 1000 if seen and seen.step_time_seconds is not None else None, ",.0f"),
        _number(seen.step_time_ratio if seen else None, ".2f"),
        str(status.restarts),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def to_svg(picture: RenderableType, *, title: str, width: int = 190) -> str:
    """Draw a picture as an SVG document."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True)
    console.print(picture)
    return console.export_svg(title=title)
