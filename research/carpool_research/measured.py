"""Judges the shipped models on rows of `carpool profile` (`research/measurements`), which none was fitted to.

Memory, activity and step time are predicted as `carpool predict` would, from stored features, and compared with the job
alone. Slowdowns follow from the activity that was measured alone, as in `evaluate --suite slowdown --frozen`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, zip_longest
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

import click
import msgspec
import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.resources.prediction import Interval, ProductPrediction
from carpool_predictor.catalog import store
from carpool_predictor.models.memory import Pair, fit_line
from carpool_predictor.models.slowdown import fair_share
from carpool_predictor.profiler.machine import Workload
from carpool_predictor.profiler.session import COLUMNS, MeasuredRow
from carpool_simulator.power import power_of
from numpy.typing import NDArray

from carpool_research.published import Case, Judged, judge, memory_row
from carpool_research.report import markdown
from carpool_research.slowdown import candidates, fit, gavel, lucid, profiled
from carpool_research.slowdown.candidates import Speeds
from carpool_research.tables import DataError, read_table

FILES = sorted(profiled.MEASUREMENTS.glob("*_sharing.csv"))
"""This project's own rows, a file for each product."""
HOST_BOUND = 60.0
"""GPU utilization alone, in percent, below which a step counts as limited by the processor."""
SLOWED = {False: f"utilization ≥ {HOST_BOUND:g}%", True: f"utilization < {HOST_BOUND:g}%"}
"""Names of jobs by whether the processor limits them."""
Numbers = NDArray[np.float64]
Table = list[dict[str, str]]
"""Rows from heads to cells."""
PEAKS = ("allocated", "reserved", "process")
ACTIVITY = (
    ("gpu_util_percent", "GPU utilization", 1), ("sm_active_ratio", "SM activity", 100),
    ("sm_occupancy_ratio", "SM occupancy", 100), ("dram_active_ratio", "DRAM activity", 100),
)  # fmt: skip
MODES = ("time-slicing", "mps")
_TEXTS = ("reason", "partners")


def read(paths: Sequence[Path] = FILES) -> list[MeasuredRow]:
    """Return the completed rows of files of `carpool profile`.

    Raises:
        DataError: A column is missing, or a row is invalid.
    """
    return [row for path in paths for row in read_table(path, COLUMNS, _row) if row.status == "ok"]


def _row(cells: Mapping[str, str]) -> MeasuredRow:
    values = {name: cell if cell or name in _TEXTS else None for name, cell in cells.items()}
    return msgspec.convert(values, MeasuredRow, strict=False)


def workload(row: MeasuredRow) -> Workload:
    """Return the job of a row."""
    return msgspec.convert({name: getattr(row, name) for name in Workload.__struct_fields__}, Workload)


def cases(rows: Sequence[MeasuredRow]) -> dict[str, list[Case]]:
    """Return a case for each job alone and mode, by kind of peak; the kinds share their names."""
    return {
        kind: [
            Case(
                name=workload(row).key,
                source=row.mode,
                kind=kind,
                model=CatalogModel(name=row.model),
                training=Training(batch_size=row.batch_size, optimizer=job.optimizer, precision=job.precision),
                gpu=row.product,
                memory_mib=getattr(row, f"peak_{kind}_mib"),
                step_time_s=row.step_time_s,
                excluded="",
            )
            for row in rows
            if not row.partners and (job := workload(row))
        ]
        for kind in PEAKS
    }


def is_host_bound(row: MeasuredRow) -> bool:
    """Whether the processor limits the step of a job alone."""
    return (row.gpu_util_percent or 0.0) < HOST_BOUND


@dataclass(frozen=True)
class Alone:
    """A job alone, in one mode, beside its prediction."""

    row: MeasuredRow
    prediction: ProductPrediction


