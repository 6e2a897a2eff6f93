"""Snapshot: everything that the reconciliation of one job reads, frozen, and which of its pods are the job's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction, ProductPrediction
from carpool_core.values import JobUid
from carpool_predictor.calibration.colocation import measured_runs
from carpool_predictor.calibration.run_history import RunHistory, fingerprint, is_equivalent
from carpool_predictor.calibration.scales import StepTimeScale

from carpool_operator import attempts
from carpool_operator.attempts import Backoff
from carpool_operator.inventory import Inventory
from carpool_operator.pods import attempt_of, controller_of, is_worker


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the API server refused to create an object."""

    reason: str
    message: str
    is_final: bool
    """Whether the same object will always be refused."""
    retry_in_s: float = 0.0
    """Seconds after which the creation is tried again."""


class PodWarning(NamedTuple):
    """An event about a volume of a pod that explains why the pod does not start."""

    reason: str
    message: str


class CalibrationKey(NamedTuple):
    """Calibration data behind a prediction of a job on a product; the prediction can differ only if the key does."""

    jobs: int
    """Bit length of the number of jobs that the stack's correction was fitted to."""
    history: RunHistory | None = None
    """Results of earlier runs of the same model, which change while one of them runs."""

    colocations: int = 0
    """Bit length of the number of measured runs beside co-tenants, plus the number of measured jobs that are listed."""
    step_time: StepTimeScale = StepTimeScale()
    """Scale of its predicted step time."""

    def is_reflected_in(self, prediction: ProductPrediction) -> bool:
        """Return whether a prediction was made from so similar calibration data that a new one would not differ."""
        memory = prediction.memory
        is_measured = self.step_time.measured_s is not None
        if (measured_runs(prediction.colocations), prediction.comparable) != (self.colocations, is_measured):
            return False
        if self.step_time.differs_from(prediction.step_time_seconds.median, prediction.step_time_factor):
            return False
        if memory.learned_jobs.bit_length() != self.jobs:
            return False
        return is_equivalent(memory.learned_gist, fingerprint(self.history))


@dataclass(frozen=True, slots=True)
class CalibrationState:
    """Calibration data that concern one job."""

    is_on: bool = False
    """Whether the operator learns from runs."""
    learned: frozenset[str] = frozenset()
    """Sample names of this job's attempts that the calibration holds for good."""
    peak_stable_s: float = 0.0
    """Seconds for which the peak memory of the present attempt has not changed."""
    solo_step_s: float | None = None
    """Step time alone of an earlier run of the same job on the product of its placement; None if unknown."""
    keys: Mapping[str, CalibrationKey] = field(default_factory=dict)
    """Calibration key of a prediction made now, by product; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job and its surroundings."""

    job: GpuTrainingJob
    now: datetime
    digest: str
    """Digest of the input of the job's prediction."""
    products: tuple[str, ...]
    """GPU products that the prediction has to cover, sorted."""
    prediction: Prediction | None = None
    """The computed prediction for this digest and these products."""
    model_version: str = ""
    """Version of the predictor's model; a prediction of another version is renewed."""
    retry_in_s: float = 0.0
    """Seconds until a transient abstention for this digest may be tried again."""
    traces_ahead: int = 0
    """Number of other models that are traced before this job's; see `TraceQueue.ahead`."""
    trace_waited_s: float = 0.0
    """Seconds for which the job has waited for its trace to begin; 0 if it waits for none."""
    pods: tuple[Pod, ...] = ()
    """Pods that name the job as their controller, from the cache."""
    created: Mapping[str, str] = field(default_factory=dict)
    """UIDs of the pods that this process created for the job and that are not known to be deleted, by name."""
    expected: frozenset[str] = frozenset()
    """Names of pods that were created a moment ago and that the cache does not show yet."""
    is_template_checked: bool = False
    """Whether the API server has validated the pod of this generation of the job."""
    refusal: Refusal | None = None
    """Why the last creation or check was refused."""
    warnings: Mapping[str, PodWarning | None] = field(default_factory=dict)
    """Newest warning about each pod for which it was read, by pod UID; None if there is none."""
    unreserved_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each bound, unfinished pod has had no reservation, by pod UID."""
    nodes: tuple[GpuNode, ...] = ()
    """GpuNodes of the job's pods."""
    inventory: Inventory = field(default_factory=dict)
    """Nodes of the cluster, by kind."""
    backoff: Backoff = field(default_factory=Backoff)
    autoscaling: bool = False
    """Whether a job that no present GPU can hold gets pods, for which an autoscaler may add a node."""
    calibration: CalibrationState = field(default_factory=CalibrationState)
    slowdowns: Mapping[JobUid, float] = field(default_factory=dict)
    """Measured slowdown of the jobs that have GPUs of the same nodes, as far as known; empty if the job never moves."""
    lags_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which the same worker, if any, has been the likeliest cause, by anomaly."""


def is_own(pod: Pod, snapshot: Snapshot) -> bool:
    """Return whether a pod is the job's own: the status records its UID, or this process has just created it.

    A user who may create pods can write a job's UID, a worker's name and Carpool's labels into them, and change labels
    and owners later. A pod's own UID cannot be chosen, and users cannot write the status. A pod whose UID a crashed
    predecessor did not record any more is not the job's own, so it is deleted and created again.
    """
    latest, number = attempts.latest(snapshot.job.status), attempt_of(pod) or 0
    if latest is None:
        return False
    if pod.metadata.uid in latest.pod_uids:
        return True
    if number > latest.number or not is_worker(pod, snapshot.job):
        return False
    return number < latest.number or snapshot.created.get(pod.metadata.name) == pod.metadata.uid


def split_pods(snapshot: Snapshot) -> tuple[Snapshot, list[Pod]]:
    """Return the snapshot with the job's own pods only, and the pods that only claim it, which must be deleted."""
    judged = [(pod, is_own(pod, snapshot)) for pod in snapshot.pods]
    foreign = [pod for pod, own in judged if not own and controller_of(pod.metadata) == snapshot.job.metadata.uid]
    return replace(snapshot, pods=tuple(pod for pod, own in judged if own)), foreign


def foreign_message(names: str) -> str:
    """Return the message of the event about foreign pods."""
    return f"deletes {names}: this job is given as controller, but its status does not record such a pod"
