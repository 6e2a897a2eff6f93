"""Builds a model on tensors without data and traces its training step at two batch sizes. Imports PyTorch."""

import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import GraphLayer, GraphModel, ModelSource, Training
from carpool_core.values import Precision
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.features import Sample, TraceError
from carpool_predictor.parallel import shares_of
from carpool_predictor.tracing.adapters import adapt, parameter_count, quantized_weights
from carpool_predictor.tracing.operators import OperatorCache
from carpool_predictor.tracing.sharding import bytes_of
from carpool_predictor.tracing.step import (
    FakeTraining,
    TensorMode,
    fake_mode,
    fake_weights,
    meta_mode,
    prepare,
    trace_step,
    trace_varying,
    weight_dtype,
)

T = TypeVar("T")


def explained(what: str, run: Callable[[], T], file: Path | None = None) -> T:
    """Run code of a model, and turn its errors into a TraceError whose message begins with `what`.

    The message names the line of the user's file; catalog models have none.
    """
    try:
        return run()
    except TraceError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        cause = f"the model's graph depends on the data ({_first_line(e)}), so that it has no fixed cost"
        raise TraceError("DataDependentGraph", f"{what}{_place(e, file)}: {cause}") from e
    except UnsupportedOperatorException as e:
        cause = f"no fake kernel for {_first_line(e)}"
        raise TraceError("OperatorUnsupported", f"{what}{_place(e, file)}: {cause}") from e
    except SystemExit as e:
        advice = "put what is not needed to build the model under `if __name__ == '__main__':`"
        raise TraceError("TraceFailed", f"{what}{_place(e, file)}: it ended the process ({e.code}); {advice}") from e
    except Exception as e:
        advice = _advice(e) if file is not None and isinstance(e, ImportError) else ""
        cause = f"{type(e).__name__}: {_first_line(e)}"
        first = _first_cause(e)
        if first is not e and _first_line(first) not in cause:
            cause = f"{cause}; its cause is {type(first).__name__}: {_first_line(first)}"
        raise TraceError("TraceFailed", f"{what}{_place(e, file)}: {cause}{advice}") from e


