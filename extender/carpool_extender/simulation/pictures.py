"""Pictures of a contest: utilization over time, completion times, and who ran where. Needs matplotlib."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from carpool_extender.simulation.contest import DEFAULT, DEFAULT_POLICY, Line
from carpool_extender.simulation.state import Finished, Outcome

matplotlib.use("Agg")
MOST_GPUS = 24
"""GPUs that a chart of who ran where shows; more would be no picture."""
Shown = tuple[str, Outcome]
"""A strategy's name and its first run."""
_WIDE, _TALL = (9, 4), (9, 6)
_COLOURS, _STYLES = 10, ("-", "--", ":", "-.")
_CARPOOLS = (DEFAULT, DEFAULT_POLICY)
"""Names of Carpool's own line, among strategies and among policies."""
_KINDS = "tab20"
"""Colours of kinds of jobs; where there are more kinds they begin again."""


class Bar(NamedTuple):
    """One job on one of its GPUs."""

    job: Finished
    gpu: str
    lane: int
    """Its place among those that have the GPU at the same time."""


def draw(folder: Path, name: str, lines: Sequence[Line]) -> list[Path]:
    """Write the pictures of the first seed; return their paths. Who ran where is drawn of the first line and Carpool's.

    Where that is not among them the last takes its place; a cluster that is too large for a chart has none.
    """
    shown = [(line.strategy.name, line.example) for line in lines if line.example and line.example.finished]
    written = [_utilization(folder / f"{name}-utilization.png", shown), _completion(folder / f"{name}-cdf.png", shown)]
    carpools = [number for number, (title, _) in enumerate(shown) if title in _CARPOOLS]
    charted = {0, *(carpools or [len(shown) - 1])[:1]}
    return written + [
        _gantt(folder / f"{name}-gantt-{number}.png", title, outcome)
        for number, (title, outcome) in enumerate(shown)
        if len(outcome.gpus) <= MOST_GPUS and number in charted
    ]


def _style(number: int) -> str:
    """Return colour and style of a line, so that no two look alike."""
    return f"C{number % _COLOURS}{_STYLES[number // _COLOURS % len(_STYLES)]}"


def _utilization(path: Path, shown: Sequence[Shown]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for number, (name, outcome) in enumerate(shown):
        times, values = zip(*outcome.utilization, strict=True)
        minutes, percent = [t / 60 for t in times], [100 * u for u in values]
        axes.step(minutes, percent, _style(number), where="post", lw=1, label=name)
    axes.set(xlabel="minutes", ylabel="mean GPU utilization, %", ylim=(0, 105))
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)
    return path


def _completion(path: Path, shown: Sequence[Shown]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for number, (name, outcome) in enumerate(shown):
        times = sorted((one.end_s - one.job.arrival_s) / 60 for one in outcome.finished)
        percent = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(times, percent, _style(number), lw=1, label=name)
    axes.set(xlabel="minutes from submission to end", ylabel="jobs, %")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)
    return path


def _gantt(path: Path, name: str, outcome: Outcome) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_TALL, layout="constrained")
    axes = figure.subplots()
    order = {str(gpu.device.uuid): row for row, gpu in enumerate(outcome.gpus)}
    kinds = {kind: number for number, kind in enumerate(sorted({one.job.truth.kind for one in outcome.finished}))}
    colours = matplotlib.colormaps[_KINDS]
    bars = list(lanes(outcome.finished))
    height = 0.8 / (1 + max(bar.lane for bar in bars))
    for one, gpu, lane in bars:
        axes.broken_barh(
            [(one.start_s / 60, (one.end_s - one.start_s) / 60)],
            (order[gpu] + 0.1 + lane * height, 0.9 * height),
            color=colours(kinds[one.job.truth.kind] % colours.N),
        )
    axes.set(xlabel="minutes; a colour is a kind of job", ylabel="GPU", title=f"{name}: the attempts that succeeded")
    axes.set(
        ylim=(0, len(order)), yticks=[row + 0.5 for row in order.values()], yticklabels=list(map(str, order.values()))
    )
    for row in order.values():
        axes.axhline(row, color="0.85", lw=0.5)
    figure.savefig(path, dpi=120)
    return path


def lanes(finished: Sequence[Finished]) -> Iterator[Bar]:
    """Give every job a lane of each of its GPUs that nobody else has at the time, the lowest there is."""
    ends: dict[str, list[float]] = {}
    for one in sorted(finished, key=lambda one: one.start_s):
        for gpu in one.gpus:
            taken = ends.setdefault(gpu, [])
            lane = next((i for i, end in enumerate(taken) if end <= one.start_s), len(taken))
            taken[lane : lane + 1] = [one.end_s]
            yield Bar(one, gpu, lane)
