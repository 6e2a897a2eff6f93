"""The suite `slowdown`: evaluates the model on Lucid and writes `slowdown.md`. Needs the extra `train`."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from carpool_predictor.models.slowdown import shipped
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carpool_research.report import Metric, Progress, Report, markdown, save, silent, write_card
from carpool_research.slowdown import candidates, fit, gavel, lucid, online, profiled
from carpool_research.slowdown.fit import LEVEL, MAX_ERROR, MIN_FOUND, Runs
from carpool_research.slowdown.gavel import BehindMps, LeftOutErrors
from carpool_research.slowdown.lucid import BASELINES, EXACT, FOUND, Pairs, Score, forest, score
from carpool_research.tables import KINDS, file_of

OURS = "shipped: median"
UPPER = "shipped: upper quantile"
HIDING = "a host hides with p ="
BUSY = 0.8
NEIGHBOURS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.97, 1.01)
"""Limits between groups of neighbours by utilization."""

Numbers = NDArray[np.float64]


def _texts(
    runs: Mapping[str, Runs],
    by_exponent: Mapping[float, LeftOutErrors],
    behind_mps: BehindMps,
    pairs: Pairs,
    scores: Mapping[str, Score],
    selection: Mapping[str, candidates.Result],
) -> dict[str, str]:
    """Return the tables and numbers of the card."""
    upper, median = lucid.shipped_upper(pairs), lucid.shipped_median(pairs)
    bad, off = pairs.slowdown > FOUND, np.abs(median - pairs.slowdown)
    missed, model = lucid.missed(median, pairs), shipped()
    by_mps = {"median": behind_mps.predicted.ravel(), "upper": _upper_by_mps(behind_mps).ravel()}
    rules = {name: rule(pairs) for name, rule in fit.RULES.items()}
    return {
        "holding": f"{model.holding:g}",
        "level": f"{100 * model.level:g}",
        "time_slicing": f"{model.time_slicing_factor:g}",
        "least": f"{np.exp(model.time_slicing_factor):.2f}",
        "mps": f"{model.mps_factor:g}",
        "holding_table": markdown(_by_exponent(runs)),
        "hiding": markdown(_hiding(by_exponent)),
        "exponent": f"{gavel.most_cautious(by_exponent):g}",
        "gavel_pairs": str(len(behind_mps.measured)),
        "gavel_largest": f"{behind_mps.measured.max():.1f}",
        "gavel_none": f"{(behind_mps.measured - 1).mean():.3f}",
        "gavel_error": f"{np.abs(behind_mps.predicted - behind_mps.measured).mean():.3f}",
        "gavel_above": f"{100 * float((behind_mps.measured > behind_mps.predicted).mean()):.0f}",
        "selection": markdown(_selection(selection)),
        "winner": candidates.winner(selection),
        "interval_models": str(model.models),
        "interval_share": f"{100 * model.models / (model.models + 1):.0f}",
        "interval": markdown(_interval(behind_mps)),
        "gavel_limits": markdown(fit.limits_table(behind_mps.measured.ravel(), by_mps, {})),
        "lucid_slowdowns": str(len(pairs.slowdown)),
        "lucid_pairs": str(len(pairs.slowdown) // 2),
        "lucid_large": f"{100 * float(bad.mean()):.0f}",
        "lucid": markdown(_scores(scores)),
        "goals": markdown(fit.goals_table(pairs)),
        "missed": str(missed.total()),
        "large": str(int(bad.sum())),
        "missed_by": ", ".join(f"{name} {count}" for name, count in missed.most_common()),
        "upper_held": f"{100 * float((pairs.slowdown <= upper).mean()):.1f}",
        "upper_ratio": f"{float((upper / median).mean()):.2f}",
        "error_large": f"{off[bad].mean():.3f}",
        "error_small": f"{off[~bad].mean():.3f}",
        "right": f"{profiled.right_percent(median, pairs.slowdown):.0f}",
        "repeated": f"{lucid.repeated_difference(pairs):.3f}",
        "faster": f"{100 * float((pairs.raw < 1).mean()):.0f}",
        "by_neighbour": markdown(_by_neighbour(pairs)),
        "limits": markdown(fit.limits_table(pairs.slowdown, {"median": median, "upper": upper}, rules)),
        "groups": markdown(fit.groups_table()),
        "overbusy": f"{100 * fit.busier_than_whole(pairs):.0f}",
    }


def _by_exponent(runs: Mapping[str, Runs]) -> list[dict[str, str]]:
    """Return the errors of SM activity for the best k of each kind of network, the shipped k, and k = 1."""
    table = []
    for name, of in {
        **{f"{kind.upper()}s": [of] for kind, of in runs.items()},
        "both alike": list(runs.values()),
    }.items():
        best = fit.best_exponent(of)
        errors = {
            f"error with {what}": fit.error(of, k)
            for what, k in (("it", best), ("shipped k", shipped().holding), ("k = 1", 1.0))
        }
        row = {"networks": name, "runs": str(sum(len(one.busy) for one in of)), "best k": f"{best:.2f}"}
        row |= {head: f"{error:.3f}" for head, error in errors.items()}
        table.append(row | {"k of the active engine": f"{fit.best_exponent(of, fit.engine_active):.2f}"})
    return table


def _hiding(by_exponent: Mapping[float, LeftOutErrors]) -> list[dict[str, str]]:
    """Return errors of left-out steps, one column per exponent p."""
    best = gavel.best(by_exponent)
    beyond = {p: one.beyond(best) for p, one in by_exponent.items()}
    rows = {"error of the left-out step": {p: f"{100 * one.error:.1f}%" for p, one in by_exponent.items()}}
    rows |= {
        f"of {job}": {p: f"{100 * one.of_jobs[job]:.1f}%" for p, one in by_exponent.items()} for job in best.of_jobs
    }
    rows["difference to the best"] = {p: f"{100 * more:.2f}" for p, (more, _) in beyond.items()}
    rows[f"standard error, by {len(best.of_jobs)} jobs"] = {p: f"{100 * error:.2f}" for p, (_, error) in beyond.items()}
    return [{"p": name} | {f"{p:g}": cell for p, cell in cells.items()} for name, cells in rows.items()]


def _selection(results: Mapping[str, candidates.Result]) -> list[dict[str, str]]:
    return [
        {"candidate": name}
        | {kind: f"{error:.3f}" for kind, error in one.errors.items()}
        | {"score": f"{one.score:.3f}"}
        for name, one in results.items()
    ]


def _interval(pairs: BehindMps) -> list[dict[str, str]]:
    """Return the share of each model's slowdowns below the upper end of the other models."""
    table = []
    for model in np.unique(pairs.models):
        is_own = pairs.models == model
        own, others = pairs.log_errors[is_own], pairs.log_errors[~is_own]
        factor = gavel.factor(others, pairs.models[~is_own], LEVEL)
        row = {"held out": str(model), "slowdowns": f"{own.size:,}", "factor": f"{np.exp(factor):.2f}"}
        table.append(row | {"below the upper end": f"{(own <= factor).mean():.0%}"})
    return table


