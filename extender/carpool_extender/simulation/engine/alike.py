"""Checks of simulated GPUs: two GPUs of which the same is known are alike, and are looked at once for each demand.

Simulated jobs are of few kinds, so that GPUs come back to states in which some GPU was before. In a real cluster what
is measured hardly ever repeats itself, and this would gain nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from carpool_extender.cache.cluster import Cluster
from carpool_extender.cache.gpu_table import Bools, GpuTable, Rows
from carpool_extender.framework.filters import Evaluation, FilterResults, empty_findings, look

MOST_STATES = 50_000
OF_GPU = ("alive", "device_class", "unavailable", "mode", "prepared", "count", "mig_gb", "mig_slices", "user")
OF_TENANTS = ("memory_mib", "util", "sm", "dram", "max_slowdown", "namespace", "cluster_tenancy")
"""What the checks look at; the aggregates follow from it."""


class _Known(NamedTuple):
    """What was found about one demand, by state; shape (states,) each."""

    is_known: Bools
    found: FilterResults


class Alike:
    """Runs the checks on GPUs of a cluster whose classes of devices and namespaces stay as they are.

    Args:
        cluster: What is simulated.
        most: States that are remembered; beyond, all are forgotten.
        looking: Runs the checks on GPUs.
    """

    def __init__(
        self, cluster: Cluster, most: int = MOST_STATES, looking: Callable[[Evaluation, GpuTable], FilterResults] = look
    ) -> None:
        self._cluster, self._most, self._look = cluster, most, looking
        self._generation = -1
        self._number: dict[tuple[object, ...], int] = {}
        self._state: Rows = np.zeros(0, np.intp)
        self._known: dict[bytes, _Known] = {}

    def __call__(self, asked: Evaluation, rows: Rows | None) -> FilterResults:
        """Run all checks of a demand on some GPUs; on all where None."""
        columns = asked.snapshot.columns
        self._follow(columns)
        states = self._state if rows is None else self._state[rows]
        known = self._of(asked)
        if not known.is_known[states].all():
            new, first = np.unique(states, return_index=True)
            first = first[~known.is_known[new]]
            new = states[first]
            known.found.put(new, self._look(asked, columns.take(first if rows is None else rows[first])))
            known.is_known[new] = True
        return known.found.of(states)

    def _of(self, asked: Evaluation) -> _Known:
        states = len(self._number)
        shape = asked.pod_request.shape
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = _Known(np.zeros(states, np.bool_), empty_findings(states))
        elif len(known.is_known) < states:
            more = np.append(known.is_known, np.zeros(2 * states - len(known.is_known), np.bool_))
            known = self._known[shape] = _Known(more, known.found.resized(2 * states))
        return known

    def _follow(self, columns: GpuTable) -> None:
        """Number the states of GPUs that changed."""
        gpus, generation = len(columns.alive), self._cluster.generation
        changed = self._cluster.changed_since(self._generation) if len(self._state) == gpus else None
        if len(self._number) > self._most:
            self._number.clear()
            self._known.clear()
            changed = None
        if changed is None:
            self._state, changed = np.zeros(gpus, np.intp), np.arange(gpus)
        of_gpus = zip(*[getattr(columns, name)[changed].tolist() for name in OF_GPU], strict=True)
        of_tenants = [getattr(columns, name) for name in OF_TENANTS]
        for row, of_gpu, count in zip(changed.tolist(), of_gpus, columns.count[changed].tolist(), strict=True):
            state = (*of_gpu, *[array[row, :count].tobytes() for array in of_tenants]) if count else of_gpu
            self._state[row] = self._number.setdefault(state, len(self._number))
        self._generation = generation
