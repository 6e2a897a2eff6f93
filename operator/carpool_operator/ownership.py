"""Ownership: which pods are a job's workers. Pure.

A user who may create pods can write a job's UID, a worker's name and Carpool's labels into them, and change labels and
owners later. A pod's own UID cannot be chosen. The status, which users cannot write, records the UIDs of the latest
attempt's pods after their creation.
"""

from dataclasses import replace

from carpool_core.kube.pods import Pod

from carpool_operator import attempts
from carpool_operator.pods import attempt_of, controller_of, is_worker
from carpool_operator.snapshot import Snapshot


def is_own(pod: Pod, snapshot: Snapshot) -> bool:
    """Return whether a pod is the job's own: the status records its UID, or this process has just created it.

    A pod whose UID a crashed predecessor did not record any more is not, so it is deleted and created again.
    """
    latest, number = attempts.latest(snapshot.job.status), attempt_of(pod) or 0
    if latest is None:
        return False
    if pod.metadata.uid in latest.pod_uids:
        return True
    if number > latest.number or not is_worker(pod, snapshot.job):
        return False
    if number < latest.number or snapshot.created.get(pod.metadata.name) == pod.metadata.uid:
        return True
    return latest.outcome != attempts.CREATING and not latest.pod_uids  # an earlier version recorded no UIDs


def split_pods(snapshot: Snapshot) -> tuple[Snapshot, list[Pod]]:
    """Return the snapshot with the job's own pods only, and the pods that only claim it, which must be deleted."""
    judged = [(pod, is_own(pod, snapshot)) for pod in snapshot.pods]
    foreign = [pod for pod, own in judged if not own and controller_of(pod.metadata) == snapshot.job.metadata.uid]
    return replace(snapshot, pods=tuple(pod for pod, own in judged if own)), foreign


def foreign_message(names: str) -> str:
    """Return the message of the event about foreign pods."""
    return f"deletes {names}: this job is given as controller, but its status does not record such a pod"
