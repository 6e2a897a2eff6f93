"""A detailed record of a traced step, under its own optimizer and others without tracing the whole step again.

Forward and backward passes are the same under every optimizer; state and update differ. Each optimizer's update is
traced alone, once per model, and replaces the traced one in the recorded allocations. The result is exact.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carpool_core.values import Optimizer
from torch import Tensor
from torch._ops import OpOverload

from carpool_predictor.features import StepRecord, UpdateRecord
from carpool_predictor.tracing.allocator import CachingAllocator, reserved_after
from carpool_predictor.tracing.operators import OperatorCache, like
from carpool_predictor.tracing.step import FakeTraining, Kind, Peak, StepTracker, trace_step, with_optimizer

Event = tuple[int, int]
"""Number of a storage, and its size in bytes at allocation, -1 at release."""
_FIRST_NUMBER = 1 << 40
"""First number of an update's storages, beyond those of a step."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer's update of a model."""

    state: tuple[Event, ...]
    events: tuple[Event, ...]
    """Temporaries of the update."""
    temporary_bytes: int
    """Peak of the temporaries."""
    kernels: int
    bytes_moved: float

    @property
    def memory(self) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """Return the allocations, which some optimizers have in common."""
        return self.state, self.events

    @property
    def state_bytes(self) -> int:
        """Bytes of state."""
        return sum(size for _, size in self.state)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The allocations of a traced step, divided where optimizers differ."""

    before_state: tuple[Event, ...]
    before_update: tuple[Event, ...]
    """Inputs, forward and backward pass."""
    releases: tuple[Event, ...]
    """Releases at the end of the update: the gradients."""
    peak_bytes: int
    """Peak before the update, without state."""
    activation_bytes: int
    """Activations and temporaries among that peak."""
    live_bytes: int
    """Live bytes at the beginning of the update, without state."""
    live_activation_bytes: int

    def under(self, update: Update) -> list[Event]:
        """Return the events of the step under another update."""
        return [*self.before_state, *update.state, *self.before_update, *update.events, *self.releases]


def trace_update(fake: FakeTraining, optimizer: Optimizer, updated: Collection[int]) -> Update:
    """Trace an optimizer's update alone.

    Args:
        fake: The model.
        optimizer: The optimizer.
        updated: Positions of the parameters that have a gradient.
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
    """Return the record of a step with another update.

    Args:
        step: The traced step.
        update: The update that replaces the step's own.
        reserved_bytes: Bytes that the caching allocator holds after `step.under(update)`.
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


_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


class DetailTracker(StepTracker):  # type: ignore[no-untyped-call]  # as its parent
    """Tracks convolution workspaces, and the allocations that depend on the optimizer.

    Args:
        parameters: Parameters of the model.
        operators: Cache of operator results.
    """

    def __init__(self, parameters: Sequence[Tensor] = (), operators: OperatorCache | None = None) -> None:
        super().__init__(operators)
        self.unfolded_max = 0
        self.convolved_max = 0
        """Input, weight and output of one convolution together, which some algorithms copy into another layout."""
        self.updated: tuple[int, ...] = ()
        """Positions of the parameters that have a gradient at the beginning of the update."""
        self.work_before_update = (0, 0.0)
        """Kernels and bytes moved."""
        self._parameters = parameters
        self._peak = self._live = Peak(0, ())
        self._begun: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Record the beginning of a phase, and at the update the state that other updates start from."""
        self._begun[phase] = len(self.storages.events)
        if phase == "update":
            self._peak = self.storages.peak
            self._live = self.storages.now
            self.work_before_update = (self.kernels, self.bytes_moved)
            self.updated = tuple(i for i, p in enumerate(self._parameters) if p.grad is not None)

    def step_events(self) -> StepEvents:
        """Return the finished step without its optimizer's part."""
        events, begun = self.storages.events, self._begun
        state = sum(size for _, size in events[begun["state"] : begun["forward"]])
        before, after = events[: begun["update"]], events[begun["update"] :]
        known = {number for number, _ in before}
        return StepEvents(
            before_state=tuple(events[: begun["state"]]),
            before_update=tuple(events[begun["forward"] : begun["update"]]),
            releases=tuple(event for event in after if event[0] in known),
            peak_bytes=self._peak.total_bytes - state,
            activation_bytes=self._peak.activation_bytes,
            live_bytes=self._live.total_bytes - state,
            live_activation_bytes=self._live.activation_bytes,
        )

    def observe(self, func: Any, args: Any, out: Any) -> None:
        """Record the workspace of a convolution: its tensors in another layout, or its unfolded input."""
        if func._schema.name in _CONVOLUTIONS:
            self._convolve(func, args, out)

    def _convolve(self, func: OpOverload, args: Any, out: Any) -> None:
        is_forward = func._schema.name == _CONVOLUTIONS[0]
        taken, weight, given = (args[0], args[1], out) if is_forward else (args[1], args[2], args[0])
        groups = args[8] if is_forward else args[9]
        if groups > 1 and weight.shape[1] == 1:
            return  # depthwise convolutions run in PyTorch's kernels, without workspace
        convolved = sum(t.numel() * t.element_size() for t in (taken, weight, given))
        self.convolved_max = max(self.convolved_max, convolved)
        if weight.shape[2:].numel() > 1:
            unfolded = given.shape[0] * given.shape[2:].numel() * weight[0].numel() * taken.element_size()
            self.unfolded_max = max(self.unfolded_max, unfolded)


def record_step(
    fake: FakeTraining, batch_size: int, updates: Updates | None = None, operators: OperatorCache | None = None
) -> StepRecord:
    """Trace one step in detail.

    Args:
        fake: The model.
        batch_size: Samples of the step.
        updates: Other optimizers whose step is recorded too.
        operators: Cache of operator results.
    """
    tracker = DetailTracker(list(fake.model.parameters()), operators)
    step, _ = trace_step(fake, batch_size, tracker)
    events = tracker.storages.events
    return StepRecord(
        batch_size=batch_size,
        peak_bytes=step.peak_bytes,
        activation_bytes=step.activation_bytes,
        flops=step.flops,
        bytes_moved=step.bytes_moved,
        kernels=step.kernels,
        unfolded_max=tracker.unfolded_max,
        largest_bytes=max(tracker.convolved_max, max((size for _, size in events), default=0)),
        reserved_bytes=_reserved(events),
        updates={} if updates is None else _updated(tracker, updates),
    )


def _updated(tracker: DetailTracker, updates: Updates) -> Mapping[Optimizer, UpdateRecord]:
    step = tracker.step_events()
    found = updates.of(tracker.updated)
    replays = {update.memory: step.under(update) for update in found.values()}
    reserved = {memory: _reserved(events) for memory, events in replays.items()}
    return {
        optimizer: under(step, update, reserved[update.memory], tracker.work_before_update)
        for optimizer, update in found.items()
    }


def _reserved(events: Sequence[Event]) -> int:
    """Return the reserved bytes after two replays of the step; the second one reuses the blocks of the first."""
    allocator = CachingAllocator()
    reserved_after(events, allocator)
    freed = {number for number, size in events if size < 0}
    # Weights and optimizer state outlive the step and exist when it runs again.
    return reserved_after([event for event in events if event[0] in freed], allocator)
