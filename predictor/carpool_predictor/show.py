"""How a prediction looks to people: one GPU line by line with its intervals, several side by side."""

from collections.abc import Iterator
from dataclasses import fields

from carpool_core.resources.prediction import Interval
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from carpool_predictor.parts import MemoryParts
from carpool_predictor.report import ProductReport, Report

_WIDTH_OF_INTERVALS = 190
"""Columns of a terminal in which the intervals of several GPUs fit beside the medians."""


def as_text(title: str, report: Report, *, width: int) -> RenderableType:
    """Draw what is predicted; intervals of several GPUs only where the terminal is wide, they are in the JSON, too."""
    return Group(*_tables(title, report, with_intervals=width >= _WIDTH_OF_INTERVALS))


def _tables(title: str, report: Report, *, with_intervals: bool) -> Iterator[RenderableType]:
    if len(report.products) == 1:
        (product,) = report.products
        # Not the table's own title, which would be broken to the width of the table.
        yield Text(f"{title}, on {product.answer.prediction.product}", style="italic")
        yield _one(report, product)
    else:
        yield _memory(title, report)
        yield _speed(report, with_intervals=with_intervals)
        yield _parts(report)
        if any(product.mig for product in report.products):
            yield _mig(report)
    yield Text(f"{report.prediction.reason}: {report.prediction.message}", style="dim")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _span(interval: Interval | None, scale: float = 1.0, digits: int = 0, *, with_ends: bool = True) -> str:
    if interval is None:
        return ""
    median, lower, upper = (f"{x * scale:,.{digits}f}" for x in (interval.median, interval.lower, interval.upper))
    return f"{median} [dim]({lower} - {upper})[/dim]" if with_ends else median


def _one(report: Report, product: ProductReport) -> Table:
    found = product.answer.prediction
    memory, activity = found.memory, found.activity
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("memory", f"{memory.median_mib:,} MiB")
    table.add_row("  at most", f"{memory.upper_mib:,} MiB, {memory.coverage:.0%} sure")
    table.add_row("  class", f"{memory.class_lower_mib // 1024} - {memory.class_upper_mib // 1024} GiB")
    for name in _names():
        table.add_row(f"  {name.removesuffix('_mib')}", f"{getattr(product.parts, name):,.0f} MiB")
    table.add_row("GPU utilization", f"{_span(activity.gpu_util_percent)} %")
    table.add_row("SM activity", f"{_span(activity.sm_active_ratio, 100)} %")
    table.add_row("SM occupancy", f"{_span(activity.sm_occupancy_ratio, 100)} %")
    table.add_row("DRAM activity", f"{_span(activity.dram_active_ratio, 100)} %")
    table.add_row("step time", f"{_span(found.step_time_seconds, 1000, 1)} ms")
    table.add_row("largest batch", str(product.largest))
    for profile, largest in product.mig.items():
        table.add_row(f"  on {profile}", str(largest))
    inside = {"memory": _memory_learned(report, product)} | _speed_learned(product)
    table.add_row("inside what was learned", _named(inside))
    return table


def _memory(title: str, report: Report) -> Table:
    table = _table(title, "GPU", "MiB", "at most", "sure", "class GiB", "largest batch", "learned")
    for product in report.products:
        memory = product.answer.prediction.memory
        table.add_row(
            _short(product.answer.prediction.product),
            f"{memory.median_mib:,}",
            f"{memory.upper_mib:,}",
            f"{memory.coverage:.0%}",
            f"{memory.class_lower_mib // 1024}-{memory.class_upper_mib // 1024}",
            str(product.largest),
            "yes" if _memory_learned(report, product) else "no",
        )
    return table


def _speed(report: Report, *, with_intervals: bool) -> Table:
    table = _table("How busy it is, alone", "GPU", "util %", "SM %", "occ %", "DRAM %", "step ms", "learned")
    for product in report.products:
        found = product.answer.prediction
        activity = found.activity
        table.add_row(
            _short(found.product),
            _span(activity.gpu_util_percent, with_ends=with_intervals),
            _span(activity.sm_active_ratio, 100, with_ends=with_intervals),
            _span(activity.sm_occupancy_ratio, 100, with_ends=with_intervals),
            _span(activity.dram_active_ratio, 100, with_ends=with_intervals),
            _span(found.step_time_seconds, 1000, 1, with_ends=with_intervals),
            _named(_speed_learned(product)),
        )
    return table


def _memory_learned(report: Report, product: ProductReport) -> bool:
    return report.memory_inside and product.answer.memory_calibrated


def _speed_learned(product: ProductReport) -> dict[str, bool]:
    return {"activity": product.answer.activity_measured, "time": product.answer.step_time_inside}


def _named(inside: dict[str, bool]) -> str:
    """Name what lies inside what was learned."""
    return "all" if all(inside.values()) else ", ".join(name for name, is_so in inside.items() if is_so) or "none"


def _short(product: str) -> str:
    return product.removeprefix("NVIDIA ").removeprefix("GeForce ")


_SHORT_PARTS = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "workspace": "worksp"}
"""Headings with which the table of parts fits into 80 columns."""


def _names() -> list[str]:
    return [field.name for field in fields(MemoryParts)]


def _parts(report: Report) -> Table:
    names = [name.removesuffix("_mib") for name in _names()]
    table = _table(
        "What the memory consists of at its peak, MiB", "GPU", *(_SHORT_PARTS.get(name, name) for name in names)
    )
    for product in report.products:
        table.add_row(
            _short(product.answer.prediction.product), *(f"{getattr(product.parts, name):,.0f}" for name in _names())
        )
    return table


def _mig(report: Report) -> Table:
    table = _table("Largest batch on a MIG instance", "GPU", "profile: batch")
    for product in report.products:
        if product.mig:
            batches = ", ".join(f"{profile}: {found}" for profile, found in product.mig.items())
            table.add_row(_short(product.answer.prediction.product), batches)
    return table
