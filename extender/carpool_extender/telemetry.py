"""Metrics of the extender."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version

from carpool_core.clock import Clock
from carpool_core.metrics import build_info
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from carpool_extender.watches import Watches

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Telemetry:
    """Measures requests and the steps of binding."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self.registry = registry
        self._clock = clock
        self._requests = Histogram(
            "carpool_extender_request_seconds", "Time of a request.", ["verb"], buckets=_FAST, registry=registry
        )
        self._steps = Histogram(
            "carpool_extender_bind_seconds",
            "Time of each step of a bind: reserve, prepare (by the node's agent), bind.",
            ["step"],
            buckets=_FAST,
            registry=registry,
        )
        build_info(registry, "extender", version("carpool"))

    def request(self, verb: str) -> AbstractContextManager[None]:
        """Measure a request."""
        return self._measured(self._requests.labels(verb).observe)

    def step(self, name: str) -> AbstractContextManager[None]:
        """Measure a step of a bind."""
        return self._measured(self._steps.labels(name).observe)

    @contextmanager
    def _measured(self, observe: Callable[[float], None]) -> Iterator[None]:
        started = self._clock.monotonic()
        try:
            yield
        finally:
            observe(self._clock.monotonic() - started)


class KnowledgeCollector(Collector):
    """What the extender knows, read at scrape time."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauges."""
        nodes = self._watches.cluster.nodes.values()
        yield GaugeMetricFamily(
            "carpool_extender_reservations",
            "Reservations of all nodes.",
            value=sum(len(node.spec.reservations) for node in nodes),
        )
        ages = GaugeMetricFamily(
            "carpool_extender_watch_age_seconds", "Time since the API server's last word.", labels=["kind"]
        )
        for kind, age in self._watches.ages().items():
            ages.add_metric([kind], age)
        yield ages
