"""Metrics of the extender."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version

import numpy as np
from carpool_core.clock import Clock
from carpool_core.metrics import build_info
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from carpool_extender.cache.cluster import KINDS
from carpool_extender.framework.filters import CHECKS
from carpool_extender.informers import Informers

VERBS = ("filter", "prioritize", "bind", "preempt")
"""kube-scheduler's requests."""
_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class ExtenderMetrics:
    """Measures requests and the steps of binding."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self.registry = registry
        self._clock = clock
        self._requests = Histogram(
            "carpool_extender_request_seconds", "Time of a request.", ["verb"], buckets=_FAST, registry=registry
        )
        for verb in VERBS:  # `rate` needs a scrape from before the first observation, here and below
            self._requests.labels(verb)
        self._steps = Histogram(
            "carpool_extender_bind_seconds",
            "Time of each step of a bind: reserve, prepare (by the node's agent), bind.",
            ["step"],
            buckets=_FAST,
            registry=registry,
        )
        for step in ("reserve", "prepare", "bind"):
            self._steps.labels(step)
        self._kept_back = Histogram(
            "carpool_extender_kept_back_seconds",
            "Time that a bind waited because as many were in flight as can be; a part of its request.",
            buckets=_FAST,
            registry=registry,
        )
        self.admissions = Counter(
            "carpool_extender_admissions_total",
            "Jobs that the queue admitted, and jobs that returned to it because their pods were not reserved in time.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("admitted", "returned"):
            self.admissions.labels(outcome)
        self.pending_jobs = Gauge("carpool_extender_pending_jobs", "Jobs that wait in the queue.", registry=registry)
        self.queue_wait = Histogram(
            "carpool_extender_queue_wait_seconds",
            "Time from the creation of a job's pods until the queue admitted the job, by the last reason to wait.",
            ["reason"],
            buckets=(1, 5, 15, 60, 300, 900, 3600, 14400, 86400, 604800),
            registry=registry,
        )
        self._refusals = Counter(
            "carpool_extender_refusals_total",
            "GPUs that a check refused to waiting jobs, counted each time that a reason is written.",
            ["check"],
            registry=registry,
        )
        for check in CHECKS:
            self._refusals.labels(check.name)
        self._passes = Histogram(
            "carpool_extender_admission_pass_seconds",
            "Time of one pass over the pending jobs.",
            buckets=_FAST,
            registry=registry,
        )
        build_info(registry, "extender", version("carpool"))

    def refused(self, failed: NDArray[np.int8]) -> None:
        """Count the first checks that failed, as `FilterResults.failed` has them."""
        for check in CHECKS:
            self._refusals.labels(check.name).inc(int((failed == check.number).sum()))

    def request(self, verb: str) -> AbstractContextManager[None]:
        """Measure a request."""
        return self._measured(self._requests.labels(verb).observe)

    def kept_back(self) -> AbstractContextManager[None]:
        """Measure for how long a bind waits because as many are in flight as can be."""
        return self._measured(self._kept_back.observe)

    def admission_pass(self) -> AbstractContextManager[None]:
        """Measure a pass over the pending jobs."""
        return self._measured(self._passes.observe)

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


class StateCollector(Collector):
    """The extender's state, read at scrape time."""

    def __init__(self, informers: Informers, reasons: Callable[[], Iterable[str]], orphaned: Callable[[], int]) -> None:
        self._informers, self._reasons, self._orphaned = informers, reasons, orphaned

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauges."""
        nodes = self._informers.cluster.nodes.values()
        yield GaugeMetricFamily(
            "carpool_extender_reservations",
            "Reservations of all nodes.",
            value=sum(len(node.spec.reservations) for node in nodes),
        )
        waiting = GaugeMetricFamily("carpool_extender_waiting_jobs", "Jobs in the queue, by reason.", labels=["reason"])
        for reason, number in Counts(self._reasons()).items():
            waiting.add_metric([reason], number)
        yield waiting
        unreleased = "Reservations that no pod needs and that could not be released."
        yield GaugeMetricFamily("carpool_extender_orphaned_reservations", unreleased, self._orphaned())
        snapshot = self._informers.cluster.snapshot()
        gpus = snapshot.gpus
        free = int((gpus.alive & ~gpus.unavailable & (gpus.count == 0)).sum())
        yield GaugeMetricFamily("carpool_extender_free_gpus", "Available GPUs without a reservation.", free)
        no_work = "GPUs of a node that get no new work, by reason."
        unavailable = GaugeMetricFamily("carpool_extender_unavailable_gpus", no_work, labels=["node", "reason"])
        kinds = Counts((gpus.node[row], why.kind) for row, why in snapshot.unavailable.items())
        for (node, cause), number in kinds.items():
            unavailable.add_metric([snapshot.node_names[node], KINDS[cause]], number)
        yield unavailable
        ages = GaugeMetricFamily(
            "carpool_extender_watch_age_seconds", "Time since the API server's last answer or event.", labels=["kind"]
        )
        for kind, age in self._informers.ages().items():
            ages.add_metric([kind], age)
        yield ages
