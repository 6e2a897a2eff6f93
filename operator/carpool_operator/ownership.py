"""Pods that name a job as their controller and are not its workers.

Whoever may create pods may write the job's UID, a worker's name and Carpool's labels into them. What nobody can choose
is a pod's own UID: the status records those of the present attempt's pods.
"""

from dataclasses import replace

from carpool_core.kube.pods import Pod

from carpool_operator import attempts, conditions
from carpool_operator.pods import attempt_of, is_worker
from carpool_operator.snapshot import Snapshot
from carpool_operator.status import Draft


def is_own(pod: Pod, snapshot: Snapshot) -> bool | None:
    """Whether a pod is the job's own; None where that is open.

    It is open while the pods of an attempt are being created: one that this process does not know may be its
    predecessor's, killed before it could record it. It is not looked at, so it is created, and what is in the way then
    is compared with what would have been created.
    """
    job = snapshot.job
    if not is_worker(pod, job):
        return False
    if conditions.is_finished(job.status):
        return True
    present = attempts.present(job.status)
    number, latest = attempt_of(pod) or 0, 1 if present is None else present.number
    if number != latest:
        return number < latest
    recorded = () if present is None else present.pod_uids
    if pod.metadata.uid in recorded or pod.metadata.uid in snapshot.made:
        return True
    if present is None or present.outcome == attempts.CREATING:
        return None
    return not recorded


def without_impostors(snapshot: Snapshot) -> Draft:
    """Begin a decision that looks at the job's own pods only; delete what merely claims to be controlled by the job."""
    judged = [(pod, is_own(pod, snapshot)) for pod in snapshot.pods]
    draft = Draft(replace(snapshot, pods=tuple(pod for pod, own in judged if own)))
    others = [pod for pod, own in judged if own is False]
    for pod in others:
        draft.delete_pod(pod)
    told = sorted(pod.metadata.name for pod in others if pod.metadata.deletion_timestamp is None)
    if told:
        names = ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
        draft.say("Warning", "ForeignPod", foreign(names))
    return draft


def foreign(names: str) -> str:
    """Say that pods are deleted because they are not the job's."""
    return f"deletes {names}: this job is given as controller, but Carpool did not create such a pod for it"
