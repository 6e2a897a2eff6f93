"""Fits of the step-time model to synthetic measurements."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from carpool_core.resources.features import TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer
from carpool_predictor.models.step_time import Utilization, read_model
from carpool_research.step_time.data import MODELS, ModelRow, Product, Shape, operators, read_models
from carpool_research.step_time.fit import (
    CHOICES,
    Choice,
    by_roofline,
    by_utilization,
    choose,
    fit,
    fit_as,
    gpus_held_out,
    model_of,
    roofline_s,
    seconds,
    train_step_time,
)
from carpool_research.step_time.report import frozen, run

COLUMNS = ["gpu", "model", "mode", "seqlen", "batch", "variant", "e2e_ms"]


TRUE = Utilization(form="sum", matrix=0.8, bandwidth=0.6, kernel_s=8e-6)


def write(data: Path, rows: list[list[object]]) -> Path:
    folder = data / "neusight"
    folder.mkdir(exist_ok=True)
    with (folder / "e2e_labels_flat.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return data


def synthetic(data: Path) -> Path:
    rows: list[list[object]] = []
    for gpu in ("Tesla_P4", "Tesla_V100-PCIE-32GB", "NVIDIA_A100-PCIE-40GB", "NVIDIA_H100_80GB_HBM3"):
        for model, batch in (("bert_large", 2), ("gpt2_large", 1)):
            for mode in ("inf", "train"):
                products, passes = operators(MODELS[model], batch, 256, training=mode == "train")
                step = ModelRow(gpu, model, mode == "train", batch, 1.0, products, passes)
                rows.append([gpu, model, mode, 256, batch, "", 1e3 * seconds(TRUE, gpu, step.cost)])
    return write(data, rows)


def with_epochs(data: Path) -> Path:
    folder = data / "zeus"
    folder.mkdir()
    for gpu in ("a40", "p100", "rtx6000", "v100"):
        lines = [
            "network,batch_size,power_limit,time_per_epoch",
            "resnet50,64,300,4000",
            "resnet50,64,100,9000",
            "ncf,8,300,1",
        ]
        (folder / f"summary_power_{gpu}.csv").write_text("\n".join(lines))
    return data


def test_fitting_recovers_the_parameters_of_the_times(tmp_path: Path) -> None:
    rows, left_out = read_models(synthetic(tmp_path))
    found = fit(rows)
    assert left_out == 0
    assert found.form == "sum"
    assert (found.matrix, found.bandwidth) == pytest.approx((TRUE.matrix, TRUE.bandwidth), rel=0.02)
    assert found.kernel_s == pytest.approx(TRUE.kernel_s, rel=0.05)


@pytest.mark.parametrize("true", CHOICES, ids=str)
def test_the_form_of_the_times_is_chosen(true: Choice, tmp_path: Path) -> None:
    law = Utilization(form=true.form, matrix=0.7, bandwidth=0.5, kernel_s=4e-5 if true.kernels else 0.0)
    rows = [replace(row, time_s=seconds(law, row.gpu, row.cost)) for row in read_models(synthetic(tmp_path))[0]]
    assert choose(rows) == true


def test_a_gpu_is_predicted_from_the_others(tmp_path: Path) -> None:
    rows, _ = read_models(synthetic(tmp_path))
    measured = np.array([row.time_s for row in rows])
    assert gpus_held_out(rows, by_utilization) == pytest.approx(measured, rel=0.03)
    assert np.all(by_roofline([], rows) < measured)


def test_a_backward_pass_takes_twice_the_flops_of_its_forward() -> None:
    forward, _ = operators(MODELS["gpt2_large"], 2, 128, training=False)
    both, _ = operators(MODELS["gpt2_large"], 2, 128, training=True)
    assert sum(p.times * p.flops for p in both) == 3 * sum(p.times * p.flops for p in forward)


def test_flops_of_bert_agree_with_the_common_estimate() -> None:
    shape, tokens = MODELS["bert_large"], 8 * 512
    products, _ = operators(shape, 8, 512, training=False)
    weights = shape.layers * (4 * shape.width**2 + 2 * shape.width * shape.hidden)
    attention = shape.layers * 4 * 8 * 512**2 * shape.width
    assert sum(p.times * p.flops for p in products) == 2 * weights * tokens + attention


def test_the_roofline_takes_the_longer_of_computing_and_moving() -> None:
    wide, thin = Product(1, 1, 4096, 4096, 4096), Product(1, 1, 4096, 1, 4096)
    for product, expected in ((wide, wide.flops / 14.1e12), (thin, thin.bytes / 900e9)):
        step = ModelRow("Tesla_V100-PCIE-32GB", "x", False, 1, 1.0, (product,), ())
        assert roofline_s(step) == pytest.approx(expected)


def test_rows_that_cannot_be_evaluated_are_counted(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        ["AMD_Instinct_MI100", "bert_large", "inf", 512, 8, "", 5.0],
        ["NVIDIA_L4", "switch4", "inf", 512, 8, "", 5.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "fusion", 5.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "", 0.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "", 5.0],
    ]
    kept, left_out = read_models(write(tmp_path, rows))
    assert (len(kept), left_out) == (1, 4)


def test_suite_and_training_write_the_same_bytes_twice(tmp_path: Path) -> None:
    data = with_epochs(synthetic(tmp_path))
    reports, models = [], []
    for name in ("one", "two"):
        fit_as.cache_clear()
        reports.append(run(data, tmp_path / name))
        models.append(train_step_time(data, tmp_path / name).read_bytes())
    one, two = ([path.read_bytes() for path in report.files] for report in reports)
    assert one == two
    assert models[0] == models[1]
    assert read_model(models[0]) == model_of(read_models(data)[0])
    assert all(figure.met for figure in reports[0].metrics if figure.met is not None)


def test_the_shipped_model_is_evaluated_without_fitting(tmp_path: Path) -> None:
    found = {figure.name: figure.value for figure in frozen(synthetic(tmp_path)).metrics}
    assert found["rows"] == 16
    assert 0 < found["median error, %"] < 60


@pytest.mark.parametrize(("name", "build"), [("bert_large", "bert"), ("gpt2_large", "gpt")])
def test_the_arithmetic_agrees_with_the_tracer(name: str, build: str) -> None:
    shape = MODELS[name]._replace(layers=2)
    products, passes = operators(shape, 4, 256, training=True)
    counted = ModelRow("Tesla_T4", name, True, 4, 1.0, products, passes).cost
    traced = traced_transformer(build, shape, 256, 4)
    assert traced.flops == pytest.approx(counted.flops, rel=0.02)
    assert traced.bytes_moved == pytest.approx(counted.bytes_moved, rel=0.2)
    assert 0.8 < traced.kernels / counted.kernels < 1.8


def traced_transformer(build: str, shape: Shape, length: int, batch_size: int) -> TracedStep:
    """Trace Hugging Face's own model in eager mode, fed with embeddings."""
    import transformers
    from carpool_predictor.catalog.recipes import Recipe
    from carpool_predictor.tracing.models import trace_recipe
    from torch import Tensor, nn

    class Fed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, embeddings: Tensor) -> Tensor:
            logits: Tensor = self.model(inputs_embeds=embeddings).logits
            return logits

    def bert() -> nn.Module:
        config = transformers.BertConfig(
            hidden_size=shape.width, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            intermediate_size=shape.hidden, vocab_size=shape.vocabulary, attn_implementation="eager",
        )  # fmt: skip
        return Fed(transformers.BertForMaskedLM(config))

    def gpt() -> nn.Module:
        config = transformers.GPT2Config(
            n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads, vocab_size=shape.vocabulary,
            attn_implementation="eager", use_cache=False,
        )  # fmt: skip
        return Fed(transformers.GPT2LMHeadModel(config))

    recipe = Recipe(build, {"bert": bert, "gpt": gpt}[build], (length, shape.width))
    return trace_recipe(recipe, Training(batch_size=batch_size, optimizer=Optimizer.SGD), (batch_size,)).steps[0]
