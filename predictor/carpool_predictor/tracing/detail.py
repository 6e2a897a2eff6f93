"""A closer look at a traced step: what the calibrated models learn from beside the peak."""

from collections.abc import Mapping, Sequence
from typing import Any

from carpool_core.values import Optimizer
from torch import Tensor
from torch._ops import OpOverload

from carpool_predictor.features.records import StepRecord, UpdateRecord
from carpool_predictor.tracing.allocator import CachingAllocator, reserved_after
from carpool_predictor.tracing.remembering import Remembered
from carpool_predictor.tracing.step import FakeTraining, trace_step
from carpool_predictor.tracing.trackers import Peak, StepTracker
from carpool_predictor.tracing.updates import Event, StepEvents, Updates, under

_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


class DetailTracker(StepTracker):  # type: ignore[no-untyped-call]  # as its parent
    """Adds what convolutions may need for themselves, and where another optimizer's step would differ.

    Args:
        parameters: The model's.
        remembered: What operators gave in other steps.
    """

    def __init__(self, parameters: Sequence[Tensor] = (), remembered: Remembered | None = None) -> None:
        super().__init__(remembered)
        self.unfolded_max = 0
        self.convolved_max = 0
        """Input, weight and output of one convolution together, which some algorithms copy into another layout."""
        self.updated: tuple[int, ...] = ()
        """Positions of the parameters that have a gradient as the update begins."""
        self.work_before_update = (0, 0.0)
        """Kernels and bytes moved."""
        self._parameters = parameters
        self._peak = self._live = Peak(0, ())
        self._begun: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Note when what begins, and all that another update would set out from."""
        self._begun[phase] = len(self.storages.events)
        if phase == "update":
            self._peak = self.storages.peak
            self._live = self.storages.now
            self.work_before_update = (self.kernels, self.bytes_moved)
            self.updated = tuple(i for i, p in enumerate(self._parameters) if p.grad is not None)

    def step_events(self) -> StepEvents:
        """Return the step without its optimizer's part, once it is over."""
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
        """Note what a convolution may need for itself: its tensors in another layout, or its input unfolded."""
        if func._schema.name in _CONVOLUTIONS:
            self._convolve(func, args, out)

    def _convolve(self, func: OpOverload, args: Any, out: Any) -> None:
        is_forward = func._schema.name == _CONVOLUTIONS[0]
        taken, weight, given = (args[0], args[1], out) if is_forward else (args[1], args[2], args[0])
        groups = args[8] if is_forward else args[9]
        if groups > 1 and weight.shape[1] == 1:
            return  # depthwise ones run in PyTorch's own kernels, which take nothing for themselves
        convolved = sum(t.numel() * t.element_size() for t in (taken, weight, given))
        self.convolved_max = max(self.convolved_max, convolved)
        if weight.shape[2:].numel() > 1:
            unfolded = given.shape[0] * given.shape[2:].numel() * weight[0].numel() * taken.element_size()
            self.unfolded_max = max(self.unfolded_max, unfolded)


def record_step(
    fake: FakeTraining, batch_size: int, updates: Updates | None = None, remembered: Remembered | None = None
) -> StepRecord:
    """Trace one step closely.

    Args:
        fake: The model.
        batch_size: Samples of the step.
        updates: Other optimizers under which the step is reckoned, too.
        remembered: What operators gave in other steps.
    """
    tracker = DetailTracker(list(fake.model.parameters()), remembered)
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
    """Replay the step twice: the second time it finds the blocks that the first one left."""
    allocator = CachingAllocator()
    reserved_after(events, allocator)
    freed = {number for number, size in events if size < 0}
    # What outlives the step (weights, optimizer state) is there already when it runs again.
    return reserved_after([event for event in events if event[0] in freed], allocator)
