"""Port to the Kubernetes API: the calls that Carpool makes."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec

T = TypeVar("T")

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """API group, version and names of a kind."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of the kind's objects."""
        return f"{self.group}/{self.version}" if self.group else self.version


PODS = ResourceKind("", "v1", "pods", "Pod")
NODES = ResourceKind("", "v1", "nodes", "Node", namespaced=False)
SERVICES = ResourceKind("", "v1", "services", "Service")
POD_DISRUPTION_BUDGETS = ResourceKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
CONFIG_MAPS = ResourceKind("", "v1", "configmaps", "ConfigMap")
LEASES = ResourceKind("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = ResourceKind("", "v1", "events", "Event")
GPU_TRAINING_JOBS = ResourceKind("carpool.dev", "v1alpha1", "gputrainingjobs", "GpuTrainingJob")
GPU_NODES = ResourceKind("carpool.dev", "v1alpha1", "gpunodes", "GpuNode", namespaced=False)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list."""

    items: list[msgspec.Raw]
    """Each object, still encoded."""
    resource_version: str
    continue_token: str
    """Empty on the last page."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch."""

    type: EventType
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Selector:
    """Objects of a kind to list or watch; empty fields select all."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""


class KubeApi(Protocol):
    """Calls raise the errors of `carpool_core.kube.errors`."""

    @property
    def namespace(self) -> str:
        """Namespace of the kubeconfig's context or of the pod, for commands that name none."""
        ...

    @property
    def server_ahead_s(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's; 0 before the first answer."""
        ...

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Return one object decoded as `type_`; unknown fields are ignored."""
        ...

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        """Return one page of the selected objects. Raises `Gone` if the token has expired."""
        ...

    def watch(self, kind: ResourceKind, selector: Selector, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Yield changes after `resource_version` and bookmarks, until the server ends the connection.

        Raises `Gone` if the version is too old.
        """
        ...

    async def create(
        self,
        kind: ResourceKind,
        body: Mapping[str, Any] | msgspec.Struct,
        *,
        namespace: str = "",
        name: str = "",
        subresource: str = "",
        is_dry_run: bool = False,
        wants_object: bool = True,
    ) -> dict[str, Any]:
        """Create an object, or post to the `subresource` (such as `binding`) of the one called `name`.

        A dry run goes through all checks of the API server and stores nothing. Without `wants_object` the server
        returns only the metadata.
        """
        ...

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        patch: Mapping[str, Any] | list[Mapping[str, Any]],
        *,
        namespace: str = "",
        subresource: str = "",
        wants_object: bool = True,
    ) -> dict[str, Any]:
        """Patch an object: a mapping is sent as a merge patch, a list as a JSON patch.

        A merge patch with `metadata.resourceVersion` raises `Conflict` if the object has changed since. Without
        `wants_object` the server returns only the metadata.
        """
        ...

    async def replace_status(
        self, kind: ResourceKind, name: str, status: Mapping[str, Any], *, namespace: str = "", resource_version: str
    ) -> dict[str, Any]:
        """Replace an object's whole status and return the metadata; `Conflict` if the object has changed since.

        This costs the server less than a patch, for which it encodes and decodes the object another time.
        """
        ...

    def logs(
        self, pod: str, *, namespace: str, container: str, is_followed: bool = False, tail_lines: int | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines of a container's log; with `is_followed` until it ends. Raises `Invalid` before it starts."""
        ...

    async def delete(
        self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "", resource_version: str = ""
    ) -> None:
        """Delete an object; `Conflict` if another has the name now (`uid`), or it has changed (`resource_version`)."""
        ...


async def list_all(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector | None = None) -> list[T]:
    """Read all selected objects of a kind, page by page.

    Raises:
        KubeError: They could not be read.
    """
    found, token = list[T](), ""
    while True:
        page = await api.list_page(kind, selector or Selector(), continue_token=token)
        found += [msgspec.json.decode(item, type=type_) for item in page.items]
        token = page.continue_token
        if not token:
            return found
