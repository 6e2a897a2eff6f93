"""Jobs together in the rows of `carpool profile`, and the shipped slowdown model judged on any folder of pairs."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from math import ceil, nan
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from carpool_predictor.models.slowdown import shipped
from carpool_predictor.profiler.machine import Workload

from carpool_research.report import Metric, Report
from carpool_research.slowdown import gavel, lucid
from carpool_research.slowdown.candidates import (
    CANDIDATES,
    Numbers,
    Speeds,
    estimated_sm,
    from_gavel,
    from_lucid,
    shipped_median,
    shipped_upper,
)
from carpool_research.slowdown.lucid import FOUND
from carpool_research.tables import DataError, read_table

COLUMNS = (
    "mode", "status", "model", "batch_size", "optimizer", "precision", "partners", "slowdown", "gpu_util_percent",
    "sm_active_ratio", "dram_active_ratio", "product",
)  # fmt: skip
MEASUREMENTS = Path(__file__).parents[2] / "measurements"
"""Folder of this project's own rows, a file for each product."""
PAIR = 2
_NOT_FITTED = ("no slowdown", "max(1, Σutil)", "fair share", "mean-value analysis, k = 1", "shipped")
MIN_BELOW, MIN_RIGHT, MIN_RECALL = 25.0, 60.0, 0.75
"""Required: percent of the error of *no slowdown* that the model saves, and of right warnings at this recall."""


_Activity = tuple[float, float, float]
"""Utilization, SM activity and DRAM activity of the GPU, 0..1; NaN if not measured."""


class Run(NamedTuple):
    """A job alone or with partners."""

    place: tuple[str, str]
    """Product and mode."""
    jobs: tuple[str, ...]
    """The job, and its partners."""
    slowdown: float
    activity: _Activity


def _run(row: dict[str, str]) -> Run | None:
    if row["status"] != "ok":
        return None
    settings = {name: row[name] for name in ("model", "batch_size", "optimizer", "precision")}
    job = msgspec.convert(settings, Workload, strict=False).key
    slowdown, util, sm, dram = (float(row[name] or "nan") for name in COLUMNS[-5:-1])
    jobs = (job, *filter(None, row["partners"].split("+")))
    return Run((row["product"], row["mode"]), jobs, slowdown, (util / 100, sm, dram))


