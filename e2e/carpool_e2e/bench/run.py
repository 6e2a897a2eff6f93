"""`make bench`: measures, and writes each section of docs/benchmarks.md."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool_core.clock import SystemClock
from carpool_simulator.progress import provenance
from rich.console import Console

from carpool_e2e.bench import latency, placement, predictions, simulator, throughput
from carpool_e2e.bench.measure import Section, replaced
from carpool_e2e.chart import PROJECT

REPORT = PROJECT / "docs" / "benchmarks.md"
Report = Callable[[str], None]


def _simulator(report: Report, console: Console) -> Section | None:
    if simulator.DATA not in os.environ:
        report(f"{simulator.DATA} is not set, so there is no trace: the section stays as it was")
        return None
    return simulator.measure(report, Path(os.environ[simulator.DATA]))


SECTIONS: Mapping[str, Callable[[Report, Console], Section | None]] = {
    "latency": latency.measure,
    "throughput": throughput.measure,
    "placement": lambda report, _: placement.measure(report),
    "predictions": lambda report, _: predictions.measure(report),
    "simulator": _simulator,
}
"""All sections, in the order of the report."""


def main(console: Console, only: str | None = None) -> None:
    """Measure one section or all, and put each into the report as soon as it is there."""
    for name in [only] if only else SECTIONS:
        console.rule(name)
        made = provenance(SystemClock())
        section = SECTIONS[name](lambda line: console.print(line, highlight=False), console)
        if section is not None:
            lines = section.lines(f"on {made.when} UTC, version {made.version}")
            REPORT.write_text(replaced(REPORT.read_text(encoding="utf-8"), lines), encoding="utf-8")
