"""What Gavel's pairs (K80, P100, V100, behind MPS) teach about the shape of slowdown.

Gavel measured throughputs alone and in pairs, but no utilization. A job's busy share is worked out from its solo
throughput at several batch sizes: step time = a + c · batch, where a passes without the GPU, so that u = c · batch /
(a + c · batch).
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carpool_extender.simulation.workload import WorkloadError

EXPONENTS = np.round(np.arange(1.25, 10.01, 0.25), 2)
FILE = "oracle_throughputs.json"
"""The one of Gavel's tables whose pairs are all measured."""
Key = tuple[str, str, str]
Columns = NDArray[np.float64]


def softened(util: Columns, exponent: float) -> Columns:
    """Slowdown of the first of two: 1 + g(sum) - g(own), g a smooth maximum with 1; `util` has shape (n, 2)."""
    own = util[:, 0]

    def g(x: Columns) -> Columns:
        result: Columns = (1 + x**exponent) ** (1 / exponent)
        return result

    return 1 + np.minimum(g(util.sum(axis=1)) - g(own), own)


def exponent_of_gavel(data: Path) -> float:
    """Fit the exponent to Gavel's pairs by the least mean absolute error of the logarithm."""
    util, slowdown = _pairs(data)
    errors = [np.abs(np.log(softened(util, float(p)) / slowdown)).mean() for p in EXPONENTS]
    return float(EXPONENTS[int(np.argmin(errors))])


def _pairs(data: Path) -> tuple[Columns, Columns]:
    path = data / "gavel" / "gavel_throughputs_flat.csv"
    if not path.is_file():
        raise WorkloadError(f"expected Gavel's measurements at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if _is_measured(row)]
    alone: dict[Key, float] = {}
    for row in rows:
        alone |= {_key(row, which): float(row[f"iso_tput_{which}_steps_s"]) for which in "ab"}
    busy = _busy(alone)
    util, slowdown = [], []
    for row in rows:
        for one, two in (("a", "b"), ("b", "a")):
            mine, other = _key(row, one), _key(row, two)
            if mine in busy and other in busy:
                util.append((busy[mine], busy[other]))
                slowdown.append(max(1.0, alone[mine] / float(row[f"coloc_tput_{one}"])))
    return np.array(util), np.array(slowdown)


def _is_measured(row: dict[str, str]) -> bool:
    """Whether both jobs ran on one GPU; 0 stands for out of memory as well as for what was never run."""
    is_pair = row["file"] == FILE and row["ngpu_a"] == row["ngpu_b"] == "1"
    return is_pair and float(row["coloc_tput_a"] or 0) > 0 and float(row["coloc_tput_b"] or 0) > 0


def _key(row: dict[str, str], which: str) -> Key:
    return row["gpu"], row[f"job_{which}"], row[f"bs_{which}"]


def _busy(alone: dict[Key, float]) -> dict[Key, float]:
    """Busy share of each job that was measured at several batch sizes."""
    families: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (gpu, job, batch), throughput in alone.items():
        if batch:
            families.setdefault((gpu, job), []).append((int(batch), 1 / throughput))
    found: dict[Key, float] = {}
    for (gpu, job), points in families.items():
        if len(points) < 3:
            continue
        batch, step = np.array(points, np.float64).T
        weights = 1 / step
        matrix = np.stack([weights, batch * weights], axis=1)
        _, slope = np.linalg.lstsq(matrix, np.ones(len(step)), rcond=None)[0]
        for size, time in points:
            found[gpu, job, str(size)] = float(np.clip(slope * size / time, 0.0, 1.0))
    return found
