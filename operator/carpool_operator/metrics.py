"""Metrics of the operator."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from carpool_core.metrics import build_info
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.values import JobState
from carpool_predictor.calibration.document import Calibration
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


class _Calibration(Collector):
    """Reports the calibration by stack when it is scraped."""

    def __init__(self, calibration: Callable[[], Calibration | None]) -> None:
        self._calibration = calibration

    def collect(self) -> Iterator[Metric]:
        known = self._calibration()
        in_use = GaugeMetricFamily(
            "carpool_operator_calibration_in_use",
            "1 if predictions use the calibration; 0 if learning is off or its ConfigMap cannot be read.",
        )
        in_use.add_metric([], known is not None)
        yield in_use
        labels = ["product", "precision", "driver"]
        jobs = GaugeMetricFamily(
            "carpool_operator_calibration_jobs", "Different jobs that a stack was calibrated from.", labels=labels
        )
        runs = GaugeMetricFamily(
            "carpool_operator_calibration_runs", "Runs of a stack that were learned, ever.", labels=labels
        )
        refused = GaugeMetricFamily(
            "carpool_operator_calibration_refused_runs", "Runs with invalid measurements, ever.", labels=labels
        )
        coverage = GaugeMetricFamily(
            "carpool_operator_calibration_coverage_ratio",
            "Share of a stack's last 100 judged runs whose memory was below the bound; absent before the first.",
            labels=labels,
        )
        for state in known.stacks if known is not None else ():
            of = [state.stack.product, state.stack.precision.value, state.stack.driver]
            jobs.add_metric(of, state.jobs)
            runs.add_metric(of, state.seen)
            refused.add_metric(of, state.refused)
            if state.coverage is not None:
                coverage.add_metric(of, state.coverage)
        yield from (jobs, runs, refused, coverage)


class Metrics:
    """The operator's metrics with their own registry."""

    def __init__(
        self,
        version: str,
        jobs: Callable[[], Iterable[GpuTrainingJob]],
        calibration: Callable[[], Calibration | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        build_info(self.registry, "operator", version)
        self.reconcile_seconds = Histogram(
            "carpool_operator_reconcile_seconds",
            "Duration of one reconciliation, including its writes.",
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self.reconcile_total = Counter(
            "carpool_operator_reconcile_total",
            "Reconciliations by result: ok, superseded (the job had changed), retry (API error), error (a defect).",
            ["result"],
            registry=self.registry,
        )
        self.prediction_seconds = Histogram(
            "carpool_operator_prediction_seconds",
            "Duration of one prediction, including the tracing of its model.",
            registry=self.registry,
            buckets=(0.001, 0.01, 0.1, 1, 2.5, 5, 10, 30, 60, 120),
        )
        self.registry.register(_JobStates(jobs))
        self.registry.register(_Calibration(calibration))
