"""What a simulated cluster learns from what ran on it, by the functions with which the operator learns.

Nothing is revealed of a job before it ran: its peak once it has run long enough for its measure to count, whether its
bound held when it ends, and that it died when it dies.
"""

from carpool_core.products import find_product
from carpool_core.resources.prediction import Prediction
from carpool_predictor.calibration.document import Calibration, Measured, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.cost_models.memory import shipped
from carpool_predictor.cost_models.solo import Activity
from carpool_predictor.prediction.estimator import Job, OnProduct, summary
from carpool_predictor.prediction.expected import expected_of

from carpool_extender.simulation.truth.workload import SimJob


class Learner:
    """Holds the calibration of one simulated cluster.

    Args:
        is_strict: Whether jobs run alone where nothing was measured on such a stack.
        steady_s: Age at which a peak is taken for the job's, in seconds.
    """

    def __init__(self, *, is_strict: bool, steady_s: float) -> None:
        self._is_strict, self._steady_s = is_strict, steady_s
        self._calibration = Calibration()
        self._told: dict[str, Prediction] = {}
        self._shipped: dict[str, OnProduct] = {}
        self.version = 0
        """Grows whenever something was learned."""

    def predict(self, job: SimJob, asked: Job) -> Prediction:
        """Predict a job with all that is known by now."""
        found = self._told.get(job.truth.kind)
        if found is None:
            product = find_product(job.truth.product)
            known = asked.calibrated(self._calibration, product, job.truth.model)
            before = self._shipped.get(job.truth.kind)
            if before is None:
                before = self._shipped[job.truth.kind] = asked.on(product)
            found = summary(asked, [known.on(product, is_strict=self._is_strict, before=before)])
            self._told[job.truth.kind] = found
        return found

    def saw(
        self,
        job: SimJob,
        uid: str,
        *,
        counted_mib: int,
        capacity_mib: int,
        age_s: float | None,
        alone: Activity,
        at_least: bool,
    ) -> None:
        """Take in what a job was measured to use.

        Args:
            job: The job.
            uid: Names its run.
            counted_mib: The bound that its placement counted with; 0 where it counted with none.
            capacity_mib: Memory of its GPU.
            age_s: For how long it has run, in seconds; None where it has ended.
            alone: What it would do on a GPU of its own, as far as can be told from what all tenants do together.
            at_least: Whether that is the least that it would do.
        """
        measured = Measured(
            peak_mib=job.truth.memory_mib,
            capacity_mib=capacity_mib,
            ended=age_s is None,
            steady=age_s is None or age_s >= self._steady_s,
            sample=uid,
            util=alone.util,
            sm_active=alone.sm,
            at_least=at_least,
        )
        self._observe(job, measured, counted_mib)

    def starved(self, job: SimJob, uid: str, *, counted_mib: int, capacity_mib: int, had_mib: int) -> None:
        """Take in that a job died of memory.

        Args:
            job: The job.
            uid: Names its run.
            counted_mib: The bound that its placement counted with; 0 where it counted with none.
            capacity_mib: Memory of its GPU.
            had_mib: What there was for it.
        """
        self._observe(
            job,
            Measured(peak_mib=had_mib, capacity_mib=capacity_mib, out_of_memory=True, sample=uid),
            counted_mib,
        )

    def _observe(self, job: SimJob, measured: Measured, counted_mib: int) -> None:
        if job.asked is None:
            return
        product = find_product(job.truth.product)
        stack = Stack(product=product.name, precision=job.asked.training.precision)
        expected = expected_of(job.asked, job.truth.model, counted_mib, product)
        after = observe(self._calibration, stack, expected, measured, shipped())
        if after is not self._calibration:
            self._calibration = after
            self._told.clear()
            self.version += 1
