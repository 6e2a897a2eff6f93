"""The suite `activity`: GPU utilization, SM activity and occupancy; writes `activity.md`. Needs the extra `train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog import store
from carpool_predictor.features import cost_at
from carpool_predictor.models.activity import activity_on, shipped
from matplotlib.figure import Figure

from carpool_research.activity import baselines
from carpool_research.activity.baselines import PRODUCT, RealRow, judge
from carpool_research.activity.fit import (
    COLUMNS,
    SHIPPED,
    TARGETS,
    ActivityRow,
    HeldOut,
    chosen_inside,
    clean,
    held_out,
    matrix,
    read_rows,
    values,
)
from carpool_research.activity.fit import PRODUCT as MEASURED
from carpool_research.report import Metric, Progress, Report, markdown, save, silent, write_card
from carpool_research.tables import KINDS, file_of

_BATCHES = (16, 64)


def real_figures(rows: Sequence[RealRow]) -> tuple[Metric, ...]:
    """Return mean absolute errors of GPU utilization on real networks, in points."""
    return (
        Metric("GPU utilization, real CNNs on another GPU: mean absolute error, points", round(_error(rows), 2)),
        Metric("GPU utilization, real CNNs on another GPU: that of the roofline", round(_roofline_error(rows), 2)),
        Metric("GPU utilization, real CNNs on another GPU: inside the interval, %", round(_coverage(rows), 1)),
    )


def _error(rows: Sequence[RealRow]) -> float:
    return float(np.mean([abs(row.predicted - row.measured) for row in rows]))


def _roofline_error(rows: Sequence[RealRow]) -> float:
    return float(np.mean([abs(row.roofline - row.measured) for row in rows]))


def _coverage(rows: Sequence[RealRow]) -> float:
    return 100 * float(np.mean([row.lower <= row.measured <= row.upper for row in rows]))


def reach() -> float:
    """Return the share of stored models, at two batch sizes, whose activity is learned and not the roofline's."""
    product = find_product(MEASURED)
    inside = []
    for name in store.shipped().document.entries:
        for batch_size in _BATCHES:
            training = Training(batch_size=batch_size, optimizer=Optimizer.ADAM)
            features = store.shipped().features(CatalogModel(name=name), training)
            if features is not None:
                inside.append(activity_on(features, cost_at(features, batch_size), training, product).inside)
    return float(np.mean(inside))


def _real(rows: Sequence[RealRow]) -> list[dict[str, str]]:
    return [
        {
            "network": r.model,
            "batch": str(r.batch_size),
            "precision": r.precision,
            "measured": f"{r.measured:.0f}",
            "predicted": f"{r.predicted:.0f}",
            "interval": f"{r.lower:.0f} to {r.upper:.0f}",
            "roofline": f"{r.roofline:.0f}",
        }
        for r in rows
    ]


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


SEED = 0
MAX_ERROR_POINTS = 7.0
FOREST_RMSLE = 0.15
_UNITS = {"gpu_util_percent": 1.0, "sm_active_ratio": 100.0, "sm_occupancy_ratio": 100.0}
_TITLES = {
    "gpu_util_percent": "GPU utilization", "sm_active_ratio": "SM activity", "sm_occupancy_ratio": "SM occupancy",
}  # fmt: skip


@dataclass(frozen=True)
class Accuracy:
    """How good predictions for unseen architectures are, in points."""

    mean_error: float
    median_error: float
    p95_error: float
    constant_error: float
    """Mean error of always answering the median."""
    coverage: float
    """Share inside the interval that should hold nine of ten."""
    width: float
    """Median width of that interval."""


def inputs(*, is_whole: bool) -> dict[Path, tuple[str, ...]]:
    """Return the columns of each file that the suite reads, below the data folder."""
    real: dict[Path, tuple[str, ...]] = {baselines.FILE: baselines.COLUMNS} if is_whole else {}
    return {**{file_of(kind): COLUMNS for kind in KINDS}, **real}


