"""From a pod to its request, through the job that controls it, whose status no user can write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from cachetools import LRUCache
from carpool_core.demand import Demand, demand_of
from carpool_core.keys import DOMAIN, RESOURCE_GPU
from carpool_core.kube.api import GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.errors import Invalid, NotFound
from carpool_core.kube.pods import (
    Container,
    OwnerReference,
    Pod,
    PodSpec,
    container_uid,
    is_training_job,
    job_owner_reference,
    parse_worker_name,
)
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.values import JobUid, PodUid

from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.scores import UnknownPolicyError, find_policy
from carpool_extender.informers import Informers, JobRow

ANNOTATION_POLICY = f"{DOMAIN}/policy"
"""On a job: the policy by which its place is chosen, where the site allows jobs to choose."""
REMEMBERED = 4096
"""Requests in the cache, with the facts about each class of devices."""


class NotOurs(Exception):  # noqa: N818  # an answer about the pod, not a failure of ours
    """A pod without a GpuTrainingJob; `str()` states what was expected, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The site's settings for jobs."""

    policies: bool = False
    """Whether a job may choose its own policy."""
    peaks: bool = True
    """Whether a job that never ran may count with its own peak once that was measured."""
    tenancy_groups: Mapping[str, str] = field(default_factory=dict)
    """Tenancy group by namespace; that of `*` holds for all namespaces without an own entry."""

    def tenancy_group(self, namespace: str) -> str:
        """Return the tenancy group of a namespace; empty if it is in none."""
        return self.tenancy_groups.get(namespace, self.tenancy_groups.get("*", ""))


AS_SHIPPED = JobOptions()


class Workloads:
    """Looks up the job of each pod."""

    def __init__(self, api: KubeApi, informers: Informers, choices: JobOptions) -> None:
        self._api, self._informers, self._choices = api, informers, choices
        self._known: LRUCache[JobUid, tuple[str, PodRequest]] = LRUCache(REMEMBERED)

    async def of(self, pod: Pod) -> PodRequest:
        """Return the request of a pod.

        Raises:
            NotOurs: No job controls it, or its request differs from its job.
            KubeError: The job had to be read, and could not be.
        """
        return self._checked(pod, await self._job(pod, controller_of(pod)))

    def watched(self, pod: Pod) -> PodRequest:
        """Return the request of a pod from what was watched, or read when its job was admitted; calls no API.

        Raises:
            NotOurs: No such job is known, or the pod's request differs from its job.
        """
        owner = controller_of(pod)
        job = self._informers.job(JobUid(owner.uid))
        if job is not None:
            check_worker(pod, job)
            if job.status.prediction is not None:
                return self._checked(pod, job)
            if (known := self._known.get(JobUid(owner.uid))) is not None:
                return known[1]
        raise NotOurs(
            f"NotAdmitted: expected pod {_name(pod)} to be admitted by Carpool's queue, found no prediction of its job "
            f"{owner.name}; let the operator create the job's pods"
        )

    def _checked(self, pod: Pod, job: JobRow) -> PodRequest:
        check_worker(pod, job)
        return self._request(job, pod.spec)

    async def _job(self, pod: Pod, owner: OwnerReference) -> JobRow:
        """Read the job again if the watch may be behind: it lacks the job, its prediction or the pod's UID."""
        job = self._informers.job(JobUid(owner.uid))
        if job is None or job.status.prediction is None or not _is_recorded(pod, job):
            try:
                job = await self._api.get(GPU_TRAINING_JOBS, owner.name, JobRow, namespace=pod.metadata.namespace)
            except NotFound as error:
                raise no_such_job(pod, owner) from error
            except Invalid as error:
                raise NotOurs(f"NotAJob: the job that pod {_name(pod)} names cannot be read: {error}") from error
            if not is_training_job(job.api_version, job.kind):
                raise no_such_job(pod, owner)
        if job.metadata.uid != owner.uid or job.metadata.namespace != pod.metadata.namespace:
            raise no_such_job(pod, owner)
        return job

    def _request(self, job: JobRow, spec: PodSpec) -> PodRequest:
        uid, version = JobUid(job.metadata.uid), job.metadata.resource_version
        known = self._known.get(uid)
        wanted = job.status.prediction, container_uid(spec), spec.node_constraints
        if known is not None and known[0] == version and version:
            request = known[1]
            if (request.demand.prediction, request.user, request.constraints) == wanted:
                return request
        pod_request = pod_request_of(job, spec, self._choices)
        if known is not None and known[1].is_as(pod_request):
            pod_request = known[1]
        self._known[uid] = (version, pod_request)
        return pod_request


def controller_of(pod: Pod) -> OwnerReference:
    """Return the reference to the GpuTrainingJob that controls a pod.

    Raises:
        NotOurs: There is none.
    """
    owner = job_owner_reference(pod.metadata)
    if owner is not None:
        return owner
    raise NotOurs(
        f"NotAJob: pod {_name(pod)} asks for {RESOURCE_GPU} but no GpuTrainingJob controls it; "
        f"create a GpuTrainingJob with this pod's spec as its template"
    )


