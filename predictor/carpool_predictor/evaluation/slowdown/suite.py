"""The suite `slowdown`: learned on GPUMemNet and Gavel, judged on Lucid; writes `slowdown.md`. Needs `train`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import shipped
from carpool_predictor.evaluation.figures import save
from carpool_predictor.evaluation.slowdown import card, demand, gavel, groups, holding, learned, lucid, steps
from carpool_predictor.evaluation.slowdown.asked import MAX_ERROR, MIN_FOUND
from carpool_predictor.evaluation.slowdown.card import OURS, UPPER
from carpool_predictor.evaluation.slowdown.lucid import BASELINES, Pairs, Score, forest, score
from carpool_predictor.evaluation.slowdown.queueing import Weighted
from carpool_predictor.evaluation.suites import Figure, Report, Tell, counted, silent

HIDING = (1.25, 1.5)
"""Exponents p of hosts that hide, that could be shipped in the place of b."""
SHARED = ("ResNet-18", "ResNet18")
"""The architecture that both Gavel and Lucid measured, by its names there."""

Numbers = NDArray[np.float64]


def run(data: Path, out: Path, tell: Tell = silent) -> Report:
    """Evaluate, and write the card; `tell` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = holding.read(data), gavel.read(data)
    tell("Gavel: steps left out, for each exponent")
    by_exponent = steps.errors_by_exponent(measured)
    tell("Gavel: pairs, for each exponent")
    demands = demand.demands(measured, by_exponent)
    exponent = steps.best_exponent(by_exponent)
    learned_on = demands.by_exponent[exponent].pairs
    pairs = lucid.read(data)
    engine = holding.best_exponent(list(runs.values()), holding.engine_active)
    by_engine = (Weighted.of(measured, exponent, engine).fit().demand, engine)
    predictions = _predictions(pairs, by_engine, tell)
    scores = {name: score(predicted, pairs) for name, predicted in predictions.items()}
    page, picture = out / "slowdown.md", out / "figures" / "slowdown-predicted.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(pairs, predictions[OURS]), picture)
    lines = [
        *card.head(),
        *learned.held_by_who_is_busy(runs),
        *learned.worked_out_from_steps(by_exponent),
        *demand.section(demands, by_exponent, pairs, holding.engine_share(list(runs.values()))),
        *learned.queued_behind_mps(learned_on.foretell_held_out()),
        *card.judged(pairs, scores, _models_held_out(pairs, learned_on)),
        *groups.section(pairs),
        *card.doubts(pairs),
    ]
    page.write_text("\n".join(lines), encoding="utf-8")
    return Report("slowdown", _figures(scores), (page, picture))


def _predictions(pairs: Pairs, by_engine: tuple[float, float], tell: Tell) -> dict[str, Numbers]:
    k = shipped().holding
    hiding = {f"not shipped: b = 1, and a host hides with p = {p:g}": lucid.hiding(pairs, p, k) for p in HIDING}
    forests = {
        "not shipped: random forest on Lucid, models held out": True,
        "not shipped: random forest on Lucid, pairs of jobs held out": False,
    }
    return {
        **{name: model(pairs) for name, model in BASELINES.items()},
        OURS: lucid.shipped_median(pairs),
        UPPER: lucid.shipped_upper(pairs),
        "not shipped: b = 1": lucid.turns(pairs, 1.0, k),
        **hiding,
        "not shipped: b = {:.3f}, and k = {:.2f} by the active engine".format(*by_engine): lucid.turns(
            pairs, *by_engine
        ),
        **{name: forest(pairs, models_held_out=forests[name]) for name in counted(list(forests), "Lucid", tell)},
    }


def _models_held_out(pairs: Pairs, learned_on: Weighted) -> Numbers:
    """Foretell each of Lucid's pairs with the b of Gavel's pairs without the architecture that both have."""
    gavels, lucids = SHARED
    without = learned_on.without([gavels]).fit().demand
    is_shared = np.array([lucids in models for models in pairs.models])
    return np.where(is_shared, lucid.turns(pairs, without, shipped().holding), lucid.shipped_median(pairs))


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
