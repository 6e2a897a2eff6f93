"""The suite `step-time`: time of a step on GPUs that were held out; writes `step-time.md`. Needs the extra `train`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer
from carpool_predictor.features import cost_at
from carpool_predictor.models.step_time import StepTimeModel, Utilization, shipped
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carpool_research.report import Metric, Progress, Report, save, silent
from carpool_research.step_time import data
from carpool_research.step_time.data import INFERRED, SEEN, read_epochs, read_models
from carpool_research.step_time.fit import (
    CHOICES,
    OURS,
    PREDICTORS,
    Judged,
    by_form,
    by_noisy_choice,
    certain,
    choose,
    errors,
    gpus_held_out,
    judge,
    model_of,
    seconds,
)

Matrix = NDArray[np.float64]


def write(
    judged: Judged,
    everything: Judged,
    left_out: int,
    model: StepTimeModel,
    epochs: Sequence[data.EpochRow],
    convolutional: Matrix,
) -> str:
    """Write the card.

    Args:
        judged: What is certain.
        everything: The same with the model whose width was inferred.
        left_out: Rows that cannot be judged.
        model: What is shipped.
        epochs: Zeus' rows of ResNet-50.
        convolutional: Predicted for them, in seconds.
    """
    learned, rows = model.learned, judged.rows
    chosen = [str(choose([row for row in rows if row.gpu != gpu])) for gpu in sorted({row.gpu for row in rows})]
    seen = [row for row in rows if row.gpu in SEEN]
    others = {**{str(choice): by_form(choice) for choice in CHOICES}, "form chosen by the median": by_noisy_choice}
    counts = ", ".join(f"{chosen.count(name)} × {name}" for name in sorted(set(chosen)))
    return "\n".join(
        [
            "# Model card: step time",
            "",
            "Written by `python -m carpool_research evaluate --suite step-time`; do not edit.",
            "",
            "How long a step takes on a GPU that was never measured: what `carpool predict` and the operator answer.",
            "As NeuSight does, what is learned is how much of the roofline is used, never how long anything takes; by",
            "three numbers instead of a network, from the step's FLOPs, bytes and kernels as they are traced:",
            "",
            "    step = FLOPs / (FP32 peak · M) + bytes / (bandwidth · B) + O · kernels",
            "",
            f"M = {learned.matrix:.3f}, B = {learned.bandwidth:.3f}, O = {learned.kernel_s * 1e6:.1f} µs"
            + (" (the larger of the first two, not their sum)" if learned.form == "larger" else "")
            + ". The interval is",
            f"{model.lower:.2f} to {model.upper:.2f} times the prediction: the 5% and 95% quantiles on GPUs held out.",
            "",
            "## Data",
            "",
            f"sitar-lab/NeuSight, `e2e_labels`: {len(everything.rows)} steps of five transformers in FP32 on "
            f"{len({row.gpu for row in everything.rows})} GPUs by NVIDIA; {left_out} rows are",
            "left out: AMD's GPUs, several GPUs at once, compiled models, mixtures of experts, times of 0. FLOPs,",
            "bytes and kernels come from the models' published sizes by arithmetic; a test compares with the tracer.",
            f"{len(everything.rows) - len(rows)} further rows are neither learned nor judged in the first table:",
            f"the width of {INFERRED} does not stand in the data (GPT-3's table gives 2048 and 24 heads of 128), and",
            "3072 was found out from the very times. A line of the table says what they would change.",
            "",
            "## How tuning stayed off the judged rows",
            "",
            "For each GPU held out, the three numbers are fitted, and the form (sum or larger; with or without O) is",
            "chosen, on the other GPUs alone, the choice by holding each of those out in turn: the smallest mean error",
            f"of the logarithm wins. It fell on: {counts}.",
            "The lines of the table below that name a form fix it beforehand; choosing by the median error instead,",
            "which was tried first, is noisy on so few rows.",
            "",
            "## GPUs held out",
            "",
            "Relative errors of the time of a step. First each GPU predicted from all others; then NeuSight's own",
            f"split, learned on {', '.join(name.replace('_', ' ') for name in SEEN)}, judged on",
            f"{', '.join(sorted({row.gpu.replace('_', ' ') for row in judged.unseen}))}.",
            "",
            "| | each held out: median | mean | p95 | NeuSight's split: median | mean | p95 |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {name} | {_three(errors(judged.each[name], rows))} "
                f"| {_three(errors(judged.split[name], judged.unseen))} |"
                for name in PREDICTORS
            ),
            *(
                f"| ours, {name} | {_three(errors(gpus_held_out(rows, predictor), rows))} "
                f"| {_three(errors(predictor(seen, judged.unseen), judged.unseen))} |"
                for name, predictor in others.items()
            ),
            f"| ours with {INFERRED} | {_three(errors(everything.each[OURS], everything.rows))} "
            f"| {_three(errors(everything.split[OURS], everything.unseen))} |",
            "",
            "NeuSight reports means of 7 to 15% for itself; a median of 153% for Habitat on these GPUs.",
            "",
            "| GPU, learned on all others | rows | median error | predicted over measured | plain roofline |",
            "|---|---|---|---|---|",
            *_by_gpu(judged),
            "",
            "![predicted over measured](figures/step-time-predicted.svg)",
            "",
            "## A convolutional network, nothing of it fitted",
            "",
            "ResNet-50 on ImageNet as Zeus measured it (whole epochs, image loading included), from its trace and the",
            "three numbers above.",
            "",
            "| GPU | batch sizes | median error | predicted over measured |",
            "|---|---|---|---|",
            *_by_epoch(epochs, convolutional),
            "",
            "## What to doubt",
            "",
            "- Measured in FP32 without tensor cores. Where they compute (mixed precision; convolutions from Ampere",
            "  on), 40% of their peak is assumed, and the interval is 1.6 times as wide on both sides.",
            "- NeuSight's steps have no optimizer; its time is that of the bytes it moves.",
            "- P4, T4 and L4 run below their clocks under their power limits of 70 to 75 W, which no datasheet says.",
            "- Waiting for data is not in a model's graph, and not in the prediction.",
            "",
        ]
    )


def _three(found: Matrix) -> str:
    return f"{np.median(found):.1%} | {found.mean():.1%} | {np.quantile(found, 0.95):.1%}"


def _by_gpu(judged: Judged) -> list[str]:
    lines = []
    names = np.array([row.gpu for row in judged.rows])
    measured = np.array([row.time_s for row in judged.rows])
    for gpu in sorted(set(names)):
        held = names == gpu
        ours, plain = (errors(judged.each[name], judged.rows)[held] for name in (OURS, "plain roofline"))
        ratio = float(np.median(judged.each[OURS][held] / measured[held]))
        lines.append(
            f"| {gpu.replace('_', ' ')} | {held.sum()} | {np.median(ours):.1%} | {ratio:.2f} | {np.median(plain):.1%} |"
        )
    return lines


def _by_epoch(epochs: Sequence[data.EpochRow], predicted: Matrix) -> list[str]:
    lines = []
    names = np.array([row.gpu for row in epochs])
    measured = np.array([row.time_s for row in epochs])
    for gpu in sorted(set(names)):
        held = names == gpu
        sizes = [row.batch_size for row in epochs if row.gpu == gpu]
        error = np.median(np.abs(predicted[held] / measured[held] - 1))
        ratio = np.median(predicted[held] / measured[held])
        lines.append(f"| {gpu.upper()} | {min(sizes)} to {max(sizes)} | {error:.1%} | {ratio:.2f} |")
    return lines


MAX_ERROR = 0.12


def inputs(*, is_whole: bool) -> dict[Path, tuple[str, ...]]:
    """Return the columns of each file that the suite reads, below the data folder."""
    zeus: dict[Path, tuple[str, ...]] = (
        {data.file_of(gpu): data.ZEUS_COLUMNS for gpu in data.ZEUS_GPUS} if is_whole else {}
    )
    return {data.FILE: data.COLUMNS, **zeus}


def run(data: Path, out: Path, progress: Progress = silent) -> Report:
    """Evaluate, and write the card; `progress` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, left_out = read_models(data)
    epochs = read_epochs(data)
    judged = judge(certain(rows), "each GPU held out", progress)
    everything = judge(rows, f"each GPU held out, with {INFERRED}", progress)
    model = model_of(rows)
    progress("ResNet-50 on Zeus' GPUs, from its trace")
    convolutional = _epochs(model.learned, epochs)
    card = out / "step-time.md"
    figure = out / "figures" / "step-time-predicted.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(judged), figure)
    card.write_text(write(judged, everything, left_out, model, epochs, convolutional))
    return Report("step-time", _figures(judged, everything, epochs, convolutional), (card, figure))


