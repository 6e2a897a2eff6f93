"""What the operator measures of itself."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from carpool_core.metrics import build_info
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.values import JobState
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class _JobStates(Collector):
    """Counts the jobs of each state when it is scraped."""

    def __init__(self, jobs: Callable[[], Iterable[GpuTrainingJob]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("carpool_operator_jobs", "GpuTrainingJobs, by state.", labels=["state"])
        tally = Tally(job.status.state for job in self._jobs())
        for state in JobState:
            family.add_metric([state], tally[state])
        yield family


class Metrics:
    """The operator's metrics in a registry of their own."""

    def __init__(self, version: str, jobs: Callable[[], Iterable[GpuTrainingJob]]) -> None:
        self.registry = CollectorRegistry()
        build_info(self.registry, "operator", version)
        self.reconcile_seconds = Histogram(
            "carpool_operator_reconcile_seconds",
            "Time of one look at a job, its writes included.",
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self.reconcile_total = Counter(
            "carpool_operator_reconcile_total",
            "Looks at jobs, by result: ok, superseded (the job had changed), retry (the API failed), error (a defect).",
            ["result"],
            registry=self.registry,
        )
        self.prediction_seconds = Histogram(
            "carpool_operator_prediction_seconds",
            "Time of one prediction, the tracing of a model included.",
            registry=self.registry,
            buckets=(0.001, 0.01, 0.1, 1, 2.5, 5, 10, 30, 60, 120),
        )
        self.registry.register(_JobStates(jobs))
