"""Prometheus' text format, for pages of many series: the library takes several times as long, at every scrape."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["CONTENT_TYPE", "text"]

_TYPES = {"gauge": "gauge", "counter": "counter", "unknown": "untyped"}
"""Kinds that are written here, and what the format calls them; all others are left to the library."""
_NONE: tuple[Mapping[str, str] | None, str] = None, ""
Labels = tuple[tuple[str, str], ...]


class _Alone(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def text(registry: CollectorRegistry) -> bytes:
    """Write down what a registry shows now, exactly as `generate_latest` does.

    Args:
        registry: Whose metrics have names of letters, digits and underscores only, as all of ours.
    """
    page: list[str] = []
    written: dict[Labels, str] = {}  # many families have series of the same labels
    known: dict[int, tuple[Mapping[str, str], str]] = {}  # or even of one mapping, which must live as long as its ID
    for metric in registry.collect():
        suffix = "_total" if metric.type == "counter" else ""
        name = f"{metric.name}{suffix}"
        if metric.type not in _TYPES or any(s.name != name or s.timestamp is not None for s in metric.samples):
            page.append(generate_latest(_Alone(metric)).decode())
            continue
        about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        page.append(f"# HELP {name} {about}\n# TYPE {name} {_TYPES[metric.type]}\n")
        for sample in metric.samples:
            of_all, labels = known.get(id(sample.labels), _NONE)
            if of_all is not sample.labels:
                key = tuple(sample.labels.items())
                labels = written.get(key) or written.setdefault(key, _written(key))
                known[id(sample.labels)] = sample.labels, labels
            page.append(f"{name}{labels} {floatToGoString(sample.value)}\n")  # type: ignore[no-untyped-call]  # untyped there
    return "".join(page).encode()


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