def check_worker(pod: Pod, job: JobRow) -> None:
    """Check that a pod is a worker of an active job: anyone who may create pods can name any job as its owner.

    Raises:
        NotOurs: The pod is in another namespace, has no worker's name, is not recorded, asks for other GPUs than its
            job, or the job is not active.
    """
    if job.metadata.namespace != pod.metadata.namespace:
        raise no_such_job(pod, controller_of(pod))
    named = parse_worker_name(pod.metadata.name)
    if named is None or named.job != job.metadata.name or named.worker >= job.spec.workers:
        raise NotOurs(
            f"NotAWorker: expected a pod of job {job.metadata.name} to be called "
            f"{job.metadata.name}-worker-INDEX-ATTEMPT with an index below {job.spec.workers}, found {_name(pod)}; "
            "let the operator create the job's pods"
        )
    if (why := job.inactive_because) is not None:
        raise NotOurs(
            f"JobNotActive: expected job {job.metadata.name} of pod {_name(pod)} to be active, but it {why}; "
            "the operator deletes the pod"
        )
    if not _is_recorded(pod, job):
        raise NotOurs(
            f"NotRecorded: expected UID {pod.metadata.uid} of pod {_name(pod)} in the latest attempt of job "
            f"{job.metadata.name}, found other pods; it is tried again once the operator has recorded it, and deleted "
            "if the operator did not create it"
        )
    asked, expected = gpus_asked(pod), job.spec.gpus_per_worker
    if asked != expected:
        raise NotOurs(
            f"WrongRequest: pod {_name(pod)} asks for {asked} {RESOURCE_GPU}, its job's gpusPerWorker is "
            f"{expected}; let the operator create the job's pods"
        )


def _is_recorded(pod: Pod, job: JobRow) -> bool:
    """Return whether the operator recorded a pod's UID in the job's status, which users cannot write."""
    return pod.metadata.uid in job.status.latest_attempt.pod_uids


def too_many(pod_request: PodRequest, pod_uid: PodUid, holders: set[PodUid]) -> str | None:
    """Return why a pod gets no reservation while others of its job have theirs; None if it may have one.

    `holders` are the pods of its job that have reservations.
    """
    others, demand = len(holders - {pod_uid}), pod_request.demand
    if others < pod_request.workers:
        return None
    return (
        f"TooManyWorkers: job {demand.namespace}/{demand.job_name} has spec.workers {pod_request.workers}, and "
        f"{others} of its pods have reservations already; this one is tried again when one of them has ended"
    )


def policy_of(job: JobRow, *, allowed: bool) -> str | None:
    """Return the policy that a job chose for itself; None where it chose none.

    Raises:
        NotOurs: There is no such policy, or the site leaves jobs no choice.
    """
    wanted = job.metadata.annotations.get(ANNOTATION_POLICY)
    if wanted is None:
        return None
    name = f"{job.metadata.namespace}/{job.metadata.name}"
    try:
        found = find_policy(wanted).name
    except UnknownPolicyError as error:
        raise NotOurs(f"UnknownPolicy: job {name}: {error}") from error
    if not allowed:
        raise NotOurs(
            f"PolicyNotAllowed: job {name} has the annotation {ANNOTATION_POLICY}: {wanted}, but this site chooses the "
            "policy for all jobs; remove the annotation, or have an administrator set settings.jobPolicies: true in "
            "the chart's values (CARPOOL_JOB_POLICIES=true of the extender)"
        )
    return found


def gpus_asked(pod: Pod) -> int:
    """Return the number of GPUs that a pod's containers request together."""
    return sum(_gpus(container) for container in (*pod.spec.containers, *pod.spec.init_containers))


def _gpus(container: Container) -> int:
    value = container.resources.limits.get(RESOURCE_GPU, container.resources.requests.get(RESOURCE_GPU, 0))
    text = str(value)
    return int(text) if text.isdigit() else 0


def pod_request_of(job: JobRow, spec: PodSpec, choices: JobOptions) -> PodRequest:
    """Return what each worker of a job asks for, and what the job chose.

    A job that died of memory never counts with its measured peak.

    Raises:
        NotOurs: It chose a policy that does not exist, or that it may not choose.
    """
    policy = policy_of(job, allowed=choices.policies)
    may_use_measured_peak = choices.peaks and not job.status.died_of_memory
    demand = replace(demand_of_row(job), tenancy_group=choices.tenancy_group(job.metadata.namespace))
    return PodRequest(
        demand,
        policy,
        job.spec.workers,
        container_uid(spec),
        may_use_measured_peak,
        job.spec.training.steps,
        spec.node_constraints,
    )


def demand_of_row(job: JobRow) -> Demand:
    """Return what a job asks for."""
    # JobRow has every attribute that demand_of reads, without the pod template and the model's features.
    return demand_of(cast("GpuTrainingJob", job))


def no_such_job(pod: Pod, owner: OwnerReference) -> NotOurs:
    """Return the refusal of a pod that names a job which does not exist."""
    return NotOurs(
        f"NotAJob: pod {_name(pod)} names GpuTrainingJob {owner.name} with UID {owner.uid} as its controller, "
        f"and there is none in its namespace; create the job, its pods are made for it"
    )


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
