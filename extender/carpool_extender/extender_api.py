"""The extender protocol of kube-scheduler (`k8s.io/kube-scheduler/extender/v1`) on the wire.

Its own fields are Go-capitalised, because those Go types have no JSON tags; the embedded pod is ordinary camelCase.
"""

from typing import Any

import msgspec
from carpool_core.kube.pods import Pod


class _Go(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Base of types whose fields are Go-capitalised."""


class ExtenderArgs(_Go, frozen=True, kw_only=True):
    """Body of filter and prioritize. `Nodes`, sent without `nodeCacheCapable`, is not decoded."""

    pod: Pod
    node_names: list[str] | None = None


class FilterResult(_Go, frozen=True, kw_only=True):
    """Answer of filter. `NodeNames` is always written: if it were omitted, no node would fit."""

    nodes: None = None
    node_names: list[str] = []
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class HostPriority(_Go, frozen=True, kw_only=True):
    """One element of the answer of prioritize."""

    host: str
    score: int


class BindingArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Body of bind."""

    pod_name: str = msgspec.field(name="PodName")
    pod_namespace: str = msgspec.field(name="PodNamespace")
    pod_uid: str = msgspec.field(name="PodUID")
    node: str = msgspec.field(name="Node")


class BindingResult(_Go, frozen=True, kw_only=True):
    """Answer of bind."""

    error: str = ""


class PreemptionArgs(_Go, frozen=True, kw_only=True):
    """Body of preempt."""

    pod: Pod
    node_name_to_meta_victims: dict[str, Any] | None = None


class PreemptionResult(_Go, frozen=True, kw_only=True):
    """Answer of preempt: the nodes on which evicting pods would help."""

    node_name_to_meta_victims: dict[str, Any] = {}
