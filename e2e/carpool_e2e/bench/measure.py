"""Figures of a benchmark, the section that shows them, and readings of a process."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a section."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def row(self) -> str:
        """Return the row in Markdown, with the target and whether it is met."""
        if self.at_most is not None:
            target, is_met = f"≤ {self.at_most:,g} {self.unit}", self.value <= self.at_most
        elif self.at_least is not None:
            target, is_met = f"≥ {self.at_least:,g} {self.unit}", self.value >= self.at_least
        else:
            return f"| {self.what} | {self} |  |  |"
        return f"| {self.what} | {self} | {target} | {'met' if is_met else 'missed'} |"

    def __str__(self) -> str:
        amount = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{amount} {self.unit}"


@dataclass(frozen=True, slots=True)
class Section:
    """A section of docs/benchmarks.md."""

    title: str
    text: str
    """How it was measured."""
    figures: Sequence[Figure]

    def lines(self, made: str) -> list[str]:
        """Return the section in Markdown.

        Args:
            made: When it was measured, and with which version.
        """
        head = [f"## {self.title}", "", f"Measured {made}, on {machine()}.", "", self.text, ""]
        return [*head, "| | measured | target | |", "|---|---|---|---|", *(figure.row() for figure in self.figures), ""]


def machine() -> str:
    """Return the processors, memory and software of this machine."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor() or "unknown processor",
    )
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} × {model}, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def replaced(report: str, section: Sequence[str]) -> str:
    """Return the report with a section in place of the one with the same heading, or at the end."""
    parts = ("\n" + report).split("\n## ")
    heading = section[0].removeprefix("## ")
    others = [part for part in parts if part.partition("\n")[0] != heading]
    at = next((i for i, part in enumerate(parts) if part.partition("\n")[0] == heading), len(others))
    new = "\n".join(section).removeprefix("## ")
    return "\n## ".join(part.rstrip("\n") + "\n" for part in [*others[:at], new, *others[at:]]).removeprefix("\n")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    # The clock ID is made as by clock_getcpuclockid(3), which Python does not offer.
    return time.clock_gettime((~pid << 3) | 2)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no VmRSS: has it ended?")
