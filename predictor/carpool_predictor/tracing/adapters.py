"""Adapters and quantised weights of a model on tensors without data.

LoRA is computed as `peft` does; NF4 and int8 are stored and multiplied as by bitsandbytes. Neither library is needed.

| storage | bytes per weight | source |
|---|---|---|
| nf4 | 1/2 + 4/64 | bitsandbytes/functional.py, quantize_4bit: blocks of 64 with an FP32 maximum |
| nf4-double | 1/2 + 1/64 + 4/(64 · 256) | arXiv 2305.14314, section 3: the maxima in 8 bits, in blocks of 256 |
| int8 | 1, and 4 per output | bitsandbytes/nn/modules.py, Int8Params: FP32 maxima of rows |
"""

import difflib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch uses)
from carpool_core.resources.features import ALL_LINEAR, Adapter
from carpool_core.resources.job import Training
from carpool_core.values import Precision, Quantization
from torch import Tensor, nn

from carpool_predictor.features import TraceError

_STORED_BYTES: dict[Quantization, Callable[[int, int], tuple[int, int]]] = {
    Quantization.NF4: lambda weights, _: (-(-weights // 2), 4 * -(-weights // 64)),
    Quantization.NF4_DOUBLE: lambda weights, _: (-(-weights // 2), -(-weights // 64) + 4 * -(-weights // (64 * 256))),
    Quantization.INT8: lambda weights, outputs: (weights, 4 * outputs),
}
"""Bytes of a quantised matrix and of its maxima, from its numbers of weights and outputs.

Maxima are no parameters: sharded jobs have all of them on each GPU (fsdp_qlora's train.py says so)."""


def _store(module: nn.Module, kind: Quantization, *matrices: tuple[int, int]) -> None:
    """Register the bytes of a module's quantised matrices, of which weights and outputs are given."""
    weights, maxima = map(sum, zip(*(_STORED_BYTES[kind](*matrix) for matrix in matrices), strict=True))
    module.register_buffer("quantized", torch.empty(weights, dtype=torch.uint8))
    module.register_buffer("maxima", torch.empty(maxima, dtype=torch.uint8))
    module.quantized_parameters = sum(weights for weights, _ in matrices)  # type: ignore[assignment]


_PRODUCTS = {
    Precision.FP32: torch.float32, Precision.TF32: torch.float32, Precision.FP16_MIXED: torch.float16
}  # fmt: skip
"""Type of dequantised weights by precision, if not BF16."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with quantised weights, which each pass dequantises into the type of the products."""

    def __init__(self, layer: nn.Module, kind: Quantization, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features_of(layer)
        _store(self, kind, (self.in_features * self.out_features, self.out_features))
        self.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
        # bitsandbytes' int8 product keeps its input (autograd/_functions.py, MatMul8bitLt); the 4-bit one does not.
        self._keeps_input, self._dtype = kind is Quantization.INT8, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the input's type."""
        shape = (self.out_features, self.in_features)
        bias = None if self.bias is None else self.bias.to(self._dtype)
        out: Tensor = _QuantizedProduct.apply(x.to(self._dtype), shape, bias, self._keeps_input)
        return out.to(x.dtype)


class _QuantizedProduct(torch.autograd.Function):
    """`F.linear` with a weight that exists during the pass only (bitsandbytes/autograd/_functions.py, MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None, keeps_input: bool) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*([x] if keeps_input else []))
        return F.linear(x, x.new_zeros(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (gradient,) = gradients
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ gradient.new_zeros(ctx.shape), None, bias, None


def _quantize_experts(module: nn.Module, kind: Quantization, dtype: torch.dtype) -> None:
    """Store a module's stacked matrices of experts in 4 bits; each access dequantises them all.

    bitsandbytes does so (nn/parametrize.py, replace_parameter_4bit), and has no such function for int8.
    """
    stacked = {
        name: weight.shape for name, weight in module._parameters.items() if weight is not None and weight.dim() == 3
    }
    if not stacked or kind is Quantization.INT8:
        return

    def dequantised(shape: torch.Size) -> property:
        return property(lambda module: module.quantized.new_zeros(shape, dtype=dtype))

    for name in stacked:
        del module._parameters[name]
    _store(module, kind, *((shape.numel(), shape[-1]) for shape in stacked.values()))
    own = {name: dequantised(shape) for name, shape in stacked.items()}
    module.__class__ = type(type(module).__name__, (type(module),), own)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank product beside it (peft/tuners/lora/layer.py, Linear.forward).

    The matrices are FP32 also beside 16-bit weights (`autocast_adapter_dtype`), and multiply in the type of the input.
    """

    def __init__(self, layer: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        inputs, outputs = features_of(layer)
        self.base_layer = layer
        self.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else nn.Identity()
        self.lora_A = nn.Linear(inputs, adapter.rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(adapter.rank, outputs, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the scaled low-rank product."""
        result: Tensor = self.base_layer(x)
        own = self.lora_dropout(x.to(torch.float32)).to(x.dtype)
        own = F.linear(F.linear(own, self.lora_A.weight.to(x.dtype)), self.lora_B.weight.to(x.dtype))
        return (result + own * 2.0).to(result.dtype)


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and outputs of a linear layer, or of the transposed one that Hugging Face calls Conv1D."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape  # type: ignore[misc]
    return int(inputs), int(outputs)


def adapt(model: nn.Module, training: Training) -> None:
    """Freeze a model, quantise its linear layers but the head, and add the adapter that is trained.

    Raises:
        TraceError: Quantised weights have no adapter, or no layer has the name of a target.
    """
    adapter, quantization = training.adapter, training.quantization
    if adapter is None:
        if quantization is not None:
            raise TraceError(
                "AdapterInvalid",
                "quantized weights are frozen, so that training.quantization needs training.adapter; "
                "add an adapter, such as {kind: lora, rank: 8}",
            )
        return
    model.requires_grad_(False)
    linear = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) or (type(layer).__name__ == "Conv1D" and hasattr(layer, "weight"))
    ]
    body = [name for name, _ in linear[:-1]]
    wanted = _targets(adapter, [name for name, _ in linear], body)
    dtype = _PRODUCTS.get(training.precision, torch.bfloat16)
    if quantization is not None:
        for module in list(model.modules()):
            _quantize_experts(module, quantization, dtype)
    for name, layer in linear:
        made = layer
        if quantization is not None and name in body:
            made = QuantizedLinear(layer, quantization, dtype)
        if name in wanted:
            made = LoraLinear(made, adapter)
        if made is not layer:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)


def _targets(adapter: Adapter, names: list[str], body: list[str]) -> set[str]:
    """Return the names of the layers that get an adapter."""
    wanted: set[str] = set()
    for target in adapter.targets or [ALL_LINEAR]:
        found = body if target == ALL_LINEAR else [n for n in names if n == target or n.endswith(f".{target}")]
        if not found:
            lasts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            near = difflib.get_close_matches(target, lasts, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            has = ", ".join(lasts[:12]) if lasts else "none"
            raise TraceError(
                "AdapterInvalid",
                f"expected names of linear layers in training.adapter.targets, found {target!r}; {hint}"
                f"The model's linear layers are {has}",
            )
        wanted.update(found)
    return wanted


def quantized_weights(model: nn.Module) -> list[Tensor]:
    """Return the bytes of quantised weights, without their maxima."""
    return [module.quantized for module in model.modules() if hasattr(module, "quantized_parameters")]  # type: ignore[misc]  # a buffer


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; quantised weights count, which are stored as bytes."""
    quantized = (getattr(module, "quantized_parameters", 0) for module in model.modules())
    return sum(p.numel() for p in model.parameters()) + sum(quantized)