def frozen(data: Path) -> Report:
    """Judge the shipped model on rows that it never saw; nothing is fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, _ = read_models(data)
    model = shipped()
    predicted = np.array([seconds(model.learned, row.gpu, row.cost) for row in rows])
    measured = np.array([row.time_s for row in rows])
    inside = (measured >= predicted * model.lower) & (measured <= predicted * model.upper)
    found = errors(predicted, rows)
    return Report(
        "step-time",
        (
            Metric("rows", len(rows)),
            _asked("median error, %", float(np.median(found))),
            Metric("p95 error, %", round(100 * float(np.quantile(found, 0.95)), 2)),
            Metric("inside the 90% interval, %", round(100 * float(inside.mean()), 1)),
        ),
    )


def _epochs(learned: Utilization, epochs: Sequence[data.EpochRow]) -> Matrix:
    """Predict ResNet-50's steps from its trace."""
    # Imports PyTorch, which the rest of this suite does without.
    from carpool_predictor.catalog.recipes import recipe_of
    from carpool_predictor.tracing.models import trace_recipe

    training = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)
    features = trace_recipe(recipe_of(CatalogModel(name="torchvision/resnet50")), training)
    predicted = []
    for row in epochs:
        gpu = data.ZEUS_GPUS[row.gpu]
        rate, bandwidth = gpu.fp32_tflops * 1e12 * learned.matrix, gpu.memory_bandwidth_gb_s * 1e9
        predicted.append(learned.seconds(cost_at(features, row.batch_size), rate, bandwidth))
    return np.array(predicted)


