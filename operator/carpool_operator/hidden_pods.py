"""Pods of an attempt that the cache no longer shows.

The cache selects pods by a label, and whoever may change a pod can take it away: the pod is then as good as deleted,
and runs on. What stays is its UID in the status, and its name.
"""

from collections.abc import Iterable

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt, GpuTrainingJob

from carpool_operator.actions import EndUnseen
from carpool_operator.pods import pod_name

STILL_THERE = "PodHidden"
"""Why nothing is begun while a pod that the cache does not show lives."""


def end_unseen(
    job: GpuTrainingJob, attempt: Attempt | None, pods: Iterable[Pod], *, is_awaited: bool
) -> EndUnseen | None:
    """Build what ends the recorded pods of an attempt that are not among `pods`; None where all of them are."""
    if attempt is None:
        return None
    seen = list(pods)
    uids = frozenset(attempt.pod_uids) - {pod.metadata.uid for pod in seen}
    known = {pod.metadata.name for pod in seen}
    names = [pod_name(job.metadata.name, worker, attempt.number) for worker in range(len(attempt.pod_uids))]
    return EndUnseen(tuple(name for name in names if name not in known), uids, is_awaited) if uids else None
