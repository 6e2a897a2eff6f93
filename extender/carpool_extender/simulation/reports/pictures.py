"""Pictures of a contest: utilization over time, completion times, and who ran where. Drawing needs matplotlib."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from carpool_extender.simulation.contest import DEFAULT, DEFAULT_POLICY, Line
from carpool_extender.simulation.engine.state import Finished, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MOST_GPUS = 24
"""GPUs that a chart of who ran where shows; more would be no picture."""
Shown = tuple[str, Outcome]
"""A strategy's name and its first run."""
_WIDE, _TALL = (11, 4.5), (9, 6)
_WEIGHTS = {True: 2.2, False: 1.0}
"""How thick a line is, in points: of the first and Carpool's own, which lie on top, and of the others, of which there
may be a dozen."""
_FAR_APART = 50
"""Where the slowest job takes so many times as long as the middle one, times are told by their logarithms."""
_DASHES = ("-", "--", ":", "-.")
_CARPOOLS = (DEFAULT, DEFAULT_POLICY)
"""Names of Carpool's own line, among strategies and among policies."""
_PALETTE, _SHADES = 20, 10
"""Matplotlib's tab20: ten colours, dark and light by turns. Where there are more kinds of jobs they begin again."""
_SEED = "seed 0"
"""Of which run all pictures are."""
_NO_WORD = re.compile(r"[^a-z0-9.]+")


class Bar(NamedTuple):
    """One job on one of its GPUs."""

    job: Finished
    gpu: str
    lane: int
    """Its place among those that have the GPU at the same time."""


class Style(NamedTuple):
    """How a strategy's line looks."""

    colour: str
    """One of tab20's, as `#rrggbb`."""
    dash: str


def draw(folder: Path, name: str, lines: Sequence[Line]) -> list[Path]:
    """Write the pictures of the first seed; return their paths. Who ran where is drawn of the first line and Carpool's.

    Where that is not among them the last takes its place; a cluster that is too large for a chart has none, nor has
    a strategy of which no job ended.
    """
    ran = [(line.strategy.name, line.example) for line in lines if line.example and line.has_placed]
    ended = [(title, outcome) for title, outcome in ran if outcome.finished]
    figures = {}
    if ran:
        figures["utilization"] = utilization(name, ran)
    if ended:
        figures["cdf"] = completion(name, ended)
        carpools = [number for number, (title, _) in enumerate(ended) if title in _CARPOOLS]
        for number in sorted({0, *(carpools or [len(ended) - 1])[:1]}):
            title, outcome = ended[number]
            if len(outcome.gpus) <= MOST_GPUS:
                figures[f"gantt-{_NO_WORD.sub('-', title.lower()).strip('-')}"] = gantt(name, title, outcome)
    for kind, figure in figures.items():
        figure.savefig(folder / f"{name}-{kind}.png", dpi=120)
    return [folder / f"{name}-{kind}.png" for kind in figures]


def remove(folder: Path, name: str) -> None:
    """Remove the pictures that an earlier run of a workload left: they would stand beside tables of another run."""
    for pattern in ("utilization", "cdf", "gantt-*"):
        for path in folder.glob(f"{name}-{pattern}.png"):
            path.unlink()


def style(number: int) -> Style:
    """Return how the line of a number, from 0, looks: the first 80 differ, the first 20 in colour."""
    import matplotlib
    from matplotlib.colors import to_hex

    shade = 2 * (number % _SHADES) + number // _SHADES % 2
    return Style(to_hex(matplotlib.colormaps["tab20"](shade)), _DASHES[(number + number // _PALETTE) % len(_DASHES)])


def _weigh(drawn: "Sequence[Line2D]", number: int, title: str) -> None:
    is_own = number == 0 or title in _CARPOOLS
    for one in drawn:
        one.set(linewidth=_WEIGHTS[is_own], zorder=3 if is_own else 2)


def utilization(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw the mean utilization of all GPUs over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for number, (title, outcome) in enumerate(shown):
        times, values = zip(*outcome.utilization, strict=True)
        minutes, percent = [t / 60 for t in times], [100 * u for u in values]
        colour, dash = style(number)
        drawn = axes.step(minutes, percent, color=colour, linestyle=dash, where="post", label=title)
        _weigh(drawn, number, title)
    axes.set(xlabel="minutes", ylabel="mean GPU utilization, %", ylim=(0, 105))
    axes.set_title(f"{name}: how busy the GPUs are, {_SEED}")
    figure.legend(loc="outside right upper", fontsize=6, handlelength=4)
    return figure


def completion(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw which share of the jobs had ended so long after their submission."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for number, (title, outcome) in enumerate(shown):
        times = sorted((one.end_s - one.job.arrival_s) / 60 for one in outcome.finished)
        percent = [100 * (i + 1) / len(times) for i in range(len(times))]
        colour, dash = style(number)
        _weigh(axes.step(times, percent, color=colour, linestyle=dash, label=title), number, title)
    taken = [(one.end_s - one.job.arrival_s) / 60 for _, outcome in shown for one in outcome.finished]
    if max(taken) > _FAR_APART * median(taken) > 0:
        axes.set_xscale("log")
    axes.set(xlabel="minutes from submission to end", ylabel="jobs that ended, %")
    axes.set_title(f"{name}: how long jobs take, {_SEED}")
    figure.legend(loc="outside right upper", fontsize=6, handlelength=4)
    return figure


def gantt(name: str, title: str, outcome: Outcome) -> "Figure":
    """Draw who ran where under one strategy."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=_TALL, layout="constrained")
    axes = figure.subplots()
    order = {str(gpu.device.uuid): row for row, gpu in enumerate(outcome.gpus)}
    kinds = {kind: number for number, kind in enumerate(sorted({one.job.truth.kind for one in outcome.finished}))}
    colours = matplotlib.colormaps["tab20"]
    bars = list(lanes(outcome.finished))
    height = 0.8 / (1 + max(bar.lane for bar in bars))
    for one, gpu, lane in bars:
        axes.broken_barh(
            [(one.start_s / 60, (one.end_s - one.start_s) / 60)],
            (order[gpu] + 0.1 + lane * height, 0.9 * height),
            facecolor=colours(kinds[one.job.truth.kind] % colours.N),
            edgecolor="black",  # jobs of one kind that follow each other would look like one
            linewidth=0.4,
        )
    axes.set(xlabel="minutes; a colour is a kind of job", ylabel="GPU")
    axes.set_title(f"{name}, {title}, {_SEED}: the attempts that succeeded")
    axes.set(
        ylim=(0, len(order)), yticks=[row + 0.5 for row in order.values()], yticklabels=list(map(str, order.values()))
    )
    for row in order.values():
        axes.axhline(row, color="0.85", lw=0.5)
    return figure


def lanes(finished: Sequence[Finished]) -> Iterator[Bar]:
    """Give every job a lane of each of its GPUs that nobody else has at the time, the lowest there is."""
    ends: dict[str, list[float]] = {}
    for one in sorted(finished, key=lambda one: one.start_s):
        for gpu in one.gpus:
            taken = ends.setdefault(gpu, [])
            lane = next((i for i, end in enumerate(taken) if end <= one.start_s), len(taken))
            taken[lane : lane + 1] = [one.end_s]
            yield Bar(one, gpu, lane)
