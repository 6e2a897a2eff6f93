"""What each ATen operator costs on a GPU: which launch work, how many kernels, FLOPs and bytes.

Bytes follow the plainest rule, stated so that it can be doubted: an operator reads each of its input tensors once and
writes each of its outputs once, through no cache. FLOPs are those of matrix products and convolutions, by PyTorch's
own formulas (`torch.utils.flop_counter`); element-wise arithmetic is bound by memory and counts as none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

_NO_WORK = frozenset(
    {
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided",
        "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "resize_", "set_",
    }
)  # fmt: skip
"""ATen operators that only allocate or look; views are recognised by their schema."""

_FOREACH_TENSORS = 48
"""Tensors one multi-tensor launch can take (ATen/native/cuda/MultiTensorApply.cuh: 110 to 30 by list depth)."""
_FOREACH_ELEMENTS = 320 * 65536
"""Elements one multi-tensor launch can take: 320 blocks of 65,536 each (same file)."""

_KERNELS = {"native_layer_norm_backward": 2, "native_group_norm_backward": 2}
"""Kernels where one operator launches another number than one."""

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"


def launches_work(func: OpOverload) -> bool:
    """Whether the operator runs a kernel on a GPU, rather than allocating, looking or making a view."""
    namespace, name = func._schema.name.split("::")
    return namespace in ("aten", "torchvision") and not func.is_view and name not in _NO_WORK


def kernel_count(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the number of kernels that the operator launches."""
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        elements: int = sum(t.numel() for t in args[0])
        return max(1, math.ceil(len(args[0]) / _FOREACH_TENSORS), math.ceil(elements / _FOREACH_ELEMENTS))
    if name == "convolution_backward":
        return sum(bool(wanted) for wanted in args[-1])
    if name.startswith("_scaled_dot_product") and name.endswith("_backward"):
        return 3
    return _KERNELS.get(name, 1)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or outputs; operators nest lists one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor once touches; an expanded dimension is read from one place."""
    size = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size * tensor.element_size()


def bytes_moved(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the operator reads and writes."""
    return sum(map(tensor_bytes, tensors_in(*args, *kwargs.values()))) + sum(
        map(tensor_bytes, tensors_in(*out) if isinstance(out, (list, tuple)) else tensors_in(out))
    )


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of attention: two products of (queries × keys), over the heads' widths.

    Args:
        query: Shape (batch, heads, queries, width).
        key: Shape (batch, heads, keys, width).
        value: Shape (batch, heads, keys, value width).
    """
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of attention's backward pass: scores again, then four products (FlashAttention, appendix B)."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


def flop_formula(func: OpOverload) -> Callable[..., float] | None:
    """Return the operator's FLOPs as a function of (args, kwargs, out); None where it counts as none.

    Attention on the CPU has formulas of our own, because not every PyTorch counts its operators.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == _SDPA:
        return lambda args, kwargs, out: attention_flops(*(t.shape for t in args[:3]))
    if name == f"{_SDPA}_backward":
        return lambda args, kwargs, out: attention_backward_flops(*(t.shape for t in args[1:4]))
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, out: formula(*args, **kwargs, out_val=out)


class Costs:
    """Looks operators up once; a step calls the same few hundred times."""

    def __init__(self) -> None:
        self._known: dict[OpOverload, tuple[bool, Callable[..., float] | None]] = {}

    def of(self, func: OpOverload) -> tuple[bool, Callable[..., float] | None]:
        """Return whether the operator launches work, and its FLOP formula."""
        found = self._known.get(func)
        if found is None:
            found = self._known[func] = (launches_work(func), flop_formula(func))
        return found


PRIM_DEVICE = torch.ops.prim.device.default
"""Asked dozens of times an operator on fake tensors; trackers pass it on at once."""
