"""Draws the chart's Grafana dashboards from the answers of a Prometheus that scrapes a running cluster."""

import hashlib
import json
import math
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, StrMethodFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from carpool_e2e.binaries import ensure
from carpool_e2e.chart import NAMESPACE, PROJECT, Manifest
from carpool_e2e.cluster import AGENT_PORT, Cluster
from carpool_e2e.demo import manifests

DASHBOARDS = PROJECT / "helm" / "carpool" / "dashboards"
PICTURES = PROJECT / "docs" / "images" / "dashboards"
SCRAPE_S = 2
VARIABLES = {"$__rate_interval": "20s", "$__range": "5m"}
"""Values of Grafana's own variables."""
DRAWN = "Dashboard"
"""Text of a picture with the digest of the dashboard that it shows."""
MAX_LEGEND = 8
"""Most series that a legend names."""
_ROW_IN, _COLUMN_IN = 0.3, 0.5
"""Height of a row of Grafana's grid and width of a column, in inches."""
_FORMATS = {
    "bytes": EngFormatter("B", places=1),
    "h": EngFormatter("h", places=1),
    "joule": EngFormatter("J", places=1),
    "massg": EngFormatter("g", places=1),
    "celsius": StrMethodFormatter("{x:.3g} °C"),
    "cps": StrMethodFormatter("{x:.3g}/s"),
    "percentunit": StrMethodFormatter("{x:.1%}"),
    "s": EngFormatter("s", places=1),
    "short": StrMethodFormatter("{x:.4g}"),
    "watt": EngFormatter("W", places=1),
}
"""Formats by Grafana's names of units."""

Series = Mapping[str, Any]
"""One series of Prometheus's answer: `metric` with its labels, and `value` or `values`."""
Query = Callable[[str], Sequence[Series]]
Found = Sequence[tuple[str, Mapping[int, float]]]
"""Legend of each series, and its values by time in s."""

_SMALL: dict[str, Any] = {
    "model": {"features": manifests.SMALL_FEATURES | {"name": "a small network of the dashboards"}},
    "training": manifests.small("x")["spec"]["training"],
}
"""A model of its own: slowdowns that are measured here must not count for the demo's jobs."""
_WHOLE_NODE: dict[str, Any] = {"gpu": {"product": manifests.H100}, "gpusPerWorker": 4, "sharing": {"mode": "Exclusive"}}


def jobs() -> tuple[list[Manifest], Manifest]:
    """Return four jobs of which one ends, and a job that waits for one of them, named `whole`."""
    use = ("--no-loop", "--memory-mib=2300", "--step-seconds=0.2")
    small = [manifests.job(name, *use, *more, **_SMALL) for name, *more in (("ends", "--steps=60"), ("a",), ("b",))]
    whole, waits = (manifests.job(name, "--no-loop", "--memory-mib=100", **_WHOLE_NODE) for name in ("whole", "waits"))
    return [*small, whole], waits


def targets(cluster: Cluster) -> dict[str, str]:
    """Return the address of each process's metrics."""
    ports = cluster.plane.ports
    found = {"operator": f"127.0.0.1:{ports.operator_metrics}", "scheduler": f"127.0.0.1:{ports.extender_metrics}"}
    return found | {name: f"{node.link.node_address}:{AGENT_PORT}" for name, node in cluster.kubelets.items()}


@contextmanager
def prometheus(cluster: Cluster, folder: Path, *, honor_labels: bool = True) -> Iterator[str]:
    """Scrape the cluster as the chart's PodMonitors do, and return Prometheus's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    static = [
        {"targets": [address], "labels": {"namespace": NAMESPACE, "pod": name, "container": "metrics"}}
        for name, address in targets(cluster).items()
    ]
    scrape = {"job_name": "carpool", "honor_labels": honor_labels, "static_configs": static}
    file = folder / f"{port}.yaml"
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scrape]}))
    command = [
        ensure(["prometheus"])["prometheus"],
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / str(port)}",
    ]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def answer(address: str, query: str, /, **window: float) -> list[Series]:
    """Return the series that a query finds now or, given `start`, `end` and `step` in s, in that window."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    parameters = urllib.parse.urlencode({"query": re.sub(r"\$[a-z]+", ".*", query), **window})
    url = f"{address}/api/v1/{'query_range' if window else 'query'}?{parameters}"
    with urllib.request.urlopen(url, timeout=10) as found:  # noqa: S310  # our own
        series: list[Series] = json.load(found)["data"]["result"]
    return series


def figures(address: str, *, start: float) -> Iterator[tuple[str, Figure]]:
    """Yield name and picture of each dashboard from `start`, in s since 1970, until now."""
    window = {"start": int(start), "end": int(time.time()), "step": SCRAPE_S}
    for file in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(file.read_text(encoding="utf-8"))
        yield file.stem, draw(dashboard, window, lambda query: answer(address, query, **window))