def _upper_by_mps(pairs: BehindMps) -> Numbers:
    upper: Numbers = pairs.predicted * np.exp(shipped().mps_factor * pairs.neighbour_busy)
    return upper


def _scores(scores: Mapping[str, Score]) -> list[dict[str, str]]:
    heads = ("model", "error of slowdown", "error of speed", "slowdowns > 15% found", "right when predicted")
    rows = [
        (name, f"{one.error:.3f}", f"{one.speed_error:.3f}", f"{one.found_percent:.0f}%", f"{one.right_percent:.0f}%")
        for name, one in scores.items()
    ]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def _by_neighbour(pairs: Pairs) -> list[dict[str, str]]:
    """Return mean slowdowns of busy jobs by the neighbour's utilization, measured and predicted."""
    models = {"measured": pairs.slowdown, "k = 1": BASELINES[EXACT](pairs), "shipped": lucid.shipped_median(pairs)}
    own, other = pairs.busy.T
    table = []
    for least, most in pairwise(NEIGHBOURS):
        of = (own >= BUSY) & (other >= least) & (other < most)
        row = {"neighbour's utilization": f"{least:g} to {min(most, 1):g}", "slowdowns": str(int(of.sum()))}
        table.append(row | {name: f"{found[of].mean():.2f}" for name, found in models.items()})
    return table


