"""What an asker may read of the cluster besides GPUs; what he may not is said."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from carpool_core.keys import SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, NODES, PODS, KubeApi, ResourceKind, Selector
from carpool_core.kube.errors import Forbidden
from carpool_core.kube.pods import Pod, job_owner_reference, parse_worker_name
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobUid, PodUid

from carpool_extender.explain.hosts import Amounts, Host, HostPod, Hosts, PodNeeds

T = TypeVar("T")
_GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""Tolerated by every worker's pod: the operator writes it there."""


class _Named(msgspec.Struct, frozen=True):
    """Any object, as far as its name goes."""

    metadata: ObjectMeta


@dataclass
class Offers:
    """Which nodes kube-scheduler would offer for a pod."""

    needs: PodNeeds = field(default_factory=PodNeeds)
    requests: Amounts = field(default_factory=dict)
    hosts: Hosts | None = None
    """None where nothing could be read."""
    notes: list[str] = field(default_factory=list)
    """What was not checked, as sentences."""

    def refusal(self, node: str) -> str | None:
        """Say why a node would not be offered; None where nothing known forbids it."""
        return None if self.hosts is None else self.hosts.refusal(node, self.needs, self.requests)

    def ours(self) -> list[str]:
        """Names of the Nodes on which GPUs are to be expected, as far as they could be read."""
        return [] if self.hosts is None else self.hosts.ours()

    def take(self, node: str) -> None:
        """Count a worker on a node."""
        if self.hosts is not None:
            self.hosts.take(node, self.requests)


async def hosts_of(
    api: KubeApi, template: dict[str, Any], without: JobUid | None = None, unchecked: Sequence[str] = ()
) -> Offers:
    """Read Nodes and pods, and what a worker's pod will ask of them.

    Args:
        api: The Kubernetes API, with the asker's rights.
        template: The job's pod template.
        without: The job whose own pods do not count.
        unchecked: What was not checked before, to be noted, too.
    """
    spec = template.get("spec") or {}
    try:
        needs = msgspec.convert({**spec, "tolerations": [*(spec.get("tolerations") or []), _GPU_TAINT]}, PodNeeds)
        requests = needs.requests
    except (ValueError, TypeError) as error:
        what = "taints, node selectors, CPU and memory of nodes"
        return Offers(notes=[*unchecked, f"not checked: {what}: spec.template: {error}"])
    notes = [*unchecked, *([f"not checked: {', '.join(needs.unchecked)}"] if needs.unchecked else [])]
    try:
        nodes = await all_of(api, NODES, Host)
    except Forbidden:
        notes.append("not checked: taints, node selectors, CPU and memory of nodes (you may not list nodes)")
        return Offers(needs, requests, notes=notes)
    try:
        pods = await all_of(api, PODS, HostPod)
    except Forbidden:
        pods = []
        notes.append("not checked: what other pods take of CPU and memory (you may not list all pods)")
    return Offers(needs, requests, Hosts(nodes, pods, without), notes)


@dataclass(frozen=True, slots=True)
class Workers:
    """How far the workers of a job are, as their pods tell."""

    done: frozenset[PodUid] = frozenset()
    """Have done their work, and need no place any more."""
    waiting: tuple[str, ...] = ()
    """Names of pods that wait for a place."""
    bound: Mapping[PodUid, tuple[str, str]] = field(default_factory=dict)
    """Pods that are on a node and have not ended, each with its name and that node's, by UID."""
    unread: str = ""
    """Why nothing is known of them; empty where it is."""

    def but(self, pods: frozenset[PodUid]) -> "Workers":
        """Return the same where some pods need no place either, because they have theirs where nobody can look."""
        return replace(self, done=self.done | pods)


async def workers_of(api: KubeApi, job_uid: JobUid, namespace: str, held: Container[PodUid]) -> Workers:
    """Read the pods of a job's workers in its last attempt, those of which the extender counts, too.

    Args:
        api: The Kubernetes API, with the asker's rights.
        job_uid: The job.
        namespace: Its namespace.
        held: Pods that have their places.
    """
    ours = Selector(namespace=namespace, fields=f"spec.schedulerName={SCHEDULER_NAME}")
    try:
        found = await all_of(api, PODS, Pod, ours)
    except Forbidden:
        return Workers(unread=f"you may not list pods in namespace {namespace}")
    pods = _of_last_attempt(found, job_uid)
    waiting = [
        pod.metadata.name
        for pod in pods
        if pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp and pod.metadata.uid not in held
    ]
    done = frozenset(PodUid(pod.metadata.uid) for pod in pods if pod.status.phase == "Succeeded")
    bound = {
        PodUid(pod.metadata.uid): (pod.metadata.name, pod.spec.node_name)
        for pod in pods
        if pod.spec.node_name and pod.status.phase not in ("Succeeded", "Failed")
    }
    return Workers(done, tuple(sorted(waiting)), bound)


def _of_last_attempt(pods: Iterable[Pod], job_uid: JobUid) -> list[Pod]:
    """Return the workers' pods of a job that are of its last attempt: those of the one before are there still."""
    attempts: dict[int, list[Pod]] = {}
    for pod in pods:
        owner, named = job_owner_reference(pod.metadata), parse_worker_name(pod.metadata.name)
        if owner is not None and owner.uid == job_uid and named is not None:
            attempts.setdefault(named.attempt, []).append(pod)
    return attempts[max(attempts)] if attempts else []


async def gpu_nodes(api: KubeApi) -> tuple[list[GpuNode], dict[str, str]]:
    """Read all GpuNodes; return those that can be read, and a sentence on each of the others, by name.

    Raises:
        KubeError: They could not be read at all.
    """
    found, odd = [], {}
    for raw in await all_of(api, GPU_NODES, msgspec.Raw):
        try:
            found.append(msgspec.json.decode(raw, type=GpuNode))
        except msgspec.ValidationError as error:
            name = msgspec.json.decode(raw, type=_Named).metadata.name
            odd[name] = f"left out: GpuNode {name}, which makes no sense: {error}"
    return found, odd


_ALL = Selector()


async def all_of(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector = _ALL) -> list[T]:
    """Read all objects of a kind, or those that are selected, page by page.

    Raises:
        KubeError: They could not be read.
    """
    found, token = [], ""
    while True:
        page = await api.list_page(kind, selector, continue_token=token)
        found += [msgspec.json.decode(item, type=type_) for item in page.items]
        token = page.continue_token
        if not token:
            return found