def alone(rows: Sequence[MeasuredRow], judged: Sequence[Judged]) -> list[Alone]:
    """Return the jobs alone beside their predictions."""
    contexts = {one.case.name: one.context for one in judged}
    return [
        Alone(row, contexts[workload(row).key].on(find_product(row.product)).prediction)
        for row in rows
        if not row.partners and workload(row).key in contexts
    ]


def memory_table(judged: Mapping[str, Sequence[Judged]]) -> Table:
    """Return errors, bounds and classes of memory by kind of peak."""
    table = []
    for kind, of in judged.items():
        ratios = [one.bound_mib / (one.case.memory_mib or 1) for one in of]
        table.append({"peak": kind} | memory_row(of) | {"widest bound": f"{max(ratios):.2f}"})
    return [*table, line_row(judged["process"])]


def step_time_table(found: Sequence[Alone]) -> Table:
    """Return errors of step times, by what limits the step and by precision."""
    table = []
    for name, of in _groups(found).items():
        factors = [one.prediction.step_time_seconds.median / (one.row.step_time_s or 1) for one in of]
        table.append(
            {
                "jobs alone": name,
                "runs": str(len(of)),
                "median factor": f"{median(max(f, 1 / f) for f in factors):.2f}",
                "predicted/measured": f"{median(factors):.2f}",
                "lowest": f"{min(factors):.2f}",
                "highest": f"{max(factors):.2f}",
                "interval holds": _held(
                    [one.prediction.step_time_seconds for one in of], [one.row.step_time_s or 0.0 for one in of]
                ),
            }
        )
    return table


def _groups(found: Sequence[Alone]) -> dict[str, list[Alone]]:
    by: dict[str, Callable[[Alone], bool]] = {
        f"{SLOWED[False]}, fp32": lambda one: not is_host_bound(one.row) and one.row.precision == "fp32",
        f"{SLOWED[False]}, bf16-mixed": lambda one: not is_host_bound(one.row) and one.row.precision != "fp32",
        SLOWED[True]: lambda one: is_host_bound(one.row),
        "all": lambda _: True,
    }
    chosen = {name: list(filter(is_chosen, found)) for name, is_chosen in by.items()}
    return {name: of for name, of in chosen.items() if of}


def _held(intervals: Sequence[Interval], measured: Sequence[float]) -> str:
    inside = sum(one.lower <= value <= one.upper for one, value in zip(intervals, measured, strict=True))
    return f"{inside} of {len(measured)}"


def activity_table(found: Sequence[Alone]) -> Table:
    """Return errors of activity in points, by kind, and of power in percent of its limit from measured SM activity."""
    table = []
    for column, title, unit in ACTIVITY:
        pairs = [(getattr(one.prediction.activity, column), getattr(one.row, column)) for one in found]
        known = [(interval, value) for interval, value in pairs if interval is not None and value is not None]
        errors = [unit * (interval.median - value) for interval, value in known]
        table.append(
            {
                "activity": title,
                "runs": str(len(known)),
                "mean error, points": f"{fmean(map(abs, errors)):.1f}",
                "of the median of all": f"{_constant_error([unit * value for _, value in known]):.1f}",
                "bias": f"{fmean(errors):+.1f}",
                "interval holds": _held(*zip(*known, strict=True)),
            }
        )
    power = [(power_of(find_product(one.row.product)), one.row) for one in found if one.row.power_w]
    limit_w = find_product(found[0].row.product).power_limit_w
    errors = [
        100 * (line.awake_w + (line.full_w - line.awake_w) * (row.sm_active_ratio or 0) - (row.power_w or 0)) / limit_w
        for line, row in power
    ]
    table.append(
        {
            "activity": "power, percent of the limit, from measured SM activity",
            "runs": str(len(errors)),
            "mean error, points": f"{fmean(map(abs, errors)):.1f}",
            "of the median of all": f"{_constant_error([100 * (row.power_w or 0) / limit_w for _, row in power]):.1f}",
            "bias": f"{fmean(errors):+.1f}",
        }
    )
    return table


