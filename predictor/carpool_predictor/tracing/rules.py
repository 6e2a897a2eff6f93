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
            if _is_fusable(*args, **kwargs):
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


def _is_fusable(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *_: Any, **options: Any) -> bool:
    bias = options.get("attn_mask", bias)
    if query.dim() != 4 or key.dim() != 4:
        return False
    # Without data nobody minds that keys have fewer heads than queries; on CUDA the fused kernels take them so.
    return query.is_meta or (not options.get("enable_gqa", False) and bias is not None and bias.requires_grad)


class _BiasGradient(torch.autograd.Function):
    """Passes attention's output through, and on the way back gives a trainable bias its gradient.

    CUDA's memory-efficient kernel writes that gradient for each pair of query and key, and then sums it to the bias'
    own shape; it does not keep the scores, as the CPU does.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor, scores: tuple[int, ...]) -> Tensor:
        ctx.scores, ctx.shape, ctx.dtype = scores, bias.shape, bias.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scores = gradients[0].new_empty(ctx.scores, dtype=ctx.dtype)
        return gradients[0], scores.sum_to_size(ctx.shape), None


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Choose the fused kernel, as CUDA does where the CPU and meta tensors would keep the matrix of scores."""
    bias = options.pop("attn_mask", bias)
    is_causal = rest[1] if len(rest) > 1 else options.get("is_causal", False)
    constant = None if bias is None else bias.detach()
    if constant is not None and constant.dtype is torch.bool:
        constant = torch.empty_like(constant, dtype=query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=constant, scale=options.get("scale"))[0]
    if bias is None or not bias.requires_grad:
        return out
    passed: Tensor = _BiasGradient.apply(out, bias, (*query.shape[:-1], key.shape[-2]))
    return passed


def _full(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value
