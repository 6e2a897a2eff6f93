"""Page of the metrics, read from each process's own registry; nothing is started for it."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_core.metrics import build_info
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_deviceplugin import app as agent
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_extender import app as extender
from carpool_extender.settings import ExtenderSettings
from carpool_operator.metrics import Metrics
from carpool_operator.settings import OperatorSettings
from prometheus_client import CollectorRegistry

from carpool_docs.markdown import code, table
from carpool_docs.markdown import page as page_of

_INTRODUCTION = """Every process answers `/metrics` in the formats of Prometheus and OpenMetrics, `/healthz`, and
`/readyz`, which answers with status 503 and the reason where the process is not ready. The chart serves all three on
port 9400, which it calls `metrics`.

A histogram has the series `NAME_bucket`, `NAME_sum` and `NAME_count`."""

_NOTES = {
    "agent": """GPUs stand under DCGM's names with DCGM's units and labels, so that dashboards made for `dcgm-exporter`
show them. Labels that say nothing here (`pci_bus_id`, `GPU_I_PROFILE`, `GPU_I_ID`, `container`) are empty; `pod` and
`namespace` are set where a GPU has one tenant only. What each tenant uses stands in `carpool_gpu_tenant_…`.""",
}

_SUFFIXES = {"_bytes": "bytes", "_seconds": "s", "_joules": "J", "_ratio": "0..1"}
_HEADER = ("Metric", "Type", "Unit", "Labels", "Meaning")


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    """As it is exposed: a counter's ends in `_total`."""
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """Unit by the end of the name, or by what the help says of it; `count` for numbers of things."""
        name = self.name.removesuffix("_total")
        by_name = next((unit for end, unit in _SUFFIXES.items() if name.endswith(end)), "")
        stated = re.search(r"\((?:in (\S+)|(0\.\.1))\)\.$", self.help)
        if by_name or stated:
            return by_name or (stated[1] or stated[2] if stated else "")
        if "always 1" in self.help:
            return "1"
        return "0 or 1" if self.help.startswith("1 where") else "count"


def _operator() -> CollectorRegistry:
    return Metrics("", list).registry


def _extender() -> CollectorRegistry:
    return extender.build(ExtenderSettings(), FakeKube(), FakeClock()).registry


def _agent() -> CollectorRegistry:
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory() as state:
        settings = AgentSettings(node_name="node", simulated_gpus="Tesla T4:1", state_dir=Path(state))
        collector = AgentCollector(agent.build(settings, FakeKube(), FakeClock()))
        # The device's files go with the folder, so everything is read now.
        registry.register(_Kept(list(collector.collect())))
    build_info(registry, "agent", "")
    return registry


class _Kept:
    """Shows again what was read."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


@dataclass(frozen=True)
class _Process:
    registry: Callable[[], CollectorRegistry]
    port: int


PROCESSES: Mapping[str, _Process] = {
    "operator": _Process(_operator, OperatorSettings().metrics_port),
    "extender": _Process(_extender, ExtenderSettings().metrics_port),
    "agent": _Process(_agent, AgentSettings().metrics_port),
}


def families(process: str) -> Iterator[Family]:
    """Yield what a process exposes, by name."""
    found: dict[str, Family] = {}
    # prometheus_client has labels only in samples, and there are none yet.
    registry: Any = PROCESSES[process].registry()
    for collector in registry._collector_to_names:
        for family in collector.collect():
            labels: tuple[str, ...] = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Family(name, family.type, tuple(labels), family.documentation)
    yield from (found[name] for name in sorted(found))


def page() -> str:
    """Write the page."""
    parts = [_INTRODUCTION]
    for process, how in PROCESSES.items():
        parts += [f"## carpool {process}", f"Port {how.port} where `--metrics-port` does not say otherwise."]
        parts += [_NOTES[process]] if process in _NOTES else []
        parts.append(table(_HEADER, [_row(family) for family in families(process)]))
    return page_of("Metrics", *parts)


def _row(family: Family) -> tuple[str, ...]:
    labels = ", ".join(code(label) for label in family.labels)
    return code(family.name), family.type, family.unit, labels, family.help
