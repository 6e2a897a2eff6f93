"""Changes of a training that save memory, without tracing: the tracer is a fake."""

import asyncio
import json

import msgspec
import pytest
from carpool_core.products import find_product
from carpool_core.resources.features import Adapter, ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.values import Optimizer, Precision, Quantization
from carpool_predictor.advice import advise, changed_contexts, changes
from carpool_predictor.features import Abstention
from carpool_predictor.predict import PredictionContext, prepare
from carpool_predictor.report import as_json, as_text, report_on
from carpool_predictor.tracing.process import TraceRequest
from job_runs import features
from rich.console import Console

A100, T4 = find_product("A100-SXM4-40GB"), find_product("Tesla T4")
CHECKPOINTING, LORA, QLORA = "activation checkpointing", "LoRA of rank 16", "LoRA of rank 16, weights in nf4"


@pytest.mark.parametrize(
    ("training", "names"),
    [
        pytest.param(
            Training(),
            [CHECKPOINTING, "4 passes of batch 8", "precision bf16-mixed", "optimizer adamw-fused",
             "optimizer adamw-8bit", LORA, QLORA],
            id="all",
        ),
        pytest.param(
            Training(batch_size=1, activation_checkpointing=True, precision=Precision.BF16, optimizer=Optimizer.SGD),
            [LORA, QLORA],
            id="only adapters are left",
        ),
        pytest.param(
            Training(batch_size=2, adapter=Adapter(rank=4), optimizer=Optimizer.ADAMW_8BIT),
            [CHECKPOINTING, "2 passes of batch 1", "precision bf16-mixed", "weights in nf4"],
            id="an adapter keeps its rank",
        ),
        pytest.param(
            Training(batch_size=7, adapter=Adapter(), quantization=Quantization.INT8, optimizer=Optimizer.LION),
            [CHECKPOINTING, "precision bf16-mixed", "optimizer adamw-8bit"],
            id="a batch that passes do not divide",
        ),
    ],
)  # fmt: skip
def test_what_a_training_has_is_not_suggested(training: Training, names: list[str]) -> None:
    found = list(changes(training))
    assert [change.name for change in found] == names
    assert all(change.apply(training) != training for change in found)


class Tracer:
    """Answers with half of the activations under checkpointing; knows no adapters."""

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        return await self.run(TraceRequest(model=model, training=training))

    async def run(self, request: TraceRequest) -> ModelFeatures | Abstention:
        training = request.training
        if training.adapter is not None:
            return Abstention(reason="AdapterInvalid", message="no linear layers")
        steps = features().steps
        if training.activation_checkpointing:
            steps = [
                msgspec.structs.replace(
                    s, peak_bytes=s.peak_bytes - s.activation_bytes // 2, activation_bytes=s.activation_bytes // 2
                )
                for s in steps
            ]
        return msgspec.structs.replace(
            features(),
            steps=steps,
            optimizer=training.optimizer,
            precision=training.precision,
            gradient_accumulation=training.gradient_accumulation,
            activation_checkpointing=training.activation_checkpointing,
        )


def test_changes_that_save_are_reported_with_what_then_fits() -> None:
    training = Training(batch_size=64)
    request = TraceRequest(model=ModelSource(catalog=CatalogModel(name="timm/x")), training=training)
    job = prepare(features(), training)
    assert isinstance(job, PredictionContext)
    changed = asyncio.run(changed_contexts(request, job, Tracer()))  # type: ignore[arg-type]
    assert [change.name for change, _ in changed] == ["4 passes of batch 16", CHECKPOINTING]
    one, two = (report_on("x", job, gpus, changed=changed) for gpus in ([A100], [A100, T4]))
    (product,) = json.loads(msgspec.json.encode(as_json(one)))["products"]
    saved = {entry["change"]: entry for entry in product["advice"]}
    assert saved["4 passes of batch 16"]["training"] == {"batchSize": 16, "gradientAccumulation": 4}
    for entry in saved.values():
        assert entry["saves_mib"] == product["memory"]["median_mib"] - entry["memory"]["median_mib"] > 1000
        assert entry["largest_batch"]["batch_size"] >= 64
    console = Console(width=100, record=True, file=None)
    console.print(as_text("x", one), as_text("x", two))
    text = console.export_text()
    assert "Changes that save memory" in text
    assert "2 of 2" in text


async def test_advice_on_a_job_names_savings_and_what_then_fits() -> None:
    model = ModelSource(catalog=CatalogModel(name="timm/x"))
    found = await advise(model, Training(batch_size=64), [T4, A100], Tracer())  # type: ignore[arg-type]
    assert found.startswith(f"on {A100.name} 4 passes of batch 16 saves ")
    assert f"; {CHECKPOINTING} saves " in found
    assert " GiB, after which batch " in found
    assert await advise(model, Training(batch_size=64), [], Tracer()) == ""  # type: ignore[arg-type]
