"""Every panel of every dashboard has data on a running cluster that a real Prometheus scrapes."""

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from carpool_docs import dashboards
from carpool_e2e.binaries import ensure
from carpool_e2e.chart import NAMESPACE
from carpool_e2e.cluster import AGENT_PORT, Cluster
from carpool_e2e.demo import manifests
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e

NOT_SIMULATED = {("gpu", "Temperature"), ("gpu", "Last XID error")}
"""Panels of sensors that simulated GPUs do not have."""
SMALL = {key: manifests.small("x")["spec"][key] for key in ("model", "training")}
WHOLE_NODE = {"gpu": {"product": manifests.H100}, "gpusPerWorker": 4, "sharing": {"mode": "Exclusive"}}


@contextmanager
def prometheus(cluster: Cluster, folder: Path, *, honor_labels: bool) -> Iterator[str]:
    """Scrape the cluster as the chart's PodMonitors do, and return Prometheus's address."""
    ports = cluster.plane.ports
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    targets = {"operator": f"127.0.0.1:{ports.operator_metrics}", "scheduler": f"127.0.0.1:{ports.extender_metrics}"}
    targets |= {name: f"{node.link.node_address}:{AGENT_PORT}" for name, node in cluster.kubelets.items()}
    static = [
        {"targets": [address], "labels": {"namespace": NAMESPACE, "pod": name, "container": "metrics"}}
        for name, address in targets.items()
    ]
    scrape = {"job_name": "carpool", "honor_labels": honor_labels, "static_configs": static}
    file = folder / f"{port}.yaml"
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": "2s"}, "scrape_configs": [scrape]}))
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


def answer(address: str, query: str) -> list[dict[str, str]]:
    """Return the labels of the series that a query finds."""
    for name, value in (("$__rate_interval", "20s"), ("$__range", "5m")):
        query = query.replace(name, value)
    query = urllib.parse.urlencode({"query": re.sub(r"\$[a-z]+", ".*", query)})
    with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=10) as found:  # noqa: S310  # our own
        return [one["metric"] for one in json.load(found)["data"]["result"]]


def without_data(address: str) -> set[tuple[str, str]]:
    """Return the panels with a query that finds nothing, not the labels of its legend, or another namespace."""
    found = set()
    for name, dashboard in dashboards.read().items():
        for panel in dashboard.panels:
            for legend, query in panel.queries.items():
                series, labels = answer(address, dashboards.portable(query)), re.findall(r"\{\{(\w+)\}\}", legend)
                is_complete = all(one.get(label) for one in series for label in labels)
                if not (series and is_complete and {one.get("namespace", "default") for one in series} == {"default"}):
                    found.add((name, panel.title))
    return found


def test_every_panel_has_data_with_and_without_honored_labels(
    cluster: Cluster, watcher: Watcher, tmp_path: Path
) -> None:
    use = ("--no-loop", "--memory-mib=2300", "--step-seconds=0.2")
    ends, a, b = (manifests.job(name, *use, *more, **SMALL) for name, *more in (("ends", "--steps=60"), "a", "b"))
    whole, waits = (manifests.job(name, "--no-loop", "--memory-mib=100", **WHOLE_NODE) for name in ("whole", "waits"))
    with (
        prometheus(cluster, tmp_path, honor_labels=True) as honored,
        prometheus(cluster, tmp_path, honor_labels=False) as exported,
    ):
        cluster.apply(ends, whole, a, b)
        watcher.running("whole")
        cluster.apply(waits)
        for address in (honored, exported):
            with suppress(AssertionError):
                eventually("data in every panel", lambda at=address: without_data(at) == NOT_SIMULATED, 120)
            assert without_data(address) == NOT_SIMULATED
