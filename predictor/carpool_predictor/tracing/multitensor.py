"""An optimizer's multi-tensor operators on tensors without data: PyTorch works them out tensor by tensor, in Python.

That is half of a trace. What such an operator gives is known without asking: one tensor like each of the first list, or
nothing where it writes into that list.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_PREFIX = "aten::_foreach_"
_LIKE_THE_FIRST = frozenset(
    {"add", "addcdiv", "addcmul", "div", "lerp", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "sqrt", "sub"}
)
"""Operators that keep shape and type of the first list, where an optimizer calls them."""


@cache
def is_answered(func: OpOverload) -> bool:
    """Whether `answer` knows what the operator gives."""
    name = func._schema.name
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).removesuffix("_") in _LIKE_THE_FIRST


def answer(func: OpOverload, args: Sequence[Any]) -> list[Tensor] | None:
    """Return what the operator gives on tensors of the device `meta`."""
    return None if func._schema.name.endswith("_") else [like(tensor) for tensor in args[0]]


def like(tensor: Tensor) -> Tensor:
    """Return what `torch.empty_like` does, which works out a tensor's layout in Python where it has no data."""
    if not tensor.is_meta or not tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_FULL = frozenset({torch.ops.aten.full_like.default, torch.ops.aten.zeros_like.default})
"""What an optimizer's state is made by."""


class Answered(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Answers these operators, and what makes an optimizer's state, and counts nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or call on."""
        if func in _FULL and args[0].is_meta:
            return like(args[0])
        if is_answered(func) and args[0][0].is_meta:
            return answer(func, args)
        return func(*args, **(kwargs or {}))
