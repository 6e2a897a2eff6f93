"""Performs what was decided, in order, and stops where the world has moved on."""

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec
import structlog
from carpool_core.clock import Clock
from carpool_core.keys import LABEL_JOB
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, SERVICES, KubeApi, ResourceKind
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod, PodMeta
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import ObjectMeta

from carpool_operator.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateService,
    Decision,
    DeleteJob,
    DeletePod,
    EndUnseen,
    Learn,
    Predict,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.calibrator import Learner
from carpool_operator.expectations import Recollection
from carpool_operator.hidden_pods import STILL_THERE
from carpool_operator.informers import Jobs, key_of, version_of
from carpool_operator.ownership import foreign
from carpool_operator.pods import controller_of, is_about_the_pod, is_as_built, sentence
from carpool_operator.prediction_worker import Predictions
from carpool_operator.snapshot import Refusal

_TEMPLATES = 256
"""Templates that were found right and are not checked again: most jobs differ in their model, not in their pods."""


class _Owned(msgspec.Struct, frozen=True):
    """Any object, as far as its owners go."""

    metadata: PodMeta


class Superseded(Exception):  # noqa: N818  # not an error: the job is looked at again
    """What was decided no longer applies: the job changed, ended, or a pod was refused. It is looked at again."""


class ForeignPodError(Exception):
    """A pod of a worker's name gives the job as its controller, and is not what Carpool makes, or is going."""

    def __init__(self, name: str, uid: str, *, is_going: bool) -> None:
        super().__init__(f"pod {name} is not as Carpool would have made it")
        self.name, self.uid, self.is_going = name, uid, is_going


def _taken(what: str, name: str, found: _Owned, job: GpuTrainingJob) -> str:
    owner = next((o for o in found.metadata.owner_references if o.controller), None)
    whose = "nobody" if owner is None else f"{owner.kind} {owner.name} (UID {owner.uid})"
    return (
        f"{what} {name} exists already and belongs to {whose}, not to this job (UID {job.metadata.uid}): "
        f"delete that {what}, or give the job another name"
    )


def _digest(job: GpuTrainingJob, body: dict[str, Any]) -> bytes:
    """Digest of all that the API server may refuse about a pod but its name and what Carpool itself writes beside."""
    told = (job.metadata.namespace, job.spec.template.get("metadata"), body["spec"])
    return blake2b(msgspec.json.encode(told), digest_size=16).digest()


def _in_the_way(name: str) -> str:
    return f"pod {name} stands in the way of the worker's and is being deleted; where that lasts, see its finalizers"


