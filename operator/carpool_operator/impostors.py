"""Pods that name a job as their controller and are not its workers."""

from dataclasses import replace

from carpool_operator.draft import Draft
from carpool_operator.pods import is_worker
from carpool_operator.snapshot import Snapshot


def without_impostors(snapshot: Snapshot) -> Draft:
    """Begin a decision that looks at the job's own pods only; delete what merely claims to be controlled by the job.

    Whoever may create pods may write the job's UID and Carpool's labels into them.
    """
    draft = Draft(replace(snapshot, pods=tuple(pod for pod in snapshot.pods if is_worker(pod, snapshot.job))))
    others = [pod for pod in snapshot.pods if not is_worker(pod, snapshot.job)]
    for pod in others:
        draft.delete_pod(pod)
    told = sorted(pod.metadata.name for pod in others if pod.metadata.deletion_timestamp is None)
    if told:
        names = ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
        message = f"deletes {names}: this job is given as controller, but Carpool did not create such a pod for it"
        draft.say("Warning", "ForeignPod", message)
    return draft
