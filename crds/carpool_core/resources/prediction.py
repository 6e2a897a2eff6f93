"""Prediction of a job, returned by the predictor and stored in the job's status."""

from typing import Annotated, Literal

from carpool_core.resources.schema import ATOMIC, Resource, field
from carpool_core.values import SharingMode


class Interval(Resource, frozen=True, kw_only=True):
    """Median and central 90% interval of a predicted quantity."""

    median: Annotated[float, field("Median.")]
    lower: Annotated[float, field("5% quantile.")]
    upper: Annotated[float, field("95% quantile.")]


class MemoryPrediction(Resource, frozen=True, kw_only=True):
    """Peak GPU memory of one worker's process, with its CUDA context."""

    median_mib: Annotated[int, field("Median, in MiB.", ge=0)]
    upper_mib: Annotated[int, field("Upper bound that placement uses, in MiB.", ge=0)]
    upper_unenforced_mib: Annotated[
        int,
        field(
            "Upper bound that placement uses if nothing enforces it, as with time-slicing, in MiB; upperMib if that is "
            "larger.",
            ge=0,
        ),
    ] = 0
    coverage: Annotated[float, field("Share of jobs whose true peak is below the bound, 0..1.", ge=0, le=1)]
    class_lower_mib: Annotated[int, field("Lower edge of the predicted memory class, in MiB.", ge=0)] = 0
    class_upper_mib: Annotated[
        int, field("Upper edge of the predicted memory class, in MiB; upperMib may be larger.", ge=0)
    ] = 0
    learned_jobs: Annotated[
        int,
        field(
            "Number of different jobs from which the bound was learned, measured in this cluster on this product in "
            "the job's precision; 0 means the shipped bound.",
            ge=0,
        ),
    ] = 0
    learned_runs: Annotated[int, field("Number of known runs of this model at this size.", ge=0)] = 0
    learned_gist: Annotated[
        str,
        field(
            "Summary of those runs (runs, out-of-memory failures, whether a peak was stable, largest MiB, MiB that "
            "were too few). When it changes noticeably, a job without a placement is predicted again.",
            max_length=128,
        ),
    ] = ""
    trusted: Annotated[
        bool,
        field(
            "False if the job must run alone on such a GPU: nothing similar was measured there, or the bound exceeds "
            "the GPU's memory and the median does not, or runs of this model ran out of memory there or took nearly "
            "all of it."
        ),
    ] = True

    def bound_mib(self, mode: SharingMode) -> int:
        """Return the bound that placement uses on each GPU, in MiB; `mode` is how the GPU is shared."""
        is_enforced = mode is not SharingMode.TIME_SLICING
        return self.upper_mib if is_enforced else max(self.upper_mib, self.upper_unenforced_mib)

    @property
    def is_refuted(self) -> bool:
        """Whether known runs of this model at this size are the reason why it is not trusted."""
        return not self.trusted and self.learned_runs > 0


class ActivityPrediction(Resource, frozen=True, kw_only=True):
    """Utilization of a GPU by the job alone."""

    gpu_util_percent: Annotated[Interval, field("Share of time in which some kernel ran (NVML), 0..100.")]
    sm_active_ratio: Annotated[Interval, field("Mean share of SMs with work, 0..1.")]
    dram_active_ratio: Annotated[Interval, field("Share of memory cycles in use, 0..1.")]
    sm_occupancy_ratio: Annotated[
        Interval | None, field("Mean share of warp slots in use over all SMs, 0..1; absent if unknown.")
    ] = None


ANY_FAMILY = "*"
"""Family of a `LearnedColocation` that counts beside all families without one of their own."""
OF_JOB = "@"
"""Separator between a family and the digest of a job of it."""


def family_of(name: str) -> str:
    """Return the family in the name of a family or of a job of it."""
    return name.partition(OF_JOB)[0]


class LearnedColocation(Resource, frozen=True, kw_only=True):
    """Correction of predicted slowdowns beside equal jobs or beside a family, from measured slowdowns."""

    family: Annotated[
        str,
        field(
            "Family of the co-tenant, followed by @ and its job's digest for one job; * for all that are not listed.",
            max_length=128,
        ),
    ]
    mode: Annotated[SharingMode, field("How both share a GPU.")]
    runs: Annotated[int, field("Measured runs of the two families or jobs together; 0 if they never met.", ge=0)]
    own: Annotated[
        list[float],
        field(
            "Logarithm of the factor to the job's predicted slowdown: [c0, c1, c2] in c0 + c1·u + c2·v, with its "
            "utilization u and the co-tenant's v alone, 0..1.",
            schema=ATOMIC,
            min_length=3,
            max_length=3,
        ),
    ]
    own_width: Annotated[
        float,
        field(
            "Share of the interval of the job's predicted slowdown that remains: 1 before a run, 0 if both jobs met.",
            ge=0,
            le=1,
        ),
    ]
    other: Annotated[
        list[float],
        field(
            "The same for the co-tenant's predicted slowdown; u is the co-tenant's utilization and v the job's.",
            schema=ATOMIC,
            min_length=3,
            max_length=3,
        ),
    ]
    other_width: Annotated[float, field("Share of the interval of the co-tenant's slowdown that remains.", ge=0, le=1)]
    sensitivity: Annotated[
        float, field("c0 of the co-tenant's slowdown beside any third job, without its pressure.")
    ] = 0.0
    pressure: Annotated[float, field("Its part of c0 of a third job's slowdown.")] = 0.0


class ProductPrediction(Resource, frozen=True, kw_only=True):
    """Prediction for one GPU product."""

    product: Annotated[str, field("GPU product, by NVML's name.", min_length=1, max_length=128)]
    memory: Annotated[MemoryPrediction, field("GPU memory.")]
    activity: Annotated[ActivityPrediction, field("Utilization when alone.")]
    step_time_seconds: Annotated[Interval, field("Step time when alone, in seconds.")]
    step_time_factor: Annotated[
        float, field("Factor in stepTimeSeconds: measured over modelled step time; 1 if nothing was measured.", gt=0)
    ] = 1.0
    colocations: Annotated[
        list[LearnedColocation],
        field(
            "Slowdowns beside other jobs, learned from measured steps; empty before the first.",
            schema=ATOMIC,
            max_length=96,
        ),
    ] = []
    comparable: Annotated[
        bool,
        field("Whether an earlier run of the same job showed its step time alone, so that slowdowns are measured."),
    ] = False


class Prediction(Resource, frozen=True, kw_only=True):
    """Prediction of a job before it runs, or the reason why there is none."""

    outcome: Annotated[Literal["Predicted", "Abstained"], field("Whether the predictor answered or abstained.")]
    reason: Annotated[str, field("One CamelCase word for programs.", min_length=1, max_length=256)]
    message: Annotated[str, field("A sentence for people.", max_length=4096)] = ""
    model_version: Annotated[str, field("Version of the predictor's model.", max_length=128)] = ""
    input_digest: Annotated[
        str, field("Digest of the prediction's input; the job is predicted again when it changes.", max_length=128)
    ] = ""
    family: Annotated[
        str,
        field(
            "Family of the model, @ and the job's digest, by which slowdowns are learned; empty if unknown.",
            max_length=128,
        ),
    ] = ""
    fitting_batch: (
        Annotated[
            int,
            field(
                "Largest batch that fits one of the products by its bound, where the job's own batch fits none; 0 if "
                "none is known to.",
                ge=0,
            ),
        ]
        | None
    ) = None
    products: Annotated[
        list[ProductPrediction], field("Prediction for each GPU product.", schema=ATOMIC, max_length=64)
    ] = []
