"""Makes CPU tensors compute as CUDA tensors would, where the two differ in what they keep in memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own name for it)
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FULL_PRECISION: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax,
        F.log_softmax, torch.log_softmax, Tensor.log_softmax, F.softplus, torch.exp, Tensor.exp, torch.pow, Tensor.pow,
        torch.rsqrt, Tensor.rsqrt, torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum, torch.norm, Tensor.norm,
    }
)  # fmt: skip
"""Functions that autocast runs in FP32 on CUDA but not on the CPU (aten/src/ATen/autocast_mode.h)."""


class CudaRules(TorchFunctionMode):
    """Overrides functions above autograd.

    Attention with dropout: CUDA's fused kernels draw the mask inside, the CPU falls back to keeping the whole matrix of
    scores, so dropout is left out. Under autocast: CUDA's list of functions that run in FP32.
    """

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change the arguments of the few functions concerned, and call on."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs)
            if args[0].is_meta:
                return _fused_attention(*args, **kwargs)
        elif self._autocast and func in _FULL_PRECISION:
            args = tuple(map(_full, args))
            kwargs = {name: _full(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Signature: query, key, value, attn_mask, dropout_p, is_causal, …
    if len(args) > 4:
        return (*args[:4], 0.0, *args[5:]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *rest: Any, **options: Any
) -> Any:
    """Choose the fused kernel, as both CPU and CUDA do; meta tensors would go through the matrix of scores."""
    is_causal = rest[1] if len(rest) > 1 else options.get("is_causal", False)
    if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]


def _full(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value
