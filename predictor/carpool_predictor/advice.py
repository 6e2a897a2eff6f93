"""Changes of a training that save memory, each traced as the job itself is. No PyTorch."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import Adapter
from carpool_core.resources.job import ModelSource, Training
from carpool_core.values import Optimizer, Precision, Quantization

from carpool_predictor.features import Abstention
from carpool_predictor.optimizers import TABLE
from carpool_predictor.predict import BatchFinder, PredictionContext, prepare, usable_mib
from carpool_predictor.tracing.process import TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer

_RANK = 16
"""Rank of a suggested adapter, common in examples of fine-tuning."""
_PASSES = 4
"""Passes into which a suggested accumulation divides the batch."""
_LEAST_SAVED_MIB = 64
"""Changes that save less are not shown."""
_LOWER = {
    Precision.FP32: Precision.BF16_MIXED, Precision.TF32: Precision.BF16_MIXED, Precision.BF16_MIXED: Precision.BF16
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """A changed training."""

    name: str
    """The change, in words."""
    fields: dict[str, Any]
    """Changed fields of `Training`."""

    def apply(self, training: Training) -> Training:
        """Return the training with the change."""
        return msgspec.structs.replace(training, **self.fields)


def changes(training: Training) -> Iterator[Change]:
    """Yield the changes that may save memory for a training, one at a time."""
    if not training.activation_checkpointing:
        yield Change("activation checkpointing", {"activation_checkpointing": True})
    passes = min(_PASSES, training.batch_size)
    if passes > 1 and training.batch_size % passes == 0:
        yield Change(
            f"{passes} passes of batch {training.batch_size // passes}",
            {
                "batch_size": training.batch_size // passes,
                "gradient_accumulation": training.gradient_accumulation * passes,
            },
        )
    if lower := _LOWER.get(training.precision):
        yield Change(f"precision {lower}", {"precision": lower})
    state = TABLE[training.optimizer].state_per_parameter(4)
    for optimizer in (Optimizer.ADAMW_FUSED, Optimizer.ADAMW_8BIT):
        row = TABLE[optimizer]
        if row.state_per_parameter(4) < state or (TABLE[training.optimizer].at_once and state == 8.0):
            yield Change(f"optimizer {optimizer}", {"optimizer": optimizer})
    adapter = training.adapter or Adapter(rank=_RANK)
    if training.adapter is None:
        yield Change(f"LoRA of rank {_RANK}", {"adapter": adapter})
    if training.quantization is None:
        name = "weights in nf4" if training.adapter else f"LoRA of rank {_RANK}, weights in nf4"
        yield Change(name, {"adapter": adapter, "quantization": Quantization.NF4})


async def changed_contexts(
    request: TraceRequest, job: PredictionContext, tracer: SubprocessTracer
) -> list[tuple[Change, PredictionContext]]:
    """Trace each change of a job, and return those that save memory, the largest saving first.

    Changes that the model does not support, such as an adapter without linear layers, are left out.
    """

    async def traced(change: Change) -> tuple[Change, PredictionContext | Abstention]:
        training = change.apply(request.training)
        found = await tracer.run(msgspec.structs.replace(request, training=training))
        return change, prepare(found, training, job.model)

    saving = [
        (change, context)
        for change, context in await asyncio.gather(*map(traced, changes(request.training)))
        if isinstance(context, PredictionContext) and job.reserved_mib - context.reserved_mib >= _LEAST_SAVED_MIB
    ]
    return sorted(saving, key=lambda found: found[1].reserved_mib)


async def advise(model: ModelSource, training: Training, gpus: Sequence[GpuProduct], tracer: SubprocessTracer) -> str:
    """Return what changes would save, and the largest batch that then fits, on the largest GPU; empty if nothing."""
    job = prepare(await tracer.trace(model, training), training)
    if isinstance(job, Abstention) or not gpus:
        return ""
    gpu = max(gpus, key=usable_mib)
    median_mib = job.memory_on(gpu).median_mib
    found = [
        f"{change.name} saves {(median_mib - changed.memory_on(gpu).median_mib) / 1024:,.1f} GiB, after which batch "
        f"{BatchFinder(changed).within(gpu, usable_mib(gpu))} fits"
        for change, changed in await changed_contexts(TraceRequest(model=model, training=training), job, tracer)
    ]
    return f"on {gpu.name} {'; '.join(found)}" if found else ""
