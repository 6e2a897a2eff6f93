"""What a step costs under other optimizers than the one that it was traced with, exactly and without tracing it again.

Forward and backward passes are the same under every optimizer. What differs is the state, which is there from the
start, and the update, whose temporaries do not depend on the batch. So the update of each optimizer is traced alone,
once for a model, and takes the place of the traced one in the record of all allocations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from carpool_core.values import Optimizer

from carpool_predictor.features.records import UpdateRecord
from carpool_predictor.tracing.multitensor import like
from carpool_predictor.tracing.step import FakeTraining, with_optimizer
from carpool_predictor.tracing.trackers import Kind, StepTracker

Event = tuple[int, int]
"""Number of a storage, and its bytes as it begins to live, -1 as it ends."""
_FIRST_NUMBER = 1 << 40
"""Numbers of an update's storages, which must not meet those of the step that it is put into."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer's update of a model."""

    state: tuple[Event, ...]
    events: tuple[Event, ...]
    """Its temporaries."""
    temporary_bytes: int
    """The most of them at once."""
    kernels: int
    bytes_moved: float

    @property
    def memory(self) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """Return what the update takes and gives back, which is the same for some optimizers."""
        return self.state, self.events

    @property
    def state_bytes(self) -> int:
        """Bytes of state."""
        return sum(size for _, size in self.state)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """A traced step, cut where another optimizer's differs."""

    before_state: tuple[Event, ...]
    before_update: tuple[Event, ...]
    """Inputs, forward and backward pass."""
    releases: tuple[Event, ...]
    """What was alive as the update began and ended with it: the gradients."""
    peak_bytes: int
    """Peak before the update, without state."""
    activation_bytes: int
    """Activations and temporaries among that peak."""
    live_bytes: int
    """Alive as the update begins, without state."""
    live_activation_bytes: int

    def under(self, update: Update) -> list[Event]:
        """Return the events of the step under another update."""
        return [*self.before_state, *update.state, *self.before_update, *update.events, *self.releases]


def trace_update(fake: FakeTraining, optimizer: Optimizer, updated: Collection[int]) -> Update:
    """Trace an optimizer's update alone.

    Args:
        fake: The model.
        optimizer: The optimizer, which may be another than the model's own.
        updated: Which of the model's parameters have a gradient then, as their positions.
    """
    other = with_optimizer(fake, optimizer)
    tracker = StepTracker()
    storages = tracker.storages
    parameters = list(other.model.parameters())
    with other.mode:
        for position in updated:
            parameters[position].grad = like(parameters[position])
    tracker.kind = Kind.TEMPORARY
    storages.adopt([*parameters, *(p.grad for p in parameters if p.grad is not None)], Kind.PARAMETER)
    first = len(storages.events)
    storages.adopt(other.state(), Kind.OPTIMIZER)
    begun = len(storages.events)
    before = storages.total_bytes
    with other.mode, tracker:
        other.optimizer.step()
    update = Update(
        state=_renumbered(storages.events[first:begun]),
        events=_renumbered(storages.events[begun:]),
        temporary_bytes=storages.peak.total_bytes - before,
        kernels=tracker.kernels,
        bytes_moved=float(tracker.bytes_moved),
    )
    other.optimizer.zero_grad()
    return update


def _renumbered(events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple((number + _FIRST_NUMBER, size) for number, size in events)


def under(step: StepEvents, update: Update, reserved_bytes: int, work_before: tuple[int, float]) -> UpdateRecord:
    """Put a step together with an update.

    Args:
        step: The traced step.
        update: The update in place of its own.
        reserved_bytes: What the caching allocator holds after `step.under(update)`.
        work_before: Kernels and bytes moved before the update.
    """
    before, during = step.peak_bytes, step.live_bytes + update.temporary_bytes
    activations = step.activation_bytes if before >= during else step.live_activation_bytes + update.temporary_bytes
    kernels, bytes_moved = work_before
    return UpdateRecord(
        peak_bytes=max(before, during) + update.state_bytes,
        activation_bytes=activations,
        reserved_bytes=reserved_bytes,
        bytes_moved=bytes_moved + update.bytes_moved,
        kernels=kernels + update.kernels,
    )


class Updates:
    """Traces the updates of a model under other optimizers, each once.

    Args:
        fake: The model.
        optimizers: The other optimizers.
    """

    def __init__(self, fake: FakeTraining, optimizers: Sequence[Optimizer]) -> None:
        self._fake = fake
        self._optimizers = optimizers
        self._known: dict[tuple[int, ...], dict[Optimizer, Update]] = {}

    def of(self, updated: tuple[int, ...]) -> dict[Optimizer, Update]:
        """Return the updates of the parameters at some positions."""
        if updated not in self._known:
            self._known[updated] = {o: trace_update(self._fake, o, updated) for o in self._optimizers}
        return self._known[updated]