def draw(dashboard: Mapping[str, Any], window: Mapping[str, int], query: Query) -> Figure:
    """Draw the panels at their places; `query` returns an expression's series in the window."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    times = range(window["start"], window["end"] + 1, window["step"])
    width, height = 24 * _COLUMN_IN, rows * _ROW_IN + 0.4
    figure = Figure(figsize=(width, height))
    figure.text(
        0.5,
        1 - 0.2 / height,
        f"{dashboard['title']}, the last {(window['end'] - window['start']) / 60:.0f} minutes",
        ha="center",
    )
    for panel in panels:
        at, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
        left, below = (0.1, 0.1) if panel["type"] == "stat" else (0.7, 0.7)  # for the texts beside and below the axes
        corner = (at["x"] * _COLUMN_IN + left, (rows - at["y"] - at["h"]) * _ROW_IN + below)
        size = (at["w"] * _COLUMN_IN - left - 0.1, at["h"] * _ROW_IN - below - 0.3)
        axes = figure.add_axes((corner[0] / width, corner[1] / height, size[0] / width, size[1] / height))
        axes.set_title(panel["title"], loc="left", size=8, weight="bold")
        found = [
            (
                _legend(target["legendFormat"], one["metric"]),
                {int(time_s): float(value) for time_s, value in one["values"]},
            )
            for target in panel["targets"]
            for one in query(target["expr"])
        ]
        if panel["type"] == "stat" or not found:
            _write_last(axes, found, _FORMATS[defaults["unit"]])
        else:
            lines = {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]}
            is_stack = "stacking" in defaults.get("custom", {})
            stacked = [one for one in found if is_stack and one[0] not in lines]
            others = [one for one in found if not is_stack or one[0] in lines]
            _draw_lines(axes, stacked, others, _FORMATS[defaults["unit"]], times)
    return figure


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), template)


def _write_last(axes: Axes, found: Found, form: Formatter) -> None:
    """Write the last value of each series."""
    axes.set(xticks=[], yticks=[])
    last = {name: form(list(points.values())[-1]) for name, points in found}
    lines = [f"{name}  {value}" for name, value in last.items()] if len(last) > 1 else [*last.values(), "No data"][:1]
    size = 8 if len(last) > 1 else 16
    axes.text(0.5, 0.5, "\n".join(lines), size=size, ha="center", va="center")


def _draw_lines(axes: Axes, stacked: Found, lines: Found, form: Formatter, times: range) -> None:
    """Draw each series over time, those of `stacked` on each other."""
    minutes = [(at - times[-1]) / 60 for at in times]
    names = [name for name, _ in (*stacked, *lines)]
    colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(names)))
    if stacked:
        areas = [[points.get(at, 0) for at in times] for _, points in stacked]
        axes.stackplot(
            minutes, areas, labels=names[: len(stacked)], colors=colours[: len(stacked)], alpha=0.7, step="mid"
        )
    for (name, points), colour in zip(lines, colours[len(stacked) :], strict=True):
        drawn = [points.get(at, math.nan) for at in times]
        axes.plot(minutes, drawn, ".-", markersize=2, linewidth=1, label=name, color=colour)
    axes.set_xlim(minutes[0], 0)
    axes.axhline(0, color="none")  # the axis begins at 0
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min" if value else "now")
    axes.yaxis.set_major_formatter(lambda value, _: form(value))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    columns = max(1, 100 // (8 + max(map(len, names))))
    shown = axes.get_legend_handles_labels()[0][:MAX_LEGEND]
    axes.legend(handles=shown, fontsize=6, ncols=columns, loc="upper left", bbox_to_anchor=(-0.1, -0.12), frameon=False)


def play(cluster: Cluster, address: str) -> Iterator[Path]:
    """Let jobs come, wait and end for three and a half minutes, and draw the dashboards into `PICTURES`."""
    start, (first, waits) = time.time(), jobs()
    for manifest in (*first, waits):
        cluster.apply(manifest)
        time.sleep(30)
    cluster.kubectl("delete", "gputrainingjob", "whole")
    time.sleep(60)
    PICTURES.mkdir(exist_ok=True)
    for name, figure in figures(address, start=start):
        picture, drawn = PICTURES / f"{name}.png", PngInfo()
        drawn.add_text(DRAWN, digest(name))
        figure.savefig(picture, dpi=80)
        Image.open(picture).quantize(256).save(picture, optimize=True, pnginfo=drawn)
        yield picture


def digest(name: str) -> str:
    """Return a digest of a dashboard, which its picture has as the text `DRAWN`."""
    return hashlib.sha256((DASHBOARDS / f"{name}.json").read_bytes()).hexdigest()
