"""Shares of a model's state that each GPU of a sharded job holds. No PyTorch.

| kind | weights | gradients | optimizer state | buffers | source |
|---|---|---|---|---|---|
| ddp | all | all | all | gradients again | torch/nn/parallel/distributed.py, without gradient views |
| fsdp | 1/n | 1/n | 1/n | two blocks, with gradients | torch/distributed/fsdp/_fully_shard, prefetching |
| zero-1 | all | all | 1/n | two buckets | deepspeed/runtime/zero/stage_1_and_2.py |
| zero-2 | all | 1/n | 1/n | two buckets | the same |
| zero-3 | 1/n | 1/n | 1/n | two buckets, two blocks | deepspeed/runtime/zero/stage3.py |

In mixed precision fsdp stores FP32 and gathers 16 bits; DeepSpeed stores 16 bits, with FP32 copies beside the state.
State on the host takes no memory, but FSDP1 moves gradients only once the backward pass has all of them
(torch/distributed/fsdp/_runtime_utils.py, _accumulate_sharded_grad).
"""

from typing import NamedTuple

from carpool_core.resources.job import Training
from carpool_core.values import ParallelKind, Precision

from carpool_predictor.features import TraceError

BUCKET_ELEMENTS = 200_000_000
"""Elements of DeepSpeed's buckets, as in the Hugging Face Trainer's examples."""
_FP32 = 4


class Shares(NamedTuple):
    """Bytes that a GPU stores per byte of the traced tensors."""

    weights: float = 1.0
    quantized: float = 1.0
    """Share of quantised weights, which mixed precision stores once."""
    gradients: float = 1.0
    optimizer: float = 1.0
    """Share of the optimizer's state and of its temporaries."""
    copy_bytes: float = 0.0
    """Bytes per trainable weight of its FP32 copy beside the state."""
    update_bytes: float = 0.0
    """Bytes per trainable weight of its FP32 gradient, and of the flat one that it is cast from, during the update."""
    bucket_copies: float = 0.0
    """Copies of all gradients, in buckets."""
    bucket_elements: int = 0
    """Elements of further buckets."""
    work: float = 1.0
    """Share of the arithmetic."""
    is_gathered: bool = False
    """Whether blocks are gathered before they run."""
    is_16_bit: bool = False
    """Whether mixed precision computes with 16-bit weights, instead of by autocast."""


WHOLE = Shares()
"""Of a job that divides nothing."""


def shares_of(training: Training) -> Shares:
    """Return the shares of a training.

    Raises:
        TraceError: The combination is impossible.
    """
    division = training.parallelism
    if division is None:
        return WHOLE
    is_zero = division.kind not in (ParallelKind.DDP, ParallelKind.FSDP)
    if is_zero and training.precision is Precision.BF16:
        raise TraceError(
            "ParallelismInvalid",
            f"expected precision bf16-mixed with {division.kind}, because DeepSpeed keeps FP32 copies of 16-bit "
            "weights; found bf16-true",
        )
    if division.cpu_offload and division.kind is ParallelKind.DDP:
        raise TraceError(
            "ParallelismInvalid", "ddp divides no state that could be on the host; choose fsdp or zero-1 to zero-3"
        )
    layers = 1 / division.tensor_parallel
    if division.kind is ParallelKind.DDP:
        return Shares(layers, layers, layers, layers, bucket_copies=layers if division.gpus > 1 else 0.0, work=layers)
    is_mixed = training.precision in (Precision.BF16_MIXED, Precision.FP16_MIXED)
    divided, wide = layers / division.gpus, 2 if is_mixed else 1
    on_gpu = 0.0 if division.cpu_offload else divided
    stored = on_gpu * wide
    if not is_zero:
        return Shares(stored, on_gpu, divided * wide, stored, work=layers, is_gathered=True, is_16_bit=is_mixed)
    weights = on_gpu if division.kind is ParallelKind.ZERO_3 else layers
    return Shares(
        weights=weights,
        quantized=weights,
        gradients=layers if division.kind is ParallelKind.ZERO_1 else on_gpu,
        optimizer=stored,
        copy_bytes=_FP32 * on_gpu if is_mixed else 0.0,
        update_bytes=1.5 * _FP32 * on_gpu if is_mixed else 0.0,
        bucket_elements=2 * BUCKET_ELEMENTS,
        work=layers,
        is_gathered=division.kind is ParallelKind.ZERO_3,
        is_16_bit=is_mixed,
    )
