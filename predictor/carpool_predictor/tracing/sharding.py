"""What a GPU of a sharded job allocates besides the model's own tensors: buckets, and blocks that are gathered."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from carpool_predictor.parallel import Shares
from carpool_predictor.tracing.tracker import Kind, LiveStorages


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class ShardedState:
    """What a GPU of a sharded job allocates in a step besides the model's own tensors."""

    def __init__(self, shares: Shares, model: nn.Module, blocks: Iterable[nn.Module], storages: LiveStorages) -> None:
        self._shares, self._model, self._blocks, self._storages = shares, model, list(blocks), storages
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._trainable = sum(map(Tensor.numel, trainable))
        self._gradient_bytes = bytes_of(trainable)
        self._gathered: list[torch.UntypedStorage] = []
        self._held: list[torch.UntypedStorage] = []
        storages.scales |= {
            Kind.PARAMETER: shares.weights, Kind.GRADIENT: shares.gradients, Kind.OPTIMIZER: shares.optimizer
        }  # fmt: skip

    def begin(self, stack: ExitStack) -> None:
        """Allocate copies, buckets and what is outside of blocks; gather blocks when they run, until `stack` ends."""
        shares = self._shares
        copies = shares.copy_bytes * self._trainable
        itemsize = self._gradient_bytes / max(self._trainable, 1)
        buckets = shares.bucket_copies * self._gradient_bytes
        buckets += min(shares.bucket_elements, 2 * self._trainable) * itemsize
        self._lasting = [self._allocate(copies), self._allocate(buckets)]
        if not shares.is_gathered:
            return
        inside = {id(p) for block in self._blocks for p in block.parameters()}
        self._held.append(self._allocate(bytes_of(p for p in self._model.parameters() if id(p) not in inside)))
        for block in self._blocks:
            weights = bytes_of(block.parameters())
            gradients = bytes_of(p for p in block.parameters() if p.requires_grad)
            stack.callback(block.register_forward_pre_hook(self._gather(weights)).remove)
            stack.callback(block.register_full_backward_pre_hook(self._gather(weights + gradients)).remove)

    def begin_update(self) -> None:
        """Free the gathered weights; the update's temporaries are those of a share."""
        self._gathered.clear()
        self._held.clear()
        self._storages.scales[Kind.TEMPORARY] = self._shares.optimizer
        self._held.append(self._allocate(self._shares.update_bytes * self._trainable))

    def _gather(self, size: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            del self._gathered[:-1]  # the block before stays while this one runs
            self._gathered.append(self._allocate(size))

        return hook

    def _allocate(self, size: float) -> torch.UntypedStorage:
        made = torch.UntypedStorage(int(size), device="meta")  # type: ignore[no-untyped-call]  # no operator to track
        self._storages.adopt_storages([made], Kind.BUFFER)
        return made
