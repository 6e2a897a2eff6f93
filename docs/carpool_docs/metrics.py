"""Page of the metrics, read from the registry of each process; no process is started."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_core.metrics import ApiMetrics, build_info
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_deviceplugin import app as agent
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_extender import app as extender
from carpool_extender.settings import ExtenderSettings
from carpool_operator.metrics import Metrics
from prometheus_client import CollectorRegistry

from carpool_docs import code, table
from carpool_docs import page as page_of
from carpool_docs.settings import PROCESSES

_INTRODUCTION = """Every process answers `/metrics` in the text format of Prometheus, or in OpenMetrics if the client
asks for it, `/healthz`, and `/readyz`, which answers with status 503 and the reason if the process is not ready. With
the chart all three are on port 9400, named `metrics`. [Monitoring](../monitoring.md) describes the dashboards.

A histogram has the series `NAME_bucket`, `NAME_sum` and `NAME_count`."""

_NOTES = {
    "agent": """GPUs have DCGM's metrics with DCGM's units and labels, so that dashboards for `dcgm-exporter` show them.
`GPU_I_PROFILE` and `GPU_I_ID` are set for MIG instances; `pod`, `namespace` and `container` if a GPU or an instance has
exactly one tenant. `carpool_gpu_tenant_…` has the use of each tenant.""",
}

_SUFFIXES = {"_bytes": "bytes", "_seconds": "s", "_joules": "J"} | {
    **dict.fromkeys(("_slowdown_ratio", "_peak_ratio", "_time_ratio", "_widening_ratio"), "1"),
    "_ratio": "0..1",
}
_HEADER = ("Metric", "Type", "Unit", "Labels", "Meaning")


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    """Exposed name; that of a counter ends in `_total`."""
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """Unit by the suffix of the name or by the help; `count` otherwise."""
        name = self.name.removesuffix("_total")
        by_name = next((unit for end, unit in _SUFFIXES.items() if name.endswith(end)), "")
        stated = re.search(r"\((?:in (\S+)|(0\.\.1))\)\.$", self.help)
        if by_name or stated:
            return by_name or (stated[1] or stated[2] if stated else "")
        if "always 1" in self.help:
            return "1"
        return "0 or 1" if re.match("1 (if|while|for each) ", self.help) else "count"


def _agent() -> CollectorRegistry:
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory() as state:
        settings = AgentSettings(
            node_name="node", simulated_gpus="Tesla T4:1", state_dir=Path(state), carbon_grams_per_kwh=0
        )
        collector = AgentCollector(agent.build(settings, FakeKube(), FakeClock()))
        # The device's files are removed with the folder, so that everything is read now.
        registry.register(_Read(list(collector.collect())))
    build_info(registry, "agent", "")
    return registry


class _Read:
    """Collector of families that were read before."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


REGISTRIES: Mapping[str, Callable[[], CollectorRegistry]] = {
    "operator": lambda: Metrics("", list).registry,
    "extender": lambda: extender.build(ExtenderSettings(), FakeKube(), FakeClock()).registry,
    "agent": _agent,
}
"""Registry of each process."""


def families(process: str) -> Iterator[Family]:
    """Yield the metrics of a process, by name."""
    found: dict[str, Family] = {}
    # prometheus_client has labels only in samples, and there are none yet.
    registry: Any = REGISTRIES[process]()
    ApiMetrics(registry)
    for collector in registry._collector_to_names:
        for family in collector.collect():
            labels: tuple[str, ...] = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Family(name, family.type, tuple(labels), family.documentation)
    yield from (found[name] for name in sorted(found))


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for process in REGISTRIES:
        parts += [f"## carpool {process}", f"Default port: {PROCESSES[process]().metrics_port} (`--metrics-port`)."]
        parts += [_NOTES[process]] if process in _NOTES else []
        parts.append(table(_HEADER, [_row(family) for family in families(process)]))
    return page_of("Metrics", *parts)


def _row(family: Family) -> tuple[str, ...]:
    labels = ", ".join(code(label) for label in family.labels)
    return code(family.name), family.type, family.unit, labels, family.help
