"""Every panel of every dashboard has data on a running cluster that a real Prometheus scrapes."""

import math
import re
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from carpool_docs import dashboards
from carpool_e2e.binaries import ensure
from carpool_e2e.cluster import Cluster
from carpool_e2e.dashboards import SCRAPE_S, answer, figures, jobs, prometheus, targets
from kubectl import Watcher, eventually
from matplotlib.axes import Axes

pytestmark = pytest.mark.e2e


def without_data(address: str, start: float) -> set[tuple[str, str]]:
    """Return the panels with a query that finds no number, not the labels of its legend, or another namespace.

    `start` is in s since 1970. Latencies have numbers only while there are calls.
    """
    window = {"start": int(start), "end": int(time.time()), "step": SCRAPE_S}
    found = set()
    for name, dashboard in dashboards.read().items():
        for panel in dashboard.panels:
            for legend, query in panel.queries.items():
                answered = answer(address, dashboards.portable(query), **window)
                series = [one["metric"] for one in answered if any(math.isfinite(float(v)) for _, v in one["values"])]
                labels = re.findall(r"\{\{(\w+)\}\}", legend)
                is_complete = all(one.get(label) for one in series for label in labels)
                if not (series and is_complete and {one.get("namespace", "default") for one in series} == {"default"}):
                    found.add((name, panel.title))
    return found


def has_data(axes: Axes) -> bool:
    """Return whether a panel's picture has a number."""
    values = [y for line in axes.lines for y in line.get_ydata() if line.get_label()[0] != "_"]
    is_drawn = bool(axes.collections) or any(map(math.isfinite, values))
    return is_drawn or any("No data" not in text.get_text() for text in axes.texts)


def scraped(address: str, cluster: Cluster) -> bool:
    """Return whether the metrics of every process were scraped."""
    with suppress(OSError):  # it does not listen yet
        up = [one["metric"]["pod"] for one in answer(address, "up == 1")]
        return set(up) == set(targets(cluster))
    return False


def promtools_faults(address: str) -> list[str]:
    """Return what `promtool check metrics` finds in the metrics of a process, except in DCGM's names."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as found:  # our own
        text = found.read()
    command = [ensure(["promtool"])["promtool"], "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    faults = (done.stdout + done.stderr).decode().splitlines()
    return [fault for fault in faults if not fault.startswith("DCGM_")]


def test_every_panel_has_data_with_and_without_honored_labels(
    cluster: Cluster, watcher: Watcher, tmp_path: Path
) -> None:
    start, (first, waits) = time.time(), jobs()
    with (
        prometheus(cluster, tmp_path) as honored,
        prometheus(cluster, tmp_path, honor_labels=False) as exported,
    ):
        for address in (honored, exported):
            # Otherwise no scrape is from before the jobs, and their increase is none.
            eventually("a first scrape", lambda at=address: scraped(at, cluster))
        cluster.apply(*first)
        watcher.running("whole")
        cluster.apply(waits)
        for address in (honored, exported):
            with suppress(AssertionError):
                eventually("data in every panel", lambda at=address: not without_data(at, start), 120)
            assert without_data(address, start) == set()
        assert {fault for address in targets(cluster).values() for fault in promtools_faults(address)} == set()
        drawn: list[tuple[str, Axes]] = []

        def empty() -> set[tuple[str, str]]:
            drawn[:] = [(name, axes) for name, figure in figures(honored, start=start) for axes in figure.axes]
            return {(name, axes.get_title("left")) for name, axes in drawn if not has_data(axes)}

        eventually("a picture of every panel's data", lambda: not empty(), 60)
        assert len(drawn) == sum(len(one.panels) for one in dashboards.read().values())
