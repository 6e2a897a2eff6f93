"""A closer look at a traced step: what the calibrated models learn from beside the peak.

Workspaces are those of one rule, stated so that it can be doubted: cuDNN's tensor-core convolutions work on
channels-last data, so that each convolution on PyTorch's default layout copies its input, weight and output
(docs.nvidia.com/deeplearning/performance/dl-performance-convolutional, "tensor layouts"). Depthwise convolutions run
in PyTorch's own kernels, which take none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from carpool_core.values import Optimizer
from torch import Tensor
from torch._ops import OpOverload

from carpool_predictor.allocator import CachingAllocator, reserved_after
from carpool_predictor.records import FAMILIES, StepRecord, UpdateRecord
from carpool_predictor.remembering import Remembered
from carpool_predictor.step import FakeTraining, trace_step
from carpool_predictor.trackers import Peak, StepTracker
from carpool_predictor.updates import StepEvents, Updates, under

_MATRIX = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation"})
_POOLS = ("max_pool", "avg_pool", "adaptive_", "upsample", "_upsample", "grid_sampler", "im2col", "col2im")


def family_of(func: OpOverload, args: Any) -> str:
    """Return the kind of operator, one of `records.FAMILIES`."""
    name: str = func._schema.name.removeprefix("aten::")
    if name in ("convolution", "convolution_backward"):
        return "depthwise" if _is_depthwise(name, args) else "convolution"
    if name in _MATRIX:
        return "matrix"
    prefixes = (
        ("attention", ("_scaled_dot_product",)),
        ("normalization", ("native_", "cudnn_batch_norm", "batch_norm", "_native_batch")),
        ("softmax", ("_softmax", "_log_softmax", "softmax")),
        ("pooling", _POOLS),
        ("update", ("_foreach_", "_fused_")),
        (
            "copy",
            ("cat", "copy_", "clone", "_to_copy", "index", "slice", "select", "constant_pad", "roll", "embedding"),
        ),
        ("reduction", ("sum", "mean", "var", "max", "min", "linalg", "norm", "std", "cumsum", "nll_loss")),
    )
    return next((family for family, starts in prefixes if name.startswith(starts)), "elementwise")


def _is_depthwise(name: str, args: Any) -> bool:
    groups, weight = (args[8], args[1]) if name == "convolution" else (args[9], args[2])
    return bool(groups > 1 and weight.shape[1] == 1)


class DetailTracker(StepTracker):  # type: ignore[no-untyped-call]  # as its parent
    """Adds kinds of operators, workspaces, and when what was alive.

    Args:
        parameters: The model's.
        remembered: What operators gave in other steps.
    """

    def __init__(self, parameters: Sequence[Tensor] = (), remembered: Remembered | None = None) -> None:
        super().__init__(remembered)
        self.by_family: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self.saved_bytes = 0
        self.peak_before_update = Peak(0, ())
        self.workspace_max = 0
        self.workspace_peak = 0
        self.unfolded_max = 0
        self.largest_bytes = 0
        self.updated: tuple[int, ...] = ()
        """Positions of the parameters that have a gradient as the update begins."""
        self.work_before_update = (0, 0.0)
        """Kernels and bytes moved."""
        self._parameters = parameters
        self._live = Peak(0, ())
        self._begun: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Note what is alive as backward begins, and all that another update would set out from."""
        self._begun[phase] = len(self.storages.events)
        if phase == "backward":
            self.saved_bytes = self.storages.total_bytes
        elif phase == "update":
            self.peak_before_update = self.storages.peak
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
            before_state=_allocated(events[: begun["state"]]),
            before_update=_allocated(events[begun["forward"] : begun["update"]]),
            releases=_allocated(event for event in after if event[0] in known),
            peak_bytes=self.peak_before_update.total_bytes - state,
            activation_bytes=self.peak_before_update.activation_bytes,
            live_bytes=self._live.total_bytes - state,
            live_activation_bytes=self._live.activation_bytes,
        )

    def observe(self, func: Any, args: Any, out: Any, work: tuple[int, float, int]) -> None:
        """Count an operator under its kind, and its workspace if it is a convolution."""
        family = family_of(func, args)
        counts = self.by_family[family]
        for place, count in enumerate(work):
            counts[place] += count
        if family == "convolution":
            self._convolve(func, args, out)

    def _convolve(self, func: OpOverload, args: Any, out: Any) -> None:
        forward = func._schema.name == "aten::convolution"
        taken, weight, given = (args[0], args[1], out) if forward else (args[1], args[2], args[0])
        workspace = sum(t.numel() * t.element_size() for t in (taken, weight, given))
        self.storages.pass_through(workspace)
        self.workspace_max = max(self.workspace_max, workspace)
        self.workspace_peak = max(self.workspace_peak, self.storages.total_bytes + workspace)
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
        by_kind=tracker.storages.peak.by_kind,
        saved_bytes=tracker.saved_bytes,
        peak_before_update=tracker.peak_before_update.total_bytes,
        workspace_max=tracker.workspace_max,
        workspace_peak=max(tracker.workspace_peak, step.peak_bytes),
        unfolded_max=tracker.unfolded_max,
        largest_bytes=max((size for _, size in events), default=0),
        reserved_bytes=_reserved(_allocated(events)),
        reserved_workspace_bytes=_reserved(events),
        families={name: tracker.by_family[name] for name in FAMILIES if name in tracker.by_family},
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


def _allocated(events: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the events of tensors, without those of workspaces."""
    return tuple(event for event in events if event[0] >= 0)


def _reserved(events: Iterable[tuple[int, int]]) -> int:
    """Replay the step twice: the second time it finds the blocks that the first one left."""
    first = list(events)
    allocator = CachingAllocator()
    reserved_after(first, allocator)
    freed = {number for number, size in first if size < 0}
    # What outlives the step (weights, optimizer state) is there already when it runs again.
    return reserved_after([event for event in first if event[0] in freed], allocator)