def _asked(name: str, error: float) -> Metric:
    return Metric(name, round(100 * error, 2), f"≤ {100 * MAX_ERROR:g}", error <= MAX_ERROR)


def _figures(
    judged: Judged, everything: Judged, epochs: Sequence[data.EpochRow], convolutional: Matrix
) -> tuple[Metric, ...]:
    figures = []
    for title, predictions, rows in (
        ("each GPU held out", judged.each, judged.rows),
        ("NeuSight's held-out GPUs", judged.split, judged.unseen),
    ):
        for name, predicted in predictions.items():
            error = float(np.median(errors(predicted, rows)))
            label = f"{title}: median error of {name}, %"
            figures.append(_asked(label, error) if name == OURS else Metric(label, round(100 * error, 2)))
    for title, predicted, rows in (
        (f"each GPU held out, with {INFERRED}", everything.each[OURS], everything.rows),
        (f"NeuSight's held-out GPUs, with {INFERRED}", everything.split[OURS], everything.unseen),
    ):
        error = float(np.median(errors(predicted, rows)))
        figures.append(Metric(f"{title}: median error of {OURS}, %", round(100 * error, 2)))
    error = float(np.median(errors(convolutional, epochs)))
    figures.append(Metric("ResNet-50 on Zeus' GPUs: median error of utilization (ours), %", round(100 * error, 2)))
    return tuple(figures)


def _draw(judged: Judged) -> Figure:
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    names = np.array([row.gpu for row in judged.rows])
    measured = np.array([row.time_s for row in judged.rows])
    predicted = judged.each[OURS]
    for gpu in sorted(set(names)):
        held = names == gpu
        axes.scatter(measured[held], predicted[held], s=14, label=gpu.replace("_", " "))
    ends = [float(measured.min()), float(measured.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted, its GPU held out, s")
    axes.legend(fontsize=7)
    return figure
