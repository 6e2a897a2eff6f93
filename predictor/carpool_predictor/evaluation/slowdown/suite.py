"""The suite `slowdown`: learned on GPUMemNet and Gavel, judged on Lucid; writes `slowdown.md`. Needs `train`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from carpool_predictor.evaluation.figures import save
from carpool_predictor.evaluation.slowdown import card, gavel, groups, holding, lucid
from carpool_predictor.evaluation.slowdown.asked import MAX_ERROR, MIN_FOUND
from carpool_predictor.evaluation.slowdown.card import OURS, UPPER
from carpool_predictor.evaluation.slowdown.lucid import BASELINES, Pairs, Score, forest, score
from carpool_predictor.evaluation.suites import Figure, Report, Tell, counted, silent

Numbers = NDArray[np.float64]


def run(data: Path, out: Path, tell: Tell = silent) -> Report:
    """Evaluate, and write the card; `tell` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = holding.read(data), gavel.read(data)
    tell("Gavel: steps left out, for each exponent")
    by_exponent = gavel.errors_by_exponent(measured)
    held_out = gavel.queueing(measured, gavel.best_exponent(by_exponent))
    pairs = lucid.read(data)
    predictions = _predictions(pairs, tell)
    scores = {name: score(predicted, pairs) for name, predicted in predictions.items()}
    page, picture = out / "slowdown.md", out / "figures" / "slowdown-predicted.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(pairs, predictions[OURS]), picture)
    lines = [
        *card.head(),
        *card.held_by_who_is_busy(runs),
        *card.hidden_by_hosts(by_exponent),
        *card.queued_behind_mps(held_out),
        *card.judged(pairs, scores),
        *groups.section(),
        *card.doubts(),
    ]
    page.write_text("\n".join(lines), encoding="utf-8")
    return Report("slowdown", _figures(scores), (page, picture))


def _ours_and_baselines(pairs: Pairs) -> dict[str, Numbers]:
    found = {name: model(pairs) for name, model in BASELINES.items()}
    return {**found, OURS: lucid.shipped_median(pairs), UPPER: lucid.shipped_upper(pairs)}


def _predictions(pairs: Pairs, tell: Tell) -> dict[str, Numbers]:
    forests = {
        "not shipped: random forest on Lucid, models held out": True,
        "not shipped: random forest on Lucid, pairs of jobs held out": False,
    }
    return {
        **_ours_and_baselines(pairs),
        **{name: forest(pairs, models_held_out=forests[name]) for name in counted(list(forests), "Lucid", tell)},
    }


def _figures(scores: Mapping[str, Score]) -> tuple[Figure, ...]:
    figures = []
    for name, one in scores.items():
        asked = name == OURS
        limits = (f"≤ {MAX_ERROR}", f"≥ {MIN_FOUND:g}") if asked else ("", "")
        met = (one.speed_error <= MAX_ERROR, one.found_percent >= MIN_FOUND) if asked else (None, None)
        figures += [
            Figure(f"error of speed, {name}", round(one.speed_error, 4), limits[0], met[0]),
            Figure(f"slowdowns > 15% found, {name}, %", round(one.found_percent, 1), limits[1], met[1]),
            Figure(f"error of slowdown, {name}", round(one.error, 4), "", None),
        ]
    return tuple(figures)


def _draw(pairs: Pairs, predicted: Numbers) -> Drawing:
    figure = Drawing(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(predicted, pairs.slowdown, s=4, rasterized=True)
    ends = [1.0, float(pairs.slowdown.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted slowdown", ylabel="measured slowdown (Lucid)")
    return figure
