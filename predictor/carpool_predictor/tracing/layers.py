"""Counts a model's leaf layers by kind, as HotCloud '20 does."""

from carpool_core.resources.features import LayerCounts
from torch import nn

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_ACTIVATION_NAMES = frozenset(
    {
        "celu", "elu", "gelu", "gelutanh", "hardmish", "hardsigmoid", "hardswish", "hardtanh", "leakyrelu",
        "logsigmoid", "logsoftmax", "mish", "prelu", "quickgelu", "relu", "relu6", "selu", "sigmoid", "silu", "softmax",
        "softplus", "softsign", "starrelu", "swish", "tanh", "tanhshrink",
    }
)  # fmt: skip


def kind_of(layer: nn.Module) -> str:
    """Return the `LayerCounts` field that a leaf layer counts under. Libraries' own classes go by their names."""
    name = type(layer).__name__.lower()
    if isinstance(layer, nn.modules.conv._ConvNd):
        return "convolution"
    if isinstance(layer, (nn.Linear, nn.Bilinear)) or name in ("conv1d", "linear"):
        return "linear"  # Hugging Face calls a transposed linear layer Conv1D; PyTorch's own was caught above
    if isinstance(layer, _RECURRENT):
        return "recurrent"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if "norm" in name:
        return "normalization"
    stem = name.removesuffix("me").removesuffix("jit").removesuffix("act")
    return "activation" if stem in _ACTIVATION_NAMES or name in _ACTIVATION_NAMES else "other"


def count_layers(model: nn.Module) -> LayerCounts:
    """Count leaf modules by kind, an identity not at all.

    A recurrent module counts once for each of its layers and directions; and, as in HotCloud '20, each such cell is two
    linear layers besides: the product with its input, and that with its state.
    """
    counts = dict.fromkeys(LayerCounts.__struct_fields__, 0)
    for layer in model.modules():
        if any(True for _ in layer.children()) or isinstance(layer, nn.Identity):
            continue
        kind, cells = kind_of(layer), 1
        if isinstance(layer, nn.RNNBase):
            cells = layer.num_layers * (2 if layer.bidirectional else 1)
        counts[kind] += cells
        if kind == "recurrent":
            counts["linear"] += 2 * cells
    return LayerCounts(**counts)