def _first_cause(error: BaseException) -> BaseException:
    """Return the error that an error was raised from, over all steps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:500]


def _place(error: BaseException, file: Path | None) -> str:
    """Return the innermost traceback line in the user's file, or in a file of its folder."""
    if file is None:
        return ""
    folder = file.parent.resolve()
    # The folder may contain a virtual environment with its libraries.
    libraries = {Path(__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        found = Path(frame.filename).resolve()
        if not found.is_file():
            continue  # code without a file, such as `<frozen importlib._bootstrap>`, resolves to the current folder
        if folder in found.parents and "site-packages" not in found.parts and libraries.isdisjoint(found.parents):
            return f" at {found.relative_to(folder)}, line {frame.lineno}, in {frame.name}"
    return ""


def _advice(error: ImportError) -> str:
    if error.name is None:
        return "; import modules beside the file by their names, without a leading dot"
    return (
        f"; install what provides {error.name} where carpool runs, set PYTHONPATH to where it lies if it is your own, "
        "or name a file that builds the model without it"
    )


Shape = tuple[int, ...]
"""Shape of one sample, without the batch."""


def build_inline(graph: GraphModel) -> nn.Sequential:
    """Build the layers in order, each for the output shape of the previous one.

    Raises:
        TraceError: A layer does not fit its input; the message names the layer and the shape.
    """
    shape = tuple(graph.input)
    layers: list[nn.Module] = []
    for index, layer in enumerate(graph.layers):
        where = f"spec.model.graph.layers[{index}] ({layer.kind})"
        module, out = _BUILDERS[layer.kind](layer, shape, where)
        if min(out, default=1) < 1:
            raise TraceError("GraphInvalid", f"{where} leaves nothing of samples of shape {list(shape)}")
        layers.append(module)
        shape = out
    return nn.Sequential(*layers)


def _wanted(value: int | None, name: str, where: str) -> int:
    if value is None:
        raise TraceError("GraphInvalid", f"{where} needs `{name}`")
    return value


def _image(shape: Shape, where: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise TraceError(
            "GraphInvalid", f"{where} expects samples of shape [channels, height, width], found {list(shape)}"
        )
    return shape[0], shape[1], shape[2]


def _slid(length: int, kernel: int, stride: int, padding: int = 0) -> int:
    """Return the output length of a convolution along one dimension (torch.nn.Conv2d, dilation 1)."""
    return (length + 2 * padding - kernel) // stride + 1


def _linear(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
    out = _wanted(layer.out, "out", where)
    return nn.Linear(shape[-1], out), (*shape[:-1], out)


def _conv(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
    channels, height, width = _image(shape, where)
    out, kernel = _wanted(layer.out, "out", where), _wanted(layer.kernel, "kernel", where)
    stride, padding = layer.stride or 1, layer.padding or 0
    places = (_slid(height, kernel, stride, padding), _slid(width, kernel, stride, padding))
    return nn.Conv2d(channels, out, kernel, stride=stride, padding=padding), (out, *places)


def _pool(pool: Callable[..., nn.Module]) -> Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]:
    def build(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
        channels, height, width = _image(shape, where)
        kernel = _wanted(layer.kernel, "kernel", where)
        stride = layer.stride or kernel
        return pool(kernel, stride=stride), (channels, _slid(height, kernel, stride), _slid(width, kernel, stride))

    return build


def _same(make: Callable[[Shape], nn.Module]) -> Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]:
    return lambda layer, shape, where: (make(shape), shape)


_BUILDERS: dict[str, Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]] = {
    "Linear": _linear,
    "Conv2d": _conv,
    "BatchNorm2d": lambda layer, shape, where: (nn.BatchNorm2d(_image(shape, where)[0]), shape),
    "LayerNorm": _same(lambda shape: nn.LayerNorm(shape[-1])),
    "ReLU": _same(lambda shape: nn.ReLU()),
    "GELU": _same(lambda shape: nn.GELU()),
    "Tanh": _same(lambda shape: nn.Tanh()),
    "MaxPool2d": _pool(nn.MaxPool2d),
    "AvgPool2d": _pool(nn.AvgPool2d),
    "Flatten": lambda layer, shape, where: (nn.Flatten(), (math.prod(shape),)),
    "Dropout": _same(lambda shape: nn.Dropout()),
}


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_ACTIVATION_NAMES = frozenset(
    {
        "celu", "elu", "gelu", "gelutanh", "hardmish", "hardsigmoid", "hardswish", "hardtanh", "leakyrelu",
        "logsigmoid", "logsoftmax", "mish", "prelu", "quickgelu", "relu", "relu6", "selu", "sigmoid", "silu", "softmax",
        "softplus", "softsign", "starrelu", "swish", "tanh", "tanhshrink",
    }
)  # fmt: skip


def kind_of(layer: nn.Module) -> str:
    """Return the `LayerCounts` field of a leaf layer; classes of libraries are recognised by name."""
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
    """Count leaf modules by kind, without identities.

    A recurrent module counts once for each layer and direction. As in HotCloud '20, each such cell also counts as two
    linear layers: the products with its input and with its state.
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


def factory_recipe(file: str, name: str, first: Sample, *others: Sample) -> Recipe:
    """Import a Python file and return the recipe of the model that one of its functions builds.

    Raises:
        TraceError: There is no such function, it needs arguments, or the file cannot be imported.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise TraceError("FactoryFailed", f"expected a Python file, found {file!r}")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    explained(f"{file} failed on import", lambda: loader.exec_module(module), path)
    function = getattr(module, name, None)
    if not callable(function):
        raise TraceError("FactoryFailed", f"{file} has no function {name!r}")
    if isinstance(function, nn.Module):
        raise TraceError(
            "FactoryFailed",
            f"expected a function that returns the model, found {name} in {file}, which is a model "
            "already; name a function that builds it",
        )
    _check_arguments(function, name)

    def build() -> nn.Module:
        model = function()
        if not isinstance(model, nn.Module):
            raise TraceError(
                "FactoryFailed", f"{name} in {file} returned {type(model).__name__}; expected an nn.Module"
            )
        return model

    return Recipe(f"{path.stem}:{name}", build, first.shape, first.tokens, path, others)


def _check_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # written in C; a call shows its arguments
    try:
        signature.bind()
    except TypeError as e:
        raise TraceError(
            "FactoryFailed",
            f"expected a function without arguments, found {name}{signature}; give its arguments defaults, or name a "
            "function that calls it with them",
        ) from e


_MAX_SAMPLE_ELEMENTS = 2**31
"""Most elements of a sample; more are a mistake (8 GiB in FP32)."""


def model_recipe(model: ModelSource | None) -> Recipe:
    """Return the recipe of a catalog or inline model.

    Raises:
        TraceError: The model is neither, or the catalog does not have it.
    """
    if model is not None and model.catalog is not None:
        return recipe_of(model.catalog)
    if model is not None and model.graph is not None:
        graph = model.graph
        return Recipe("graph", lambda: build_inline(graph), tuple(graph.input))
    raise TraceError("TraceFailed", "expected model.catalog, model.graph or a factory to trace, found none of them")


def batch_sizes(batch_size: int) -> tuple[int, int]:
    """Return two batch sizes to trace, ascending: the job's own, and half or twice it.

    Batch normalization cannot train on a batch of one, the half of two or three.
    """
    return (batch_size // 2, batch_size) if batch_size >= 4 else (batch_size, batch_size * 2)


def build(recipe: Recipe, training: Training, mode: TensorMode) -> tuple[nn.Module, FakeTraining]:
    """Build a model with fake weights and prepare it for training."""
    samples = (Sample(recipe.input_shape, recipe.tokens), *recipe.others)
    for shape in (sample.shape for sample in samples):
        if not shape or min(shape) < 1 or math.prod(shape) > _MAX_SAMPLE_ELEMENTS:
            raise TraceError(
                "InputShapeInvalid", f"expected the shape of one sample, such as [3, 224, 224], found {shape}"
            )
    shares = shares_of(training)
    if shares.is_16_bit:
        training = msgspec.structs.replace(training, precision=Precision.BF16)
    with fake_weights(mode, weight_dtype(training.precision)):
        module = explained("its constructor failed", recipe.build, recipe.file)
    with fake_weights(mode), mode:
        adapt(module, training)
    # Checkpointing replaces forwards, not modules, so that the layer counts stay the same.
    return module, explained(
        "it cannot be trained", lambda: prepare(module, mode, training, *samples, shares=shares), recipe.file
    )


def trace_recipe(
    recipe: Recipe, training: Training, sizes: Sequence[int] = (), operators: OperatorCache | None = None
) -> ModelFeatures:
    """Build a model with fake weights and trace its training step at ascending batch sizes, by default `batch_sizes`.

    Several traces may share a cache of operator results.

    Raises:
        TraceError: The model cannot be built or trained without data.
    """
    sizes = sizes or batch_sizes(training.batch_size)
    try:
        return trace_under(meta_mode(), recipe, training, sizes, operators)
    except TraceError:
        # Some models mix meta tensors with real ones, which fake tensors allow; their errors are clearer, too.
        return trace_under(fake_mode(), recipe, training, sizes, operators)


def trace_under(
    mode: TensorMode, recipe: Recipe, training: Training, sizes: Sequence[int], operators: OperatorCache | None = None
) -> ModelFeatures:
    """Trace a training step at some batch sizes, with one kind of tensors without data; see `trace_recipe`."""
    module, fake = build(recipe, training, mode)
    parameters, shares = list(module.parameters()), fake.shares
    quantized = bytes_of(quantized_weights(module))

    def step(batch_size: int) -> TracedStep:
        what = f"a training step on input of shape {[batch_size, *recipe.input_shape]} failed"
        trace = trace_varying if training.varying_lengths else trace_step
        return explained(what, lambda: trace(fake, batch_size, operators)[0], recipe.file)

    return ModelFeatures(
        name=recipe.name,
        parameters=parameter_count(module),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=int(bytes_of(parameters) * shares.weights)
        + int(quantized * shares.quantized)
        + bytes_of(module.buffers())
        - quantized,
        trainable_bytes=bytes_of(p for p in parameters if p.requires_grad),
        layers=count_layers(module),
        optimizer=training.optimizer,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        gradient_accumulation=training.gradient_accumulation,
        adapter=training.adapter,
        quantization=training.quantization,
        cross_entropy=training.cross_entropy,
        compile=training.compile,
        activation_offloading=training.activation_offloading,
        varying_lengths=training.varying_lengths,
        parallelism=training.parallelism,
        steps=list(map(step, sizes)),
    )
