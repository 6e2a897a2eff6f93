"""Actions: the result of a reconciliation, as data. The performer performs them in order."""

from dataclasses import dataclass
from typing import Any, Literal

from carpool_core.resources.job import JobStatus
from carpool_predictor.calibration.colocation import MeasuredSteps

from carpool_operator.observations import Observation


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace the job's status, provided that the job has not changed since it was read."""

    status: JobStatus
    pod: str = ""
    """Name of the latest attempt's only pod, which was created just before: the status gets its UID."""


@dataclass(frozen=True, slots=True)
class CheckTemplate:
    """Have the API server validate the template's pod by a dry run."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateCompanion:
    """Create the workers' Service or PodDisruptionBudget; an existing one that the job controls is as good."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod; an existing one that this process created is as good."""

    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod of this name and UID."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ReadWarnings:
    """Read the newest warning about a pod's volumes; the job is reconciled again with it."""

    uid: str
    bound_at: str
    """When the pod was bound, RFC 3339; older warnings do not count."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job after its time to live."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record an event about the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Predict:
    """Compute a prediction in the background; the job is reconciled again when it is done."""

    digest: str
    products: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """Add an observation to the calibration; the job is reconciled again when it is stored."""

    observation: Observation | MeasuredSteps


Action = (
    CheckTemplate
    | WriteStatus
    | CreateCompanion
    | CreatePod
    | DeletePod
    | ReadWarnings
    | DeleteJob
    | RecordEvent
    | Predict
    | Learn
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions in the order in which a crash between them does no harm."""

    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None
    """Seconds after which the job is reconciled again without an event; None: only after an event."""
