"""Tensors that autograd keeps for the backward pass, where `torch.compile` or offloading keeps fewer."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from carpool_predictor.tracing.operators import tensors_in

_FUSED = frozenset(
    {
        "add", "add_", "cat", "clamp", "cos", "div", "dropout", "exp", "float", "gelu", "group_norm",
        "layer_norm", "log_softmax", "masked_fill", "mean", "mul", "mul_", "neg", "pow", "relu", "rms_norm", "rsqrt",
        "rsub", "sigmoid", "silu", "sin", "softmax", "softplus", "square", "sub", "sum", "tanh", "to", "type_as", "var",
        "where",
    }
)  # fmt: skip
"""Functions that Inductor fuses, and whose outputs it computes again in the backward pass."""
_SMALL = 8
"""Inputs that are so many times smaller than the output count as small."""
_LEAST_OFFLOADED = 1024
"""Bytes of the smallest tensor that is moved to the host."""
_STASHED = 5
"""Tensors on their way to the host; both numbers are torchtune's (training/_activation_offloading.py)."""


class KeptTensors(TorchFunctionMode):
    """Drops what the backward pass gets in another way, and keeps what that takes.

    A compiled model keeps operands of matrix products, of convolutions and of attention, and outputs from which fused
    functions start. The rule reproduces the choice of PyTorch's partitioner (torch/_functorch/partitioners.py,
    `min_cut_rematerialization_partition`) for a transformer's block. Offloaded tensors are on the host.
    """

    def __init__(self, permanent: Iterable[Tensor], *, compiled: bool, offloaded: bool) -> None:
        super().__init__()
        self._permanent = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in permanent})
        self._sources = WeakIdKeyDictionary()
        """Tensors from which the content of a storage can be computed again, by storage."""
        self._compiled, self._offloaded = compiled, offloaded
        self._inputs: dict[Any, Tensor] = {}
        """Inputs of the fused function that runs, by storage."""
        self._computed_from: tuple[Tensor, ...] = ()
        self._stash: deque[Tensor] = deque(maxlen=_STASHED)
        self._stack = ExitStack()

    def __enter__(self) -> "KeptTensors":
        """Begin with the forward pass."""
        if self._compiled:
            super().__enter__()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
            self._stack.callback(super().__exit__, None, None, None)
        self._stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        return self

    def __exit__(self, *exception: Any) -> None:
        """End with the forward pass."""
        self._stack.close()
        self._stash.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note from what its output can be computed."""
        if getattr(func, "__name__", "") not in _FUSED:
            return func(*args, **(kwargs or {}))
        self._inputs = {tensor.untyped_storage(): tensor for tensor in tensors_in(*args)}
        sources = {id(source): source for tensor in self._inputs.values() for source in self._sources_of(tensor)}
        self._computed_from = tuple(sources.values())
        try:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage() not in self._inputs:
                large = [source for source in self._computed_from if source.numel() * _SMALL >= out.numel()]
                if len(large) < 2:  # a sum of two tensors is kept instead of both
                    self._sources[out.untyped_storage()] = self._computed_from
        finally:
            self._inputs, self._computed_from = {}, ()
        return out

    def _sources_of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        storage = tensor.untyped_storage()
        found: tuple[Tensor, ...] = self._sources.get(storage, (tensor,))  # type: ignore[no-untyped-call]
        return found

    def _pack(self, tensor: Tensor) -> tuple[Callable[[], Tensor], tuple[Any, ...]]:
        """Return how the backward pass gets the tensor, and what is kept for it."""
        storage = tensor.untyped_storage()
        if storage in self._permanent:
            return (lambda: tensor), ()
        kept: tuple[Tensor | None, ...] = (tensor,)
        if self._inputs:
            kept = self._sources_of(tensor) if storage in self._inputs else self._computed_from
        if self._offloaded:
            kept = tuple(map(self._offload, kept))
        if len(kept) == 1 and kept[0] is tensor:
            return (lambda: tensor), ()
        shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return (lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)), kept

    def _offload(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.untyped_storage() in self._permanent:
            return tensor
        if tensor.numel() * tensor.element_size() < _LEAST_OFFLOADED:
            return tensor
        self._stash.append(tensor)
        return None


def _unpack(packed: tuple[Callable[[], Tensor], tuple[Any, ...]]) -> Tensor:
    return packed[0]()