def run(data: Path, out: Path, progress: Progress = silent) -> Report:
    """Evaluate, and write the card; `progress` hears what is being fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    raw = {kind: read_rows(data, kind) for kind in ("mlp", "cnn")}
    rows = {kind: clean(found) for kind, found in raw.items()}
    everything = rows["mlp"] + rows["cnn"]
    tables = _tables(raw, rows, progress)
    found = {target: held_out(everything, target, SEED, progress) for target in TARGETS}
    drawn = draw(found["gpu_util_percent"], out / "figures")
    nested, sizes = chosen_inside(everything, "gpu_util_percent", SEED, progress)
    errors = np.abs(nested - found["gpu_util_percent"].measured)
    kinds = np.array([row.kind for row in everything])
    inside = {kind: float(errors[kinds == kind].mean()) for kind in ("cnn", "mlp")}
    differing = sum(size != SHIPPED for size in sizes)
    progress("real models, from their traces")
    real = judge(data)
    texts = _texts(raw, rows, tables, found, real)
    texts |= {"nested_cnn": f"{inside['cnn']:.2f}", "nested_mlp": f"{inside['mlp']:.2f}"}
    card = write_card(__package__, out / "activity.md", texts | {"differing": f"{differing} of {len(sizes)}"})
    return Report("activity", (*_figures(found, tables, inside), *real_figures(real)), (card, *drawn))


def _tables(
    raw: Mapping[str, Sequence[ActivityRow]], rows: Mapping[str, Sequence[ActivityRow]], progress: Progress
) -> dict[str, dict[str, baselines.Score]]:
    """Return the errors of each regressor in HotCloud's protocol and in others."""
    mlp, cnn, uncleaned = rows["mlp"], rows["cnn"], [r for r in raw["cnn"] if r.measured]
    splits = {"MLP, random split": mlp, "CNN, random split": cnn, "CNN before cleaning, random split": uncleaned}
    held = {"MLP, architectures held out": mlp, "CNN, architectures held out": cnn}
    over = "trained on MLP, judged on CNN"
    return {
        **{name: baselines.random_split(chosen, SEED, name, progress) for name, chosen in splits.items()},
        **{name: baselines.architectures_held_out(chosen, SEED, name, progress) for name, chosen in held.items()},
        over: baselines.across(mlp, cnn, SEED, over, progress),
    }


def frozen(data: Path) -> Report:
    """Judge the shipped model on rows that it never saw; nothing is fitted.

    Raises:
        DataError: A file or a column is missing.
    """
    rows = [row for kind in KINDS for row in clean(read_rows(data, kind))]
    model = shipped()
    predicted = np.array([[target.forest.predict(row) for target in model.targets] for row in matrix(rows).tolist()])
    figures = [Metric("rows", len(rows))]
    for column, (target, stored) in enumerate(zip(TARGETS, model.targets, strict=True)):
        medians = predicted[:, column]
        ends = np.array(
            [
                stored.around(median, convolutional=row.kind == "cnn")[1:]
                for median, row in zip(medians, rows, strict=True)
            ]
        )
        found = HeldOut(values(rows, target), medians, ends[:, 0], ends[:, 1], tuple(row.group for row in rows))
        for kind in sorted({row.kind for row in rows}):
            a = accuracy(found, _UNITS[target], f"{kind}/")
            name = f"{_TITLES[target]}, {kind.upper()}"
            has_goal = target == "gpu_util_percent" and kind == "cnn"
            figures.append(
                Metric(
                    f"{name}: mean absolute error, points",
                    round(a.mean_error, 2),
                    f"≤ {MAX_ERROR_POINTS:g}" if has_goal else "",
                    a.mean_error <= MAX_ERROR_POINTS if has_goal else None,
                )
            )
            figures.append(Metric(f"{name}: inside the 90% interval, %", round(100 * a.coverage, 1)))
    return Report("activity", tuple(figures))


def accuracy(found: HeldOut, unit: float, group: str) -> Accuracy:
    """Judge the rows whose group begins with `group`."""
    chosen = np.array([name.startswith(group) for name in found.groups])
    measured = found.measured[chosen] * unit
    errors = np.abs(found.predicted[chosen] * unit - measured)
    lower = np.clip(found.lower[chosen] * unit, 0, 100)
    upper = np.clip(found.upper[chosen] * unit, 0, 100)
    return Accuracy(
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
        constant_error=float(np.abs(measured - np.median(measured)).mean()),
        coverage=float(((measured >= lower) & (measured <= upper)).mean()),
        width=float(np.median(upper - lower)),
    )


