"""Results of `carpool simulate`: a Markdown table of strategies, and every run as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec
from carpool_extender.queue.order import QueueOrder

from carpool_simulator.progress import Provenance
from carpool_simulator.strategy import Knowledge
from carpool_simulator.sweep import FIGURES, SLOWED, PolicyResult
from carpool_simulator.truth import Workload

HEADS = {
    "makespan_min": "makespan min",
    "utilization_percent": "utilization %",
    "completion_min": "completion min",
    "running_s": "running s",
    "slowed_percent": f"slowed beyond {SLOWED:g} times, % of jobs",
    "oom": "out of memory",
    "energy_mj": "energy MJ",
    "waiting_min": "waiting min",
    "gpus_in_use": "GPUs in use",
    "unused_percent": "unused on these %",
    "memory_percent": "memory in use %",
    "unplaced": "never placed",
}
"""Column heads of the figures."""
SHOWN = ("makespan_min", "utilization_percent", "completion_min", "running_s", "slowed_percent", "oom", "energy_mj")
COMPARED = {*SHOWN[:3], "energy_mj", "waiting_min", "gpus_in_use", "memory_percent"}
"""Figures with a column for the change against the first line."""
_SILENT = " A job that declares no steps counts as one hour."
_ORDERS = {
    QueueOrder.ALTERNATE: "Carpool's queue orders jobs by arrival; among jobs that arrived within the same ten minutes "
    "the longest and the shortest alternate (`settings.queueOrder: Alternate`, the default)." + _SILENT,
    QueueOrder.LONGEST_FIRST: "Carpool's queue starts the longest job first (`settings.queueOrder: LongestFirst`)."
    + _SILENT,
    QueueOrder.ARRIVAL: "Carpool's queue orders jobs by arrival (`settings.queueOrder: Arrival`).",
}


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the results of one run of the command."""

    title: str
    jobs: int
    seeds: int
    assumptions: list[str]
    cpu_s: dict[str, float]
    """Processor time of one run of each strategy, in seconds."""
    made: Provenance
    """Time and version of the run."""
    table: list[list[str]]
    """Cells of the table, its head first."""


def write(out: Path, name: str, workload: Workload, results: Sequence[PolicyResult], made: Provenance) -> None:
    """Write `name.csv` with the figures of every run and seed, and `name.json` with facts about them."""
    seeds = len(results[0].runs)
    about = About(
        title=workload.title,
        jobs=len(workload.jobs),
        seeds=seeds,
        assumptions=list(workload.assumptions),
        cpu_s={one.strategy.name: round(one.cpu_s / seeds, 1) for one in results},
        made=made,
        table=table(results, workload.shown),
    )
    (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "seed", *FIGURES])
        for one in results:
            for seed, run in enumerate(one.runs):
                writer.writerow([one.strategy.name, seed, *(f"{getattr(run, figure):.6g}" for figure in FIGURES)])


def section(workload: Workload, assumptions: Sequence[str], results: Sequence[PolicyResult]) -> list[str]:
    """Return the lines of the report: title, table and assumptions."""
    seeds = len(results[0].runs)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One run, so the spread is unknown"
    slowed = (
        f" `{HEADS['slowed_percent']}`: finished jobs that ran longer than {SLOWED:g} times their solo time, measured "
        "from the successful start."
    )
    return [
        f"## {workload.title}",
        "",
        f"{spread}; changes are against the first line.{slowed}{_order(results)}",
        "",
        *markdown(results, workload.shown),
        "",
        "Assumptions:",
        "",
        *(f"- {one}" for one in assumptions),
        "",
    ]


def markdown(results: Sequence[PolicyResult], shown: Sequence[str] = ()) -> list[str]:
    """Return `table` in Markdown."""
    head, *rows = table(results, shown)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def table(results: Sequence[PolicyResult], shown: Sequence[str] = ()) -> list[list[str]]:
    """Return the head and a row for each strategy, with these figures, the usual ones if empty.

    It has the mean, the standard deviation of several seeds, and the change against the first line.
    """
    names = list(shown or SHOWN)
    names += ["unplaced"] if "unplaced" not in names and any(line.mean("unplaced") for line in results) else []
    head = ["strategy"]
    for name in names:
        head += [HEADS[name], "change"] if name in COMPARED else [HEADS[name]]
    return [head, *(_cells(one, results[0], names) for one in results)]


def _cells(one: PolicyResult, first: PolicyResult, names: Sequence[str]) -> list[str]:
    cells = [one.strategy.name]
    for name in names:
        spread = f" ± {one.spread(name):.1f}" if len(one.runs) > 1 else ""
        cells.append(f"{one.mean(name):.1f}{spread}")
        if name in COMPARED:
            is_comparable = one is not first and first.mean(name) > 0
            change = 100 * (one.mean(name) / first.mean(name) - 1) if is_comparable else 0.0
            cells.append(f"{change:+z.1f}%" if is_comparable else "")
    return cells


def _order(results: Sequence[PolicyResult]) -> str:
    """Return sentences on the queue of each line, as far as lines differ."""
    ours = {one.strategy.order for one in results if one.strategy.knowledge is Knowledge.PREDICTED}
    strict = [one.strategy.name for one in results if one.strategy.in_order]
    text = f" {_ORDERS[min(ours, key=list(_ORDERS).index)]}" if ours else ""
    if strict and len(strict) < len(results):
        text += f" Strictly in order, so that the first job blocks all others: {', '.join(strict)}."
    return text
