"""Builds models of Hugging Face's `transformers` from a configuration: `transformers/NAME[@key=value,…]`.

NAME is a model of the hub (`bert-base-uncased`, `openai-community/gpt2-xl`; its published values are in `hub`) or a
configuration class (`LlamaConfig`); keys override values of the configuration, and `attn_implementation=eager` computes
attention without a fused kernel; `task=semantic-segmentation` chooses another head. No weights, no network.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch uses)
from torch import Tensor, nn
from transformers import masking_utils
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto import configuration_auto
from transformers.models.auto import modeling_auto as auto

from carpool_predictor.catalog.hub import published, split_name, unknown_to_the_hub
from carpool_predictor.features import TraceError

_LONGEST = 512
"""Default tokens of a sample, as in most examples of fine-tuning; fewer if the model accepts fewer."""
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_ATTENTION = ("sdpa", "eager")
"""Values of `attn_implementation`: one fused kernel, or scores and dropout masks that are kept."""
_LENGTHS = ("max_position_embeddings", "n_positions")


_TASKS = {
    "image-classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "semantic-segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "object-detection": auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
    "video-classification": auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    "speech-recognition": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
"""Classes by type of model, for each value of `task`; the first that a model can do is the default."""


class HubModel(nn.Module):
    """Adapts a model of `transformers` to one input tensor and its logits."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self._config = config

    def set_grad_checkpointing(self, enable: bool, context_fn: Callable[[], Any]) -> None:
        """Switch activation checkpointing on, with the method name of timm's models."""
        if enable:
            # `transformers` deprecates the older of the two names.
            newer = getattr(self.model, "activation_checkpointing_enable", None)
            options = {"use_reentrant": False, "context_fn": context_fn}
            (newer or self.model.gradient_checkpointing_enable)(options)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Any:
        """Return logits for token ids, shape (batch, tokens), images, videos or spectrograms.

        Maps of classes have the size of the images, as in the losses of `transformers`.
        """
        task = task_of(self._config)
        named = {"input_ids" if task is None else "pixel_values": x}
        if task == "speech-recognition":
            named = {"input_features": x}
            named["decoder_input_ids"] = x.new_zeros((x.shape[0], self._config.max_target_positions), dtype=torch.long)
        elif self._config.is_encoder_decoder and task is None:
            named["decoder_input_ids"] = x
        with patch.object(masking_utils, "find_packed_sequence_indices", _nothing_packed):
            logits = self.model(**named).logits
        if task == "semantic-segmentation":
            return F.interpolate(logits, size=x.shape[-2:], mode="bilinear")
        return logits


def _nothing_packed(_: Tensor) -> None:
    """Return that samples are not packed, which `transformers` would read from the data."""


def configure(name: str, num_classes: int | None) -> Any:
    """Return the configuration of `NAME[@key=value,…]`.

    Raises:
        TraceError: The name is unknown (the nearest are suggested), or the configuration refuses a value.
    """
    base, given = split_name(name)
    attention = given.pop("attn_implementation", None)
    if attention not in (None, *_ATTENTION):
        raise TraceError(
            "UnknownCatalogModel",
            f"expected attn_implementation={' or '.join(_ATTENTION)}, found {attention}; flash kernels take the memory "
            "of sdpa",
        )
    model = published(base)
    task = given.pop("task", None) or (model.values.get("task") if model else None)
    if task not in (None, *_TASKS):
        raise TraceError("UnknownCatalogModel", f"expected task={' or '.join(_TASKS)}, found {task}")
    kind = _configuration(model.config if model else base)
    if kind is None:
        raise unknown_to_the_hub(base)
    values = {key: value for key, value in {**(model.values if model else {}), **given}.items() if key != "task"}
    unknown = sorted(key for key in given if not hasattr(kind(), key))
    if unknown:
        raise TraceError("UnknownCatalogModel", f"{kind.__name__} has no value named {', '.join(unknown)}")
    if num_classes is not None:
        values["num_labels"] = num_classes
    elif task_of(kind()) is not None:
        values.setdefault("num_labels", 1000)
    try:
        config = kind(**values)
    except Exception as e:  # a configuration's own checks may raise anything
        raise TraceError("UnknownCatalogModel", f"{kind.__name__} refuses these values: {e}") from e
    config.carpool_task = task
    if attention is not None:
        config._attn_implementation = attention
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values serves generation
    if num_classes is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # classifiers look for the last token that is no padding
    return config


def _configuration(name: str) -> type[PretrainedConfig] | None:
    """Return a configuration class by its name, or None."""
    kinds = (kind for kind, config in configuration_auto.CONFIG_MAPPING_NAMES.items() if config == name)
    # Model types without a configuration class name the class of another type.
    found = next((own for kind in kinds if (own := getattr(_package_of(kind), name, None)) is not None), None)
    return found if isinstance(found, type) and issubclass(found, PretrainedConfig) else None


def _package_of(model_type: str) -> Any:
    """Import the package of one model type; importing all of `transformers` takes seconds."""
    return import_module(f"transformers.models.{configuration_auto.model_type_to_module_name(model_type)}")


def task_of(config: Any) -> str | None:
    """Return the task of a configuration in `_TASKS`; None for texts."""
    given = getattr(config, "carpool_task", None)
    return given or next((task for task, row in _TASKS.items() if config.model_type in row), None)


def sample_shape(config: Any) -> tuple[int, ...]:
    """Return the default shape of one sample, such as (channels, height, width) of images and (tokens,) of texts."""
    task = task_of(config)
    if task == "speech-recognition":
        return (getattr(config, "num_mel_bins", 80), 2 * config.max_source_positions)
    if task is not None:
        size = getattr(config, "image_size", None) or (640 if task == "object-detection" else 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = [config.num_frames] if task == "video-classification" else []
        return (*frames, getattr(config, "num_channels", 3), height, width)
    longest = [n for name in _LENGTHS if isinstance(n := getattr(config, name, None), int) and n > 0]
    return (min([*longest, _LONGEST]),)


def build(config: Any, num_classes: int | None) -> nn.Module:
    """Build the model with its language-modeling head, or with a classifier.

    Raises:
        TraceError: `transformers` has no such model for the configuration.
    """
    task = task_of(config)
    heads = (
        [_TASKS[task]]
        if task is not None
        else [auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
        if num_classes is not None
        else [
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if config.is_encoder_decoder else {},
            auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        ]
    )
    found = next((names[config.model_type] for names in heads if config.model_type in names), None)
    if found is None:
        raise TraceError(
            "CatalogUnsupported",
            f"transformers has no model of kind {config.model_type!r} that takes token ids or images and can be "
            "trained here; give a factory of your own",
        )
    kind = getattr(_package_of(config.model_type), found if isinstance(found, str) else found[0])
    if kind._supports_sdpa and config._attn_implementation != _ATTENTION[1]:
        # CUDA's fused kernels draw these masks internally and keep none of them.
        for dropout in filter(partial(hasattr, config), _ATTENTION_DROPOUT):
            setattr(config, dropout, 0.0)
    return HubModel(kind(config), config)
