"""Activation checkpointing, by one rule.

A model with a switch of its own (`set_grad_checkpointing`, as timm's have) is told to checkpoint. In any other, each
composite child of an outermost `nn.Sequential` or `nn.ModuleList` with at least two of them (the blocks of a stage) is
recomputed in the backward pass. A model with neither has nothing to checkpoint, and that is said instead of guessed.
"""

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from carpool_predictor.features.abstention import TraceError


def checkpoint_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on.

    Raises:
        TraceError: The model has no blocks that could be recomputed.
    """
    switch = getattr(model, "set_grad_checkpointing", None)
    if callable(switch):
        try:
            switch(True)
        except (AssertionError, NotImplementedError, AttributeError, TypeError) as e:
            raise TraceError("CheckpointingUnsupported", f"the model refuses activation checkpointing: {e}") from e
        return
    blocks = list(_blocks(model))
    if not blocks:
        raise TraceError(
            "CheckpointingUnsupported",
            "activationCheckpointing needs blocks to recompute (composite children of nn.Sequential or nn.ModuleList), "
            "and this model has none; set training.activationCheckpointing to false",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        composite = [block for block in child.children() if any(True for _ in block.children())]
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(composite) > 1:
            yield from composite
        else:
            yield from _blocks(child)
