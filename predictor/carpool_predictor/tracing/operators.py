"""Cost of each ATen operator on a GPU (kernels, FLOPs, bytes), CUDA's behaviour on the CPU, and cached results.

Bytes: an operator reads each input tensor once and writes each output once, without caches. FLOPs: matrix products and
convolutions by `torch.utils.flop_counter`; element-wise arithmetic is bound by memory and counts as none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch uses)
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_NO_WORK = frozenset(
    {
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided",
        "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "resize_", "set_",
    }
)  # fmt: skip
"""ATen operators that only allocate or inspect; views are recognised by their schema."""

_FOREACH_TENSORS = 48
"""Tensors one multi-tensor launch can take (ATen/native/cuda/MultiTensorApply.cuh: 110 to 30 by list depth)."""
_FOREACH_ELEMENTS = 320 * 65536
"""Elements one multi-tensor launch can take: 320 blocks of 65,536 each (same file)."""

_KERNELS = {"native_layer_norm_backward": 2, "native_group_norm_backward": 2}
"""Number of kernels of operators that do not launch exactly one."""

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"


def launches_work(func: OpOverload) -> bool:
    """Whether the operator runs a kernel on a GPU; allocations, inspections and views do not."""
    namespace, name = func._schema.name.split("::")
    return namespace in ("aten", "torchvision") and not func.is_view and name not in _NO_WORK


def kernel_count(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the number of kernels that the operator launches."""
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
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


