"""Draws how the memory model did on rows whose families were held out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carpool_predictor.evaluation.figures import save
from carpool_predictor.evaluation.memory.fit import Sample


class Answers(Protocol):
    """What the card draws of the rows with families held out."""

    @property
    def samples(self) -> Sequence[Sample]:
        """What was judged."""
        ...

    @property
    def median(self) -> NDArray[np.float64]:
        """Predicted medians, in MiB."""
        ...

    @property
    def upper(self) -> NDArray[np.float64]:
        """Predicted bounds, in MiB."""
        ...

    @property
    def measured(self) -> NDArray[np.float64]:
        """Measured peaks, in MiB."""
        ...

    @property
    def errors(self) -> NDArray[np.float64]:
        """Absolute relative errors."""
        ...

    def families(self) -> list[tuple[str, int, float]]:
        """Return (family, rows, coverage in percent), the least covered first."""
        ...


def draw(judged: Answers, out: Path) -> tuple[Path, ...]:
    """Draw memory: measured over predicted, calibration of the bound, error by family."""
    out.mkdir(parents=True, exist_ok=True)
    return (
        save(_predicted(judged), out / "memory-predicted.svg"),
        save(_calibration(judged), out / "memory-calibration.svg"),
        save(_by_family(judged), out / "memory-families.svg"),
    )


def _predicted(judged: Answers) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(judged.median / 1024, judged.measured / 1024, s=4, rasterized=True)
    axes.plot([1.5, 45], [1.5, 45], color="grey", linewidth=0.8)
    axes.set(xlabel="predicted (median), GiB", ylabel="measured, GiB", xscale="log", yscale="log")
    return figure


def _calibration(judged: Answers) -> Figure:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    ratios = np.sort(judged.measured / judged.upper)
    axes.plot(ratios, np.linspace(0, 100, len(ratios)))
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.axhline(95, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="measured over bound", ylabel="share of rows, %", xlim=(0.7, 1.3))
    return figure


def _by_family(judged: Answers) -> Figure:
    names = np.array([s.family for s in judged.samples])
    order = sorted(np.unique(names), key=lambda name: float(np.median(judged.errors[names == name])))
    figure = Figure(figsize=(6, 0.16 * len(order) + 1), layout="constrained")
    axes = figure.add_subplot()
    axes.boxplot([100 * judged.errors[names == n] for n in order], orientation="horizontal", sym=".", widths=0.6)
    axes.set_yticks(range(1, len(order) + 1), [str(n) for n in order], fontsize=6)
    axes.set(xlabel="error of the median, %", xscale="symlog")
    return figure
