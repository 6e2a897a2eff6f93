"""Published architectures by name. Weights are never downloaded."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_core.resources.job import CatalogModel
from torch import nn

from carpool_predictor.catalog.hub import split_name
from carpool_predictor.catalog.names import unknown, unsupported
from carpool_predictor.features import Sample, TraceError

_FRAMES = 16
"""Frames of a sample of torchvision's video models, as in their training clips."""


@dataclass(frozen=True)
class Recipe:
    """A function that builds a model, and the shape of its input."""

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    """Shape of one sample."""
    tokens: bool = False
    """Whether a sample is whole numbers, such as the ids of tokens."""
    file: Path | None = None
    """The user's file that builds it; None for published models."""
    others: tuple[Sample, ...] = ()
    """Further inputs, in order."""


def recipe_of(model: CatalogModel) -> Recipe:
    """Return the recipe of a catalog model.

    Raises:
        TraceError: The library or the model is unknown (the nearest names are suggested), or a library is missing.
    """
    library, _, name = model.name.partition("/")
    if library == "timm":
        return _timm(model, name)
    if library == "torchvision":
        return _torchvision(model, name)
    if library == "transformers":
        return _transformers(model, name)
    raise unsupported(model.name)


def _timm(model: CatalogModel, name: str) -> Recipe:
    try:
        import timm
    except ImportError as e:
        raise _missing("timm", e) from e
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    options: dict[str, Any] = {} if model.num_classes is None else {"num_classes": model.num_classes}
    config = timm.models.get_pretrained_cfg(name)
    own = tuple(config.input_size) if config is not None else (3, 224, 224)
    shape = tuple(model.input or own)
    if shape[:1] != own[:1] and len(shape) == 3:
        options["in_chans"] = shape[0]

    def build() -> nn.Module:
        if shape[1:] == own[1:]:
            return _checked_module(timm.create_model(name, pretrained=False, **options))
        try:
            return _checked_module(timm.create_model(name, pretrained=False, img_size=shape[1:], **options))
        except TypeError:
            # Convolutional models accept any size and lack this argument.
            return _checked_module(timm.create_model(name, pretrained=False, **options))

    return Recipe(model.name, build, shape)


def _torchvision(model: CatalogModel, name: str) -> Recipe:
    try:
        from torchvision import models  # type: ignore[import-untyped]
    except ImportError as e:
        raise _missing("torchvision", e) from e
    name, given = split_name(name)
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    options: dict[str, Any] = {**given, "weights": None}
    if model.num_classes is not None:
        options["num_classes"] = model.num_classes
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # would take seconds for values that are never read
    builder = models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    channels, *size = _torchvision_input(models.get_model_weights(name))
    is_video = ".video." in builder.__module__
    shape = tuple(model.input or (channels, *([_FRAMES] if is_video else []), *size))
    return Recipe(model.name, lambda: _checked_module(models.get_model(name, **options)), shape)


def _torchvision_input(weights: Any) -> tuple[int, ...]:
    # Detection weights have no crop.
    published = [getattr(entry.transforms, "keywords", {}) for entry in weights] if weights is not None else []
    crops = [options["crop_size"] for options in published if options.get("crop_size")]
    crop = crops[-1] if crops else 224
    height, width = crop if isinstance(crop, (tuple, list)) else (crop, crop)
    return (3, height, width)


def _transformers(model: CatalogModel, name: str) -> Recipe:
    try:
        from carpool_predictor.catalog import hub_models

        config = hub_models.configure(name, model.num_classes)
    except ImportError as e:
        raise _missing("transformers", e) from e
    shape = tuple(model.input or hub_models.sample_shape(config))
    is_text = hub_models.task_of(config) is None
    return Recipe(model.name, lambda: hub_models.build(config, model.num_classes), shape, is_text)


def _checked_module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TraceError("TraceFailed", f"expected an nn.Module, found {type(module).__name__}")
    return module


def _unknown(library: str, name: str, names: Sequence[str]) -> TraceError:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return unknown(library, name, [f"{library}/{found}" for found in near])


def _missing(library: str, error: ImportError) -> TraceError:
    return TraceError("TorchMissing", f"{library} is not installed ({error}); install Carpool's extra trace")
