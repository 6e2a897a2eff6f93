"""Names that Carpool writes into Kubernetes objects. They are an interface: never rename one."""

from typing import Final

DOMAIN: Final = "carpool.dev"
API_VERSION: Final = "v1alpha1"
GROUP_VERSION: Final = f"{DOMAIN}/{API_VERSION}"

RESOURCE_GPU: Final = f"{DOMAIN}/gpu"
"""Extended resource of a worker's container: its number of GPUs (or shares of a GPU)."""

SCHEDULER_NAME: Final = "carpool-scheduler"

LABEL_JOB: Final = f"{DOMAIN}/job"
LABEL_JOB_UID: Final = f"{DOMAIN}/job-uid"
LABEL_WORKER: Final = f"{DOMAIN}/worker"
LABEL_ATTEMPT: Final = f"{DOMAIN}/attempt"
LABEL_MANAGED: Final = f"{DOMAIN}/node"
"""Set to `managed` on nodes with GPUs for Carpool; the chart's DaemonSet runs there."""
LABEL_RELEASE_GPUS: Final = f"{DOMAIN}/release-gpus"
"""Set to `true` on a node whose GPUs the agent must not hold open: for a driver upgrade or a reset."""

ANNOTATION_GPUS: Final = f"{DOMAIN}/gpus"
ANNOTATION_MODE: Final = f"{DOMAIN}/mode"
ANNOTATION_MEMORY: Final = f"{DOMAIN}/memory-limit-mib"
ANNOTATION_REASON: Final = f"{DOMAIN}/reason"
ANNOTATION_PROBE: Final = f"{DOMAIN}/probe"
"""`spec.probe` of the pod's job; the node agent gives a container the step probe where it is `Auto`."""

GATE_ADMISSION: Final = f"{DOMAIN}/admission"
"""Scheduling gate of every worker's pod, until the queue admits its job."""

CONDITION_ADMITTED: Final = f"{DOMAIN}/Admitted"
"""Condition of a gated pod: False, with the reason for which the queue does not admit its job yet."""

CONDITION_PREDICTED: Final = "Predicted"
CONDITION_PLACED: Final = "Placed"
CONDITION_RUNNING: Final = "Running"
CONDITION_SUSPENDED: Final = "Suspended"
CONDITION_COMPLETE: Final = "Complete"
CONDITION_FAILED: Final = "Failed"

CONDITION_STEP_TIME_DRIFT: Final = "StepTimeDrift"
CONDITION_STALLED: Final = "Stalled"
CONDITION_MEMORY_NEAR_LIMIT: Final = "MemoryNearLimit"
CONDITION_STRAGGLER: Final = "Straggler"
ANOMALIES: Final = (
    CONDITION_STALLED, CONDITION_STRAGGLER, CONDITION_STEP_TIME_DRIFT, CONDITION_MEMORY_NEAR_LIMIT
)  # fmt: skip
"""Conditions that are True while a job behaves unusually, and absent before it did so first."""

CDI_KIND: Final = f"{DOMAIN}/slot"
"""CDI vendor/class of the node agent's anonymous slots."""

SIMULATED_PREFIX: Final = "Simulated "
"""Prefix of the product name of every simulated GPU."""

OUTCOME_GPU_OUT_OF_MEMORY: Final = "GpuOutOfMemory"
"""Outcome of an attempt: a worker ran out of GPU memory."""
OUTCOME_MOVED: Final = "Moved"
"""Outcome of an attempt: it left a GPU on which a job was slowed beyond its limit."""

REASON_BACKING_OFF: Final = "BackingOff"
"""Reason of condition Placed: an attempt failed, and the next one waits for the end of its backoff."""

REASON_EXCEEDS_EVERY_GPU: Final = "ExceedsEveryGpu"
"""Reason of condition Placed: no GPU of the cluster could hold the job, even when empty."""

REASON_NO_SUCH_GPU: Final = "NoSuchGpu"
"""Reason of condition Placed: the cluster has no GPU of the requested product."""

REASONS_PODS_REFUSED: Final = frozenset(
    f"{kind}{reason}" for kind in ("Pod", "Service", "PodDisruptionBudget") for reason in ("Forbidden", "NameTaken")
)
"""Reasons of condition Placed: the job's pods, Service or PodDisruptionBudget cannot be created, for a reason outside
of the job."""
