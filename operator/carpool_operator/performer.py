"""Performer: executes the actions of a decision in order, and stops where the cluster has changed since."""

from collections.abc import Callable
from datetime import datetime
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec
import structlog
from cachetools import LRUCache
from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.kube.api import (
    EVENTS,
    GPU_TRAINING_JOBS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    KubeApi,
    ResourceKind,
    Selector,
)
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import PodMeta
from carpool_core.pod_template import is_about_the_pod, template_message
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import ObjectMeta

from carpool_operator import attempts
from carpool_operator.actions import (
    Action,
    CheckTemplate,
    CreateCompanion,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    Learn,
    Predict,
    ReadWarnings,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.calibrator import Calibrator
from carpool_operator.expectations import Expectations
from carpool_operator.informers import JobCache
from carpool_operator.pods import controller_of, key_of
from carpool_operator.prediction_worker import PredictionWorker
from carpool_operator.snapshot import PodWarning, Refusal, foreign_message

_COMPANIONS = {kind.kind: kind for kind in (SERVICES, POD_DISRUPTION_BUDGETS)}

_VOLUME_FAILURES = frozenset({"FailedMount", "FailedAttachVolume"})
_VOLUME_COMPONENTS = frozenset({"kubelet", "attachdetach-controller"})
"""Components of Kubernetes that report failures of a pod's volumes."""

_MAX_TEMPLATES = 256
"""Valid templates that are not checked again; most jobs differ in their model, not in their pods."""


class Superseded(Exception):  # noqa: N818  # not an error: the job is reconciled again
    """The rest of a decision no longer applies; the job is reconciled again."""


class _Owned(msgspec.Struct, frozen=True):
    """Any object with its owners."""

    metadata: PodMeta


class _EventSource(msgspec.Struct, frozen=True):
    component: str = ""


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    source: _EventSource = _EventSource()
    reporting_component: str = ""

    @property
    def at(self) -> str:
        """When it occurred last, RFC 3339; empty if that is unknown."""
        return self.last_timestamp or self.event_time or ""

    def is_volume_failure(self, since: datetime) -> bool:
        """Return whether a volume could not be attached or mounted at this time or later."""
        component = self.reporting_component or self.source.component
        is_failure = self.reason in _VOLUME_FAILURES and component in _VOLUME_COMPONENTS
        return is_failure and bool(self.at) and parse_rfc3339(self.at) >= since


def status_body(status: JobStatus) -> dict[str, Any]:
    """Return the wire form of a status.

    Raises:
        msgspec.ValidationError: The status is invalid; the API server does not check all of it.
    """
    body: dict[str, Any] = msgspec.to_builtins(status)
    for written, attempt in zip(body.get("attempts", ()), status.attempts, strict=False):
        written["outcome"] = attempt.outcome
    msgspec.convert(body, JobStatus)
    # The encoding omits defaults, but these columns of `kubectl get` would stay empty.
    return body | {"state": status.state.value, "restarts": status.restarts}


def _template_digest(job: GpuTrainingJob, body: dict[str, Any]) -> bytes:
    """Return the digest of everything in a pod that the API server may refuse, except for its name."""
    content = (job.metadata.namespace, job.spec.template.get("metadata"), body["spec"])
    return blake2b(msgspec.json.encode(content), digest_size=16).digest()


def _name_taken(kind: str, name: str, found: _Owned, job: GpuTrainingJob) -> str:
    owner = next((o for o in found.metadata.owner_references if o.controller), None)
    owned = "has no controller" if owner is None else f"belongs to {owner.kind} {owner.name} (UID {owner.uid})"
    return f"{kind} {name} exists already and {owned}, not to this job (UID {job.metadata.uid}): " + (
        "it is being deleted"
        if found.metadata.deletion_timestamp
        else f"delete that {kind}, or give the job another name"
    )


class Performer:
    """The only component that writes to Kubernetes, except for the calibrator's ConfigMap."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        events: EventRecorder,
        jobs: JobCache,
        expectations: Expectations,
        predictions: PredictionWorker,
        calibrator: Calibrator,
        on_status: Callable[[JobStatus, JobStatus], None],
    ) -> None:
        self._api, self._clock, self._events, self._jobs = api, clock, events, jobs
        self._expectations, self._predictions, self._calibrator = expectations, predictions, calibrator
        self._on_status = on_status
        self._valid_templates: LRUCache[bytes, None] = LRUCache(_MAX_TEMPLATES)
        self._log = structlog.get_logger()

    async def perform(self, job: GpuTrainingJob, decision: Decision) -> None:
        """Perform all actions, or those before the first that fails.

        Raises:
            Superseded: The rest no longer applies.
            KubeError: A call failed; the job has to be reconciled again.
        """
        for action in decision.actions:
            await self._perform(job, action)

    async def _perform(self, job: GpuTrainingJob, action: Action) -> None:
        match action:
            case CheckTemplate(body):
                await self._check_template(job, body)
            case WriteStatus(status, pod):
                created = self._expectations.created(job.metadata.uid)
                await self._write_status(job, attempts.with_only_pod(status, created[pod]) if pod else status)
            case CreateCompanion(body):
                await self._create_companion(job, body)
            case CreatePod():
                await self._create_pod(job, action)
            case DeletePod(name, uid):
                await self._delete_pod(job, name, uid)
            case ReadWarnings(uid, bound_at):
                await self._read_warnings(job, uid, bound_at)
            case DeleteJob():
                await self._delete_job(job)
            case RecordEvent():
                await self._record(job, action)
            case Predict(digest, products):
                self._predictions.request(key_of(job), job.spec, digest, products)
            case Learn(observation):
                self._calibrator.submit(job, observation)

    # The job

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
        # The write applied to this very version of the job, so the rest of the new version is known.
        metadata = msgspec.convert(answer["metadata"], ObjectMeta)
        self._jobs.update(msgspec.structs.replace(job, metadata=metadata, status=status))
        self._on_status(job.status, status)
        self._log.info("status written", job=key_of(job), state=str(status.state))

    async def _read_again(self, job: GpuTrainingJob) -> None:
        try:
            fresh = await self._api.get(
                GPU_TRAINING_JOBS, job.metadata.name, GpuTrainingJob, namespace=job.metadata.namespace
            )
        except NotFound:
            fresh = None
        if fresh is None or fresh.metadata.uid != job.metadata.uid:
            self._jobs.remove(key_of(job), job.metadata.uid)
        else:
            self._jobs.update(fresh)

    async def _delete_job(self, job: GpuTrainingJob) -> None:
        try:
            await self._api.delete(
                GPU_TRAINING_JOBS, job.metadata.name, namespace=job.metadata.namespace, uid=job.metadata.uid
            )
        except (NotFound, Conflict):
            return
        self._log.info("job deleted after its time to live", job=key_of(job))

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

    async def _read_warnings(self, job: GpuTrainingJob, uid: str, bound_at: str) -> None:
        """Read the newest warning about a pod's volumes since its binding.

        Raises:
            Superseded: Always; the job has to be reconciled with the warning.
        """
        selector = Selector(namespace=job.metadata.namespace, fields=f"involvedObject.uid={uid},type=Warning")
        try:
            page = await self._api.list_page(EVENTS, selector)
        except Forbidden as error:
            self._log.warning("events not read", job=key_of(job), error=str(error))
            found = []
        else:
            found = [msgspec.json.decode(raw, type=_Event) for raw in page.items]
        since = parse_rfc3339(bound_at)
        newest = max(
            (event for event in found if event.is_volume_failure(since)),
            key=lambda event: parse_rfc3339(event.at),
            default=None,
        )
        warning = None if newest is None else PodWarning(newest.reason, newest.message)
        self._expectations.warning_read(job.metadata.uid, uid, warning)
        raise Superseded("the warnings of a pod were read")

    # Creation

    async def _check_template(self, job: GpuTrainingJob, body: dict[str, Any]) -> None:
        """Have the API server validate the template's pod by a dry run; equal templates are checked once."""
        digest = _template_digest(job, body)
        if digest not in self._valid_templates:
            try:
                await self._api.create(PODS, body, namespace=job.metadata.namespace, is_dry_run=True)
            except Invalid as error:
                if is_about_the_pod(error):
                    refusal = Refusal("InvalidTemplate", template_message(error, body), is_final=True)
                    self._refuse(job, refusal, error)
            except (Conflict, Forbidden, NotFound) as error:
                # A taken name, a quota or a missing namespace may have changed by the time the pod is created.
                self._log.debug("template not checked", job=key_of(job), why=str(error))
            else:
                self._valid_templates[digest] = None
        self._expectations.template_checked(job.metadata.uid, job.metadata.generation)

    async def _create_companion(self, job: GpuTrainingJob, body: dict[str, Any]) -> None:
        kind = _COMPANIONS[body["kind"]]
        name = str(body["metadata"]["name"])
        try:
            await self._api.create(kind, body, namespace=job.metadata.namespace)
        except Conflict as error:
            found = msgspec.convert(await self._read_existing(kind, name, job, error), _Owned)
            if controller_of(found.metadata) != job.metadata.uid:
                message = _name_taken(kind.kind, name, found, job)
                self._refuse(job, Refusal(f"{kind.kind}NameTaken", message, is_final=False), error)
        except (Forbidden, Invalid) as error:
            self._refuse(job, Refusal(f"{kind.kind}Forbidden", str(error), is_final=False), error)

    async def _create_pod(self, job: GpuTrainingJob, action: CreatePod) -> None:
        now = self._clock.monotonic()
        try:
            pod = await self._api.create(PODS, action.body, namespace=job.metadata.namespace, wants_object=False)
        except Conflict as error:
            pod = await self._existing_pod(job, action.name, error)
        except (Forbidden, Invalid) as error:
            if isinstance(error, Invalid) and is_about_the_pod(error):
                message = template_message(error, action.body)
                self._refuse(job, Refusal("InvalidTemplate", message, is_final=True), error)
            self._refuse(job, Refusal("PodForbidden", str(error), is_final=False), error)
        except NotFound as error:
            self._refuse(job, Refusal("PodForbidden", f"the namespace is gone: {error}", is_final=False), error)
        else:
            self._log.info("pod created", job=key_of(job), pod=action.name)
        self._expectations.pod_created(job.metadata.uid, action.name, str(pod["metadata"]["uid"]), now)

    async def _existing_pod(self, job: GpuTrainingJob, name: str, error: Conflict) -> dict[str, Any]:
        """Return an existing pod if this process created it; delete one that only claims to be the job's."""
        found = await self._read_existing(PODS, name, job, error)
        pod = msgspec.convert(found, _Owned)
        if controller_of(pod.metadata) != job.metadata.uid:
            message = _name_taken("pod", name, pod, job)
            self._refuse(job, Refusal("PodNameTaken", message, is_final=False), error)
        is_going = pod.metadata.deletion_timestamp is not None
        if not is_going and self._expectations.created(job.metadata.uid).get(name) == pod.metadata.uid:
            return found
        # Recorded before the deletion, whose event clears the refusal and may arrive at once.
        message = f"pod {name} has the worker's name and is being deleted; if that takes long, see its finalizers"
        self._note(job, Refusal("PodNameTaken", message, is_final=False))
        if not is_going:
            await self._delete_pod(job, name, pod.metadata.uid)
            await self._record(job, RecordEvent("Warning", "ForeignPod", foreign_message(name)))
        raise Superseded(f"pod {name} is not the job's own") from error

    async def _read_existing(
        self, kind: ResourceKind, name: str, job: GpuTrainingJob, error: Conflict
    ) -> dict[str, Any]:
        """Return the object that caused a conflict.

        Raises:
            Conflict: The object is gone, or the conflict had another cause.
        """
        try:
            return await self._api.get(kind, name, dict[str, Any], namespace=job.metadata.namespace)
        except NotFound:
            raise error from None

    def _refuse(self, job: GpuTrainingJob, refusal: Refusal, error: Exception | None = None) -> NoReturn:
        """Record why nothing can be created for a while, and stop.

        Raises:
            Superseded: Always.
        """
        self._note(job, refusal)
        raise Superseded(refusal.reason) from error

    def _note(self, job: GpuTrainingJob, refusal: Refusal) -> None:
        self._expectations.pod_refused(job.metadata.uid, refusal, self._clock.monotonic())
        self._log.warning("pod refused", job=key_of(job), reason=refusal.reason, error=refusal.message)

    # Deletion

    async def _delete_pod(self, job: GpuTrainingJob, name: str, uid: str) -> None:
        try:
            await self._api.delete(PODS, name, namespace=job.metadata.namespace, uid=uid)
        except (NotFound, Conflict):
            return  # deleted already, also if another pod has its name now
        self._log.info("pod deleted", job=key_of(job), pod=name)
