"""How a worker's pod ended, in one CamelCase word and a sentence, and whether the job is to blame."""

from collections.abc import Callable
from dataclasses import dataclass

from carpool_core.keys import OUTCOME_GPU_OUT_OF_MEMORY
from carpool_core.kube.pods import ContainerTerminated, Pod, PodCondition

_GPU_OOM_WORDS = ("CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
"""What PyTorch writes when a GPU's memory is used up; newest name of the exception first."""

_DISRUPTIONS = frozenset(
    {"PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI", "DeletionByPodGC"}
)
"""Reasons of the condition DisruptionTarget that come from outside. TerminationByKubelet is not one of them: there the
pod itself used up what the node had."""

GPU_OUT_OF_MEMORY = OUTCOME_GPU_OUT_OF_MEMORY

POD_DELETED = "PodDeleted"

NO_RESERVATION = "NoReservation"

CONTAINER_FAILED = "ContainerFailed"

MPS_CLIENTS_ENDED = "MpsClientsEnded"

GPU_MEMORY_TAKEN = "GpuMemoryTaken"

TAKEN_AWAY = _DISRUPTIONS | {POD_DELETED, NO_RESERVATION, MPS_CLIENTS_ENDED, GPU_MEMORY_TAKEN}
"""Outcomes of attempts that did well until somebody took their pods, or the pods' GPUs, away."""

_MESSAGE_CHARS = 600
"""How much of a termination message is carried into the status: the end, where the exception stands."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why an attempt failed."""

    reason: str
    message: str
    charged: bool
    """Whether it counts against `backoffLimit`: only where the job's own container ran and failed."""


def _tail(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS else f"…{text[-_MESSAGE_CHARS:]}"


def _ended_badly(pod: Pod) -> tuple[str, ContainerTerminated] | None:
    """The first container of a pod that ended with an error, and how."""
    for status in pod.status.container_statuses:
        ended = status.state.terminated
        if ended is not None and (ended.exit_code != 0 or ended.reason == "OOMKilled"):
            return status.name, ended
    return None


def _disruption(pod: Pod) -> PodCondition | None:
    return next((c for c in pod.status.conditions if c.type == "DisruptionTarget" and c.status == "True"), None)


def _disrupted(pod: Pod) -> Outcome | None:
    found = _disruption(pod)
    if found is None or found.reason not in _DISRUPTIONS:
        return None
    return Outcome(found.reason, f"pod {pod.metadata.name} was taken away: {found.message}", charged=False)


def _deleted(pod: Pod) -> Outcome | None:
    return pod_deleted(pod.metadata.name) if pod.metadata.deletion_timestamp is not None else None


def _evicted(pod: Pod) -> Outcome | None:
    if pod.status.reason != "Evicted":
        return None
    return Outcome("Evicted", f"pod {pod.metadata.name} was evicted by its node: {pod.status.message}", charged=True)


def _container_failed(pod: Pod) -> Outcome | None:
    found = _ended_badly(pod)
    if found is None:
        return None
    name, ended = found
    where = f"container {name} of pod {pod.metadata.name}"
    said = f": {_tail(ended.message)}" if ended.message.strip() else ""
    if any(words in ended.message for words in _GPU_OOM_WORDS):
        return Outcome(GPU_OUT_OF_MEMORY, f"{where} ran out of GPU memory (exit code {ended.exit_code}){said}", True)
    if ended.reason == "OOMKilled":
        sentence = (
            f"{where} was killed for exceeding its limit of the host's memory, not the GPU's; raise limits.memory"
        )
        return Outcome("HostOutOfMemory", sentence, charged=True)
    return Outcome(CONTAINER_FAILED, f"{where} ended with exit code {ended.exit_code}{said}", charged=True)


def _refused_by_node(pod: Pod) -> Outcome | None:
    if not pod.status.reason:
        return None
    message = f"node {pod.spec.node_name} refused pod {pod.metadata.name}: {pod.status.message}"
    return Outcome(pod.status.reason, message, charged=False)


_RULES: tuple[Callable[[Pod], Outcome | None], ...] = (
    _disrupted,
    _deleted,
    _evicted,
    _container_failed,
    _refused_by_node,
)


def outcome_of(pod: Pod) -> Outcome:
    """Say why a pod in phase Failed failed; the first rule that applies wins."""
    for rule in _RULES:
        outcome = rule(pod)
        if outcome is not None:
            return outcome
    return Outcome("PodFailed", f"pod {pod.metadata.name} failed: {pod.status.message or 'no reason given'}", True)


def pod_deleted(name: str) -> Outcome:
    """Outcome of an attempt one of whose pods somebody deleted."""
    return Outcome(POD_DELETED, f"pod {name} was deleted while its attempt ran", charged=False)


def unreserved(pod: Pod, after_s: float) -> Outcome:
    """Outcome of an attempt one of whose pods is bound where no GPU is reserved for it."""
    message = (
        f"pod {pod.metadata.name} is bound to node {pod.spec.node_name}, but for {after_s:.0f} s its GpuNode held no "
        "reservation for it, without which the node never starts it"
    )
    return Outcome(NO_RESERVATION, message, charged=False)
