"""What is kept of what the API server tells: as much of each object as decisions look at."""

from functools import lru_cache
from sys import intern

import msgspec
from carpool_core.keys import ANNOTATION_PREDICTION, OUTCOME_GPU_OUT_OF_MEMORY
from carpool_core.kube.pods import Container, Pod
from carpool_core.resources.job import GpuSelector, MemoryOverride, Sharing
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction
from carpool_core.values import JobState

_NEED_NO_PLACE = frozenset((JobState.STARTING, JobState.RUNNING, JobState.COMPLETE, JobState.FAILED))
TEMPLATES = 256
"""Pods' containers that are remembered, so that pods of one template have one copy of them."""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Camel-cased, partial view of an object."""


class TrainingRow(_Wire, frozen=True, kw_only=True):
    """What is trained, as far as it tells how long that takes."""

    steps: int | None = None


class JobSpecRow(_Wire, frozen=True, kw_only=True):
    """Of a job's spec, what its demand depends on; templates and features are not kept."""

    workers: int = 1
    gpus_per_worker: int = 1
    training: TrainingRow = TrainingRow()
    sharing: Sharing = Sharing()
    memory: MemoryOverride = MemoryOverride()
    gpu: GpuSelector = GpuSelector()


class AttemptRow(_Wire, frozen=True, kw_only=True):
    """How an attempt ended."""

    outcome: str = ""


class JobStatusRow(_Wire, frozen=True, kw_only=True):
    """Of a job's status, what its demand depends on."""

    prediction: Prediction | None = None
    attempts: list[AttemptRow] = []

    @property
    def died_of_memory(self) -> bool:
        """Whether an attempt that is remembered used its GPU's memory up."""
        return any(attempt.outcome == OUTCOME_GPU_OUT_OF_MEMORY for attempt in self.attempts)


class JobRow(_Wire, frozen=True, kw_only=True):
    """A GpuTrainingJob with the attributes that `carpool_core.demand.demand_of` reads."""

    api_version: str = ""
    """Empty where it was not read alone: the watch asks for nothing but jobs."""
    kind: str = ""
    metadata: ObjectMeta
    spec: JobSpecRow = JobSpecRow()
    status: JobStatusRow = JobStatusRow()


class WatchedStatus(JobStatusRow, frozen=True, kw_only=True):
    """The same without the prediction of a job that asks for no place any more: it would be most of all memory.

    Whoever needs it after all, as when a pod is replaced before the job's state says so, reads the job.
    """

    state: str = ""

    def __post_init__(self) -> None:
        """Forget what no decision needs."""
        if self.state in _NEED_NO_PLACE:
            msgspec.structs.force_setattr(self, "prediction", None)
        if self.attempts and not self.died_of_memory:
            msgspec.structs.force_setattr(self, "attempts", [])


class WatchedJob(JobRow, frozen=True, kw_only=True):
    """A job as it is kept: without its labels, by which nobody decides anything."""

    status: WatchedStatus = WatchedStatus()

    def __post_init__(self) -> None:
        """Forget what no decision needs, and keep once what all jobs say."""
        if self.metadata.labels:
            msgspec.structs.force_setattr(self, "metadata", msgspec.structs.replace(self.metadata, labels={}))
        _keep_once(self, "api_version", "kind")
        _keep_once(self.metadata, "namespace")
        _keep_once(self.status, "state")


class WatchedPod(Pod, frozen=True, kw_only=True):
    """A pod as it is kept: without its labels, and without the prediction that it carried until it was bound."""

    def __post_init__(self) -> None:
        """Forget what no decision needs, and keep once what pods have in common: of bound pods there are thousands."""
        kept = self.metadata.annotations
        if self.spec.node_name and ANNOTATION_PREDICTION in kept:
            kept = {key: value for key, value in kept.items() if key != ANNOTATION_PREDICTION}
        if self.metadata.labels or kept is not self.metadata.annotations:
            meta = msgspec.structs.replace(self.metadata, labels={}, annotations=kept)
            msgspec.structs.force_setattr(self, "metadata", meta)
        _keep_once(self.metadata, "namespace")
        _keep_once(self.status, "phase")
        _keep_once(self.spec, "node_name", "scheduler_name")
        for owner in self.metadata.owner_references:
            _keep_once(owner, "api_version", "kind")
        msgspec.structs.force_setattr(self.spec, "containers", _containers(msgspec.json.encode(self.spec.containers)))


def _keep_once(of: msgspec.Struct, *names: str) -> None:
    """Have an object share strings that others say as well."""
    for name in names:
        msgspec.structs.force_setattr(of, name, intern(getattr(of, name)))


@lru_cache(maxsize=TEMPLATES)
def _containers(encoded: bytes) -> list[Container]:
    return msgspec.json.decode(encoded, type=list[Container])


class Manager(_Wire, frozen=True, kw_only=True):
    """Who wrote some fields of an object, as the API server keeps it."""

    manager: str = ""


class WatchedMeta(ObjectMeta, frozen=True, kw_only=True, rename="camel"):
    """`metadata` of a GpuNode, with who wrote it."""

    managed_fields: list[Manager] = msgspec.field(default_factory=list)


class WatchedNode(GpuNode, frozen=True, kw_only=True):
    """A GpuNode as it is kept."""

    metadata: WatchedMeta
