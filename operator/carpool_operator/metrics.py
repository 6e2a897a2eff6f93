"""Metrics of the operator."""

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from carpool_core.clock import parse_rfc3339
from carpool_core.keys import ANOMALIES
from carpool_core.metrics import build_info
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import MIB, JobState
from carpool_predictor.calibration.document import Calibration
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from carpool_operator.attempts import COMPLETE, SPEC_CHANGED, SUSPENDED
from carpool_operator.outcomes import CONTAINER_FAILED, DISRUPTED, GANG_TIMEOUT, GPU_OUT_OF_MEMORY

_OUTCOMES = (COMPLETE, SUSPENDED, SPEC_CHANGED, GPU_OUT_OF_MEMORY, GANG_TIMEOUT, CONTAINER_FAILED, *sorted(DISRUPTED))
_OTHER = "Other"
"""Outcome of attempts that ended for the kubelet's own reasons, of which there may be any number."""
_JOB_GAUGES = {
    "carpool_job_predicted_step_seconds": "Predicted median of the step time of a job alone.",
    "carpool_job_observed_memory_peak_bytes": "Largest GPU memory that a worker of a job took on one GPU.",
    "carpool_job_step_time_ratio": "Measured step time of a job over the predicted one alone.",
    "carpool_job_measured_slowdown_ratio": "Measured step time of a job over its own step time alone.",
    "carpool_job_steps_done": "Training steps that a job reports for its attempt.",
    "carpool_job_steps": "Training steps of a whole job.",
    "carpool_job_expected_end_seconds": "Expected end of a job by its measured step time, in seconds since 1970.",
    "carpool_job_max_slowdown_ratio": "Largest slowdown that a job accepts.",
    "carpool_job_restarts": "Failures of a job that count against its backoffLimit.",
}


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


