"""Nodes, and which of them a pod accepts by taints, cordons, node selector and required node affinity.

The rules are those of kube-scheduler's plugins TaintToleration, NodeUnschedulable and NodeAffinity.
"""

import re

from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.schema import Resource

_KEEPS_PODS_AWAY = frozenset(("NoSchedule", "NoExecute"))
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)


class Taint(Resource, frozen=True, kw_only=True):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        """Return it as kubectl writes it."""
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


_CORDON = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
"""A pod that tolerates this taint may go to a cordoned node."""


class NodeSpec(Resource, frozen=True, kw_only=True):
    """The part of a Node's spec that keeps pods away."""

    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class NodeCondition(Resource, frozen=True, kw_only=True):
    """A condition of a Node."""

    type: str = ""
    status: str = ""


class NodeStatus(Resource, frozen=True, kw_only=True):
    """The part of a Node's status that shows whether its agent can prepare GPUs."""

    allocatable: dict[str, str] = {}
    conditions: list[NodeCondition] = []


class Node(Resource, frozen=True, kw_only=True):
    """A Node."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Toleration(Resource, frozen=True, kw_only=True):
    """A toleration of a pod. An empty key with the operator Exists is every key, an empty effect every effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Return whether a taint does not keep the pod away."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (self.operator in ("", "Equal") and self.value == taint.value)


GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
"""Every worker has it: nodes with GPUs usually have this taint."""


class NodeSelectorRequirement(Resource, frozen=True, kw_only=True):
    """A condition on one label or field of a node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, found: str | None) -> bool:
        """Return whether a value meets it; None means that there is none."""
        if self.operator in ("In", "NotIn"):
            return (found in self.values) == (self.operator == "In")
        if self.operator in ("Exists", "DoesNotExist"):
            return (found is not None) == (self.operator == "Exists")
        limit = self.values[0] if len(self.values) == 1 else ""
        if found is None or not (_INTEGER.fullmatch(found) and _INTEGER.fullmatch(limit)):
            return False
        return (self.operator == "Gt" and int(found) > int(limit)) or (
            self.operator == "Lt" and int(found) < int(limit)
        )


class NodeSelectorTerm(Resource, frozen=True, kw_only=True):
    """Conditions that must all hold; an empty term holds for no node."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = ()
    match_fields: tuple[NodeSelectorRequirement, ...] = ()

    def matches(self, node: ObjectMeta) -> bool:
        """Return whether it holds for a node."""
        of_name = {"metadata.name": node.name}
        met = [
            *(one.matches(node.labels.get(one.key)) for one in self.match_expressions),
            *(one.matches(of_name.get(one.key)) for one in self.match_fields),
        ]
        return bool(met) and all(met)


class NodeSelector(Resource, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(Resource, frozen=True, kw_only=True):
    """The part of a pod's node affinity that excludes nodes."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Resource, frozen=True, kw_only=True):
    """The part of a pod's affinity that its node decides alone."""

    node_affinity: NodeAffinity | None = None


class NodeConstraints(Resource, frozen=True, kw_only=True):
    """Which nodes a pod accepts."""

    tolerations: tuple[Toleration, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have, sorted."""
    required: NodeSelector | None = None
    """Its required node affinity."""

    def refusal(self, node: Node) -> str | None:
        """Return why the pod may not run on a node; None if it may."""
        for taint in (*node.spec.taints, *((_CORDON,) if node.spec.unschedulable else ())):
            if taint.effect in _KEEPS_PODS_AWAY and not any(one.tolerates(taint) for one in self.tolerations):
                if node.spec.unschedulable and taint.key == _CORDON.key:
                    return "its node is cordoned"
                return f"its node has the taint {taint}, which the job does not tolerate"
        for key, value in self.node_selector:
            if node.metadata.labels.get(key) != value:
                return f"its node lacks the label {key}={value} of the job's nodeSelector"
        if self.required is None or any(term.matches(node.metadata) for term in self.required.node_selector_terms):
            return None
        return "its node does not match the job's required node affinity"
