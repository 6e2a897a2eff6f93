"""Autocast for meta tensors, which PyTorch's own autocast ignores; fake tensors would take three times as long.

The lists are CUDA's (aten/src/ATen/autocast_mode.h), as Python functions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own name for it)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from carpool_predictor.features import TraceError
from carpool_predictor.tracing.operators import full_precision

_LOWER: frozenset[Callable[..., Any]] = frozenset(
    {
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear, F.prelu,
        F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.addbmm, torch.addmm, torch.addmv,
        torch.addr, torch.baddbmm, torch.bmm, torch.chain_matmul, torch.einsum, torch.gru, torch.gru_cell, torch.lstm,
        torch.lstm_cell, torch.matmul, torch.mm, torch.mv, torch.prelu, Tensor.__matmul__, Tensor.__rmatmul__,
        Tensor.addmm, Tensor.addmv, Tensor.addr, Tensor.baddbmm, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.mv,
    }
)  # fmt: skip
"""Functions that run in the lower precision."""
_LOSSES: frozenset[Callable[..., Any]] = frozenset(
    {
        F.binary_cross_entropy_with_logits, F.cross_entropy, F.kl_div, F.l1_loss, F.mse_loss, F.nll_loss,
        F.smooth_l1_loss,
    }
)  # fmt: skip
"""Losses that run in FP32; `operators` has the other FP32 functions."""
_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _ATEN.addbmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.bmm.default, _ATEN.conv_tbc.default,
        _ATEN.convolution.default, _ATEN.mm.default,
    }
)  # fmt: skip
"""ATen operators whose arguments autocast would have cast."""


class MetaAutocast(TorchFunctionMode):
    """Casts the arguments of functions to the lower precision above autograd, so that gradients are cast back."""

    def __init__(self, dtype: torch.dtype, *, keeps_casts: bool = True) -> None:
        super().__init__()
        self._dtype = dtype
        # A recomputed block enters and exits autocast by itself, so that its casts live as long as its graph.
        self._keeps_casts = keeps_casts
        self._weights: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the arguments of the listed functions, then call them."""
        kwargs = kwargs or {}
        cast = self._lowered if func in _LOWER else full_precision if func in _LOSSES else None
        if cast is not None:
            args = [_each(value, cast) for value in args]
            kwargs = {name: _each(value, cast) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        """Drop the cast copies of weights, as autocast does on exit."""
        self._weights.clear()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated

    def _lowered(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        if not (self._keeps_casts and tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self._dtype)
        found = self._weights.get(tensor)
        if found is None:
            found = self._weights[tensor] = tensor.to(self._dtype)
        return found


class NoProductMissed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Raises on an FP32 product under `MetaAutocast`, so that the trace is repeated with PyTorch's own autocast.

    The lists of Python functions may miss one, or the model disables autocast itself.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator.

        Raises:
            TraceError: Autocast should have cast its arguments.
        """
        if func in _PRODUCTS and any(isinstance(value, Tensor) and value.dtype is torch.float32 for value in args):
            raise TraceError(
                "OperatorUnsupported",
                f"{func} is not in the list of operators that autocast casts on tensors without data",
            )
        return func(*args, **(kwargs or {}))


def _each(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(item, cast) for item in value]) if type(value) in (list, tuple) else value
    return value
