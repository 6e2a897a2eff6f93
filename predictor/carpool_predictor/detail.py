"""A closer look at a traced step: what the calibrated models learn from beside the peak.

Workspaces are those of one rule, stated so that it can be doubted: cuDNN's tensor-core convolutions work on
channels-last data, so that each convolution on PyTorch's default layout copies its input, weight and output
(docs.nvidia.com/deeplearning/performance/dl-performance-convolutional, "tensor layouts"). Depthwise convolutions run
in PyTorch's own kernels, which take none.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload

from carpool_predictor.allocator import CachingAllocator, reserved_after
from carpool_predictor.operators import bytes_moved, flop_formula, kernel_count
from carpool_predictor.records import FAMILIES, StepRecord
from carpool_predictor.step import FakeTraining, trace_step
from carpool_predictor.trackers import StepTracker

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
    """Adds kinds of operators, workspaces, and when what was alive."""

    def __init__(self) -> None:
        super().__init__()
        self.by_family: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self.saved_bytes = 0
        self.peak_before_update = 0
        self.workspace_max = 0
        self.workspace_peak = 0
        self.unfolded_max = 0
        self.largest_bytes = 0

    def begin(self, phase: str) -> None:
        """Note what is alive as backward begins, and the peak before the update."""
        if phase == "backward":
            self.saved_bytes = self.storages.total_bytes
        else:
            self.peak_before_update = self.storages.peak.total_bytes

    def observe(self, func: Any, args: Any, out: Any) -> None:
        """Count an operator under its kind, and its workspace if it is a convolution."""
        family = family_of(func, args)
        counts = self.by_family[family]
        counts[0] += kernel_count(func, args)
        counts[2] += bytes_moved(args, {}, out)
        formula = flop_formula(func)
        if formula is not None:
            counts[1] += formula(args, {}, out)
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


def record_step(fake: FakeTraining, batch_size: int) -> StepRecord:
    """Trace one step closely."""
    tracker = DetailTracker()
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
        peak_before_update=tracker.peak_before_update,
        workspace_max=tracker.workspace_max,
        workspace_peak=max(tracker.workspace_peak, step.peak_bytes),
        unfolded_max=tracker.unfolded_max,
        largest_bytes=max((size for _, size in events), default=0),
        reserved_bytes=_reserved(event for event in events if event[0] >= 0),
        reserved_workspace_bytes=_reserved(events),
        families={name: tracker.by_family[name] for name in FAMILIES if name in tracker.by_family},
    )


def _reserved(events: Iterable[tuple[int, int]]) -> int:
    """Replay the step twice: the second time it finds the blocks that the first one left."""
    first = list(events)
    allocator = CachingAllocator()
    reserved_after(first, allocator)
    freed = {number for number, size in first if size < 0}
    # What outlives the step (weights, optimizer state) is there already when it runs again.
    return reserved_after([event for event in first if event[0] in freed], allocator)
