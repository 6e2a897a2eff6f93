"""Pictures of a contest: utilization over time, completion times, and who ran where. Drawing needs matplotlib."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from carpool_simulator.engine import Finished, Outcome
from carpool_simulator.sweep import DEFAULT, DEFAULT_POLICY, PolicyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GPUS = 24
"""GPUs that a chart of who ran where shows; more would be no picture."""
MOST_TOGETHER = 6
"""Strategies in one chart; of more each has its own, three to a row."""
Shown = tuple[str, Outcome]
"""A strategy's name and its first run."""
_WIDE, _TALL = (11, 4.5), (10.5, 6)
_COLUMNS, _ROW = 3, 2.0
"""Charts in a row where each strategy has its own, and how tall these are, in inches."""
_BEHIND = "0.85"
"""The grey of the others there."""
_WEIGHTS = {True: 2.2, False: 1.0}
"""How thick a line is, in points: of the first and Carpool's own, which lie on top, and of the others; or of the one
that a chart is of."""
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


class Curve(NamedTuple):
    """What is drawn of one strategy."""

    title: str
    xs: Sequence[float]
    ys: Sequence[float]
    where: Literal["pre", "post"]
    """On which side of a point its step is."""


class Style(NamedTuple):
    """How a strategy's line looks."""

    colour: str
    """One of tab20's, as `#rrggbb`."""
    dash: str


def draw(folder: Path, name: str, lines: Sequence[PolicyResult]) -> list[Path]:
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


def utilization(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw the mean utilization of all GPUs over time."""
    curves = []
    for title, outcome in shown:
        times, values = zip(*outcome.utilization, strict=True)
        curves.append(Curve(title, [t / 60 for t in times], [100 * u for u in values], "post"))
    figure = _drawn(curves)
    for axes in figure.axes:
        axes.set(ylim=(0, 105))
    figure.suptitle(f"{name}: how busy the GPUs are, {_SEED}")
    figure.supxlabel("minutes")
    figure.supylabel("mean GPU utilization, %")
    return figure


def completion(name: str, shown: Sequence[Shown]) -> "Figure":
    """Draw which share of the jobs had ended so long after their submission."""
    curves = []
    for title, outcome in shown:
        times = sorted((one.end_s - one.job.arrival_s) / 60 for one in outcome.finished)
        curves.append(Curve(title, times, [100 * (i + 1) / len(times) for i in range(len(times))], "pre"))
    figure = _drawn(curves)
    taken = [time for curve in curves for time in curve.xs]
    if max(taken) > _FAR_APART * median(taken) > 0:
        for axes in figure.axes:
            axes.set_xscale("log")
    figure.suptitle(f"{name}: how long jobs take, {_SEED}")
    figure.supxlabel("minutes from submission to end")
    figure.supylabel("jobs that ended, %")
    return figure


def _drawn(curves: Sequence[Curve]) -> "Figure":
    """Draw curves in one chart; where these are many each in a chart of its own, before the first and all others."""
    from matplotlib.figure import Figure

    if len(curves) <= MOST_TOGETHER:
        figure = Figure(figsize=_WIDE, layout="constrained")
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            is_own = number == 0 or curve.title in _CARPOOLS
            _step(axes, style(number), curve, linewidth=_WEIGHTS[is_own], zorder=3 if is_own else 2)
        figure.legend(loc="outside right upper", fontsize=6, handlelength=4)
        return figure
    others = curves[1:]
    rows = -(-len(others) // _COLUMNS)
    figure = Figure(figsize=(_WIDE[0], _ROW * rows + 1), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for number, curve in enumerate(others):
        axes = next(panels)
        for other in others:
            axes.step(other.xs, other.ys, color=_BEHIND, linewidth=_WEIGHTS[False], where=other.where, zorder=1)
        for of, (one, is_own) in enumerate(((curves[0], False), (curve, True))):
            _step(axes, Style(style(of).colour, "-"), one, linewidth=_WEIGHTS[is_own], zorder=2 + of)
        axes.tick_params(labelbottom=number + _COLUMNS >= len(others))
        axes.legend(loc="best", fontsize=6)
    for axes in panels:
        axes.remove()
    return figure


def _step(axes: "Axes", look: Style, curve: Curve, **more: float) -> None:
    axes.step(curve.xs, curve.ys, color=look.colour, linestyle=look.dash, where=curve.where, label=curve.title, **more)


def gantt(name: str, title: str, outcome: Outcome) -> "Figure":
    """Draw who ran where under one strategy."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=_TALL, layout="constrained")
    axes = figure.subplots()
    order = {str(gpu.device.uuid): row for row, gpu in enumerate(outcome.gpus)}
    kinds = {kind: number for number, kind in enumerate(sorted({one.job.truth.kind for one in outcome.finished}))}
    colours = matplotlib.colormaps["tab20"]
    begins_again = len(kinds) > colours.N
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
    again = f", of which there are {len(kinds)}: beyond {colours.N} the colours begin again" if begins_again else ""
    axes.set(xlabel=f"minutes; a colour is a kind of job{again}", ylabel="GPU")
    axes.set_title(f"{name}, {title}, {_SEED}: the attempts that succeeded")
    axes.set(
        ylim=(0, len(order)), yticks=[row + 0.5 for row in order.values()], yticklabels=list(map(str, order.values()))
    )
    for row in order.values():
        axes.axhline(row, color="0.85", lw=0.5)
    if not begins_again:
        squares = [Patch(facecolor=colours(number), edgecolor="black", linewidth=0.4) for number in kinds.values()]
        look = {"loc": "outside right upper", "fontsize": 6, "title_fontsize": 7}
        figure.legend(squares, list(kinds), title="kind of job", **look)
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