def outputs_of(out: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator returned."""
    return tensors_in(*out) if isinstance(out, (list, tuple)) else tensors_in(out)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of reading a tensor once; an expanded dimension counts once."""
    size = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size * tensor.element_size()


def bytes_moved(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the operator reads and writes."""
    return sum(map(tensor_bytes, tensors_in(*args, *kwargs.values()))) + sum(map(tensor_bytes, outputs_of(out)))


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of attention: two products of (queries × keys), over the heads' widths.

    Shapes are (batch, heads, queries or keys, width).
    """
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of attention's backward pass: scores again, then four products (FlashAttention, appendix B)."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


def grouped_flops(rows: Sequence[int], columns: Sequence[int]) -> int:
    """Return the FLOPs of a product whose groups, such as experts, divide the rows or the inner dimension."""
    return 2 * rows[-2] * rows[-1] * columns[-1]


def flop_formula(func: OpOverload) -> Callable[..., float] | None:
    """Return the operator's FLOPs as a function of (args, kwargs, out); None if it counts as none.

    Attention on the CPU and grouped products have their own formulas, because PyTorch lacks them.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == _SDPA:
        return lambda args, kwargs, out: attention_flops(*(t.shape for t in args[:3]))
    if name == f"{_SDPA}_backward":
        return lambda args, kwargs, out: attention_backward_flops(*(t.shape for t in args[1:4]))
    if name == "_grouped_mm":
        return lambda args, kwargs, out: grouped_flops(args[0].shape, args[1].shape)
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, out: formula(*args, **kwargs, out_val=out)


@cache
def cost_of(func: OpOverload) -> tuple[bool, Callable[..., float] | None]:
    """Return whether the operator launches work, and its FLOP formula."""
    return launches_work(func), flop_formula(func)


PRIM_DEVICE = torch.ops.prim.device.default
"""Called dozens of times per operator on fake tensors; trackers skip it."""


_FULL_PRECISION: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax,
        F.log_softmax, torch.log_softmax, Tensor.log_softmax, F.softplus, torch.exp, Tensor.exp, torch.pow, Tensor.pow,
        torch.rsqrt, Tensor.rsqrt, torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum, torch.norm, Tensor.norm,
    }
)  # fmt: skip
"""Functions that autocast runs in FP32 on CUDA but not on the CPU (aten/src/ATen/autocast_mode.h)."""


class CudaRules(TorchFunctionMode):
    """Makes functions above autograd behave as on CUDA.

    CUDA's fused attention draws the dropout mask internally, while the CPU would keep the matrix of scores: dropout is
    dropped. Under autocast, CUDA's FP32 functions get FP32 arguments.
    """

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change the arguments of the listed functions, then call them."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # PyTorch leaves a mode while it handles a function, so that the call inside would not come here.
            with patch.object(F, "scaled_dot_product_attention", _attention):
                return func(*args, **kwargs)
        if self._autocast and func in _FULL_PRECISION:
            args = tuple(map(full_precision, args))
            kwargs = {name: full_precision(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


_ATTENTION = F.scaled_dot_product_attention


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute attention without dropout, fused if CUDA has a kernel for it."""
    args, kwargs = _without_dropout(args, kwargs)
    return _fused_attention(*args, **kwargs) if _is_fusable(*args, **kwargs) else _ATTENTION(*args, **kwargs)


def _without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Signature: query, key, value, attn_mask, dropout_p, is_causal, …
    if len(args) > 4:
        return (*args[:4], 0.0, *args[5:]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _is_fusable(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *_: Any, **options: Any) -> bool:
    bias = options.get("attn_mask", bias)
    if query.dim() != 4 or key.dim() != 4:
        return False
    # On meta tensors keys may have fewer heads than queries, as in CUDA's fused kernels.
    return query.is_meta or (not options.get("enable_gqa", False) and bias is not None and bias.requires_grad)


class _BiasGradient(torch.autograd.Function):
    """Passes attention's output through, and returns the gradient of a trainable bias in the backward pass.

    CUDA's memory-efficient kernel writes that gradient per pair of query and key, then sums it to the bias' shape; it
    does not keep the scores.
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
    """Call the fused kernel, as CUDA does; the CPU and meta tensors would keep the matrix of scores."""
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


def full_precision(value: Any) -> Any:
    """Return a 16-bit tensor in FP32; other values unchanged."""
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_aten = torch.ops.aten
_PER_CHANNEL = frozenset({_aten.native_batch_norm.default, _aten.native_batch_norm_backward.default})
"""Operators whose outputs depend on the number of channels only, besides one like the first input."""


class OperatorCache:
    """Calls operators on meta tensors, and caches the layouts of their outputs by the layouts of their arguments."""

    def __init__(self) -> None:
        self._candidates: dict[OpOverload, bool] = {}
        self._outputs: dict[tuple[Any, ...], tuple[type, list[_Layout | None]] | None] = {}
        """Output layouts by operator and argument layouts; None if the operator returns its first argument."""

    def call(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)`, or new tensors of the same layouts."""
        candidate = self._candidates.get(func)
        if candidate is None:
            candidate = self._candidates[func] = not func.is_view and func.namespace == "aten"
        if not candidate or not _is_on_meta(args):
            return func(*args, **kwargs)
        is_coarse = func in _PER_CHANNEL and all(tensor.is_contiguous() for tensor in tensors_in(*args))
        look = _channels_of if is_coarse else _layout_of
        key = (func, *map(look, args), *((name, _layout_of(value)) for name, value in kwargs.items()))
        if key not in self._outputs:
            return self._first(key, func, args, kwargs)
        found = self._outputs[key]
        if found is None:
            return args[0]
        kind, layouts = found
        tensors = [None if layout is None else _empty(layout) for layout in layouts]
        if is_coarse and tensors[0] is not None:
            tensors[0] = _empty(_layout_of(args[0]))
        return tensors[0] if kind is Tensor else kind(tensors)

    def _first(self, key: tuple[Any, ...], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        memory = args[0].untyped_storage()._cdata if isinstance(args[0], Tensor) else None
        out = func(*args, **kwargs)
        if out is args[0] and (_layout_of(out), out.untyped_storage()._cdata) == (key[1], memory):
            self._outputs[key] = None
        elif not func._schema.is_mutable and _is_new(out, args):
            kind = Tensor if isinstance(out, Tensor) else type(out)
            self._outputs[key] = kind, list(map(_layout_of, [out] if kind is Tensor else out))
        else:
            self._candidates[func] = False
        return out


def _is_on_meta(args: Sequence[Any]) -> bool:
    found = False
    for tensor in tensors_in(*args):
        if not tensor.is_meta:
            return False
        found = True
    return found


def _is_new(out: Any, args: Sequence[Any]) -> bool:
    """Whether all outputs are tensors with their own storage of the size of their layout."""
    outputs = [out] if isinstance(out, Tensor) else out
    if type(outputs) not in (list, tuple) or not all(o is None or (type(o) is Tensor and o.is_meta) for o in outputs):
        return False
    made = [tensor.untyped_storage() for tensor in outputs if tensor is not None]
    alike = [_empty(_layout_of(tensor)).untyped_storage() for tensor in outputs if tensor is not None]
    memory = {storage._cdata for storage in made}
    return (
        len(memory) == len(made)
        and memory.isdisjoint(tensor.untyped_storage()._cdata for tensor in tensors_in(*args))
        and [storage.nbytes() for storage in made] == [storage.nbytes() for storage in alike]
    )


def _layout_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout_of, value))
    return None if value is None else (type(value), value)  # 1, 1.0 and True are equal, and give other types


def _channels_of(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() > 1:
        return value.shape[1], value.dtype, value.dim()
    return _layout_of(value)


def _empty(layout: _Layout) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


_PREFIX = "aten::_foreach_"
_LIKE_THE_FIRST = frozenset(
    {"add", "addcdiv", "addcmul", "div", "lerp", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "sqrt", "sub"}
)
"""Multi-tensor operators that keep shape and type of the first list."""


@cache
def is_answered(func: OpOverload) -> bool:
    """Whether `answer` can compute the operator's output."""
    name = func._schema.name
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).removesuffix("_") in _LIKE_THE_FIRST


def answer(func: OpOverload, args: Sequence[Any]) -> list[Tensor] | None:
    """Return the operator's output on meta tensors."""
    return None if func._schema.name.endswith("_") else [like(tensor) for tensor in args[0]]


def like(tensor: Tensor) -> Tensor:
    """Return `torch.empty_like(tensor)`, faster for contiguous meta tensors."""
    if not tensor.is_meta or not tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_FULL = frozenset({torch.ops.aten.full_like.default, torch.ops.aten.zeros_like.default})
"""Operators that create optimizer state."""


class ForeachMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Computes multi-tensor operators and the creation of optimizer state on meta tensors, without tracking."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the output, or call the operator."""
        if func in _FULL and args[0].is_meta:
            return like(args[0])
        if is_answered(func) and args[0][0].is_meta:
            return answer(func, args)
        return func(*args, **(kwargs or {}))
