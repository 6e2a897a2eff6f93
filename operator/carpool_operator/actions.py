"""What a reconciliation decides to do: data, performed elsewhere, in this order."""

from dataclasses import dataclass
from typing import Any, Literal

from carpool_core.resources.job import JobStatus

from carpool_operator.observations import Lesson


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace the job's status, provided that nobody changed the job since it was read."""

    status: JobStatus


@dataclass(frozen=True, slots=True)
class CheckTemplate:
    """Have the API server check the pod that the job's template makes, without creating it."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create the Service by which workers find each other; one of that name that the job controls is as good."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod; one of that name that the job controls already is as good."""

    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete that very pod."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EndUnseen:
    """Delete those of these pods that live although the cache shows none of them."""

    names: tuple[str, ...]
    uids: frozenset[str]
    is_awaited: bool
    """Whether nothing else happens while one of them lives."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself, whose time after its end is over."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Tell the job's owner."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Predict:
    """Compute a prediction in the background; the job is reconciled again when it is there."""

    digest: str
    products: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """Take what an attempt showed into the calibration; the job is reconciled again when that is kept for good."""

    lesson: Lesson


Action = (
    CheckTemplate
    | WriteStatus
    | CreateService
    | CreatePod
    | DeletePod
    | EndUnseen
    | DeleteJob
    | RecordEvent
    | Predict
    | Learn
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions in the order in which they are safe: what must be remembered is written before it is acted upon."""

    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None
    """Look again after so many seconds, even if nothing changes; None: only when something changes."""
