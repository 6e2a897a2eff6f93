"""The suite `step-time`: time of a step on GPUs that were held out; writes `step-time.md`. Needs the extra `train`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from carpool_predictor.activity_figures import save
from carpool_predictor.evaluation.suites import Figure, Report
from carpool_predictor.neusight import INFERRED, SEEN, ModelRow, read_models
from carpool_predictor.step_time_fit import PREDICTORS, fit, gpus_held_out

MAX_ERROR = 0.12
OURS = "utilization (ours)"

Matrix = NDArray[np.float64]


def run(data: Path, out: Path) -> Report:
    """Evaluate, and write the card.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, left_out = read_models(data)
    seen = [row for row in rows if row.gpu in SEEN]
    unseen = [row for row in rows if row.gpu not in SEEN]
    each = {name: gpus_held_out(rows, predictor) for name, predictor in PREDICTORS.items()}
    split = {name: predictor(seen, unseen) for name, predictor in PREDICTORS.items()}
    card = out / "step-time.md"
    figure = out / "figures" / "step-time-predicted.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(rows, each[OURS]), figure)
    card.write_text(_card(rows, left_out, unseen, each, split))
    return Report("step-time", _figures(rows, unseen, each, split), (card, figure))


def errors(predicted: Matrix, rows: Sequence[ModelRow]) -> Matrix:
    """Return relative errors."""
    measured = np.array([row.time_s for row in rows])
    found: Matrix = np.abs(predicted / measured - 1)
    return found


def _figures(
    rows: Sequence[ModelRow], unseen: Sequence[ModelRow], each: Mapping[str, Matrix], split: Mapping[str, Matrix]
) -> tuple[Figure, ...]:
    figures = []
    for title, predictions, judged in (("each GPU held out", each, rows), ("NeuSight's held-out GPUs", split, unseen)):
        for name, predicted in predictions.items():
            error = float(np.median(errors(predicted, judged)))
            asked = name == OURS
            figures.append(
                Figure(
                    f"{title}: median error of {name}, %",
                    round(100 * error, 2),
                    f"≤ {100 * MAX_ERROR:g}" if asked else "",
                    error <= MAX_ERROR if asked else None,
                )
            )
    return tuple(figures)


def _card(
    rows: Sequence[ModelRow],
    left_out: int,
    unseen: Sequence[ModelRow],
    each: Mapping[str, Matrix],
    split: Mapping[str, Matrix],
) -> str:
    learned = fit(rows)
    certain = [row for row in rows if row.model != INFERRED]
    new = [row for row in certain if row.gpu not in SEEN]
    new_predicted = PREDICTORS[OURS]([row for row in certain if row.gpu in SEEN], new)
    return "\n".join(
        [
            "# Model card: step time",
            "",
            "Written by `carpool evaluate --suite step-time`; do not edit.",
            "",
            "How long a step takes on a GPU that was never measured. As NeuSight does, what is learned is how much of",
            "the roofline kernels use, never how long they take; here by four numbers instead of a network. Kernels",
            "come from the models' published sizes by arithmetic. Over all rows: matrix products reach",
            f"{learned.products:.0%} of the FP32 peak, other kernels {learned.bandwidth:.0%} of the bandwidth that",
            f"their inputs and outputs need, a kernel takes {learned.kernel_s * 1e6:.1f} µs in any case, and one that",
            f"fills a single wave of tiles takes {1 + learned.waves:.2f} times as long as it should.",
            "",
            "## Data",
            "",
            f"sitar-lab/NeuSight, `e2e_labels`: {len(rows)} steps of five transformers in FP32 on "
            f"{len({row.gpu for row in rows})} GPUs by NVIDIA; {left_out} rows",
            "are left out: AMD's GPUs, several GPUs at once, compiled models, mixtures of experts, times of 0.",
            "",
            "## GPUs held out",
            "",
            "Relative errors of the time of a step. First each GPU predicted from all others; then NeuSight's own",
            f"split, learned on {', '.join(name.replace('_', ' ') for name in SEEN)}, judged on",
            f"{', '.join(sorted({row.gpu.replace('_', ' ') for row in unseen}))}.",
            "",
            "| | each held out: median | mean | p95 | NeuSight's split: median | mean | p95 |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {name} | {_three(errors(each[name], rows))} | {_three(errors(split[name], unseen))} |"
                for name in PREDICTORS
            ),
            f"| ours without {INFERRED} | {_three(errors(gpus_held_out(certain, PREDICTORS[OURS]), certain))} "
            f"| {_three(errors(new_predicted, new))} |",
            "",
            "NeuSight reports means of 7 to 15% for itself; a median of 153% for Habitat on these GPUs.",
            "",
            "| GPU, learned on all others | rows | median error | predicted over measured | plain roofline |",
            "|---|---|---|---|---|",
            *_by_gpu(rows, each),
            "",
            "![predicted over measured](figures/step-time-predicted.svg)",
            "",
            "## What to doubt",
            "",
            f"- The width of {INFERRED} does not stand in the data: GPT-3's table gives 2048 and 24 heads of 128, and",
            "  the times fit 3072. That was seen on rows that are judged here; one row of the table does without it.",
            "- Transformers in FP32 on one GPU. Mixed precision, convolutions and the optimizer are not in it.",
            "- P4, T4 and L4 run below their clocks under their power limits of 70 to 75 W, which no datasheet says.",
            "- The times of steps that `carpool predict` shows come from the roofline with intervals, not from here.",
            "",
        ]
    )


def _three(found: Matrix) -> str:
    return f"{np.median(found):.1%} | {found.mean():.1%} | {np.quantile(found, 0.95):.1%}"


def _by_gpu(rows: Sequence[ModelRow], each: Mapping[str, Matrix]) -> list[str]:
    lines = []
    names = np.array([row.gpu for row in rows])
    measured = np.array([row.time_s for row in rows])
    for gpu in sorted(set(names)):
        held = names == gpu
        ours, plain = errors(each[OURS], rows)[held], errors(each["plain roofline"], rows)[held]
        ratio = float(np.median(each[OURS][held] / measured[held]))
        lines.append(
            f"| {gpu.replace('_', ' ')} | {held.sum()} | {np.median(ours):.1%} | {ratio:.2f} | {np.median(plain):.1%} |"
        )
    return lines


def _draw(rows: Sequence[ModelRow], predicted: Matrix) -> Drawing:
    figure = Drawing(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    names = np.array([row.gpu for row in rows])
    measured = np.array([row.time_s for row in rows])
    for gpu in sorted(set(names)):
        held = names == gpu
        axes.scatter(measured[held], predicted[held], s=14, label=gpu.replace("_", " "))
    ends = [float(measured.min()), float(measured.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted, its GPU held out, s")
    axes.legend(fontsize=7)
    return figure
