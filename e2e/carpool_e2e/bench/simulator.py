"""Time of `carpool simulate` for the Philly trace, its largest."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from carpool_simulator.profiles import PRODUCT

from carpool_e2e.bench.measure import Figure, Section
from carpool_e2e.cluster import carpool_command
from carpool_e2e.errors import HarnessError

DATA = "CARPOOL_DATA"
"""Variable with the folder of published measurements and traces."""
TRACE = Path("traces") / "philly_sia.csv"
CLUSTER = f"""nodes:
- {{count: 311, product: {PRODUCT}, gpus: 8}}
- {{count: 1, product: {PRODUCT}, gpus: 2}}
"""
"""Philly's 2,490 GPUs."""
LONGEST_S = 120.0


def measure(report: Callable[[str], None], data: Path) -> Section:
    """Run the whole trace once, from the command to its table.

    Raises:
        HarnessError: The command failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(CLUSTER, encoding="utf-8")
        command = [carpool_command(), "simulate", "--trace", str(data / TRACE), "--cluster", str(cluster)]
        command += ["--policy", "least-slowdown", "--no-pictures", "--out", folder]
        began = time.monotonic()
        done = subprocess.run(command, env={**os.environ, DATA: str(data)}, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stderr.strip()}")
    jobs = len((data / TRACE).read_text(encoding="utf-8").splitlines()) - 1
    figure = Figure(f"{TRACE.name}: {jobs:,} jobs on 2,490 GPUs", took_s, "s", LONGEST_S)
    report(f"{figure.what}: {figure}")
    text = "`carpool simulate --policy least-slowdown`, from the command to its table."
    return Section("The simulator", text, [figure])
