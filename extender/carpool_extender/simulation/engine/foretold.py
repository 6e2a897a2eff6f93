"""Predictions as simulations write them: the truth, or with errors that were drawn."""

from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)

from carpool_extender.simulation.truth.workload import Truth


def exactly(truth: Truth, like: Prediction | None, *, by_utilization: bool = False) -> Prediction:
    """Write the truth as a prediction without an error, for the product that another one is for."""
    product = like.products[0].product if like is not None and like.products else ""
    return prediction_of(
        product or truth.product,
        upper_mib=truth.memory_mib,
        util=truth.util,
        sm=truth.util if by_utilization else truth.sm,
        dram=truth.dram,
    )


def prediction_of(
    product: str,
    *,
    upper_mib: int,
    util: float,
    sm: float,
    dram: float,
    step_s: float = 1.0,
    unenforced_mib: int = 0,
    trusted: bool = True,
) -> Prediction:
    """Return a prediction for one product with no spread; memory in MiB, activity 0..1, time of a step in seconds."""

    def point(value: float) -> Interval:
        return Interval(median=value, lower=value, upper=value)

    one = ProductPrediction(
        product=product,
        memory=MemoryPrediction(
            median_mib=upper_mib,
            upper_mib=upper_mib,
            upper_unenforced_mib=unenforced_mib,
            coverage=0.95,
            trusted=trusted,
        ),
        activity=ActivityPrediction(
            gpu_util_percent=point(100 * util), sm_active_ratio=point(sm), dram_active_ratio=point(dram)
        ),
        step_time_seconds=point(step_s),
    )
    return Prediction(outcome="Predicted", reason="Simulated", products=[one])