class Creator:
    """Creates pods and Services, and remembers what came of it."""

    def __init__(self, api: KubeApi, clock: Clock, recollection: Recollection) -> None:
        self._api, self._clock, self._recollection = api, clock, recollection
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._log = structlog.get_logger()

    async def check_template(self, job: GpuTrainingJob, body: dict[str, Any]) -> None:
        """Have the pod that a template makes checked, without creating it; one that differs in its name is as good."""
        template = _digest(job, body)
        if template not in self._right:
            await self._check(job, body, template)
        self._recollection.template_checked(key_of(job), version_of(job))

    async def _check(self, job: GpuTrainingJob, body: dict[str, Any], template: bytes) -> None:
        try:
            await self._api.create(PODS, body, namespace=job.metadata.namespace, is_dry_run=True)
        except Invalid as error:
            if is_about_the_pod(error):
                self._refuse(key_of(job), Refusal("InvalidTemplate", sentence(error, body), is_final=True), error)
        except (Conflict, Forbidden, NotFound) as error:
            # A name that is taken, a quota, a missing namespace may be another by the time that the pod is created.
            self._log.debug("template not checked to the end", job=key_of(job), why=str(error))
        else:
            self._right[template] = None
            while len(self._right) > _TEMPLATES:
                self._right.popitem(last=False)

    async def create_service(self, job: GpuTrainingJob, body: dict[str, Any]) -> None:
        """Create the Service of a job's workers; one of that name that the job controls is as good."""
        key, name = key_of(job), str(body["metadata"]["name"])
        try:
            await self._api.create(SERVICES, body, namespace=job.metadata.namespace)
        except Conflict as error:
            found = msgspec.convert(await self._read(SERVICES, name, job, error), _Owned)
            if controller_of(found.metadata) != job.metadata.uid:
                self._refuse(
                    key, Refusal("ServiceNameTaken", _taken("service", name, found, job), is_final=False), error
                )
        except (Forbidden, Invalid) as error:
            self._refuse(key, Refusal("ServiceForbidden", str(error), is_final=False), error)

    async def create_pod(self, job: GpuTrainingJob, action: CreatePod) -> None:
        """Create a pod; one of that name that the job controls is as good."""
        key, now = key_of(job), self._clock.monotonic()
        try:
            pod = await self._api.create(PODS, action.body, namespace=job.metadata.namespace, wants_object=False)
        except Conflict as error:
            pod = await self._adopt(job, action, error)
        except Invalid as error:
            self._refuse(key, Refusal("InvalidTemplate", sentence(error, action.body), is_final=True), error)
        except Forbidden as error:
            self._refuse(key, Refusal("PodForbidden", str(error), is_final=False), error)
        except NotFound as error:
            self._refuse(key, Refusal("PodForbidden", f"the namespace is gone: {error}", is_final=False), error)
        else:
            self._log.info("pod created", job=key, pod=action.name)
        self._recollection.pod_created(key, action.name, str(pod["metadata"]["uid"]), now)

    async def _adopt(self, job: GpuTrainingJob, action: CreatePod, error: Conflict) -> dict[str, Any]:
        """Take a pod that was made before a crash for the job's own, where it is what would have been created."""
        found = await self._read(PODS, action.name, job, error)
        pod = msgspec.convert(found, _Owned)
        if controller_of(pod.metadata) != job.metadata.uid:
            message = _taken("pod", action.name, pod, job)
            self._refuse(key_of(job), Refusal("PodNameTaken", message, is_final=False), error)
        is_going = pod.metadata.deletion_timestamp is not None
        if is_going or not is_as_built(found, action.body):
            # Noted before the pod is deleted: the news of its end takes the refusal back, and may come at once.
            self._note(key_of(job), Refusal("PodNameTaken", _in_the_way(action.name), is_final=False))
            raise ForeignPodError(action.name, pod.metadata.uid, is_going=is_going) from error
        return found

    async def _read(self, kind: ResourceKind, name: str, job: GpuTrainingJob, error: Conflict) -> dict[str, Any]:
        """Read an object that was in the way."""
        try:
            return await self._api.get(kind, name, dict[str, Any], namespace=job.metadata.namespace)
        except NotFound:
            raise error from None  # gone meanwhile, or the conflict was about something else: try again

    def refuse(self, job: GpuTrainingJob, refusal: Refusal) -> NoReturn:
        """Remember why nothing can be created for a while.

        Raises:
            Superseded: Always.
        """
        self._note(key_of(job), refusal)
        raise Superseded(refusal.reason)

    def _refuse(self, key: str, refusal: Refusal, error: Exception) -> NoReturn:
        self._note(key, refusal)
        raise Superseded(refusal.reason) from error

    def _note(self, key: str, refusal: Refusal) -> None:
        self._recollection.pod_refused(key, refusal, self._clock.monotonic())
        self._log.warning("pod refused", job=key, reason=refusal.reason, error=refusal.message)


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
    ) -> None:
        self._api, self._events, self._jobs, self._predictions = api, events, jobs, predictions
        self._learner, self._recollection = learner, recollection
        self._creator = Creator(api, clock, recollection)
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
        self._jobs.put(msgspec.structs.replace(job, metadata=metadata, status=status))
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
