"""How long `carpool simulate` takes for its largest trace: in a process of its own, as a user starts it."""

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from carpool_simulator.profiles import PRODUCT
from carpool_simulator.report import About

from carpool_e2e.bench.measure import circumstances
from carpool_e2e.bench.memory import resident_mib
from carpool_e2e.cluster import carpool_command
from carpool_e2e.errors import HarnessError

DATA = "CARPOOL_DATA"
TRACE = Path("traces") / "philly_sia.csv"
CLUSTER = f"""nodes:
- {{count: 311, product: {PRODUCT}, gpus: 8}}
- {{count: 1, product: {PRODUCT}, gpus: 2}}
"""
"""Philly's 2,490 GPUs."""
POLICY = "least-slowdown"
MUST_S, AIM_S = 120.0, 30.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run took."""

    title: str
    jobs: int
    elapsed_s: float
    processor_s: float
    memory_mib: float
    """The most that was seen resident."""
    table: list[str]
    """What it wrote, as Markdown."""
    circumstances: str
    """What else went on, in a sentence."""


def measure(data: Path, tell: Callable[[str], None]) -> Measured:
    """Run the whole trace once, from the command to its table.

    Raises:
        HarnessError: It failed; the message is what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, cluster = Path(folder), Path(folder) / "cluster.yaml"
        cluster.write_text(CLUSTER, encoding="utf-8")
        command = [carpool_command(), "simulate", "--trace", str(data / TRACE), "--cluster", str(cluster)]
        command += ["--policy", POLICY]
        begin_s = time.monotonic()
        arguments, environment = [*command, "--no-pictures", "--out", folder], {**os.environ, DATA: str(data)}
        said = out / "said"
        with said.open("wb") as errors, subprocess.Popen(arguments, env=environment, stderr=errors) as process:
            memory_mib, status, used = _watched(process.pid)
            elapsed_s = time.monotonic() - begin_s
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise HarnessError(f"{' '.join(command)}: {said.read_text(encoding='utf-8')}")
        about = msgspec.json.decode((out / "trace.json").read_bytes(), type=About)
        table = [line for line in (out / "trace.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    tell(f"{about.title}: {elapsed_s:.1f} s")
    spent_s = used.ru_utime + used.ru_stime
    return Measured(about.title, about.jobs, elapsed_s, spent_s, memory_mib, table, circumstances())


def _watched(pid: int) -> tuple[float, int, resource.struct_rusage]:
    """Wait for a process; return the most memory it was seen to hold, in MiB, its status and what it used.

    The kernel's own record of the most (`ru_maxrss`) begins with that of whoever started the process.
    """
    most_mib = 0.0
    while True:
        with suppress(ValueError):  # it ends
            most_mib = max(most_mib, resident_mib(pid))
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            return most_mib, status, used
        time.sleep(LOOK_S)


def simulator_section(found: Measured) -> list[str]:
    """Write the section of the report."""
    outcome = "kept" if found.elapsed_s <= MUST_S else "missed"
    return [
        "## The simulator",
        "",
        f"`carpool simulate --trace {TRACE.name} --cluster cluster.yaml --policy {POLICY}`, from the command",
        f"to its table: {found.title}, from the first submission to the last end, by the scheduler's own decisions.",
        found.circumstances,
        "",
        "| | found | asked for | |",
        "|---|---|---|---|",
        f"| time | {found.elapsed_s:.1f} s | ≤ {MUST_S:g} s, aimed at {AIM_S:g} s | {outcome} |",
        f"| processor time | {found.processor_s:.1f} s | | |",
        f"| jobs a second of processor time | {found.jobs / found.processor_s:,.0f} | | |",
        f"| memory | {found.memory_mib:.0f} MiB | | |",
        "",
        *found.table,
        "",
    ]
