"""A prediction, as the predictor returns it and as a job's status holds it."""

from typing import Annotated, Literal

from carpool_core.resources.schema import ATOMIC, Resource, field
from carpool_core.values import SharingMode


class Interval(Resource, frozen=True, kw_only=True):
    """A predicted quantity: its median, and a central interval that holds the truth nine times in ten."""

    median: Annotated[float, field("Median.")]
    lower: Annotated[float, field("5% quantile.")]
    upper: Annotated[float, field("95% quantile.")]


class MemoryPrediction(Resource, frozen=True, kw_only=True):
    """GPU memory that one worker's process takes at its peak, CUDA context included."""

    median_mib: Annotated[int, field("Median, in MiB.", ge=0)]
    upper_mib: Annotated[int, field("Upper bound that placement counts with, in MiB.", ge=0)]
    upper_unenforced_mib: Annotated[
        int,
        field(
            "Upper bound that placement counts with where nothing enforces it, as where jobs take turns, in MiB; "
            "upperMib where that is more.",
            ge=0,
        ),
    ] = 0
    coverage: Annotated[float, field("Share of jobs whose true peak lies under the bound, 0..1.", ge=0, le=1)]
    class_lower_mib: Annotated[
        int, field("Lower edge of the class of memory that the peak is expected in, in MiB.", ge=0)
    ] = 0
    class_upper_mib: Annotated[int, field("Upper edge of that class, in MiB; upperMib may be larger.", ge=0)] = 0
    learned_jobs: Annotated[
        int,
        field(
            "Number of different jobs, measured in this cluster on such GPUs in its precision, that the bound was "
            "learned from; 0: as shipped.",
            ge=0,
        ),
    ] = 0
    learned_runs: Annotated[int, field("Number of runs of this very model at this size that were known.", ge=0)] = 0
    learned_gist: Annotated[
        str,
        field(
            "What those runs took, summed up (runs, deaths, whether a peak stood still, most MiB, MiB that were not "
            "enough): when it changes by more than a little, a job that has no place yet is predicted anew.",
            max_length=128,
        ),
    ] = ""
    trusted: Annotated[
        bool,
        field(
            "False where the job runs alone on such a GPU: nothing like it was measured there; or the bound is more "
            "than it has and the median is not; or runs of this model, other jobs' too, died of memory there, or took "
            "nearly all of it."
        ),
    ] = True

    def bound_mib(self, mode: SharingMode, gpus: int) -> int:
        """Return the bound that placement counts with on each GPU, in MiB: more where nothing enforces it.

        Not for a worker of several GPUs: nothing is learned from those, so that each of its runs would be a first one.

        Args:
            mode: How the GPU is shared.
            gpus: GPUs of a worker.
        """
        if mode is not SharingMode.TIME_SLICING or gpus > 1:
            return self.upper_mib
        return max(self.upper_mib, self.upper_unenforced_mib)

    @property
    def is_lost(self) -> bool:
        """Whether it is not trusted for what runs of this model at its size showed, not for what is not known yet."""
        return not self.trusted and self.learned_runs > 0


class ActivityPrediction(Resource, frozen=True, kw_only=True):
    """How busy the job keeps a GPU when it has it alone."""

    gpu_util_percent: Annotated[Interval, field("Share of time in which some kernel ran (NVML), 0..100.")]
    sm_active_ratio: Annotated[Interval, field("Mean share of SMs with work, 0..1.")]
    dram_active_ratio: Annotated[Interval, field("Share of memory cycles in use, 0..1.")]
    sm_occupancy_ratio: Annotated[
        Interval | None, field("Mean share of warp slots in use over all SMs, 0..1; absent if unknown.")
    ] = None


class ProductPrediction(Resource, frozen=True, kw_only=True):
    """The prediction for one kind of GPU."""

    product: Annotated[str, field("GPU product, by NVML's name.", min_length=1, max_length=128)]
    memory: Annotated[MemoryPrediction, field("GPU memory.")]
    activity: Annotated[ActivityPrediction, field("Utilization when alone.")]
    step_time_seconds: Annotated[Interval, field("Time of one training step when alone, in seconds.")]


class Prediction(Resource, frozen=True, kw_only=True):
    """What is known of a job before it runs; or that nothing is, and why."""

    outcome: Annotated[Literal["Predicted", "Abstained"], field("Whether the predictor answered or abstained.")]
    reason: Annotated[str, field("One CamelCase word for programs.", min_length=1, max_length=256)]
    message: Annotated[str, field("A sentence for people.", max_length=4096)] = ""
    model_version: Annotated[str, field("Version of the predictor's model.", max_length=128)] = ""
    input_digest: Annotated[
        str, field("Digest of what the prediction was computed from; it is renewed when this changes.", max_length=128)
    ] = ""
    products: Annotated[
        list[ProductPrediction],
        field("The prediction for each GPU product.", schema=ATOMIC, max_length=64),
    ] = []
