"""Performs what was decided, in order, and stops where the world has moved on."""

from typing import Any

import msgspec
import structlog
from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob, JobStatus

from carpool_operator.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    Predict,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.caches import Jobs, key_of, version_of
from carpool_operator.patches import merge_patch
from carpool_operator.pods import controller_uid
from carpool_operator.predictions import Predictions
from carpool_operator.recollection import Recollection
from carpool_operator.snapshot import Refusal
from carpool_operator.template_refusal import is_about_the_pod, sentence


class Superseded(Exception):  # noqa: N818  # not an error: the job is looked at again
    """What was decided no longer applies: the job changed, ended, or a pod was refused. It is looked at again."""


def status_patch(job: GpuTrainingJob, status: JobStatus) -> dict[str, object]:
    """Build the merge patch from the job's status to a new one, valid only for this version of the job."""
    changes = merge_patch(_wire(job.status), _wire(status))
    # What is at its type's default is left out of the wire form, but these columns of `kubectl get` would stay empty.
    changes |= {"state": status.state.value, "restarts": status.restarts}
    return {"metadata": {"resourceVersion": job.metadata.resource_version}, "status": changes}


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
    ) -> None:
        self._api, self._clock, self._events, self._jobs = api, clock, events, jobs
        self._recollection, self._predictions = recollection, predictions
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
                await self._check_template(job, body)
            case WriteStatus(status):
                await self._write_status(job, status)
            case CreatePod():
                await self._create_pod(job, action)
            case DeletePod(name, uid):
                await self._delete_pod(job, name, uid)
            case DeleteJob():
                await self._delete_job(job)
            case RecordEvent():
                await self._record(job, action)
            case Predict(digest, products):
                self._predictions.request(key_of(job), job.spec, digest, products)

    async def _write_status(self, job: GpuTrainingJob, status: JobStatus) -> None:
        namespace, name = job.metadata.namespace, job.metadata.name
        try:
            written = await self._api.patch(
                GPU_TRAINING_JOBS, name, status_patch(job, status), namespace=namespace, subresource="status"
            )
        except Conflict as error:
            await self._read_again(job)
            raise Superseded("the job has changed since it was read") from error
        except NotFound as error:
            self._jobs.remove(key_of(job), job.metadata.uid)
            raise Superseded("the job is gone") from error
        self._jobs.put(msgspec.convert(written, GpuTrainingJob))
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

    async def _check_template(self, job: GpuTrainingJob, body: dict[str, Any]) -> None:
        try:
            await self._api.create(PODS, body, namespace=job.metadata.namespace, is_dry_run=True)
        except Invalid as error:
            if is_about_the_pod(error):
                self._refuse(key_of(job), Refusal("InvalidTemplate", sentence(error), is_final=True), error)
        except (Conflict, Forbidden, NotFound) as error:
            # A name that is taken, a quota, a missing namespace may be another by the time that the pod is created.
            self._log.debug("template not checked to the end", job=key_of(job), why=str(error))
        self._recollection.template_checked(key_of(job), version_of(job))

    async def _create_pod(self, job: GpuTrainingJob, action: CreatePod) -> None:
        key, now = key_of(job), self._clock.monotonic()
        try:
            await self._api.create(PODS, action.body, namespace=job.metadata.namespace)
        except Conflict as error:
            await self._adopt(job, action.name, error)
        except Invalid as error:
            self._refuse(key, Refusal("InvalidTemplate", sentence(error), is_final=True), error)
        except Forbidden as error:
            self._refuse(key, Refusal("PodForbidden", str(error), is_final=False), error)
        except NotFound as error:
            self._refuse(key, Refusal("PodForbidden", f"the namespace is gone: {error}", is_final=False), error)
        else:
            self._log.info("pod created", job=key, pod=action.name)
        self._recollection.pod_created(key, action.name, now)

    async def _adopt(self, job: GpuTrainingJob, name: str, error: Conflict) -> None:
        """A pod of that name that this very job controls was created before a crash, and is as good as a new one."""
        try:
            pod = await self._api.get(PODS, name, Pod, namespace=job.metadata.namespace)
        except NotFound:
            raise error from None  # gone meanwhile, or the conflict was about something else: try again
        if controller_uid(pod) == job.metadata.uid:
            return
        owner = next((o for o in pod.metadata.owner_references if o.controller), None)
        whose = "nobody" if owner is None else f"{owner.kind} {owner.name} (UID {owner.uid})"
        message = (
            f"pod {name} exists already and belongs to {whose}, not to this job (UID {job.metadata.uid}): "
            "delete that pod, or give the job another name"
        )
        self._refuse(key_of(job), Refusal("PodNameTaken", message, is_final=False), error)

    def _refuse(self, key: str, refusal: Refusal, error: Exception) -> None:
        self._recollection.pod_refused(key, refusal, self._clock.monotonic())
        self._log.warning("pod refused", job=key, reason=refusal.reason, error=refusal.message)
        raise Superseded(refusal.reason) from error

    async def _delete_pod(self, job: GpuTrainingJob, name: str, uid: str) -> None:
        try:
            await self._api.delete(PODS, name, namespace=job.metadata.namespace, uid=uid)
        except (NotFound, Conflict):
            return  # gone, or another pod by now: either way that pod runs no more
        self._log.info("pod deleted", job=key_of(job), pod=name)

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
