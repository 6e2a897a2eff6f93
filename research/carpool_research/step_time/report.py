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

from carpool_research.report import Metric, Progress, Report, markdown, save, silent, write_card
from carpool_research.step_time import data
from carpool_research.step_time.data import INFERRED, TRAINING_GPUS, read_epochs, read_models
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


def _texts(
    judged: Judged,
    everything: Judged,
    left_out: int,
    model: StepTimeModel,
    epochs: Sequence[data.EpochRow],
    convolutional: Matrix,
) -> dict[str, str]:
    """Return the tables and numbers of the card.

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
    train = [row for row in rows if row.gpu in TRAINING_GPUS]
    others = {**{str(choice): by_form(choice) for choice in CHOICES}, "form chosen by the median": by_noisy_choice}
    table = [_six(name, judged, judged.each[name], judged.split[name]) for name in PREDICTORS]
    table += [
        _six(f"ours, {name}", judged, gpus_held_out(rows, predictor), predictor(train, judged.unseen))
        for name, predictor in others.items()
    ]
    table.append(_six(f"ours with {INFERRED}", everything, everything.each[OURS], everything.split[OURS]))
    return {
        "matrix": f"{learned.matrix:.3f}",
        "bandwidth": f"{learned.bandwidth:.3f}",
        "overhead": f"{learned.kernel_s * 1e6:.1f}",
        "form": " (the larger of the first two, not their sum)" if learned.form == "larger" else "",
        "lower": f"{model.lower:.2f}",
        "upper": f"{model.upper:.2f}",
        "steps": str(len(everything.rows)),
        "gpus": str(len({row.gpu for row in everything.rows})),
        "left_out": str(left_out),
        "inferred": INFERRED,
        "inferred_rows": str(len(everything.rows) - len(rows)),
        "seen": ", ".join(name.replace("_", " ") for name in TRAINING_GPUS),
        "unseen": ", ".join(sorted({row.gpu.replace("_", " ") for row in judged.unseen})),
        "chosen": ", ".join(f"{chosen.count(name)} × {name}" for name in sorted(set(chosen))),
        "errors": markdown(table),
        "by_gpu": markdown(_by_gpu(judged)),
        "by_epoch": markdown(_by_epoch(epochs, convolutional)),
    }


def _six(name: str, judged: Judged, each: Matrix, split: Matrix) -> dict[str, str]:
    """Return relative errors of a predictor, each GPU held out and by NeuSight's split."""
    row = {"predictor": name}
    for head, found in (("held out", errors(each, judged.rows)), ("split", errors(split, judged.unseen))):
        numbers = {"median": np.median(found), "mean": found.mean(), "p95": np.quantile(found, 0.95)}
        row |= {f"{head}: {figure}": f"{number:.1%}" for figure, number in numbers.items()}
    return row


def _by_gpu(judged: Judged) -> list[dict[str, str]]:
    table = []
    names = np.array([row.gpu for row in judged.rows])
    measured = np.array([row.time_s for row in judged.rows])
    for gpu in sorted(set(names)):
        held = names == gpu
        ours, plain = (errors(judged.each[name], judged.rows)[held] for name in (OURS, "plain roofline"))
        ratio = float(np.median(judged.each[OURS][held] / measured[held]))
        table.append(
            {
                "GPU, predicted from all others": gpu.replace("_", " "),
                "rows": str(held.sum()),
                "median error": f"{np.median(ours):.1%}",
                "predicted over measured": f"{ratio:.2f}",
                "plain roofline": f"{np.median(plain):.1%}",
            }
        )
    return table


def _by_epoch(epochs: Sequence[data.EpochRow], predicted: Matrix) -> list[dict[str, str]]:
    table = []
    names = np.array([row.gpu for row in epochs])
    measured = np.array([row.time_s for row in epochs])
    for gpu in sorted(set(names)):
        held = names == gpu
        sizes = [row.batch_size for row in epochs if row.gpu == gpu]
        error = np.median(np.abs(predicted[held] / measured[held] - 1))
        ratio = np.median(predicted[held] / measured[held])
        table.append(
            {
                "GPU": gpu.upper(),
                "batch sizes": f"{min(sizes)} to {max(sizes)}",
                "median error": f"{error:.1%}",
                "predicted over measured": f"{ratio:.2f}",
            }
        )
    return table


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
    figure = out / "figures" / "step-time-predicted.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(judged), figure)
    card = write_card(
        __package__, out / "step-time.md", _texts(judged, everything, left_out, model, epochs, convolutional)
    )
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