def _constant_error(values: Sequence[float]) -> float:
    """Return the mean error of always answering the median."""
    return fmean(abs(value - median(values)) for value in values)


def spread_table(rows: Sequence[MeasuredRow]) -> Table:
    """Return how much the step time of a job alone differs between two of its runs, in whichever mode."""
    by_job = defaultdict(list)
    for row in rows:
        if not row.partners:
            by_job[workload(row)].append(row)
    twice = list(chain.from_iterable(combinations(of, 2) for of in by_job.values()))
    table = []
    for name, wanted in ((SLOWED[False], False), (SLOWED[True], True)):
        chosen = [of for of in twice if any(map(is_host_bound, of)) is wanted]
        differences = [max(r.step_time_s or 0 for r in of) / min(r.step_time_s or 0 for r in of) - 1 for of in chosen]
        if differences:
            quantiles = np.quantile(differences, [0.5, 0.9])
            heads = ("median difference", "90% quantile")
            table.append(
                {"jobs": name, "pairs of runs": str(len(chosen))}
                | {head: f"{value:.1%}" for head, value in zip(heads, quantiles, strict=True)}
            )
    return table


Repeats = Mapping[tuple[str, str, str], Sequence[MeasuredRow]]
"""Rows by mode, job and partners; a job alone may have several."""


def repeats(rows: Sequence[MeasuredRow]) -> Repeats:
    """Return the rows by mode, job and partners."""
    found = defaultdict(list)
    for row in rows:
        found[str(row.mode), workload(row).key, row.partners].append(row)
    return found


def mean(rows: Sequence[MeasuredRow], column: str) -> float:
    """Return the mean of a column."""
    return fmean(map(attrgetter(column), rows))


def ratio_table(one: Repeats, other: Repeats) -> Table:
    """Return the ratios of the other product's figures to the one product's, of runs that both have."""
    table, both = [], [key for key in one if key in other]
    for what, column, modes in (
        ("process memory, alone", "peak_process_mib", MODES),
        ("step time, alone", "step_time_s", MODES),
        *((f"slowdown, {mode}", "slowdown", [mode]) for mode in MODES),
    ):
        for name, wanted in (("all", {False, True}), (SLOWED[False], {False}), (SLOWED[True], {True})):
            ratios = [
                mean(other[key], column) / mean(one[key], column)
                for key in both
                if key[0] in modes and (key[2] != "") is (column == "slowdown")
                and (mean(one[*key[:2], ""], "gpu_util_percent") < HOST_BOUND) in wanted
            ]  # fmt: skip
            cells = np.quantile(ratios, [0.5, 0.1, 0.9])
            table.append(
                {"figure": what, "job": name, "runs": str(len(ratios))}
                | {
                    head: f"{cell:.2f}"
                    for head, cell in zip(("median", "10% quantile", "90% quantile"), cells, strict=True)
                }
            )
    return table


def together(rows: Sequence[MeasuredRow]) -> dict[str, Speeds]:
    """Return the runs of several jobs, as `profiled.together`."""
    return profiled.together(
        [
            profiled.Run(
                (str(row.product), row.mode),
                (workload(row).key, *filter(None, row.partners.split("+"))),
                row.slowdown or 0.0,
                ((row.gpu_util_percent or 0) / 100, row.sm_active_ratio or 0.0, row.dram_active_ratio or 0.0),
            )
            for row in rows
        ]
    )