class _PlacedJobs(Collector):
    """Reports prediction and measurements of each placed job when it is scraped; ended jobs have no series."""

    def __init__(self, jobs: Callable[[], Iterable[GpuTrainingJob]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        labels = ["namespace", "training_job"]
        memory = GaugeMetricFamily(
            "carpool_job_predicted_memory_bytes",
            "Predicted GPU memory of a job on each GPU: its median, and the bound that placement counts at first.",
            labels=[*labels, "estimate"],
        )
        families = [GaugeMetricFamily(name, text, labels=labels) for name, text in _JOB_GAUGES.items()]
        anomaly = GaugeMetricFamily(
            "carpool_job_anomaly",
            "1 while a job has an anomaly, 0 once it is over; absent before the first.",
            labels=[*labels, "anomaly"],
        )
        for job in self._jobs():
            status = job.status
            if not status.placement or status.completion_time is not None:
                continue
            of = [job.metadata.namespace, job.metadata.name]
            for condition in status.conditions:
                if condition.type in ANOMALIES:
                    anomaly.add_metric([*of, condition.type], condition.status == "True")
            predicted, place = _prediction(status), status.placement[0]
            bound_mib = place.bound_mib(predicted.memory if predicted else None)
            for estimate, mib in (("median", predicted.memory.median_mib if predicted else None), ("bound", bound_mib)):
                if mib is not None:
                    memory.add_metric([*of, estimate], mib * MIB)
            values = (
                predicted.step_time_seconds.median if predicted else None,
                status.observed.peak_memory_mib * MIB if status.observed else None,
                status.observed.step_time_ratio if status.observed else None,
                status.observed.slowdown if status.observed else None,
                status.observed.steps if status.observed else None,
                job.spec.training.steps,
                parse_rfc3339(end).timestamp() if status.observed and (end := status.observed.expected_end) else None,
                job.spec.sharing.max_slowdown,
                status.restarts,
            )
            for family, value in zip(families, values, strict=True):
                if value is not None:
                    family.add_metric(of, value)
        yield from (memory, *families, anomaly)


def _prediction(status: JobStatus) -> ProductPrediction | None:
    """Return the prediction for the product of the first worker; None without one."""
    if not status.placement or status.prediction is None:
        return None
    placed = hardware_name(status.placement[0].product)
    return next((found for found in status.prediction.products if found.product == placed), None)


class _Calibration(Collector):
    """Reports the calibration by stack when it is scraped; stacks of jobs that calibrate no others are left out."""

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
        labels = ["product", "precision", "driver", "gpus"]
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
        pairs = GaugeMetricFamily(
            "carpool_operator_colocation_runs",
            "Measured slowdowns of jobs beside one co-tenant that predictions use.",
            labels=["product", "mode"],
        )
        widening = GaugeMetricFamily(
            "carpool_operator_calibration_widening_ratio",
            "Factor to a stack's memory bound that its misses have added; above 1 if the stack has drifted.",
            labels=labels,
        )
        for (product, mode), number in Tally((one.product, one.mode) for one in (known.pairs if known else ())).items():
            pairs.add_metric([product, mode.value], number)
        for state in known.stacks if known is not None else ():
            stack = state.stack
            if not stack.plain:
                continue
            of = [stack.product, stack.precision.value, stack.driver, str(stack.gpus)]
            jobs.add_metric(of, state.jobs)
            runs.add_metric(of, state.seen)
            refused.add_metric(of, state.refused)
            widening.add_metric(of, math.exp(state.widening))
            if state.coverage is not None:
                coverage.add_metric(of, state.coverage)
        yield from (jobs, runs, refused, coverage, widening, pairs)


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
        self.predictions_total = Counter(
            "carpool_operator_predictions_total",
            "Predictions of jobs by outcome: Predicted, or Abstained.",
            ["outcome"],
            registry=self.registry,
        )
        self.attempts_total = Counter(
            "carpool_operator_attempts_total",
            "Ended attempts by outcome, such as Complete, GpuOutOfMemory or NodeLost.",
            ["outcome"],
            registry=self.registry,
        )
        self.finished_jobs_total = Counter(
            "carpool_operator_finished_jobs_total",
            "Jobs that ended, by end: Complete or Failed.",
            ["end"],
            registry=self.registry,
        )
        self.memory_peak_ratio = Histogram(
            "carpool_operator_memory_peak_ratio",
            "Measured memory peak of complete attempts over their predicted median.",
            ["product"],
            buckets=(0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4),
            registry=self.registry,
        )
        for outcome in (*_OUTCOMES, _OTHER):
            self.attempts_total.labels(outcome)
        for outcome in ("Predicted", "Abstained"):
            self.predictions_total.labels(outcome)
        for end in (JobState.COMPLETE, JobState.FAILED):
            self.finished_jobs_total.labels(end)
        self.registry.register(_JobStates(jobs))
        self.registry.register(_PlacedJobs(jobs))
        self.registry.register(_Calibration(calibration))

    def status_written(self, before: JobStatus, after: JobStatus) -> None:
        """Count what a written status of a job has that the one before had not."""
        if after.prediction is not None and after.prediction != before.prediction:
            self.predictions_total.labels(after.prediction.outcome).inc()
            for found in after.prediction.products:  # `increase` needs a scrape from before the first observation
                self.memory_peak_ratio.labels(found.product)
        if after.completion_time is not None and before.completion_time is None:
            self.finished_jobs_total.labels(after.state).inc()
        ended = {attempt.number for attempt in before.attempts if attempt.ended_at is not None}
        for attempt in after.attempts:
            if attempt.ended_at is None or attempt.number in ended:
                continue
            self.attempts_total.labels(attempt.outcome if attempt.outcome in _OUTCOMES else _OTHER).inc()
            predicted = _prediction(before)
            if attempt.outcome == COMPLETE and attempt.peak_memory_mib and predicted is not None:
                ratio = attempt.peak_memory_mib / predicted.memory.median_mib
                self.memory_peak_ratio.labels(predicted.product).observe(ratio)
