"""Memory of a sharded job's GPU besides the model's own tensors: copies, buckets, and gathered blocks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from carpool_predictor.parallel import Shares
from carpool_predictor.tracing.adapters import quantized_weights
from carpool_predictor.tracing.tracker import Kind, LiveStorages


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def sharded(
    shares: Shares, model: nn.Module, blocks: Iterable[nn.Module], storages: LiveStorages
) -> Iterator[Callable[[], None]]:
    """Count shares of the storages that are adopted inside the block, and yield the function that begins the update.

    Copies and buckets stay. Blocks are gathered when they run, with the block before; other weights until the update.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    elements, gradient_bytes = sum(map(Tensor.numel, trainable)), bytes_of(trainable)
    lasting, outside, gathered = (
        list[torch.UntypedStorage](),
        list[torch.UntypedStorage](),
        list[torch.UntypedStorage](),
    )

    def allocate(size: float, holder: list[torch.UntypedStorage]) -> None:
        holder.append(torch.UntypedStorage(int(size), device="meta"))  # type: ignore[no-untyped-call]  # no operator
        storages.adopt_storages(holder[-1:], Kind.BUFFER)

    def gather(size: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            del gathered[:-1]
            allocate(size, gathered)

        return hook

    def begin_update() -> None:
        outside.clear()
        gathered.clear()
        storages.scales[Kind.TEMPORARY] = shares.optimizer
        allocate(shares.update_bytes * elements, lasting)

    storages.scales |= {
        Kind.PARAMETER: shares.weights, Kind.QUANTIZED: shares.quantized,
        Kind.GRADIENT: shares.gradients, Kind.OPTIMIZER: shares.optimizer
    }  # fmt: skip
    allocate(shares.copy_bytes * elements, lasting)
    itemsize = gradient_bytes / max(elements, 1)
    allocate(shares.bucket_copies * gradient_bytes + min(shares.bucket_elements, 2 * elements) * itemsize, lasting)
    with ExitStack() as hooks:
        if shares.is_gathered:
            blocks = list(blocks)
            inside = {id(p) for block in blocks for p in _weights(block)}
            allocate(bytes_of(p for p in _weights(model) if id(p) not in inside), outside)
            for block in blocks:
                weights = bytes_of(_weights(block))
                gradients = bytes_of(filter(_trains, block.parameters()))
                hooks.callback(block.register_forward_pre_hook(gather(weights)).remove)
                hooks.callback(block.register_full_backward_pre_hook(gather(weights + gradients)).remove)
        yield begin_update


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *quantized_weights(module)]


def _trains(parameter: Tensor) -> bool:
    return parameter.requires_grad