def read(data: Path) -> dict[str, Speeds]:
    """Return `together` of the rows of `carpool profile` below a folder.

    Raises:
        DataError: A row cannot be read.
    """
    runs: list[Run] = []
    for path in sorted(data.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            is_profile = set(COLUMNS) <= set(next(csv.reader(file), ()))
        runs += [run for run in read_table(path, COLUMNS, _run) if run is not None] if is_profile else []
    return together(runs)


def together(runs: Sequence[Run]) -> dict[str, Speeds]:
    """Return the runs of several jobs, by product, mode and, beyond pairs, number of jobs.

    The profile of a job is the mean of its runs alone in the same mode, or with the GPU to itself. Runs with a job
    without one are omitted.
    """
    measured: dict[tuple[str, ...], list[_Activity]] = defaultdict(list)
    for one in runs:
        if len(one.jobs) == 1 and one.activity[0] >= 0:
            measured[*one.place, one.jobs[0]].append(one.activity)
    alone = {job: tuple(np.mean(of, axis=0).tolist()) for job, of in measured.items()}
    found = defaultdict(list)
    for run in runs:
        product, mode = run.place
        profiles = [alone.get((product, mode, of)) or alone.get((product, "exclusive", of)) for of in run.jobs]
        if len(profiles) >= PAIR and all(profiles) and run.slowdown > 0:
            found[*run.place, len(profiles)].append((run, profiles))
    return {
        f"{product}, {mode}" + (f", {jobs} jobs" if jobs > PAIR else ""): _speeds(of)
        for (product, mode, jobs), of in sorted(found.items())
    }


def _speeds(runs: list[tuple[Run, list[_Activity | None]]]) -> Speeds:
    busy, sm, dram = np.moveaxis(np.array([profiles for _, profiles in runs]), 2, 0)
    return Speeds(
        busy=busy,
        sm=np.where(np.isnan(sm), estimated_sm(busy), sm),
        dram=np.nan_to_num(dram),
        is_mps=np.array([run.place[1] == "mps" for run, _ in runs]),
        speed=np.array([1 / run.slowdown for run, _ in runs]),
        models=[tuple(job.split("|")[0] for job in run.jobs) for run, _ in runs],
    )


def sources(data: Path) -> dict[str, Speeds]:
    """Return the pairs of a folder: Lucid's and Gavel's, if their files are there, and rows of `carpool profile`.

    Raises:
        DataError: There is no pair, or a row cannot be read.
    """
    found = {"Lucid": from_lucid(lucid.read(data))} if (data / lucid.PAIRED).exists() else {}
    found |= {"Gavel": from_gavel(gavel.read(data))} if (data / gavel.FILE).exists() else {}
    found |= read(data)
    if not any(len(rows.speed) for rows in found.values()):
        raise DataError(
            f"expected measured pairs in {data} ({lucid.PAIRED}, {gavel.FILE}, or rows of `carpool profile`), found no "
            "such file; pass the data folder with --data"
        )
    return {name: rows for name, rows in found.items() if len(rows.speed)}


def right_percent(predicted: Numbers, measured: Numbers) -> float:
    """Return the share of right warnings at the lowest warned slowdown that finds `MIN_RECALL` of those above 15%.

    NaN if no slowdown exceeds 15%.
    """
    large = measured > FOUND
    if not large.any():
        return nan
    warned = predicted >= np.sort(predicted[large])[-ceil(MIN_RECALL * large.sum())]
    return 100 * float((large & warned).sum() / warned.sum())


def judge(rows: Speeds) -> tuple[Metric, ...]:
    """Return errors of the shipped model and of what needs no fit, and the coverage of the interval."""
    measured, predicted = 1 / rows.speed, shipped_median(rows)
    errors = {name: float(np.abs(CANDIDATES[name](rows, 0)(rows) - rows.speed).mean()) for name in _NOT_FITTED}
    below = 100 * (1 - errors["shipped"] / (errors["no slowdown"] or nan))
    right = right_percent(predicted, measured)
    large, warned, held = measured > FOUND, predicted > FOUND, measured <= shipped_upper(rows)
    slowed = np.array([model for model, *_ in rows.models])
    shares = [float(held[slowed == model].mean()) for model in np.unique(slowed)]
    return (
        Metric("slowdowns", len(measured)),
        *(Metric(f"error of speed, {name}", round(error, 4)) for name, error in errors.items()),
        Metric("error below no slowdown, %", round(below, 1), f"≥ {MIN_BELOW:g}", below >= MIN_BELOW),
        Metric("slowdowns > 15% found, %", round(100 * float((large & warned).sum() / max(1, large.sum())), 1)),
        Metric("right warnings, %", round(100 * float((large & warned).sum() / max(1, warned.sum())), 1)),
        Metric("right warnings at 75% found, %", round(right, 1), f"≥ {MIN_RIGHT:g}", right >= MIN_RIGHT),
        Metric("below the upper end, %", round(100 * float(held.mean()), 1)),
        Metric("models", len(shares)),
        Metric(
            f"models with {shipped().level:.0%} below the upper end", sum(share >= shipped().level for share in shares)
        ),
    )


def frozen(data: Path) -> Report:
    """Evaluate the shipped model on a folder's pairs without fitting.

    Raises:
        DataError: There is no pair, or a row cannot be read.
    """
    return Report(
        "slowdown",
        tuple(
            Metric(f"{source}: {one.name}", one.value, one.target, one.met)
            for source, rows in sources(data).items()
            for one in judge(rows)
        ),
    )