def slowdown_table(runs: Mapping[str, Speeds]) -> Table:
    """Return errors of the slowdown by mode, number of jobs, and what limits the slowed one."""
    table = []
    for name, of in runs.items():
        waits = of.busy[:, 0] < HOST_BOUND / 100
        none = ("no slowdown", "max(1, Σutil)", "fair share", "shipped")
        predicted = {head: candidates.CANDIDATES[head](of, 0)(of) for head in none}
        held = of.speed * candidates.shipped_upper(of) >= 1
        for slowed, chosen in (("all", waits | ~waits), (SLOWED[False], ~waits), (SLOWED[True], waits)):
            if chosen.any():
                errors = {head: np.abs(one - of.speed)[chosen].mean() for head, one in predicted.items()}
                table.append(
                    {"mode": name.split(", ")[1], "jobs": str(of.busy.shape[1]), "slowed": slowed}
                    | {"slowdowns": str(chosen.sum()), "mean": f"{(1 / of.speed[chosen]).mean():.2f}"}
                    | {f"error of speed, {head}": f"{error:.3f}" for head, error in errors.items()}
                    | {"below the upper end": f"{held[chosen].mean():.1%}"}
                )
    return table


def limits(runs: Mapping[str, Speeds]) -> Table:
    """Return which pairs share under limits, and how many of them exceed the limit."""
    return [
        {"mode": name.split(", ")[1]} | row
        for name, of in runs.items()
        if of.busy.shape[1] == profiled.PAIR
        for row in fit.limits_table(
            1 / of.speed, {"median": candidates.shipped_median(of), "upper": candidates.shipped_upper(of)}, {}
        )
    ]


MEDIANS = (
    "no slowdown", "fair share", "mean-value analysis, k = 1.5", "the same with hidden host time", "shipped",
)  # fmt: skip
FORMS: Mapping[str, Callable[[Speeds, Numbers], tuple[Numbers, Numbers]]] = {
    "exp(f) · median": lambda of, median: (median, np.ones(len(median))),
    "exp(f · v) · median": lambda of, median: (median, np.minimum(1.0, of.busy[:, 1:].sum(axis=1))),
    "exp(f) · max(median, fair share)": lambda of, median: (
        np.maximum(median, fair_share(of.busy)[:, 0]),
        np.ones(len(median)),
    ),
}
"""Forms of upper ends: functions to what exp(f · v) multiplies, and to v."""
JUDGE, ADMITTED = "RTX 3090", 1.5
"""GPU whose numbers may not ship, and the limit of a job by default."""


def selection(rows: Sequence[MeasuredRow], data: Path) -> dict[str, Table]:
    """Return the tables of decision 71: errors of the medians, and what the forms of upper ends hold and admit.

    Raises:
        DataError: A file is missing or invalid.
    """
    pairs, found = gavel.read(data), dict[str, Table]()
    runs = {**together(rows), f"{JUDGE}, time-slicing": candidates.from_lucid(lucid.read(data))}
    for gpu in sorted({one.one[0] for one in pairs.pairs}):
        here = replace(pairs, pairs=[one for one in pairs.pairs if one.one[0] == gpu])
        runs[f"{gpu.upper()}, mps"] = candidates.from_gavel(here)
    for mode in MODES:
        by_gpu: dict[str, list[Speeds]] = defaultdict(list)
        for name, of in runs.items():
            if name.split(", ")[1] == mode:
                by_gpu[name.split(", ")[0].removeprefix("NVIDIA ")].append(of)
        medians = []
        for name in MEDIANS:
            errors = {gpu: np.hstack([_errors(name, one) for one in of]).mean() for gpu, of in by_gpu.items()}
            medians.append({"median": name} | {gpu: f"{error:.3f}" for gpu, error in errors.items()})
        found |= {f"Medians, {mode}": medians, f"Upper ends, {mode}": [upper_row(name, by_gpu) for name in FORMS]}
    return found


def _errors(name: str, of: Speeds) -> Numbers:
    """Return absolute errors of speed."""
    found: Numbers = np.abs(candidates.CANDIDATES[name](of, 0)(of) - of.speed)
    return found


