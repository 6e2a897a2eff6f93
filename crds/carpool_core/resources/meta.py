"""Metadata and conditions of Kubernetes objects."""

from typing import Annotated, Literal

from carpool_core.resources.schema import Resource, field


class ObjectMeta(Resource, frozen=True, kw_only=True):
    """The fields of `metadata` that Carpool reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Condition(Resource, frozen=True, kw_only=True):
    """A `metav1.Condition`."""

    type: Annotated[str, field("Kind of the condition, CamelCase.", max_length=316)]
    status: Annotated[Literal["True", "False", "Unknown"], field("Whether the condition holds.")]
    reason: Annotated[str, field("One CamelCase word for programs.", min_length=1, max_length=1024)]
    message: Annotated[str, field("A sentence for people.", max_length=32768)] = ""
    last_transition_time: Annotated[
        str, field("Time when `status` last changed, RFC 3339.", schema={"format": "date-time"})
    ] = ""
    observed_generation: Annotated[int, field("`metadata.generation` that this was computed from.", ge=0)] = 0
