"""Demand of a job for a GPU, and why a GPU could never satisfy it. Operator and extender share both."""

import re
from dataclasses import dataclass

from carpool_core.moves import MAX_MOVES
from carpool_core.products import DeviceClass, hardware_name, product_matches
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import TenantProfile, tenancy_domain
from carpool_core.resources.prediction import Prediction, ProductPrediction
from carpool_core.values import JobUid, RequestedMode, Tenancy, WhenSlowed, parse_memory_mib

_CAPABILITY = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of each worker of a job."""

    job_uid: JobUid
    job_name: str
    namespace: str
    gpus: int
    """GPUs of one worker, all on one node."""
    mode: RequestedMode
    max_slowdown: float
    tenancy: Tenancy
    product: str | None
    """GPU product by name or a part of it; any if None."""
    min_memory_mib: int
    min_compute_capability: str | None
    memory_limit_mib: int | None
    """`spec.memory.limit`, which overrides the prediction."""
    prediction: Prediction | None
    moves: int = 0
    """Times that the job left a GPU on which a job was slowed beyond its limit."""
    tries: bool = False
    """Whether it may try new pairs, because it would leave at once."""
    tenancy_group: str = ""
    """Group of namespaces that trust each other; empty if the namespace is in none."""

    @property
    def tenancy_domain(self) -> str:
        """The tenancy group or else the namespace: its jobs share GPUs and MPS servers."""
        return tenancy_domain(self.namespace, self.tenancy_group)

    @property
    def family(self) -> str:
        """Family and digest of the job, by which slowdowns are learned; empty if the model is unknown."""
        return "" if self.prediction is None else self.prediction.family

    @property
    def is_unknown(self) -> bool:
        """Whether the job's memory is unknown, so that it must run alone."""
        is_predicted = self.prediction is not None and self.prediction.outcome == "Predicted"
        return not is_predicted and self.memory_limit_mib is None

    def prediction_on(self, product: str) -> ProductPrediction | None:
        """Return the prediction for a product, simulated or not; None if there is none."""
        if self.prediction is None:
            return None
        name = hardware_name(product)
        return next((p for p in self.prediction.products if p.product == name), None)

    def profile_on(self, product: str) -> TenantProfile:
        """Return the profile by which a GPU of this product is chosen; pessimistic without a prediction."""
        predicted = self.prediction_on(product)
        memory = self.memory_limit_mib
        if predicted is None:
            return TenantProfile(
                memory_mib=memory, max_slowdown=self.max_slowdown, tenancy=self.tenancy, family=self.family
            )
        if memory is None and predicted.memory.trusted:
            memory = predicted.memory.upper_mib
        return TenantProfile(
            memory_mib=memory,
            gpu_util_percent=predicted.activity.gpu_util_percent.median,
            sm_active_ratio=predicted.activity.sm_active_ratio.median,
            dram_active_ratio=predicted.activity.dram_active_ratio.median,
            max_slowdown=self.max_slowdown,
            tenancy=self.tenancy,
            family=self.family,
            comparable=predicted.comparable,
        )


def prediction_message(prediction: Prediction, mode: RequestedMode, limit: int | str | None) -> str:
    """Return the prediction's message for the job's owner, with a warning if `spec.memory.limit` is too small."""
    if prediction.outcome == "Predicted":
        return prediction.message + ("" if mode is RequestedMode.EXCLUSIVE else _exceeding(prediction, limit))
    if limit is None and mode is not RequestedMode.EXCLUSIVE:
        return prediction.message
    cause = prediction.message.partition(";")[0]
    if mode is RequestedMode.EXCLUSIVE:
        return f"{cause}; the job asks for a GPU of its own (Exclusive), which needs no prediction"
    return (
        f"{cause}; placement counts with spec.memory.limit ({limit}), so the job may share a GPU that has so much free"
    )


def _exceeding(prediction: Prediction, limit: int | str | None) -> str:
    """Return a warning if the predicted median exceeds the job's limit on every product."""
    least = min((one.memory.median_mib for one in prediction.products), default=0)
    try:
        if limit is None or parse_memory_mib(limit) >= least:
            return ""
    except ValueError:
        return ""  # the job fails with its own message
    return f"; more than its spec.memory.limit ({limit}): it may run out of GPU memory"


def demand_of(job: GpuTrainingJob) -> Demand:
    """Return the demand that a job's spec and its status.prediction make."""
    spec = job.spec
    limit, least = spec.memory.limit, spec.gpu.min_memory
    return Demand(
        job_uid=JobUid(job.metadata.uid),
        job_name=job.metadata.name,
        namespace=job.metadata.namespace,
        gpus=spec.gpus_per_worker,
        mode=spec.sharing.mode,
        max_slowdown=spec.sharing.max_slowdown,
        tenancy=spec.sharing.tenancy,
        product=spec.gpu.product,
        min_memory_mib=0 if least is None else parse_memory_mib(least),
        min_compute_capability=spec.gpu.min_compute_capability,
        memory_limit_mib=None if limit is None else parse_memory_mib(limit),
        prediction=job.status.prediction,
        moves=job.status.moves,
        tries=spec.sharing.when_slowed is WhenSlowed.MOVE and job.status.moves < MAX_MOVES,
    )


def _capability(text: str) -> tuple[int, ...]:
    """Return a sort key; an unreadable capability sorts before all others."""
    return tuple(int(part) for part in text.split(".")) if _CAPABILITY.fullmatch(text) else (0,)


def _impossible_mode(mode: RequestedMode, kind: DeviceClass) -> str:
    known = ", ".join(kind.modes) or "nothing"
    if mode is RequestedMode.MIG:
        return f"offers no MIG instances; ask for sharing.mode Auto, or for what is offered ({known})"
    return f"cannot be shared by {mode}, only by {known}"


def unsuitable_reason(demand: Demand, kind: DeviceClass) -> str | None:
    """Return why an empty GPU of this class could not hold the demand, with the margin; None if it could."""
    if demand.product is not None and not product_matches(kind.product, demand.product):
        return f"wrong product: wants {demand.product}, is {kind.product}"
    if kind.memory_mib < demand.min_memory_mib:
        least, found = demand.min_memory_mib, kind.memory_mib
        return f"smaller than gpu.minMemory: wants a GPU of {least:,} MiB, has {found:,} MiB"
    wanted = demand.min_compute_capability
    if wanted is not None and _capability(kind.compute_capability) < _capability(wanted):
        return f"compute capability {kind.compute_capability or 'unknown'}, wants {wanted}"
    if demand.mode is not RequestedMode.AUTO and demand.mode.value not in [mode.value for mode in kind.modes]:
        return _impossible_mode(demand.mode, kind)
    needed = demand.profile_on(kind.product).memory_mib
    if needed is not None and needed > kind.usable_mib:
        return f"too small: needs {needed:,} MiB, has {kind.usable_mib:,} MiB"
    return None
