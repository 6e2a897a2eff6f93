"""Everything that a reconciliation looks at, frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction

from carpool_operator.attempts import Backoff
from carpool_operator.inventory import Inventory
from carpool_operator.observations import Knowledge


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the API server did not let a pod be created."""

    reason: str
    message: str
    is_final: bool
    """Whether the same pod will always be refused."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job and what stands around it."""

    job: GpuTrainingJob
    now: datetime
    digest: str
    """Digest of what the job's prediction is computed from."""
    products: tuple[str, ...]
    """GPU products that the prediction has to speak of, sorted."""
    prediction: Prediction | None = None
    """The prediction for this digest and these products, once it was computed."""
    model_version: str = ""
    """Version of the predictor's model; a prediction of another is renewed."""
    retry_in_s: float = 0.0
    """Seconds until this digest may be tried again, where the predictor abstained for the moment."""
    traces_ahead: int = 0
    """How many other models are traced before this job's, where it has to be traced; see `TraceQueue.ahead`."""
    pods: tuple[Pod, ...] = ()
    """Pods that the job controls, as last heard of."""
    made: frozenset[str] = frozenset()
    """UIDs of pods that this process has created for the job, or has found to be as it would have created them."""
    created: frozenset[str] = frozenset()
    """Names of pods that were created a moment ago and not heard of since."""
    is_template_checked: bool = False
    """Whether the API server has checked the pod that this generation of the job makes."""
    refusal: Refusal | None = None
    """The answer to the last attempt to create or check a pod, where it was refused."""
    unreserved_s: Mapping[str, float] = field(default_factory=dict)
    """UIDs of bound, unfinished pods that no reservation is known for, and for how many seconds that was so."""
    nodes: tuple[GpuNode, ...] = ()
    """GpuNodes on which the job's pods are."""
    inventory: Inventory = field(default_factory=dict)
    """The nodes of the cluster, by what GPUs they have."""
    backoff: Backoff = field(default_factory=Backoff)
    knowledge: Knowledge = field(default_factory=Knowledge)
    """What this process has learned, as far as it concerns the job."""
