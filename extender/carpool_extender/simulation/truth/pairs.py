"""The simulator's truth about slowdown and utilization, from measured pairs. Nothing asks the model that decides.

None of its numbers was fitted to these pairs, but its form was chosen with them in sight (its card says how).

Lucid (ASPLOS '23) measured 676 pairs of training jobs on an RTX 3090 by time-slicing, each with both jobs' speeds
relative to solo, and the utilization of the GPU.

For two simulated jobs a measured pair is taken whose jobs were as busy: of the NEIGHBOURS nearest in (own busy share,
other's busy share) one is drawn by the kinds of the two jobs, so that a pair keeps its luck and the scatter of the
measurements stays. Jobs that Lucid measured itself meet their own pair.

What "busy" means depends on the mode. Tenants that take turns meet in time: the share of time with a kernel. MPS
tenants meet on the SMs: SM activity takes its place, so that an MPS GPU answers to joint SM activity as a time-sliced
one answers to joint busy time. That carries measurements of one mode over to another, which is an assumption; a
workload may bring other pairs for MPS (`behind_mps`).

Three and more: each neighbour adds its own loss, s_i = 1 + sum of (s_ij - 1). Then everybody is stretched alike until
the GPU is no more than wholly busy, or, by turns, no busier than some two of them were measured to keep it: by busy
shares alone over slowdowns a fifth of the measured pairs are more than that. No measurement of three was at hand.
Utilization is Lucid's of the very pair by time-slicing; of all others `overlap` composes it.
"""

import csv
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from carpool_core.values import SharingMode

from carpool_extender.simulation.truth import overlap
from carpool_extender.simulation.truth.workload import Pool, Truth, WorkloadError

NEIGHBOURS = 8


class MeasuredPairs:
    """Slowdowns of tenants of one GPU, and how busy they keep it.

    Args:
        folder: Where `solo_rtx3090.csv` and `colocate_rtx3090.csv` of Lucid lie.
        seed: Draws among equally near pairs.
        behind_mps: Pairs that MPS tenants answer to; Lucid's where None.
    """

    def __init__(self, folder: Path, seed: int = 0, behind_mps: Pool | None = None) -> None:
        solo = {_key(row, ""): float(row["gpu_util"]) / 100 for row in _read(folder / "solo_rtx3090.csv")}
        points, found = [], []
        self._exact: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = {}
        for row in _read(folder / "colocate_rtx3090.csv"):
            one, two = _key(row, "1"), _key(row, "2")
            if one not in solo or two not in solo:
                continue
            for mine, other, speed in ((one, two, row["speed1"]), (two, one, row["speed2"])):
                slowdown = max(1.0, 1.0 / max(0.05, float(speed)))
                self._exact[mine, other] = slowdown
                self._busy[mine, other] = float(row["gpu_util"]) / 100
                points.append((solo[mine], solo[other]))
                found.append(slowdown)
        self._by_turns, self._seed = Pool(np.array(points), np.array(found)), seed
        self._behind_mps = behind_mps or self._by_turns
        self._known: dict[tuple[str, str, bool], float] = {}

    def slowdowns(self, mode: SharingMode, tenants: Sequence[Truth]) -> list[float]:
        """Return each tenant's true slowdown, at least 1."""
        if len(tenants) == 1 or mode in (SharingMode.EXCLUSIVE, SharingMode.MIG):
            return [1.0] * len(tenants)
        wait_for = mode is SharingMode.TIME_SLICING
        busy = [t.util if wait_for else t.sm for t in tenants]
        pair = {
            (i, j): self._pair(one, other, wait_for)
            for (i, one), (j, other) in itertools.permutations(enumerate(tenants), 2)
        }
        added = [1.0 + sum(pair[i, j] - 1.0 for j in range(len(tenants)) if j != i) for i in range(len(tenants))]
        load = sum(b / s for b, s in zip(busy, added, strict=True))
        most = max(
            busy[i] / pair[i, j] + busy[j] / pair[j, i]
            if wait_for and (tenants[i].kind, tenants[j].kind) in self._exact
            else 1.0
            for i, j in pair
        )
        return [s * max(1.0, load / max(1.0, most)) for s in added]

    def utilization(self, mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
        """Return the share of time in which the GPU is busy, 0..1: as measured of a pair, else as composed.

        A worker that waits for others of its gang on another GPU is slower than its pair was.
        """
        if len(tenants) == 2 and mode is SharingMode.TIME_SLICING:
            found = self._busy.get((tenants[0].kind, tenants[1].kind))
            if found is not None and list(slowdowns) == self.slowdowns(mode, tenants):
                return found
        return overlap.utilization(tenants, slowdowns)

    def _pair(self, one: Truth, other: Truth, wait_for: bool) -> float:
        key = (one.kind, other.kind, wait_for)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(one, other, wait_for)
        return found

    def _look_up(self, one: Truth, other: Truth, wait_for: bool) -> float:
        if wait_for and (one.kind, other.kind) in self._exact:
            return self._exact[one.kind, other.kind]
        wanted = (one.util, other.util) if wait_for else (one.sm, other.sm)
        pool = self._by_turns if wait_for else self._behind_mps
        distance = ((pool.busy - wanted) ** 2).sum(axis=1)
        near = np.argpartition(distance, NEIGHBOURS)[:NEIGHBOURS]
        draw = zlib.crc32(f"{self._seed}/{one.kind}/{other.kind}".encode()) % NEIGHBOURS
        return float(np.sort(pool.slowdowns[near])[draw])


def _key(row: dict[str, str], which: str) -> str:
    return f"lucid/{row['model' + which]}/{row['batchsize' + which]}/{row['amp' + which]}"


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise WorkloadError(f"expected Lucid's measurements at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
