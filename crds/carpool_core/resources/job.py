"""`GpuTrainingJob`: what a user writes, and what Carpool answers in its status."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.model import CatalogModel as CatalogModel  # one place to import a job's types from
from carpool_core.resources.model import GraphLayer as GraphLayer
from carpool_core.resources.model import GraphModel as GraphModel
from carpool_core.resources.model import ModelSource as ModelSource
from carpool_core.resources.schema import ATOMIC_MAP, MEMORY_RULES, QUANTITY, Resource, Rule, field
from carpool_core.resources.status import Attempt as Attempt
from carpool_core.resources.status import JobStatus as JobStatus
from carpool_core.resources.status import JobSummary as JobSummary
from carpool_core.resources.status import Neighbour as Neighbour
from carpool_core.resources.status import Observed as Observed
from carpool_core.resources.status import WorkerPlacement as WorkerPlacement
from carpool_core.resources.template import GPU_AMOUNT_RULE, TEMPLATE
from carpool_core.values import (
    Optimizer,
    Precision,
    RequestedMode,
    Tenancy,
)


class Training(Resource, frozen=True, kw_only=True):
    """How the model is trained, as far as memory, speed and length depend on it."""

    batch_size: Annotated[int, field("Samples of one step on one worker.", ge=1, le=1_000_000)] = 32
    optimizer: Annotated[Optimizer, field("Optimizer, whose state takes memory.")] = Optimizer.ADAMW
    precision: Annotated[Precision, field("Arithmetic of the step.")] = Precision.FP32
    activation_checkpointing: Annotated[bool, field("Whether activations are recomputed instead of kept.")] = False
    steps: (
        Annotated[
            int,
            field(
                "Steps of the whole training; by the predicted time of one they tell how long the job takes, by which "
                "jobs that wait are sorted unless the cluster serves them in order of arrival. Unknown when left out, "
                "and counted as an hour there.",
                ge=1,
                le=10**12,
            ),
        ]
        | None
    ) = None


class Sharing(Resource, frozen=True, kw_only=True):
    """Whether and with whom the job shares its GPU."""

    mode: Annotated[
        RequestedMode,
        field(
            "How to share a GPU. Auto: the scheduler chooses. Exclusive: alone. TimeSlicing: tenants take turns, and "
            "nothing limits their memory. MPS: side by side through one Multi-Process Service daemon, each with a "
            "memory limit. MIG: a hardware instance of its own; needs gpusPerWorker 1."
        ),
    ] = RequestedMode.AUTO
    max_slowdown: Annotated[
        float,
        field(
            "The largest slowdown that the job accepts: its step time beside neighbours over its step time alone. "
            "1 accepts none; 1.5 accepts steps half as long again. Held against predictions, of which the scheduler's "
            "settings say how sure they are.",
            ge=1,
            le=10,
        ),
    ] = 1.5
    tenancy: Annotated[
        Tenancy,
        field(
            "With whose jobs it may share a GPU. Namespace: those of its own namespace. Cluster: anybody's that are "
            "willing too, but never behind one MPS daemon across namespaces; where GPUs can be divided, Auto takes a "
            "MIG instance."
        ),
    ] = Tenancy.NAMESPACE


class MemoryOverride(Resource, frozen=True, kw_only=True):
    """An explicit memory limit, which overrides the prediction."""

    limit: (
        Annotated[
            int | str,
            field(
                "GPU memory that one worker takes on each of its GPUs, with its unit, such as 12Gi. Placement counts "
                "with it in place of the prediction, and MPS holds each process of the worker to it: a worker of "
                "several processes can take more in all, and the node agent reports it.",
                schema=QUANTITY,
                rules=MEMORY_RULES,
            ),
        ]
        | None
    ) = None


_CAPABILITY_RULES = (
    Rule(
        "self.matches('^[0-9]{1,2}[.][0-9]$')",
        "expected a CUDA compute capability such as 8.0, in quotes",
        "'expected a CUDA compute capability such as 8.0, in quotes, found ' + self",
    ),
)


class GpuSelector(Resource, frozen=True, kw_only=True):
    """Which GPUs will do."""

    product: (
        Annotated[
            str,
            field(
                "GPU product by NVML's name or a part of it, such as A100-SXM4-40GB; A100 is any A100, L4 no L40S.",
                min_length=1,
                max_length=128,
            ),
        ]
        | None
    ) = None
    min_memory: (
        Annotated[
            int | str,
            field("Least total memory of the GPU, with its unit, such as 40Gi.", schema=QUANTITY, rules=MEMORY_RULES),
        ]
        | None
    ) = None
    min_compute_capability: (
        Annotated[str, field("Least CUDA compute capability, such as 8.0.", max_length=8, rules=_CAPABILITY_RULES)]
        | None
    ) = None


_MAX_S = 2**31 - 1


class RunPolicy(Resource, frozen=True, kw_only=True):
    """How long and how often the job is tried."""

    suspend: Annotated[bool, field("True keeps the job from having pods.")] = False
    backoff_limit: Annotated[int, field("Restarts after failures before the job has failed.", ge=0, le=1000)] = 3
    active_deadline_seconds: (
        Annotated[
            int,
            field(
                "Seconds after its start in which the job must be complete; unlimited when left out.", ge=1, le=_MAX_S
            ),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[int, field("Seconds after its end until the job is deleted; never when left out.", ge=0, le=_MAX_S)]
        | None
    ) = None


class JobSpec(Resource, frozen=True, kw_only=True):
    """What a user asks for."""

    rules: ClassVar[tuple[Rule, ...]] = (
        GPU_AMOUNT_RULE,
        Rule(
            "self.gpusPerWorker == 1 || self.sharing.mode != 'MIG'",
            "a MIG instance is a part of one GPU: set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
        Rule(
            "self.gpusPerWorker == 1 || self.sharing.mode != 'MPS'",
            "each GPU has an MPS daemon of its own and a process reaches only one: "
            "set spec.gpusPerWorker to 1, or choose another sharing.mode",
            field_path=".gpusPerWorker",
        ),
    )

    model: (
        Annotated[ModelSource, field("What is trained. Left out: unknown, and the job runs alone.", schema=ATOMIC_MAP)]
        | None
    ) = None
    training: Annotated[Training, field("How it is trained.", schema=ATOMIC_MAP)] = Training()
    workers: Annotated[int, field("Number of pods that train together.", ge=1, le=1024)] = 1
    gpus_per_worker: Annotated[
        int, field("Number of GPUs (or shares of a GPU) of each worker, all on one node.", ge=1, le=16)
    ] = 1
    sharing: Annotated[Sharing, field("Whether and with whom it shares a GPU.", schema=ATOMIC_MAP)] = Sharing()
    memory: Annotated[MemoryOverride, field("Memory limit in place of the prediction.", schema=ATOMIC_MAP)] = (
        MemoryOverride()
    )
    gpu: Annotated[GpuSelector, field("Which GPUs will do.", schema=ATOMIC_MAP)] = GpuSelector()
    run_policy: Annotated[RunPolicy, field("How long and how often it is tried.")] = RunPolicy()
    template: Annotated[
        dict[str, Any],
        field("Pod template of a worker, as in a Job. Carpool adds what places it.", schema=TEMPLATE),
    ]


_HAS_ENDED = (
    "this job has ended, and nothing comes of changes (but of runPolicy.ttlSecondsAfterFinished): "
    "delete it and apply it again"
)
_IS_PLACED = "cannot change once the job is placed; only spec.runPolicy can: delete the job and apply it again"
_DECISIVE = dict.fromkeys(("workers", "gpusPerWorker", "training", "sharing", "memory", "gpu"), False) | {
    "model": True,
    "template": True,
}
"""Fields of the spec that the placement was decided by, and whether each may be absent."""
_OF_ATTEMPTS = {"runPolicy.suspend": False, "runPolicy.backoffLimit": False, "runPolicy.activeDeadlineSeconds": True}
"""Fields that steer attempts, of which an ended job makes none."""


def _same(name: str, *, is_optional: bool) -> str:
    """CEL: whether a field of the spec is what it was."""
    new, old = f"self.spec.{name}", f"oldSelf.spec.{name}"
    same = f"{new} == {old}"
    return f"(has({new}) == has({old}) && (!has({new}) || {same}))" if is_optional else f"({same})"


def _all_same(fields: Mapping[str, bool]) -> str:
    return "(" + " && ".join(_same(name, is_optional=is_optional) for name, is_optional in fields.items()) + ")"


def _first_changed(fields: Mapping[str, bool]) -> str:
    """CEL: the name of the first field that is not what it was; the last one where all others are."""
    *others, last = fields
    asked = "".join(f"!{_same(name, is_optional=fields[name])} ? 'spec.{name}' : " for name in others)
    return f"({asked}'spec.{last}')"


_ENDED = "has(oldSelf.status.completionTime)"
_FIXED = Rule(
    # One rule, which looks at the status once: it is asked with every write of a status, and to the API server each
    # look at a field costs as much as the object has fields.
    "!has(oldSelf.status) || [oldSelf.status].all(was, has(was.completionTime) "
    f"? {_all_same({**_DECISIVE, **_OF_ATTEMPTS})} "
    f": !has(was.placement) || was.placement.size() == 0 || {_all_same(_DECISIVE)})",
    f"spec {_IS_PLACED}",
    f"{_ENDED} ? '{_HAS_ENDED}' : {_first_changed(_DECISIVE)} + ' {_IS_PLACED}'",
    field_path=".spec",
)


class GpuTrainingJob(Resource, frozen=True, kw_only=True):
    """A deep-learning training job that shares GPUs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.metadata.name.size() <= 48",
            "metadata.name must have at most 48 characters, because pods are called NAME-worker-INDEX-ATTEMPT",
            field_path=".metadata.name",
        ),
        _FIXED,
    )

    api_version: str = "carpool.dev/v1alpha1"
    kind: str = "GpuTrainingJob"
    metadata: ObjectMeta
    spec: Annotated[JobSpec, field("What is asked for.")]
    status: Annotated[JobStatus, field("What Carpool knows.", schema=ATOMIC_MAP)] = JobStatus()
