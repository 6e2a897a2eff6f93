"""What kube-scheduler itself asks of a node before it offers it: taints, selectors, and room for the pod's requests.

The extender is never asked about these, so whoever wants to know where a job would go has to look for himself.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import msgspec
from carpool_core.keys import LABEL_MANAGED, RESOURCE_GPU
from carpool_core.kube.pods import PodMeta, job_owner_reference
from carpool_core.resources.meta import ObjectMeta
from carpool_core.values import JobUid, parse_quantity

from carpool_extender.explain.affinity import Affinity, NodeSelectorTerm, matches

Amounts = dict[str, Decimal]


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Camel-cased, partial snapshot of an object."""


class Taint(_Wire, frozen=True, kw_only=True):
    """What keeps pods off a node."""

    key: str
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class Toleration(_Wire, frozen=True, kw_only=True):
    """A taint that a pod does not mind."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether it makes a taint harmless."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


class _Resources(_Wire, frozen=True, kw_only=True):
    requests: dict[str, int | str] | None = None
    limits: dict[str, int | str] | None = None


class _Container(_Wire, frozen=True, kw_only=True):
    resources: _Resources | None = None
    restart_policy: str | None = None
    ports: list[dict[str, Any]] | None = None


class PodNeeds(_Wire, frozen=True, kw_only=True):
    """A pod's spec, as far as kube-scheduler's simple plugins look at it."""

    node_name: str = ""
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None
    overhead: dict[str, int | str] | None = None
    tolerations: list[Toleration] | None = None
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    topology_spread_constraints: list[dict[str, Any]] | None = None
    volumes: list[dict[str, Any]] | None = None

    @property
    def requests(self) -> Amounts:
        """What the pod takes of a node: its containers together, or an init container where that alone takes more.

        Raises:
            ValueError: An amount is no quantity.
        """
        total, at_most = Sums(), Sums()
        for init in self.init_containers or []:
            if init.restart_policy == "Always":
                total.add(_asked(init))
                at_most.raise_to(total)
            else:
                alone = Sums(total)
                alone.add(_asked(init))
                at_most.raise_to(alone)
        for container in self.containers:
            total.add(_asked(container))
        total.raise_to(at_most)
        total.add({name: parse_quantity(value) for name, value in (self.overhead or {}).items()})
        total["pods"] = Decimal(1)
        total.pop(RESOURCE_GPU, None)  # the extender gives these out
        return total

    @property
    def unchecked(self) -> list[str]:
        """What of it kube-scheduler looks at, and this module does not."""
        affinity = self.affinity
        found = {
            "pod affinity": affinity is not None and bool(affinity.pod_affinity or affinity.pod_anti_affinity),
            "topology spread": bool(self.topology_spread_constraints),
            "volumes": any("persistentVolumeClaim" in v or "ephemeral" in v for v in self.volumes or []),
            "host ports": any(port.get("hostPort") for c in self.containers for port in c.ports or []),
        }
        return [name for name, is_there in found.items() if is_there]


class Sums(Amounts):
    """Amounts by resource that can be added up."""

    def add(self, more: Mapping[str, Decimal]) -> None:
        """Add amounts."""
        for name, value in more.items():
            self[name] = self.get(name, Decimal(0)) + value

    def raise_to(self, least: Mapping[str, Decimal]) -> None:
        """Make no amount smaller than these."""
        for name, value in least.items():
            self[name] = max(self.get(name, Decimal(0)), value)


def _asked(container: _Container) -> Amounts:
    resources = container.resources or _Resources()
    asked = {**(resources.limits or {}), **(resources.requests or {})}  # a limit alone is a request, too
    return {name: parse_quantity(value) for name, value in asked.items()}


class _NodeSpec(_Wire, frozen=True, kw_only=True):
    taints: list[Taint] | None = None
    unschedulable: bool = False


class _NodeStatus(_Wire, frozen=True, kw_only=True):
    allocatable: dict[str, int | str] = {}


class Host(_Wire, frozen=True, kw_only=True):
    """A Node."""

    metadata: ObjectMeta
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()

    @property
    def taints(self) -> list[Taint]:
        """Those that keep new pods away."""
        cordon = [Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")] if self.spec.unschedulable else []
        known = {*(self.spec.taints or []), *cordon}
        return sorted((t for t in known if t.effect in ("NoSchedule", "NoExecute")), key=str)

    @property
    def is_ours(self) -> bool:
        """Whether it was given to Carpool, or its kubelet knows of slots: others need not have any GPUs."""
        return self.metadata.labels.get(LABEL_MANAGED) == "managed" or RESOURCE_GPU in self.status.allocatable


class _PodStatus(_Wire, frozen=True, kw_only=True):
    phase: str = ""


class HostPod(_Wire, frozen=True, kw_only=True):
    """A pod that may take room on a node."""

    metadata: PodMeta
    spec: PodNeeds = PodNeeds()
    status: _PodStatus = _PodStatus()


class Hosts:
    """The Nodes and what is taken of them.

    Args:
        nodes: All Nodes.
        pods: All pods.
        without: UID of the job whose pods do not count.
    """

    def __init__(self, nodes: Iterable[Host], pods: Iterable[HostPod] = (), without: JobUid | None = None) -> None:
        self._nodes = {node.metadata.name: node for node in nodes}
        self._taken: dict[str, Sums] = {}
        for pod in pods:
            owner = job_owner_reference(pod.metadata)
            own = owner is not None and without is not None and owner.uid == without
            if pod.spec.node_name and not own and pod.status.phase not in ("Succeeded", "Failed"):
                self.take(pod.spec.node_name, pod.spec.requests)

    def ours(self) -> list[str]:
        """Names of the Nodes on which GPUs are to be expected."""
        return [name for name, node in self._nodes.items() if node.is_ours]

    def take(self, node: str, requests: Amounts) -> None:
        """Count a pod on a node."""
        self._taken.setdefault(node, Sums()).add(requests)

    def refusal(self, node: str, needs: PodNeeds, requests: Amounts) -> str | None:
        """Say why kube-scheduler would not offer a node for a pod; None where nothing that is checked here forbids it.

        Args:
            node: Name of the Node.
            needs: The pod's spec.
            requests: Its requests.
        """
        host = self._nodes.get(node)
        if host is None:
            return "there is no Node of this name"
        for taint in host.taints:
            if not any(toleration.covers(taint) for toleration in needs.tolerations or []):
                return f"its node has the taint {taint}, which spec.template.spec.tolerations does not tolerate"
        if not _is_selected(host, needs):
            return "its node does not match the nodeSelector or node affinity of spec.template"
        return self._short(host, requests)

    def _short(self, host: Host, requests: Amounts) -> str | None:
        taken = self._taken.get(host.metadata.name, Sums())
        for name, wanted in sorted(requests.items()):
            left = parse_quantity(host.status.allocatable.get(name, 0)) - taken.get(name, Decimal(0))
            if wanted > left and wanted:
                return f"its node has not enough {name}: the pod requests {_told(wanted)}, {_told(left)} are left"
        return None


def _is_selected(host: Host, needs: PodNeeds) -> bool:
    labels = host.metadata.labels
    if any(labels.get(key) != value for key, value in (needs.node_selector or {}).items()):
        return False
    terms: list[NodeSelectorTerm] | None = None if needs.affinity is None else needs.affinity.required_terms
    return terms is None or any(matches(term, labels, host.metadata.name) for term in terms)


def _told(value: Decimal) -> str:
    gib = value / 2**30
    return f"{gib:.1f}Gi" if abs(gib) >= 1 else f"{value.normalize():f}"
