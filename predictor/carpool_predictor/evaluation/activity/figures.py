"""Figures of the activity card. The same numbers give the same bytes."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from carpool_predictor.evaluation.activity.fit import HeldOut
from carpool_predictor.evaluation.figures import save


def draw(found: HeldOut, out: Path) -> tuple[Path, ...]:
    """Draw GPU utilization: measured over predicted, error by architecture, calibration."""
    out.mkdir(parents=True, exist_ok=True)
    return (
        save(_predicted(found), out / "activity-predicted.svg"),
        save(_architectures(found), out / "activity-architectures.svg"),
        save(_calibration(found), out / "activity-calibration.svg"),
    )


def _predicted(found: HeldOut) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    for kind, colour in (("mlp", "tab:orange"), ("cnn", "tab:blue")):
        chosen = np.array([group.startswith(kind) for group in found.groups])
        axes.scatter(
            found.predicted[chosen], found.measured[chosen], s=4, color=colour, label=kind.upper(), rasterized=True
        )
    axes.plot([0, 100], [0, 100], color="grey", linewidth=0.8)
    axes.set(xlabel="predicted GPU utilization, %", ylabel="measured, %", xlim=(0, 100), ylim=(0, 100))
    axes.legend()
    return figure


def _architectures(found: HeldOut) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    groups = sorted(set(found.groups))
    names = np.array(found.groups)
    errors = [found.predicted[names == group] - found.measured[names == group] for group in groups]
    axes.boxplot(errors, whis=(5, 95), showfliers=False, orientation="horizontal", tick_labels=groups)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted - measured, points (box: half of the rows, whiskers: nine tenths)")
    return figure


def _calibration(found: HeldOut) -> Figure:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    names = np.array(found.groups)
    inside = (found.measured >= found.lower) & (found.measured <= found.upper)
    groups = sorted(set(found.groups))
    axes.bar(groups, [float(inside[names == group].mean()) for group in groups])
    axes.axhline(0.9, color="grey", linewidth=0.8)
    axes.tick_params(axis="x", rotation=60)
    axes.set(ylabel="share inside the 90% interval", ylim=(0, 1))
    return figure
