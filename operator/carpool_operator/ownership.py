"""Ownership: which pods are a job's workers. Pure.

A user who may create pods can write a job's UID, a worker's name and Carpool's labels into them. A pod's own UID cannot
be chosen: the status records the UIDs of the latest attempt's pods.
"""

from collections.abc import Iterable
from dataclasses import replace

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt, GpuTrainingJob

from carpool_operator import attempts, conditions
from carpool_operator.actions import DeleteHiddenPods
from carpool_operator.pods import attempt_of, is_worker, pod_name
from carpool_operator.snapshot import Snapshot

POD_HIDDEN = "PodHidden"
"""Reason of the refusal to begin an attempt while a pod lives that the cache does not show."""


def is_own(pod: Pod, snapshot: Snapshot) -> bool | None:
    """Return whether a pod is the job's own; None if that is undecided.

    It is undecided while an attempt's pods are being created: a pod that this process does not know may come from its
    predecessor, which crashed before it recorded the UID. Such a pod is ignored, so its worker's pod is created, and
    the performer compares the existing pod with the one to create.
    """
    job = snapshot.job
    if not is_worker(pod, job):
        return False
    if conditions.is_finished(job.status):
        return True
    latest = attempts.latest(job.status)
    number, latest_number = attempt_of(pod) or 0, 1 if latest is None else latest.number
    if number != latest_number:
        return number < latest_number
    recorded = () if latest is None else latest.pod_uids
    if pod.metadata.uid in recorded or pod.metadata.uid in snapshot.created_uids:
        return True
    if latest is None or latest.outcome == attempts.CREATING:
        return None
    return not recorded


def split_pods(snapshot: Snapshot) -> tuple[Snapshot, list[Pod]]:
    """Return the snapshot with the job's own pods only, and the foreign pods, which must be deleted."""
    judged = [(pod, is_own(pod, snapshot)) for pod in snapshot.pods]
    own = tuple(pod for pod, own in judged if own)
    return replace(snapshot, pods=own), [pod for pod, own in judged if own is False]


def foreign_message(names: str) -> str:
    """Return the message of the event about foreign pods."""
    return f"deletes {names}: this job is given as controller, but Carpool did not create such a pod for it"


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
    names = [pod_name(job.metadata.name, worker, attempt.number) for worker in range(len(attempt.pod_uids))]
    return DeleteHiddenPods(tuple(name for name in names if name not in shown_names), uids, blocks) if uids else None
