"""How an attempt with failed workers ended, also where they ended together with others behind an MPS server. Pure.

One client's fault ends all, and nobody can tell whose it was. So such an attempt is not counted, a few times: a job
whose own fault it is must not go on for ever. The node's agent says who ended together, soon after pods have failed.
"""

from collections.abc import Sequence
from datetime import datetime

from carpool_core.clock import parse_rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import JobStatus
from carpool_core.resources.node import GpuNode
from carpool_core.values import PodUid, SharingMode

from carpool_operator.decisions import crowding
from carpool_operator.state.snapshot import Snapshot
from carpool_operator.workers import outcomes
from carpool_operator.workers.outcomes import CONTAINER_FAILED, GPU_OUT_OF_MEMORY, MPS_CLIENTS_ENDED, Outcome

WORD_WITHIN_S = 20.0
"""How long after a worker's end its node's agent may say that others ended with it: it looks each ten seconds."""
_LOOKED_WITHIN_S = 12.0
"""How long after a worker's end whatever its agent writes says all that it will: with those ten seconds, the end's
fraction of a second, which Kubernetes leaves out, and the time that a look takes."""
LOOK_AGAIN_S = 2.0
_MOST = 3
"""Attempts of a job that are not counted for it."""


def outcome_of(failed: Sequence[Pod], snapshot: Snapshot, status: JobStatus) -> Outcome | None:
    """Say how an attempt ended; None while the agent of a node may still say that the job is not to blame.

    Args:
        failed: Its pods that have failed, at least one.
        snapshot: What is known now.
        status: Of the job, with its places.
    """
    first = _first(failed)
    outcome = outcomes.outcome_of(first)
    if outcome.reason == GPU_OUT_OF_MEMORY:
        found = crowding.judged(first, outcome, status, snapshot.nodes)
        may_be_told = found is outcome and crowding.may_have_grown(first, status, snapshot.nodes)
        return None if may_be_told and _is_silent(first, status, snapshot.nodes, snapshot.now) else found
    if outcome.reason != CONTAINER_FAILED:
        return outcome  # the container itself said what was wrong
    told = {struck.pod_uid: struck.message for node in snapshot.nodes for struck in node.status.struck}
    for pod in failed:
        if (why := told.get(PodUid(pod.metadata.uid))) is not None:
            return _not_to_blame(pod, why, sum(a.outcome == MPS_CLIENTS_ENDED for a in status.attempts))
    return None if _is_awaited(first, status, snapshot.nodes, snapshot.now) else outcome


def told_meanwhile(failed: Sequence[Pod]) -> str:
    """Say what happened to an attempt's failed pods, and what is waited for, while `outcome_of` is None."""
    what = outcomes.outcome_of(_first(failed)).message
    return f"{what}; waits for the node agent's word on whether others ended with it"


def _not_to_blame(pod: Pod, why: str, earlier: int) -> Outcome:
    if earlier < _MOST:
        return Outcome(MPS_CLIENTS_ENDED, f"pod {pod.metadata.name}: {why}", charged=False)
    often = f"this counts, as {earlier} attempts have ended so already; sharing.mode: Exclusive shows whose fault it is"
    return Outcome(MPS_CLIENTS_ENDED, f"pod {pod.metadata.name}: {why}; {often}", charged=True)


def _is_awaited(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode], now: datetime) -> bool:
    """Whether an agent may still say something of a worker: it was behind an MPS daemon, and ended just now."""
    place = next((p for p in status.placement if p.pod_uid == pod.metadata.uid), None)
    if place is None or place.mode is not SharingMode.MPS:
        return False
    node = next((node for node in nodes if node.metadata.name == place.node), None)
    if node is None or node.status.simulated:
        return False  # simulated GPUs have no such faults
    return _is_silent(pod, status, nodes, now)


def _is_silent(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode], now: datetime) -> bool:
    """Whether the agent of a worker's node has not looked yet since that ended, and may still."""
    place = next((p for p in status.placement if p.pod_uid == pod.metadata.uid), None)
    node = next((node for node in nodes if place is not None and node.metadata.name == place.node), None)
    if node is None:
        return False
    ended_at = _ended_at(pod)
    if not ended_at:
        return False
    ended, wrote = parse_rfc3339(ended_at), node.status.heartbeat_time
    if wrote is not None and (parse_rfc3339(wrote) - ended).total_seconds() >= _LOOKED_WITHIN_S:
        return False
    return abs((now - ended).total_seconds()) < WORD_WITHIN_S


def _first(failed: Sequence[Pod]) -> Pod:
    """The first to end is the cause, what follows are consequences."""
    return min(failed, key=_ended_at)


def _ended_at(pod: Pod) -> str:
    """When a pod's container ended; empty where nobody says."""
    states = [s.state.terminated for s in pod.status.container_statuses]
    return min((end.finished_at for end in states if end is not None and end.finished_at), default="")
