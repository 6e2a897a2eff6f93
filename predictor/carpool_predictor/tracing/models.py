"""From a model source to its features: build, prepare, trace at two batch sizes. Imports PyTorch."""

import math
from collections.abc import Sequence

from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer
from torch import nn

from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.features.abstention import TraceError
from carpool_predictor.features.records import ModelRecord, StepRecord
from carpool_predictor.tracing.detail import record_step
from carpool_predictor.tracing.explaining import explained
from carpool_predictor.tracing.factories import factory_recipe
from carpool_predictor.tracing.fake import TensorMode, fake_mode, fake_weights, meta_mode
from carpool_predictor.tracing.inline import build_inline
from carpool_predictor.tracing.layers import count_layers
from carpool_predictor.tracing.remembering import Remembered
from carpool_predictor.tracing.requests import TraceRequest
from carpool_predictor.tracing.step import AUTOCAST, FakeTraining, prepare, weight_dtype
from carpool_predictor.tracing.updates import Updates

_MAX_SAMPLE_ELEMENTS = 2**31
"""A sample of more elements is a mistake: 8 GiB in FP32."""


def trace_request(request: TraceRequest) -> ModelFeatures:
    """Trace what a request asks for.

    Raises:
        TraceError: The model cannot be built or traced; reason and sentence say why.
    """
    return trace_recipe(_recipe(request), request.training)


def _recipe(request: TraceRequest) -> Recipe:
    if request.factory is not None:
        return factory_recipe(request.factory)
    model = request.model
    if model is not None and model.catalog is not None:
        return recipe_of(model.catalog)
    if model is not None and model.graph is not None:
        graph = model.graph
        return Recipe("graph", lambda: build_inline(graph), tuple(graph.input))
    raise TraceError("TraceFailed", "expected model.catalog, model.graph or a factory to trace, found none of them")


def batch_sizes(batch_size: int) -> tuple[int, int]:
    """Return two batch sizes to trace, ascending: the job's own, and half or twice it.

    Half of two or three would be one, over which batch normalization cannot train.
    """
    return (batch_size // 2, batch_size) if batch_size >= 4 else (batch_size, batch_size * 2)


def trace_recipe(recipe: Recipe, training: Training) -> ModelFeatures:
    """Build a model with fake weights and trace its training step at two batch sizes."""
    return record_recipe(recipe, training, batch_sizes(training.batch_size)).features()


def build(recipe: Recipe, training: Training, mode: TensorMode) -> tuple[nn.Module, FakeTraining]:
    """Build a model with fake weights and make it ready to train."""
    shape = recipe.input_shape
    if not shape or min(shape) < 1 or math.prod(shape) > _MAX_SAMPLE_ELEMENTS:
        raise TraceError("InputShapeInvalid", f"expected the shape of one sample, such as [3, 224, 224], found {shape}")
    with fake_weights(mode, weight_dtype(training.precision)):
        module = explained("its constructor failed", recipe.build, recipe.file)
    # Checkpointing replaces forwards, not modules, so that layers are counted the same with and without it.
    return module, explained(
        "it cannot be trained", lambda: prepare(module, mode, training, shape, tokens=recipe.tokens), recipe.file
    )


def record_recipe(
    recipe: Recipe,
    training: Training,
    sizes: Sequence[int],
    others: Sequence[Optimizer] = (),
    remembered: Remembered | None = None,
) -> ModelRecord:
    """Build a model with fake weights and look closely at its step.

    Args:
        recipe: The model.
        training: How it is trained; its batch size counts for nothing.
        sizes: Batch sizes.
        others: Other optimizers under which the steps are reckoned, too.
        remembered: What operators gave in other traces, which are many.
    """

    def record(mode: TensorMode) -> ModelRecord:
        return _record(recipe, training, sizes, mode, others, remembered)

    if training.precision in AUTOCAST and training.activation_checkpointing:
        # What is computed again, on the way back, finds PyTorch's own autocast only.
        return record(fake_mode())
    try:
        return record(meta_mode())
    except TraceError:
        # Some models mix meta tensors with real ones, which fake tensors allow; and those say better what is wrong.
        return record(fake_mode())


def _record(
    recipe: Recipe,
    training: Training,
    sizes: Sequence[int],
    mode: TensorMode,
    others: Sequence[Optimizer] = (),
    remembered: Remembered | None = None,
) -> ModelRecord:
    module, fake = build(recipe, training, mode)
    parameters = list(module.parameters())
    updates = Updates(fake, others)

    def step(batch_size: int) -> StepRecord:
        what = f"a training step on input of shape {[batch_size, *fake.input_shape]} failed"
        return explained(what, lambda: record_step(fake, batch_size, updates, remembered), recipe.file)

    return ModelRecord(
        name=recipe.name,
        input_shape=recipe.input_shape,
        optimizer=training.optimizer,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(t.numel() * t.element_size() for t in [*parameters, *module.buffers()]),
        layers=count_layers(module),
        steps=tuple(map(step, sizes)),
    )
