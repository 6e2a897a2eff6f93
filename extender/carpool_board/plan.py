"""Results of `carpool simulate` in a folder."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from carpool_core.resources.schema import Resource, field
from carpool_simulator.report import About

_NAME = "trace"
"""Beginning of the files that `carpool simulate` writes."""


class NoPlanError(ValueError):
    """The folder holds no results."""


class Plan(Resource, frozen=True, kw_only=True):
    """Results of a simulation: a line for each strategy, against the first."""

    kind: Annotated[Literal["Plan"], field("Kind of the document.")] = "Plan"
    title: Annotated[str, field("The workload.")]
    jobs: Annotated[int, field("Number of its jobs.")]
    seeds: Annotated[int, field("Runs of each strategy.")]
    table: Annotated[list[list[str]], field("Cells, the head first.")]
    assumptions: Annotated[list[str], field("What was assumed, a sentence each.")]
    made: Annotated[str, field("Time and version of the run.")]
    pictures: Annotated[list[str], field("File names of its pictures, at /plan/NAME.")]


def read_plan(folder: Path | None) -> Plan:
    """Read the results of `carpool simulate --out FOLDER`.

    Raises:
        NoPlanError: There are none, or they are of another version; the message has the command that writes them.
    """
    if folder is None:
        raise NoPlanError("expected a folder of a simulation, found none: run carpool board --plan FOLDER")
    path = folder / f"{_NAME}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError) as error:
        raise _no_plan(path) from error
    if not found.table:  # an earlier version wrote none
        raise _no_plan(path)
    return Plan(
        title=found.title,
        jobs=found.jobs,
        seeds=found.seeds,
        table=found.table,
        assumptions=found.assumptions,
        made=f"{found.made.when} UTC, version {found.made.version}",
        pictures=sorted(one.name for one in folder.glob(f"{_NAME}-*.png")),
    )


def _no_plan(path: Path) -> NoPlanError:
    return NoPlanError(
        f"expected the results of a simulation in {path}, found none that can be read; run: "
        f"carpool simulate --trace TRACE.csv --out {path.parent}, and name that folder with --plan"
    )
