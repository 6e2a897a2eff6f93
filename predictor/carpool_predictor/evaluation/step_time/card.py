"""The model card of step time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.step_time import zeus
from carpool_predictor.evaluation.step_time.fit import (
    CHOICES,
    OURS,
    PREDICTORS,
    Judged,
    by_form,
    by_noisy_choice,
    choose,
    errors,
    gpus_held_out,
)
from carpool_predictor.evaluation.step_time.neusight import INFERRED, SEEN
from carpool_predictor.models.step_time import StepTimeModel

Matrix = NDArray[np.float64]


def write(
    judged: Judged,
    everything: Judged,
    left_out: int,
    model: StepTimeModel,
    epochs: Sequence[zeus.EpochRow],
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
            "Written by `carpool evaluate --suite step-time`; do not edit.",
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


def _by_epoch(epochs: Sequence[zeus.EpochRow], predicted: Matrix) -> list[str]:
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
