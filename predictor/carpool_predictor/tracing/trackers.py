"""Follows one training step on fake tensors: live memory and its composition, FLOPs, bytes moved, kernels."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from carpool_predictor.tracing import multitensor
from carpool_predictor.tracing.operators import PRIM_DEVICE, Costs, bytes_moved, kernel_count, tensors_in
from carpool_predictor.tracing.remembering import Remembered

_GRANULE = 512
"""CUDA's caching allocator rounds each block up to 512 bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


class Kind(IntEnum):
    """What a live storage is for."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    INPUT = 4
    ACTIVATION = 5
    TEMPORARY = 6


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most live memory."""

    total_bytes: int
    by_kind: tuple[int, ...]
    """Bytes of each `Kind`, indexed by it."""

    @property
    def activation_bytes(self) -> int:
        """Activations and temporaries, which are what grows with the batch besides the inputs."""
        return self.by_kind[Kind.ACTIVATION] + self.by_kind[Kind.TEMPORARY]


class LiveStorages:
    """Counts the storages that are alive, by weak references: what Python and autograd release stops counting."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], int, Kind, int]] = {}
        self._numbers = count()
        self._by_kind = [0] * len(Kind)
        self._total = 0
        self.peak = Peak(0, tuple(self._by_kind))
        self.events: list[tuple[int, int]] = []
        """(number, bytes) of each storage as it begins to live, (number, -1) as it ends: what `allocator` replays."""

    @property
    def total_bytes(self) -> int:
        """Bytes alive now."""
        return self._total

    @property
    def now(self) -> Peak:
        """What is alive now."""
        return Peak(self._total, tuple(self._by_kind))

    def adopt(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count the tensors' storages unless they are counted already, and note the peak."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            size = -(-storage.nbytes() // _GRANULE) * _GRANULE
            number = next(self._numbers)
            self._live[key] = (weakref.ref(storage, partial(self._release, key)), size, kind, number)
            self.events.append((number, size))
            self._by_kind[kind] += size
            self._total += size
        if self._total > self.peak.total_bytes:
            self.peak = self.now

    def reclassify(self, tensor: Tensor, kind: Kind) -> None:
        """Count a live storage as another kind, such as a gradient once it has accumulated."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            reference, size, before, number = self._live[key]
            self._by_kind[before] -= size
            self._by_kind[kind] += size
            self._live[key] = (reference, size, kind, number)

    def _release(self, key: int, _: Any) -> None:
        _, size, kind, number = self._live.pop(key)
        self.events.append((number, -1))
        self._by_kind[kind] -= size
        self._total -= size


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Sees every operator of a step below autograd and autocast, on the way to the fake kernels."""

    def __init__(self, remembered: Remembered | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = LiveStorages()
        self.kind = Kind.ACTIVATION
        """Kind of what the operators allocate now; the step sets it when it goes from forward to backward."""
        self.flops = 0.0
        self.bytes_moved = 0.0
        self.kernels = 0
        self._costs = Costs()
        self._remembered = remembered or Remembered()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count it."""
        kwargs = kwargs or {}
        if multitensor.is_answered(func) and args[0][0].is_meta:
            out = multitensor.answer(func, args)
        else:
            out = self._remembered.call(func, args, kwargs)
        if func is PRIM_DEVICE:
            return out
        works, formula = self._costs.of(func)
        if works:
            self.kernels += kernel_count(func, args)
            self.bytes_moved += bytes_moved(args, kwargs, out)
        if formula is not None:
            self.flops += formula(args, kwargs, out)
        self.storages.adopt(tensors_in(*out) if isinstance(out, (list, tuple)) else tensors_in(out), self.kind)
        if works:
            self.observe(func, args, out)
        return out

    def begin(self, phase: str) -> None:
        """Hear that a phase begins, the optimizer's state or an input is adopted; for trackers that look closer."""

    def observe(self, func: Any, args: Any, out: Any) -> None:
        """See an operator that launches work, after it was counted; for trackers that look closer."""
