"""The largest batch whose bound on memory fits a GPU, or a part of one."""

from dataclasses import dataclass

import msgspec
from carpool_core.products import GpuProduct

from carpool_predictor.features.abstention import Abstention
from carpool_predictor.features.checks import MAX_EXTRAPOLATION
from carpool_predictor.prediction.estimator import Job, prepare
from carpool_predictor.prediction.parts import parts_of

RESERVED_MIB = 722
"""What the driver keeps of a GPU, at most: NVML says 224 MiB (V100) to 722 (A100 80GB)."""
MIG_SHARE = 0.91
"""What a MIG instance offers of its eighths of the GPU's memory, at least: `nvidia-smi mig -lgip` lists 91% (1g.18gb of
an H200) to 99%."""


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits."""

    batch_size: int | None
    """0 where not even a single sample fits; None where only a batch could that the features are not trusted for."""
    limited_by_trace: bool = False
    """Whether another one may fit that the features are not trusted for: a larger one, or, where none is known to fit,
    one of fewer samples than `fewer_than`."""
    fewer_than: int | None = None
    """Smallest batch that the features are trusted for, where it does not fit."""

    def __str__(self) -> str:
        if self.batch_size is None:
            return f"fewer than {self.fewer_than:,}"
        return f"{self.batch_size:,}{' or more' if self.limited_by_trace else ''}" if self.batch_size else "none"


def usable_mib(product: GpuProduct) -> float:
    """Return what jobs can have of a whole GPU."""
    return product.memory_mib - RESERVED_MIB


def usable_of_profile_mib(product: GpuProduct, profile: str) -> float:
    """Return what jobs can have of a MIG instance, such as `3g.20gb`; memory comes in eighths of the GPU's."""
    nominal_mib = 1024 * int(profile.partition(".")[2].removesuffix("gb"))
    eighths = round(8 * nominal_mib / product.memory_mib)
    return MIG_SHARE * product.memory_mib * eighths / 8


class BatchFinder:
    """Finds the largest batch of one job for any product; batch sizes that were tried are remembered."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tried: dict[int, Job | Abstention] = {}
        steps = job.features.steps
        self._smallest = -(-steps[0].batch_size // MAX_EXTRAPOLATION)
        self._largest = steps[-1].batch_size * MAX_EXTRAPOLATION

    def within(self, product: GpuProduct, memory_mib: float) -> LargestBatch:
        """Return the largest batch b such that b fits and b + 1 does not, among those that can be predicted."""
        low, high = self._smallest - 1, self._largest + 1
        if self._fits(self._largest, product, memory_mib):
            return LargestBatch(self._largest, limited_by_trace=True)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(middle, product, memory_mib):
                low = middle
            else:
                high = middle
        if low >= self._smallest:
            return LargestBatch(low)
        if self._smallest == 1 or self._without_samples_mib(product) > memory_mib:
            return LargestBatch(0)
        return LargestBatch(None, limited_by_trace=True, fewer_than=self._smallest)

    def _without_samples_mib(self, product: GpuProduct) -> float:
        parts = parts_of(self._job, product, self._job.memory_on(product))
        return parts.weights_mib + parts.optimizer_mib

    def _fits(self, batch_size: int, product: GpuProduct, memory_mib: float) -> bool:
        if batch_size not in self._tried:
            training = msgspec.structs.replace(self._job.training, batch_size=batch_size)
            self._tried[batch_size] = prepare(self._job.features, training, self._job.model)
        job = self._tried[batch_size]
        return isinstance(job, Job) and job.memory_on(product).upper_mib <= memory_mib
