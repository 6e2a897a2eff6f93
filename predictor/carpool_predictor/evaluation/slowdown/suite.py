"""The suite `slowdown`: learned on GPUMemNet and Gavel, judged on Lucid; writes `slowdown.md`. Needs `train`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from carpool_predictor.evaluation.figures import save
from carpool_predictor.evaluation.slowdown import card, gavel, groups, holding, lucid, ways
from carpool_predictor.evaluation.slowdown.asked import MAX_ERROR, MIN_FOUND
from carpool_predictor.evaluation.slowdown.card import OURS, UPPER
from carpool_predictor.evaluation.slowdown.lucid import BASELINES, Pairs, Score, forest, score
from carpool_predictor.evaluation.suites import Figure, Report, Tell, counted, silent
from carpool_predictor.models.slowdown import shipped

HIDING = (1.25, 1.5)
"""Exponents p of hosts that hide, that could be shipped instead."""

Numbers = NDArray[np.float64]


def run(data: Path, out: Path, tell: Tell = silent) -> Report:
    """Evaluate, and write the card; `tell` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = holding.read(data), gavel.read(data)
    tell("Gavel: steps left out, for each exponent")
    by_exponent = gavel.errors_by_exponent(measured)
    held_out = gavel.queueing(measured, gavel.most_cautious(by_exponent), shipped().holding)
    pairs = lucid.read(data)
    engine = holding.best_exponent(list(runs.values()), holding.engine_active)
    predictions = _predictions(pairs, engine, tell)
    tell("Lucid: ways to count")
    readings = ways.readings(pairs, lucid.read(data, by_precision=False))
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
        *ways.section(readings),
        *groups.section(pairs),
        *card.doubts(),
    ]
    page.write_text("\n".join(lines), encoding="utf-8")
    return Report("slowdown", _figures(scores), (page, picture))


def _predictions(pairs: Pairs, engine: float, tell: Tell) -> dict[str, Numbers]:
    k = shipped().holding
    others = {f"not shipped: {card.HIDING} {p:g}": lucid.hiding(pairs, p, k) for p in HIDING}
    forests = {
        "not shipped: random forest on Lucid, models held out": True,
        "not shipped: random forest on Lucid, pairs of jobs held out": False,
    }
    return {
        **{name: model(pairs) for name, model in BASELINES.items()},
        OURS: lucid.shipped_median(pairs),
        UPPER: lucid.shipped_upper(pairs),
        f"not shipped: k = {engine:.2f}, by the active engine": lucid.hiding(pairs, 1.0, engine),
        **others,
        "not shipped: p = 1.5 and k = 1, as it was": lucid.hiding(pairs, 1.5, 1.0),
        **{name: forest(pairs, models_held_out=forests[name]) for name in counted(list(forests), "Lucid", tell)},
    }


def _figures(scores: Mapping[str, Score]) -> tuple[Figure, ...]:
    figures = []
    for name, one in scores.items():
        asked = name == OURS
        limits = (f"≤ {MAX_ERROR}", f"≥ {MIN_FOUND:g}") if asked else ("", "")
        figures += [
            Figure(f"{which}, {name}", round(error, 4), limits[0], error <= MAX_ERROR if asked else None)
            for which, error in (("error of slowdown", one.error), ("error of speed", one.speed_error))
        ]
        met = one.found_percent >= MIN_FOUND if asked else None
        figures.append(Figure(f"slowdowns > 15% found, {name}, %", round(one.found_percent, 1), limits[1], met))
    return tuple(figures)


def _draw(pairs: Pairs, predicted: Numbers) -> Drawing:
    figure = Drawing(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(predicted, pairs.slowdown, s=4, rasterized=True)
    ends = [1.0, float(pairs.slowdown.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted slowdown", ylabel="measured slowdown (Lucid)")
    return figure