NOT_SHIPPED = (1.25, 1.5)
"""Alternative exponents p of overlapping host time."""


def inputs(*, is_whole: bool) -> dict[Path, tuple[str, ...]]:
    """Return the columns of each file that the suite reads, below the data folder."""
    learned = {file_of(kind): fit.COLUMNS for kind in KINDS} | {Path(gavel.FILE): gavel.COLUMNS}
    evaluated = {lucid.SOLO: lucid.SOLO_COLUMNS, lucid.PAIRED: lucid.PAIRED_COLUMNS} if is_whole else {}
    return learned | evaluated


def run(data: Path, out: Path, progress: Progress = silent) -> Report:
    """Evaluate, and write the card; `progress` receives the current step.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = fit.read(data), gavel.read(data)
    progress("Gavel: steps left out, for each exponent")
    by_exponent = gavel.errors_by_exponent(measured)
    behind_mps = gavel.behind_mps(measured, gavel.most_cautious(by_exponent), shipped().holding)
    pairs = lucid.read(data)
    progress("candidates, models and sources held out")
    rows, others = candidates.from_lucid(pairs), candidates.from_gavel(measured)
    selection = candidates.compare(candidates.splits(rows, others))
    engine = fit.best_exponent(list(runs.values()), fit.engine_active)
    predictions = _predictions(pairs, engine)
    scores = {name: score(predicted, pairs) for name, predicted in predictions.items()}
    picture = out / "figures" / "slowdown-predicted.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(_draw(pairs, predictions[OURS]), picture)
    texts = _texts(runs, by_exponent, behind_mps, pairs, scores, selection) | {"online": markdown(online.table(data))}
    page = write_card(__package__, out / "slowdown.md", texts)
    return Report("slowdown", (*_figures(scores), *profiled.judge(rows)), (page, picture))


frozen = profiled.frozen


def _predictions(pairs: Pairs, engine: float) -> dict[str, Numbers]:
    def hidden(k: float, p: float) -> Numbers:
        return candidates.hidden_host(pairs.busy, k, p)[1][:, 0]

    others = {f"not shipped: {HIDING} {p:g}": hidden(shipped().holding, p) for p in NOT_SHIPPED}
    return {
        **{name: model(pairs) for name, model in BASELINES.items()},
        OURS: lucid.shipped_median(pairs),
        UPPER: lucid.shipped_upper(pairs),
        f"not shipped: k = {engine:.2f}, by the active engine": hidden(engine, 1.0),
        **others,
        "not shipped: p = 1.5 and k = 1": hidden(1.0, 1.5),
        "not shipped: random forest on Lucid, pairs of jobs held out": forest(pairs),
    }


def _figures(scores: Mapping[str, Score]) -> tuple[Metric, ...]:
    figures = []
    for name, one in scores.items():
        has_goal = name == OURS
        limits = (f"≤ {MAX_ERROR}", f"≥ {MIN_FOUND:g}") if has_goal else ("", "")
        figures += [
            Metric(f"{which}, {name}", round(error, 4), limits[0], error <= MAX_ERROR if has_goal else None)
            for which, error in (("error of slowdown", one.error), ("error of speed", one.speed_error))
        ]
        met = one.found_percent >= MIN_FOUND if has_goal else None
        figures.append(Metric(f"slowdowns > 15% found, {name}, %", round(one.found_percent, 1), limits[1], met))
    return tuple(figures)


def _draw(pairs: Pairs, predicted: Numbers) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(predicted, pairs.slowdown, s=4, rasterized=True)
    ends = [1.0, float(pairs.slowdown.max())]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted slowdown", ylabel="measured slowdown (Lucid)")
    return figure
