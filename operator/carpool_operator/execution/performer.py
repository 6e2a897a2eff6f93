"""Performs what was decided, in order, and stops where the world has moved on."""

from typing import Any

import msgspec
import structlog
from carpool_core.clock import Clock
from carpool_core.keys import LABEL_JOB
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi
from carpool_core.kube.errors import Conflict, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import ObjectMeta
from carpool_core.sealing import Sealer

from carpool_operator.decisions.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateService,
    Decision,
    DeleteJob,
    DeletePod,
    EndUnseen,
    HoldStatus,
    Learn,
    Predict,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.decisions.impostors import foreign
from carpool_operator.decisions.unseen import STILL_THERE
from carpool_operator.estimation.learner import Learner
from carpool_operator.estimation.predictions import Predictions
from carpool_operator.execution.creator import Creator, ForeignPodError, Superseded
from carpool_operator.execution.recollection import Recollection
from carpool_operator.state.snapshot import Refusal
from carpool_operator.watching.caches import Jobs, key_of


def status_body(status: JobStatus) -> dict[str, Any]:
    """Return a status as it goes over the wire.

    Raises:
        msgspec.ValidationError: Nobody would read it.
    """
    said = _wire(status)
    msgspec.convert(said, JobStatus)  # the API server takes lists of ours as they are, and readers do not
    # What is at its type's default is left out of the wire form, but these columns of `kubectl get` would stay empty.
    return said | {"state": status.state.value, "restarts": status.restarts}


def _wire(status: JobStatus) -> dict[str, Any]:
    """Encode a status; an attempt's outcome is always told, also at its type's default."""
    encoded: dict[str, Any] = msgspec.to_builtins(status)
    for written, attempt in zip(encoded.get("attempts", ()), status.attempts, strict=False):
        written["outcome"] = attempt.outcome
    return encoded


class Performer:
    """The only place that writes to Kubernetes."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        events: EventRecorder,
        jobs: Jobs,
        recollection: Recollection,
        predictions: Predictions,
        learner: Learner,
        sealer: Sealer | None,
    ) -> None:
        self._api, self._events, self._jobs, self._predictions = api, events, jobs, predictions
        self._learner, self._recollection = learner, recollection
        self._creator = Creator(api, clock, recollection, sealer)
        self._log = structlog.get_logger()

    async def perform(self, job: GpuTrainingJob, decision: Decision) -> None:
        """Perform all actions, or those before the first that fails.

        Raises:
            Superseded: The rest no longer applies.
            KubeError: A call failed; the job has to be looked at again.
        """
        for action in decision.actions:
            await self._perform(job, action)

    async def _perform(self, job: GpuTrainingJob, action: Action) -> None:
        match action:
            case CheckTemplate(body):
                await self._creator.check_template(job, body)
            case WriteStatus(status):
                await self._write_status(job, status)
            case HoldStatus(status):
                if not self._jobs.hold(job, status):
                    raise Superseded("the job has changed since it was read")
            case CreateService(body):
                await self._creator.create_service(job, body)
            case CreatePod():
                await self._create_pod(job, action)
            case DeletePod(name, uid):
                await self._delete_pod(job, name, uid)
            case EndUnseen():
                await self._end_unseen(job, action)
            case DeleteJob():
                await self._delete_job(job)
            case RecordEvent():
                await self._record(job, action)
            case Predict(digest, products):
                self._predictions.request(key_of(job), job.spec, digest, products)
            case Learn(lesson):
                self._learner.offer(job, lesson)

    async def _write_status(self, job: GpuTrainingJob, status: JobStatus) -> None:
        namespace, name = job.metadata.namespace, job.metadata.name
        try:
            answer = await self._api.replace_status(
                GPU_TRAINING_JOBS,
                name,
                status_body(status),
                namespace=namespace,
                resource_version=job.metadata.resource_version,
            )
        except Conflict as error:
            await self._read_again(job)
            raise Superseded("the job has changed since it was read") from error
        except NotFound as error:
            self._jobs.remove(key_of(job), job.metadata.uid)
            raise Superseded("the job is gone") from error
        # It was written to this very version of the job, so that the rest of it is known.
        metadata = msgspec.convert(answer["metadata"], ObjectMeta)
        self._jobs.written(msgspec.structs.replace(job, metadata=metadata, status=status))
        self._log.info("status written", job=key_of(job), state=str(status.state))

    async def _read_again(self, job: GpuTrainingJob) -> None:
        try:
            fresh = await self._api.get(
                GPU_TRAINING_JOBS, job.metadata.name, GpuTrainingJob, namespace=job.metadata.namespace
            )
        except NotFound:
            self._jobs.remove(key_of(job), job.metadata.uid)
        else:
            self._jobs.put(fresh)

    async def _create_pod(self, job: GpuTrainingJob, action: CreatePod) -> None:
        try:
            await self._creator.create_pod(job, action)
        except ForeignPodError as found:
            if not found.is_going:
                await self._delete_pod(job, found.name, found.uid)
                await self._record(job, RecordEvent("Warning", "ForeignPod", foreign(found.name)))
            raise Superseded(str(found)) from found

    async def _delete_pod(self, job: GpuTrainingJob, name: str, uid: str) -> None:
        try:
            await self._api.delete(PODS, name, namespace=job.metadata.namespace, uid=uid)
        except (NotFound, Conflict):
            return  # gone, or another pod by now: either way that pod runs no more
        self._log.info("pod deleted", job=key_of(job), pod=name)

    async def _end_unseen(self, job: GpuTrainingJob, action: EndUnseen) -> None:
        living = []
        for name in action.names:
            try:
                pod = await self._api.get(PODS, name, Pod, namespace=job.metadata.namespace)
            except NotFound:
                continue
            if pod.metadata.uid in action.uids and not pod.is_finished:
                living.append(name)
                if pod.metadata.deletion_timestamp is None:
                    await self._delete_pod(job, name, pod.metadata.uid)
        if living and action.is_awaited:
            message = f"waits for pod {living[0]} of an earlier attempt to end, whose label {LABEL_JOB} was taken away"
            self._creator.refuse(job, Refusal(STILL_THERE, message, is_final=False))

    async def _delete_job(self, job: GpuTrainingJob) -> None:
        try:
            await self._api.delete(
                GPU_TRAINING_JOBS, job.metadata.name, namespace=job.metadata.namespace, uid=job.metadata.uid
            )
        except (NotFound, Conflict):
            return
        self._log.info("job deleted after its time", job=key_of(job))

    async def _record(self, job: GpuTrainingJob, event: RecordEvent) -> None:
        await self._events.record(
            kind=GPU_TRAINING_JOBS,
            namespace=job.metadata.namespace,
            name=job.metadata.name,
            uid=job.metadata.uid,
            type=event.type,
            reason=event.reason,
            message=event.message,
        )
