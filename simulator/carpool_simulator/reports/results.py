"""Results as files: what each run came to, and what it was a run of. The document is written from these."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from carpool_extender.framework.diagnosis import pluralize

from carpool_simulator.progress import Provenance
from carpool_simulator.reports import otherwise
from carpool_simulator.reports.ordering import hanging
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import (
    EXPERIMENTS,
    FIGURES,
    Figures,
    Line,
    attributed,
    failing,
    ours,
    policed,
    varied,
    wrong,
)
from carpool_simulator.truth import Workload, WorkloadError

WRONG, FAILING = "-wrong-predictions", "-failures"
ATTRIBUTED, VARIED = "-attribution", "-assumptions"
POLICED, ORDER, OTHERWISE = "-policies", "-order", "-otherwise"
SUFFIXES = (POLICED, ORDER, OTHERWISE, WRONG, FAILING, ATTRIBUTED, VARIED)
"""Of the names of results that stand beside an experiment's own."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the results of a file are about."""

    title: str
    jobs: int
    seeds: int
    assumptions: list[str]
    cpu_s: dict[str, float]
    """Processor time of one run of each strategy, in seconds."""
    shown: list[str] = []
    """Names of the figures that its table shows; the usual ones where there are none."""
    made: Provenance = Provenance()
    """When they were made, by which version."""


class Results(NamedTuple):
    """What the files of one name say."""

    about: About
    lines: list[Line]


def write(out: Path, name: str, workload: Workload, lines: Sequence[Line], made: Provenance) -> None:
    """Write every run of every strategy, what it is about, and where it comes from."""
    seeds = len(lines[0].runs)
    about = About(
        title=workload.title,
        jobs=len(workload.jobs),
        seeds=seeds,
        assumptions=list(workload.assumptions),
        cpu_s={line.strategy.name: round(line.cpu_s / seeds, 1) for line in lines},
        shown=list(workload.shown),
        made=made,
    )
    (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    write_csv(out / f"{name}.csv", lines)


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write every run of every strategy."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "seed", *FIGURES])
        for line in lines:
            for seed, run in enumerate(line.runs):
                writer.writerow([line.strategy.name, seed, *(f"{getattr(run, name):.6g}" for name in FIGURES)])


def remove(out: Path, name: str) -> None:
    """Take results away, where there are some."""
    for suffix in ("csv", "json"):
        (out / f"{name}.{suffix}").unlink(missing_ok=True)


def read(out: Path, name: str) -> Results | None:
    """Read results back; None where there are none.

    Raises:
        WorkloadError: They were written by another version, or are not whole.
    """
    path = out / f"{name}.csv"
    if not path.is_file():
        return None
    known = {strategy.name: strategy for strategy in _strategies(name)}
    try:
        about = msgspec.json.decode((out / f"{name}.json").read_bytes(), type=About)
        runs = _runs(path, about.seeds)
    except (OSError, KeyError, ValueError, TypeError) as error:  # a cell that is missing is None
        raise WorkloadError(
            f"{path}: expected results of this version, found {error!r}; run the workload again"
        ) from error
    return Results(about, [Line(known.get(one, Strategy(one, one)), found) for one, found in runs.items()])


def _runs(path: Path, seeds: int) -> dict[str, list[Figures]]:
    """Read the runs of each strategy, which must be one for each seed, in their order."""
    runs: dict[str, list[Figures]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of = runs.setdefault(row["strategy"], [])
            if int(row["seed"]) != len(of):
                raise _not_whole(path, seeds, f"seed {row['seed']} of {row['strategy']} as its run {len(of)}")
            of.append(Figures(**{one: float(row[one]) for one in FIGURES}))
    if not runs:
        raise _not_whole(path, seeds, "no run")
    for name, of in runs.items():
        if len(of) != seeds:
            raise _not_whole(path, seeds, f"{len(of)} of {name}")
    return runs


def _not_whole(path: Path, seeds: int, found: str) -> WorkloadError:
    return WorkloadError(
        f"{path}: expected {pluralize(seeds, 'seed')} of every strategy, found {found}; run the workload again"
    )


def _strategies(name: str) -> list[Strategy]:
    base = name
    for suffix in SUFFIXES:
        base = base.removesuffix(suffix)
    if base not in EXPERIMENTS:
        return []
    experiment = EXPERIMENTS[base]
    if name.endswith(FAILING):
        experiment = failing(experiment)
    if name.endswith(POLICED):
        return policed(experiment)
    if name.endswith(ORDER):
        return hanging(experiment)
    if name.endswith(OTHERWISE):
        return otherwise.strategies(base, experiment)
    more = (ours, wrong, attributed, varied)
    return [*experiment.published, *(strategy for lines in more for strategy in lines(experiment.mode))]
