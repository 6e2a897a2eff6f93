"""How fast a job would train at a place, told to people: by the step time alone there, and by the slowdown there."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from carpool_core.demand import Demand
from carpool_core.durations import format_duration
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode


class Placed(Protocol):
    """A place that was chosen: on paper, or one that is reserved."""

    @property
    def gpu_uuids(self) -> Sequence[GpuUuid]:
        """Its GPUs."""
        ...

    @property
    def mode(self) -> SharingMode:
        """How they are shared."""
        ...

    @property
    def expected_slowdown(self) -> float:
        """Of the newcomer, when the place was chosen."""
        ...


def pace_there(demand: Demand, place: Placed, devices: Iterable[Device], steps: int | None) -> str:
    """Say in brackets how long a step takes at a place, and all of them where their number is known.

    Args:
        demand: Of the job.
        place: On one node; of unlike GPUs the slowest counts, for which the others wait.
        devices: That the node has.
        steps: Of the job's training; None where nobody said.

    Returns:
        Nothing where no step time was predicted: of a product that is not known, and of MIG instances, because what is
        predicted is that of the whole GPU.
    """
    products = {device.product for device in devices if device.uuid in place.gpu_uuids}
    known = [p.step_time_seconds.median for p in map(demand.prediction_on, products) if p is not None]
    if place.mode is SharingMode.MIG or not known or len(known) < len(products):
        return ""
    step_s = max(known) * place.expected_slowdown
    whole = (
        "" if steps is None else f", {steps:,} {'step' if steps == 1 else 'steps'} {format_duration(steps * step_s)}"
    )
    return f" (a step takes about {format_duration(step_s)} there{whole})"