def _figures(
    found: Mapping[str, HeldOut], tables: Mapping[str, Mapping[str, baselines.Score]], inside: Mapping[str, float]
) -> tuple[Metric, ...]:
    figures = [
        Metric(
            "GPU utilization, CNN, architectures held out, sizes chosen inside: mean absolute error, points",
            round(inside["cnn"], 2),
            f"≤ {MAX_ERROR_POINTS:g}",
            inside["cnn"] <= MAX_ERROR_POINTS,
        )
    ]
    for target, title in _TITLES.items():
        for kind in ("cnn", "mlp"):
            error = accuracy(found[target], _UNITS[target], f"{kind}/").mean_error
            has_goal = (kind, target) == ("cnn", "gpu_util_percent")
            figures.append(
                Metric(
                    f"{title}, {kind.upper()} architectures held out: mean absolute error, points",
                    round(error, 3),
                    f"≤ {MAX_ERROR_POINTS:g}" if has_goal else "",
                    error <= MAX_ERROR_POINTS if has_goal else None,
                )
            )
    for split in ("MLP, random split", "CNN, random split"):
        for name, score in tables[split].items():
            has_goal = name == "random forest"
            figures.append(
                Metric(
                    f"{split}: RMSLE of {name}",
                    round(score.rmsle, 4),
                    f"≤ {FOREST_RMSLE:g}" if has_goal else "",
                    score.rmsle <= FOREST_RMSLE if has_goal else None,
                )
            )
    return tuple(figures)


def _texts(
    raw: Mapping[str, Sequence[ActivityRow]],
    rows: Mapping[str, Sequence[ActivityRow]],
    tables: Mapping[str, Mapping[str, baselines.Score]],
    found: Mapping[str, HeldOut],
    real: Sequence[RealRow],
) -> dict[str, str]:
    """Return the tables and numbers of the card."""
    paper = {n: f"{baselines.PAPER[n]:.3f}" if n in baselines.PAPER else "" for n in baselines.REGRESSORS}
    hotcloud = [{"data": "the paper, its own data", **paper}]
    hotcloud += [
        {"data": title} | {n: f"{one.rmsle:.3f} ({one.error_points:.1f})" for n, one in scores.items()}
        for title, scores in tables.items()
    ]
    data = [
        {
            "networks": kind.upper(),
            "rows": f"{len(raw[kind]):,}",
            "with a measurement": f"{sum(r.measured for r in raw[kind]):,}",
            "kept": f"{len(rows[kind]):,}",
            "architectures": str(len({r.group for r in rows[kind]})),
        }
        for kind in ("mlp", "cnn")
    ]
    return {
        "data": markdown(data),
        "targets": markdown([_target(found[t], t, kind) for t in _TITLES for kind in ("cnn", "mlp")]),
        "architectures": markdown(_by_architecture(found["gpu_util_percent"])),
        "hotcloud": markdown(hotcloud),
        "product": PRODUCT.removeprefix("NVIDIA "),
        "real": markdown(_real(real)),
        "real_error": f"{_error(real):.1f}",
        "roofline_error": f"{_roofline_error(real):.1f}",
        "real_coverage": f"{_coverage(real):.0f}",
        "reach": f"{reach():.1%}",
    }


def _target(found: HeldOut, target: str, kind: str) -> dict[str, str]:
    a = accuracy(found, _UNITS[target], f"{kind}/")
    return {
        "target": f"{_TITLES[target]}, {kind.upper()}",
        "mean error": f"{a.mean_error:.2f}",
        "constant": f"{a.constant_error:.2f}",
        "median": f"{a.median_error:.2f}",
        "p95": f"{a.p95_error:.2f}",
        "inside the 90% interval": f"{a.coverage:.1%}",
        "its median width": f"{a.width:.1f}",
    }


def _by_architecture(found: HeldOut) -> list[dict[str, str]]:
    table = []
    for group in sorted(set(found.groups)):
        a = accuracy(found, 1.0, group)
        row = {"architecture": group, "rows": f"{found.groups.count(group):,}"}
        row["GPU utilization: mean error"] = f"{a.mean_error:.2f}"
        table.append(row | {"inside the 90% interval": f"{a.coverage:.1%}"})
    return table
