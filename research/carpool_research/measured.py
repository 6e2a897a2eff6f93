"""Judges the shipped models on rows of `carpool profile` (`research/measurements`), which none was fitted to.

Memory, activity and step time are predicted as `carpool predict` would, from stored features, and compared with the job
alone. Slowdowns follow from the activity that was measured alone, as in `evaluate --suite slowdown --frozen`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import click
import msgspec
import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.resources.prediction import Interval, ProductPrediction
from carpool_core.values import SharingMode
from carpool_predictor.catalog import store
from carpool_predictor.models.slowdown import slowdowns, upper_factor
from carpool_predictor.profiler.machine import Workload
from carpool_predictor.profiler.session import COLUMNS, MeasuredRow
from carpool_simulator.power import power_of

from carpool_research.published import Case, Judged, judge, memory_row
from carpool_research.report import markdown
from carpool_research.tables import read_table

ROWS = Path(__file__).parents[1] / "measurements" / "h100_80gb_sharing.csv"
HOST_BOUND = 60.0
"""GPU utilization alone, in percent, below which a step counts as limited by the processor."""
PEAKS = ("allocated", "reserved", "process")
ACTIVITY = (
    ("gpu_util_percent", "GPU utilization", 1), ("sm_active_ratio", "SM activity", 100),
    ("sm_occupancy_ratio", "SM occupancy", 100), ("dram_active_ratio", "DRAM activity", 100),
)  # fmt: skip
MODES = {SharingMode.TIME_SLICING: "time-slicing", SharingMode.MPS: "mps"}
_TEXTS = ("reason", "partners")


def read(path: Path = ROWS) -> list[MeasuredRow]:
    """Return the completed rows of a file of `carpool profile`.

    Raises:
        DataError: A column is missing, or a row is invalid.
    """
    return [row for row in read_table(path, COLUMNS, _row) if row.status == "ok"]


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


@dataclass(frozen=True)
class Alone:
    """A job alone, in one mode, beside its prediction."""

    row: MeasuredRow
    prediction: ProductPrediction

    @property
    def is_host_bound(self) -> bool:
        """Whether the processor limits the step."""
        return (self.row.gpu_util_percent or 0.0) < HOST_BOUND


def alone(rows: Sequence[MeasuredRow], judged: Sequence[Judged]) -> list[Alone]:
    """Return the jobs alone beside their predictions."""
    contexts = {one.case.name: one.context for one in judged}
    return [
        Alone(row, contexts[workload(row).key].on(find_product(row.product)).prediction)
        for row in rows
        if not row.partners and workload(row).key in contexts
    ]


def memory_table(judged: Mapping[str, Sequence[Judged]]) -> str:
    """Return errors, bounds and classes of memory by kind of peak."""
    table = []
    for kind, of in judged.items():
        ratios = [one.bound_mib / (one.case.memory_mib or 1) for one in of]
        table.append({"peak": kind} | memory_row(of) | {"widest bound": f"{max(ratios):.2f}"})
    return markdown(table)


def step_time_table(found: Sequence[Alone]) -> str:
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
    return markdown(table)


def _groups(found: Sequence[Alone]) -> dict[str, list[Alone]]:
    by: dict[str, Callable[[Alone], bool]] = {
        f"utilization ≥ {HOST_BOUND:g}%, fp32": lambda one: not one.is_host_bound and one.row.precision == "fp32",
        f"utilization ≥ {HOST_BOUND:g}%, bf16-mixed": lambda one: not one.is_host_bound and one.row.precision != "fp32",
        f"utilization < {HOST_BOUND:g}%": lambda one: one.is_host_bound,
        "all": lambda _: True,
    }
    chosen = {name: list(filter(is_chosen, found)) for name, is_chosen in by.items()}
    return {name: of for name, of in chosen.items() if of}


def _held(intervals: Sequence[Interval], measured: Sequence[float]) -> str:
    inside = sum(one.lower <= value <= one.upper for one, value in zip(intervals, measured, strict=True))
    return f"{inside} of {len(measured)}"


def activity_table(found: Sequence[Alone]) -> str:
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
    return markdown(table)


def _constant_error(values: Sequence[float]) -> float:
    """Return the mean error of always answering the median."""
    return fmean(abs(value - median(values)) for value in values)


def slowdown_table(rows: Sequence[MeasuredRow]) -> str:
    """Return errors of the slowdown by mode and number of jobs; the jobs' activity is that measured alone."""
    profiles = {(row.mode, workload(row).key): row for row in rows if not row.partners}
    table = []
    for mode in (SharingMode.TIME_SLICING, SharingMode.MPS):
        for jobs in (2, 3):
            of = [row for row in rows if row.mode == MODES[mode] and row.partners.count("+") == jobs - 2 and row.partners]
            groups = [[profiles[row.mode, key] for key in (workload(row).key, *row.partners.split("+"))] for row in of]
            busy, sm, dram = (
                np.array([[getattr(one, column) * unit for one in group] for group in groups])
                for column, unit in (("gpu_util_percent", 0.01), ("sm_active_ratio", 1), ("dram_active_ratio", 1))
            )
            measured = np.array([row.slowdown for row in of], np.float64)
            median_s = slowdowns(mode, busy, sm, dram)[:, 0]
            upper = median_s * upper_factor(mode, busy)[:, 0]
            others = {
                "no slowdown": np.ones(len(of)),
                "max(1, Σutil)": np.maximum(1.0, busy.sum(axis=1)),
                "shipped": median_s,
            }
            table.append(
                {"mode": mode, "jobs": str(jobs), "slowdowns": str(len(of)), "mean": f"{measured.mean():.2f}"}
                | {f"error of speed, {name}": f"{np.abs(1 / one - 1 / measured).mean():.3f}" for name, one in others.items()}
                | {"below the upper end": f"{(measured <= upper).mean():.1%}"}
            )
    return markdown(table)


def texts(rows: Sequence[MeasuredRow]) -> dict[str, str]:
    """Return the tables by title."""
    of_kinds = cases(rows)
    features = {
        one.name: found
        for one in of_kinds["process"]
        if one.model is not None and (found := store.features(one.model, one.training)) is not None
    }
    judged = {kind: list(judge(of, features)) for kind, of in of_kinds.items()}
    found = alone(rows, judged["process"])
    return {
        "Memory of jobs alone": memory_table(judged),
        "Step time of jobs alone": step_time_table(found),
        "Activity of jobs alone": activity_table(found),
        "Slowdowns": slowdown_table(rows),
    }


@click.command(short_help="Judge the shipped models on rows of `carpool profile`, and print tables.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=ROWS)
def measured(file: Path) -> None:
    """Judge the shipped models on a file of `carpool profile`, and print tables; the default is this project's own."""
    for title, table in texts(read(file)).items():
        click.echo(f"{title}\n\n{table}\n")
