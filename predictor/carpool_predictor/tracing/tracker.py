"""Counts memory, FLOPs, bytes and kernels of a training step, operator by operator."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Any

import torch
from carpool_core.resources.features import TracedStep
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from carpool_predictor.tracing import operators
from carpool_predictor.tracing.allocator import GRANULE, reserved_by_training
from carpool_predictor.tracing.operators import OperatorCache

_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


class Kind(IntEnum):
    """Purpose of a live storage."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    INPUT = 4
    ACTIVATION = 5
    TEMPORARY = 6
    QUANTIZED = 7


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most live memory."""

    total_bytes: int
    by_kind: tuple[int, ...]
    """Bytes of each `Kind`, indexed by it."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations and temporaries, which grow with the batch."""
        return self.by_kind[Kind.ACTIVATION] + self.by_kind[Kind.TEMPORARY]


class LiveStorages:
    """Counts live storages by weak references, so that releases by Python and autograd count."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], int, Kind, int]] = {}
        self._numbers = count()
        self._by_kind = [0] * len(Kind)
        self._total = 0
        self.peak = Peak(0, tuple(self._by_kind))
        self.scales: dict[Kind, float] = {}
        """Bytes that count for each byte of a kind, if not 1."""
        self.events: list[tuple[int, int]] = []
        """(number, bytes) of each allocation and (number, -1) of each release, for `allocator`."""
        self.state = slice(0, 0)
        """Events of the optimizer's state."""
        self.update = 0
        """Number of events before the update."""

    @property
    def allocations(self) -> int:
        """Number of allocations so far."""
        return sum(size >= 0 for _, size in self.events)

    def adopt(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count the tensors' storages unless they are counted already, and note the peak."""
        self.adopt_storages((tensor.untyped_storage() for tensor in tensors), kind)

    def adopt_state(self, tensors: Iterable[Tensor]) -> None:
        """Count the optimizer's state."""
        before = len(self.events)
        self.adopt(tensors, Kind.OPTIMIZER)
        self.state = slice(before, len(self.events))

    def adopt_storages(self, storages: Iterable[UntypedStorage], kind: Kind) -> None:
        """Count storages unless they are counted already, and note the peak."""
        for storage in storages:
            key = storage._cdata
            if key in self._live:
                continue
            size = self._size_of(storage, kind)
            number = next(self._numbers)
            self._live[key] = (weakref.ref(storage, partial(self._release, key)), size, kind, number)
            self.events.append((number, size))
            self._by_kind[kind] += size
            self._total += size
        if self._total > self.peak.total_bytes:
            self.peak = Peak(self._total, tuple(self._by_kind))

    def _size_of(self, storage: UntypedStorage, kind: Kind) -> int:
        size: int = -(-int(storage.nbytes() * self.scales.get(kind, 1)) // GRANULE) * GRANULE
        return size

    def reclassify(self, tensor: Tensor, kind: Kind) -> None:
        """Count a live storage as another kind, such as a gradient once it has accumulated."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            return
        reference, size, before, number = self._live[key]
        self._by_kind[before] -= size
        if (counted := self._size_of(storage, kind)) != size:
            self.events.append((number, -1))
            number = next(self._numbers)
            self.events.append((number, counted))
            self._total += counted - size
        self._by_kind[kind] += counted
        self._live[key] = (reference, counted, kind, number)

    def _release(self, key: int, _: Any) -> None:
        _, size, kind, number = self._live.pop(key)
        self.events.append((number, -1))
        self._by_kind[kind] -= size
        self._total -= size


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Intercepts every operator of a step below autograd and autocast, and counts it."""

    def __init__(self, cache: OperatorCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = LiveStorages()
        self.kind = Kind.ACTIVATION
        """Kind of the storages that operators allocate now; the step changes it at the backward pass."""
        self._flops = 0.0
        self._bytes_moved = 0.0
        self._kernels = 0
        self._largest_unfolded = 0
        self._largest_convolution = 0
        self.work_share = 1.0
        """Share of the FLOPs and bytes that is this GPU's."""
        self.is_compiled = False
        """Whether operators are fused: those on single elements read nothing and launch no kernel of their own."""
        self._cache = cache or OperatorCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count it."""
        kwargs = kwargs or {}
        if operators.is_answered(func) and args[0][0].is_meta:
            out = operators.answer(func, args)
        else:
            out = self._cache.call(func, args, kwargs)
        if func is operators.PRIM_DEVICE:
            return out
        works, formula = operators.cost_of(func)
        if works and self.is_compiled and torch.Tag.pointwise in func.tags:
            self._bytes_moved += operators.bytes_moved((), {}, out)
        elif works:
            self._kernels += operators.kernel_count(func, args)
            self._bytes_moved += operators.bytes_moved(args, kwargs, out) * self.work_share
        if formula is not None:
            self._flops += formula(args, kwargs, out) * self.work_share
        self.storages.adopt(operators.outputs_of(out), self.kind)
        if func._schema.name in _CONVOLUTIONS:
            self._count_workspace(func, args, out)
        return out

    def _count_workspace(self, func: OpOverload, args: Any, out: Any) -> None:
        """Record the workspace of a convolution: its tensors in another layout, or its unfolded input (im2col)."""
        is_forward = func._schema.name == _CONVOLUTIONS[0]
        taken, weight, given = (args[0], args[1], out) if is_forward else (args[1], args[2], args[0])
        groups = args[8] if is_forward else args[9]
        if groups > 1 and weight.shape[1] == 1:
            return  # depthwise convolutions run in PyTorch's kernels, without workspace
        together = sum(t.numel() * t.element_size() for t in (taken, weight, given))
        self._largest_convolution = max(self._largest_convolution, together)
        if weight.shape[2:].numel() > 1:
            unfolded = given.shape[0] * given.shape[2:].numel() * weight[0].numel() * taken.element_size()
            self._largest_unfolded = max(self._largest_unfolded, unfolded)

    def repeat(self, passes: int) -> None:
        """Count the work so far as that of so many passes, whose memory is the same."""
        self._flops *= passes
        self._bytes_moved *= passes
        self._kernels *= passes

    def traced(self, batch_size: int) -> TracedStep:
        """Return the finished step."""
        storages = self.storages
        events, peak = storages.events, storages.peak
        return TracedStep(
            batch_size=batch_size,
            peak_bytes=peak.total_bytes,
            activation_bytes=peak.activation_bytes,
            reserved_bytes=reserved_by_training(events, storages.state, storages.update),
            unfolded_bytes=self._largest_unfolded,
            largest_bytes=max(self._largest_convolution, max((size for _, size in events), default=0)),
            flops=float(self._flops),
            bytes_moved=float(self._bytes_moved),
            kernels=self._kernels,
        )
