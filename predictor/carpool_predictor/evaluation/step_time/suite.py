"""The suite `step-time`: time of a step on GPUs that were held out; writes `step-time.md`. Needs the extra `train`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from carpool_predictor.evaluation.figures import save
from carpool_predictor.evaluation.step_time import zeus
from carpool_predictor.evaluation.step_time.card import write
from carpool_predictor.evaluation.step_time.fit import OURS, Judged, certain, errors, judge, model_of, seconds
from carpool_predictor.evaluation.step_time.neusight import INFERRED, read_models
from carpool_predictor.evaluation.suites import Figure, Report, Tell, silent
from carpool_predictor.features import cost_at
from carpool_predictor.models.step_time import Utilization, shipped

MAX_ERROR = 0.12

Matrix = NDArray[np.float64]


def run(data: Path, out: Path, tell: Tell = silent) -> Report:
    """Evaluate, and write the card; `tell` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, left_out = read_models(data)
    epochs = zeus.read_epochs(data)
    judged = judge(certain(rows), "each GPU held out", tell)
    everything = judge(rows, f"each GPU held out, with {INFERRED}", tell)
    model = model_of(rows)
    tell("ResNet-50 on Zeus' GPUs, from its trace")
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
            Figure("rows", len(rows)),
            _asked("median error, %", float(np.median(found))),
            Figure("p95 error, %", round(100 * float(np.quantile(found, 0.95)), 2)),
            Figure("inside the 90% interval, %", round(100 * float(inside.mean()), 1)),
        ),
    )


def _epochs(learned: Utilization, epochs: Sequence[zeus.EpochRow]) -> Matrix:
    """Predict ResNet-50's steps from its trace."""
    # Imports PyTorch, which the rest of this suite does without.
    from carpool_predictor.catalog.recipes import recipe_of
    from carpool_predictor.tracing.models import trace_recipe

    training = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)
    features = trace_recipe(recipe_of(CatalogModel(name="torchvision/resnet50")), training)
    predicted = []
    for row in epochs:
        gpu = zeus.GPUS[row.gpu]
        rate, bandwidth = gpu.fp32_tflops * 1e12 * learned.matrix, gpu.memory_bandwidth_gb_s * 1e9
        predicted.append(learned.seconds(cost_at(features, row.batch_size), rate, bandwidth))
    return np.array(predicted)


def _asked(name: str, error: float) -> Figure:
    return Figure(name, round(100 * error, 2), f"≤ {100 * MAX_ERROR:g}", error <= MAX_ERROR)


def _figures(
    judged: Judged, everything: Judged, epochs: Sequence[zeus.EpochRow], convolutional: Matrix
) -> tuple[Figure, ...]:
    figures = []
    for title, predictions, rows in (
        ("each GPU held out", judged.each, judged.rows),
        ("NeuSight's held-out GPUs", judged.split, judged.unseen),
    ):
        for name, predicted in predictions.items():
            error = float(np.median(errors(predicted, rows)))
            label = f"{title}: median error of {name}, %"
            figures.append(_asked(label, error) if name == OURS else Figure(label, round(100 * error, 2)))
    for title, predicted, rows in (
        (f"each GPU held out, with {INFERRED}", everything.each[OURS], everything.rows),
        (f"NeuSight's held-out GPUs, with {INFERRED}", everything.split[OURS], everything.unseen),
    ):
        error = float(np.median(errors(predicted, rows)))
        figures.append(Figure(f"{title}: median error of {OURS}, %", round(100 * error, 2)))
    error = float(np.median(errors(convolutional, epochs)))
    figures.append(Figure("ResNet-50 on Zeus' GPUs: median error of utilization (ours), %", round(100 * error, 2)))
    return tuple(figures)


def _draw(judged: Judged) -> Drawing:
    figure = Drawing(figsize=(6, 5), layout="constrained")
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
