"""What must be known of a prediction to learn from what became of it."""

from carpool_core.products import GpuProduct
from carpool_core.values import MIB

from carpool_predictor.calibration.document import Expected
from carpool_predictor.cost_models.activity import activity_on
from carpool_predictor.prediction.estimator import Job


def expected_of(job: Job, name: str, counted_mib: float, product: GpuProduct) -> Expected:
    """Return what must be known of a prediction to learn from what became of it.

    Args:
        job: The job, as shipped: of no product.
        name: Name or digest of its model.
        counted_mib: The bound of the prediction that it was placed by; 0 where placement did not rely on it.
        product: What it ran on.
    """
    busy = activity_on(job.features, job.cost, job.training, product).activity
    return Expected(
        model=name,
        reserved_mib=job.reserved_mib,
        live_mib=job.cost.peak_bytes / MIB,
        correction=job.corrected.correction,
        stratum=job.corrected.stratum,
        upper_mib=counted_mib,
        util=min(busy.gpu_util_percent.median / 100, 1.0),
        sm_active=min(busy.sm_active_ratio.median, 1.0),
    )
