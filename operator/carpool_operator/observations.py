"""What an attempt showed, and what this process has learned of it: data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.values import SharingMode
from carpool_predictor.calibration.document import Measured
from carpool_predictor.calibration.run_history import Recalled, gist, is_alike, step_of


@dataclass(frozen=True, slots=True)
class Use:
    """What a tenant of a GPU is measured to do, each 0..1."""

    util: float
    sm: float
    dram: float
    """As predicted alone: no agent measures it."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one attempt showed."""

    sample: str
    """Names the attempt, so that it counts once."""
    product: str
    simulated: bool
    counted_mib: int
    """The bound that its placement counted with; 0 where it was not trusted."""
    measured: Measured
    mode: SharingMode = SharingMode.EXCLUSIVE
    together: tuple[Use, ...] = ()
    """What it does and what its neighbours do, itself first; empty where that is not known of all."""

    def with_activity(self) -> Measured:
        """Return what was measured, with what it would do on a GPU of its own."""
        if not self.together:
            return self.measured
        # With NumPy, which a process that learns nothing never needs.
        from carpool_predictor.models.slowdown import Activity, alone, is_used_up

        together = [Activity(one.util, one.sm, one.dram) for one in self.together]
        mine, at_least = alone(self.mode, together)[0], is_used_up(self.mode, together)
        return msgspec.structs.replace(self.measured, util=mine.util, sm_active=mine.sm, at_least=at_least)

    @property
    def stage(self) -> str:
        """Name the lesson: an attempt that runs has another one to teach than one that has ended, or took more."""
        if self.measured.ended:
            return f"{self.sample} ended"
        peak_mib = self.measured.peak_mib
        return f"{self.sample} " + (f"steady {peak_mib:.0f}" if self.measured.steady else f"seen {step_of(peak_mib)}")


class Mark(NamedTuple):
    """What a prediction of a job on a product is calibrated from; where it differs, so may the prediction."""

    jobs: int
    """How many different jobs the line of the stack was learned from, in powers of two."""
    recalled: Recalled | None = None
    """What runs of the very job showed: one that goes on may grow, come to stand still, or die."""

    def is_reflected_in(self, memory: MemoryPrediction) -> bool:
        """Whether a prediction that was made was calibrated from so much the same that another one is not worth it."""
        if memory.learned_jobs.bit_length() != self.jobs:
            return False
        if not memory.learned_gist and memory.learned_runs:
            # A CRD of an earlier version keeps no gist: without this each look would predict anew.
            return self.recalled is not None and memory.learned_runs == self.recalled.known
        return is_alike(memory.learned_gist, gist(self.recalled))


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What this process has learned, as far as a look at a job needs it."""

    is_on: bool = False
    learned: frozenset[str] = frozenset()
    """Attempts of this job whose lessons are in the calibration for good."""
    steady_s: float = 0.0
    """For how long the peak of the present attempt has not moved."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """For each product how much a prediction would be calibrated from."""
