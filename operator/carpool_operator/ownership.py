"""Ownership: which pods are a job's workers. Pure.

A user who may create pods can write a job's UID, a worker's name and Carpool's labels into them. A pod's own UID cannot
be chosen. The status, which users cannot write, records the UIDs of the latest attempt's pods after their creation.
"""

from collections.abc import Iterable
from dataclasses import replace

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt, GpuTrainingJob

from carpool_operator import attempts
from carpool_operator.actions import DeleteHiddenPods
from carpool_operator.pods import attempt_of, is_worker, pod_name
from carpool_operator.snapshot import Snapshot

POD_HIDDEN = "PodHidden"
"""Reason of the refusal to begin an attempt while a pod lives that the cache does not show."""


def is_own(pod: Pod, snapshot: Snapshot) -> bool:
    """Return whether a pod is the job's own: the status records its UID, or this process has just created it.

    A pod whose UID a crashed predecessor did not record any more is not, so it is deleted and created again.
    """
    latest, number = attempts.latest(snapshot.job.status), attempt_of(pod) or 0
    if latest is None or number > latest.number or not is_worker(pod, snapshot.job):
        return False
    if number < latest.number or pod.metadata.uid in latest.pod_uids:
        return True
    if snapshot.created.get(pod.metadata.name) == pod.metadata.uid:
        return True
    return latest.outcome != attempts.CREATING and not latest.pod_uids  # an earlier version recorded no UIDs


def split_pods(snapshot: Snapshot) -> tuple[Snapshot, list[Pod]]:
    """Return the snapshot with the job's own pods only, and the foreign pods, which must be deleted."""
    judged = [(pod, is_own(pod, snapshot)) for pod in snapshot.pods]
    return replace(snapshot, pods=tuple(pod for pod, own in judged if own)), [pod for pod, own in judged if not own]


def foreign_message(names: str) -> str:
    """Return the message of the event about foreign pods."""
    return f"deletes {names}: this job is given as controller, but its status does not record such a pod"


def hidden_pods(
    job: GpuTrainingJob, attempt: Attempt | None, pods: Iterable[Pod], *, blocks: bool
) -> DeleteHiddenPods | None:
    """Return the action that deletes an attempt's recorded pods that are not among `pods`; None without any.

    The cache selects pods by a label. If a user removes the label, the pod looks deleted but runs on.
    """
    if attempt is None:
        return None
    shown = list(pods)
    uids = frozenset(attempt.pod_uids) - {pod.metadata.uid for pod in shown}
    shown_names = {pod.metadata.name for pod in shown}
    workers = max(job.spec.workers, len(attempt.pod_uids))  # the spec may have changed since
    names = [pod_name(job.metadata.name, worker, attempt.number) for worker in range(workers)]
    return DeleteHiddenPods(tuple(name for name in names if name not in shown_names), uids, blocks) if uids else None
