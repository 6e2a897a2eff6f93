"""Pictures of a contest: utilization over time, completion times, and who ran where. Needs matplotlib."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from carpool_extender.simulation.contest import Line
from carpool_extender.simulation.state import Outcome

matplotlib.use("Agg")
MOST_GPUS = 24
"""GPUs that a chart of who ran where shows; more would be no picture."""
Shown = tuple[str, Outcome]
"""A strategy's name and its first run."""
_WIDE, _TALL = (9, 4), (9, 6)


def draw(folder: Path, name: str, lines: Sequence[Line]) -> list[Path]:
    """Write the pictures of the first seed; return their paths."""
    shown = [(line.strategy.name, line.example) for line in lines if line.example and line.example.finished]
    written = [_utilization(folder / f"{name}-utilization.png", shown), _completion(folder / f"{name}-cdf.png", shown)]
    return written + [
        _gantt(folder / f"{name}-gantt-{number}.png", title, outcome)
        for number, (title, outcome) in enumerate(shown)
        if len(outcome.gpus) <= MOST_GPUS and number in (0, len(shown) - 1)
    ]


def _utilization(path: Path, shown: Sequence[Shown]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for name, outcome in shown:
        curve = outcome.utilization
        axes.step([t / 60 for t, _ in curve], [100 * u for _, u in curve], where="post", lw=1, label=name)
    axes.set(xlabel="minutes", ylabel="mean GPU utilization, %", ylim=(0, 105))
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)
    return path


def _completion(path: Path, shown: Sequence[Shown]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_WIDE, layout="constrained")
    axes = figure.subplots()
    for name, outcome in shown:
        times = sorted((one.end_s - one.job.arrival_s) / 60 for one in outcome.finished)
        axes.step(times, [100 * (i + 1) / len(times) for i in range(len(times))], lw=1, label=name)
    axes.set(xlabel="minutes from submission to end", ylabel="jobs, %")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)
    return path


def _gantt(path: Path, name: str, outcome: Outcome) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_TALL, layout="constrained")
    axes = figure.subplots()
    order = {str(gpu.device.uuid): row for row, gpu in enumerate(outcome.gpus)}
    lanes: dict[str, list[float]] = {}
    for one in sorted(outcome.finished, key=lambda one: one.start_s):
        for gpu in one.gpus:
            ends = lanes.setdefault(gpu, [])
            lane = next((i for i, end in enumerate(ends) if end <= one.start_s), len(ends))
            ends[lane : lane + 1] = [one.end_s]
            bottom = order[gpu] + 0.2 * min(lane, 4)
            axes.broken_barh(
                [(one.start_s / 60, (one.end_s - one.start_s) / 60)],
                (bottom, 0.18),
                color=f"C{zlib.crc32(one.job.truth.kind.encode()) % 10}",
            )
    axes.set(xlabel="minutes", ylabel="GPU", title=name, yticks=[i + 0.5 for i in order.values()])
    axes.set_yticklabels([str(i) for i in order.values()])
    figure.savefig(path, dpi=120)
    return path