def upper_row(name: str, by_gpu: Mapping[str, Sequence[Speeds]]) -> dict[str, str]:
    """Return the shares below an upper end with f from the other GPUs, and the pairs that it admits with f from all."""
    ends = {gpu: [FORMS[name](one, candidates.shipped_median(one)) for one in of] for gpu, of in by_gpu.items()}
    logs = {
        gpu: np.hstack([-np.log(of.speed * base) / v for of, (base, v) in zip(by_gpu[gpu], of_gpu, strict=True)])
        for gpu, of_gpu in ends.items()
    }
    factors = {gpu: fit.upper_quantile(one) for gpu, one in logs.items() if gpu != JUDGE}
    row = {"upper end": name, "f": f"{(most := max(factors.values())):.3f}"}
    for gpu, one in logs.items():
        row[gpu] = f"{(one <= max(f for other, f in factors.items() if other != gpu)).mean():.0%}"
    for gpu, ((base, v), *_) in ends.items():
        row[f"{gpu} admits"] = f"{fit.within(base * np.exp(most * v), ADMITTED).mean():.0%}"
    return row


LINE_JOBS, DRAWS = 3, 200


def line_row(judged: Sequence[Judged]) -> dict[str, str]:
    """Return the error of a line from a few jobs, as a site's calibration fits it, on the other jobs."""
    by_name = {one.case.name: Pair(one.context.reserved_mib, one.case.memory_mib or 1.0) for one in judged}
    pairs, rng, errors = list(by_name.values()), np.random.default_rng(0), list[float]()
    for _ in range(DRAWS):
        order = rng.permutation(len(pairs))
        slope, intercept = fit_line([pairs[i] for i in order[:LINE_JOBS]])
        others = [pairs[i] for i in order[LINE_JOBS:]]
        errors += [abs((slope * p.simulated_mib + intercept) / p.measured_mib - 1) for p in others]
    return {"peak": f"process, from {LINE_JOBS} other jobs", "median error": f"{median(errors):.1%}"}


def tables(rows: Sequence[MeasuredRow]) -> dict[str, Table]:
    """Return the tables of one product by title."""
    of_kinds = cases(rows)
    features = {
        one.name: stored
        for one in of_kinds["process"]
        if one.model is not None and (stored := store.features(one.model, one.training)) is not None
    }
    judged = {kind: list(judge(of, features)) for kind, of in of_kinds.items()}
    found, runs = alone(rows, judged["process"]), together(rows)
    return {
        "Memory of jobs alone": memory_table(judged),
        "Step time of jobs alone": step_time_table(found),
        "The same job alone again": spread_table(rows),
        "Activity of jobs alone": activity_table(found),
        "Slowdowns": slowdown_table(runs),
        "Pairs that a limit on both jobs admits": limits(runs),
    }


def texts(rows: Sequence[MeasuredRow]) -> dict[str, str]:
    """Return the tables by title, with the products' rows beside each other, and of two products the ratios."""
    by_product: dict[str, list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        by_product[str(row.product).removeprefix("NVIDIA ")].append(row)
    each = {product: tables(of) for product, of in by_product.items()}
    found = {}
    for title in next(iter(each.values())):
        beside = zip_longest(*([{"GPU": product} | row for row in of[title]] for product, of in each.items()))
        found[title] = markdown([row for rows in beside for row in rows if row is not None])
    if len(by_product) == len(FILES):
        found["The same runs on both GPUs"] = markdown(ratio_table(*map(repeats, by_product.values())))
    return found


@click.command(short_help="Judge the shipped models on rows of `carpool profile`, and print tables.")
@click.argument("files", type=click.Path(path_type=Path, dir_okay=False), nargs=-1)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder of Lucid's and Gavel's pairs: compare priors of the slowdown and their upper ends, too (decision 71).",
)
def measured(files: Sequence[Path], data: Path | None) -> None:
    """Judge the shipped models on files of `carpool profile`, and print tables; the default are this project's own."""
    files = files or FILES
    try:
        found = texts(read(files))
        if data is not None:
            found |= {title: markdown(table) for title, table in selection(read(files), data).items()}
    except DataError as e:
        raise click.UsageError(str(e)) from e
    for title, table in found.items():
        click.echo(f"{title}\n\n{table}\n")
