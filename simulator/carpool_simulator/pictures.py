"""Figures of a sweep: utilization over time, completion times, and Gantt charts. Drawing needs matplotlib."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from carpool_simulator.engine import Finished, Outcome
from carpool_simulator.sweep import DEFAULT, DEFAULT_POLICY, PolicyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_GPUS = 24
"""Most GPUs of a Gantt chart."""
Shown = tuple[str, Outcome]
"""Name of a strategy and its run with the first seed."""
_LOG_FROM = 50
"""Completion times have a logarithmic axis if the longest is more than this multiple of the median."""
_DASHES = ("-", "--", ":", "-.")
_CARPOOL = (DEFAULT, DEFAULT_POLICY)
"""Names of Carpool's default, among strategies and among policies."""
_SEED = "seed 0"
_NO_WORD = re.compile(r"[^a-z0-9.]+")


class Bar(NamedTuple):
    """One job on one of its GPUs."""

    job: Finished
    gpu: str
    lane: int
    """Row among the jobs that share the GPU at the same time."""


class Curve(NamedTuple):
    """One step curve of a figure."""

    title: str
    xs: Sequence[float]
    ys: Sequence[float]


def draw(folder: Path, name: str, lines: Sequence[PolicyResult]) -> list[Path]:
    """Write the figures of the first seed and return their paths.

    Gantt charts cover the baseline and Carpool's default, or the last strategy without Carpool's default. There is none
    for more than `MAX_GPUS` GPUs, or for a strategy without a finished job.
    """
    ran = [(line.strategy.name, line.example) for line in lines if line.example and line.has_placed]
    ended = [(title, outcome) for title, outcome in ran if outcome.finished]
    figures = {}
    if ran:
        figures["utilization"] = utilization(name, ran)
    if ended:
        figures["cdf"] = completion(name, ended)
        carpool = next((number for number, (title, _) in enumerate(ended) if title in _CARPOOL), len(ended) - 1)
        for title, outcome in (ended[number] for number in sorted({0, carpool})):
            if len(outcome.gpus) <= MAX_GPUS:
                figures[f"gantt-{_NO_WORD.sub('-', title.lower()).strip('-')}"] = gantt(name, title, outcome)
    for kind, figure in figures.items():
        figure.savefig(folder / f"{name}-{kind}.png", dpi=120)
    return [folder / f"{name}-{kind}.png" for kind in figures]


def remove(folder: Path, name: str) -> None:
    """Remove the figures that an earlier run of a workload left."""
    for pattern in ("utilization", "cdf", "gantt-*"):
        for path in folder.glob(f"{name}-{pattern}.png"):
            path.unlink()


def utilization(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw the mean utilization of all GPUs over time."""
    curves = []
    for title, outcome in shown:
        times, values = zip(*outcome.utilization, strict=True)
        curves.append(Curve(title, [t / 60 for t in times], [100 * u for u in values]))
    figure = _curves(curves, "post")
    figure.axes[0].set(xlabel="minutes", ylabel="mean GPU utilization, %", ylim=(0, 105))
    figure.suptitle(f"{name}: GPU utilization, {_SEED}")
    return figure


def completion(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw the distribution of the times from submission to end."""
    curves = []
    for title, outcome in shown:
        times = sorted((one.end_s - one.job.arrival_s) / 60 for one in outcome.finished)
        curves.append(Curve(title, times, [100 * (i + 1) / len(times) for i in range(len(times))]))
    figure = _curves(curves, "pre")
    times = [time for curve in curves for time in curve.xs]
    scale = "log" if max(times) > _LOG_FROM * median(times) > 0 else "linear"
    figure.axes[0].set(xlabel="minutes from submission to end", ylabel="jobs that ended, %", xscale=scale)
    figure.suptitle(f"{name}: completion times, {_SEED}")
    return figure


def _curves(curves: Sequence[Curve], where: Literal["pre", "post"]) -> "Figure":
    """Draw step curves; those of the baseline and of Carpool's default are thicker and on top."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes, colours = figure.subplots(), matplotlib.colormaps["tab20"]
    for number, curve in enumerate(curves):
        is_own = number == 0 or curve.title in _CARPOOL
        axes.step(
            curve.xs,
            curve.ys,
            where=where,
            label=curve.title,
            color=colours(number % colours.N),
            # Colours repeat with another dash.
            linestyle=_DASHES[number // colours.N % len(_DASHES)],
            linewidth=2.2 if is_own else 1.0,
            zorder=3 if is_own else 2,
        )
    figure.legend(loc="outside right upper", fontsize=6, handlelength=4)
    return figure


def gantt(name: str, title: str, outcome: Outcome) -> "Figure":
    """Draw the successful attempts of one strategy, a row for each GPU and a colour for each kind of job."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10.5, 6), layout="constrained")
    axes, colours = figure.subplots(), matplotlib.colormaps["tab20"]
    rows = {str(gpu.device.uuid): row for row, gpu in enumerate(outcome.gpus)}
    kinds = {kind: number for number, kind in enumerate(sorted({one.job.truth.kind for one in outcome.finished}))}
    # An edge separates jobs of one kind that follow each other.
    edge: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4}
    bars = list(lanes(outcome.finished))
    height = 0.8 / (1 + max(bar.lane for bar in bars))
    for one, gpu, lane in bars:
        span_min = (one.start_s / 60, (one.end_s - one.start_s) / 60)
        colour = colours(kinds[one.job.truth.kind] % colours.N)
        axes.broken_barh([span_min], (rows[gpu] + 0.1 + lane * height, 0.9 * height), facecolor=colour, **edge)
    axes.set(
        title=f"{name}, {title}, {_SEED}: successful attempts",
        xlabel="minutes; colours are kinds of jobs",
        ylabel="GPU",
        ylim=(0, len(rows)),
        yticks=[row + 0.5 for row in rows.values()],
        yticklabels=[str(row) for row in rows.values()],
    )
    for row in rows.values():
        axes.axhline(row, color="0.85", lw=0.5)
    if len(kinds) <= colours.N:
        patches = [Patch(facecolor=colours(number), **edge) for number in kinds.values()]
        figure.legend(patches, list(kinds), title="kind of job", loc="outside right upper", fontsize=6)
    return figure


def lanes(finished: Sequence[Finished]) -> Iterator[Bar]:
    """Assign each job the lowest lane of each of its GPUs that is free during the job."""
    ends: dict[str, list[float]] = {}
    for one in sorted(finished, key=lambda one: one.start_s):
        for gpu in one.gpus:
            taken = ends.setdefault(gpu, [])
            lane = next((i for i, end in enumerate(taken) if end <= one.start_s), len(taken))
            taken[lane : lane + 1] = [one.end_s]
            yield Bar(one, gpu, lane)
