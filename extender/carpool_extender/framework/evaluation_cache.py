"""LRU cache of filter results per request shape, updated incrementally when GPUs change."""

from typing import Protocol

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Rows, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import Evaluation, FilterResults, empty_results, run_filters
from carpool_extender.framework.scores import BestPerNode, SchedulerConfig, select

MAX_ENTRIES = 24
"""Request shapes that are cached: 1.3 MiB each with 40,000 GPUs."""
MAX_INCREMENTAL = 0.25
"""Share of changed rows above which all rows are evaluated again."""


class FilterRunner(Protocol):
    """Runs all checks; the simulator passes one with a memo."""

    def __call__(self, evaluation: Evaluation, rows: Rows | None, /) -> FilterResults:
        """Return the results for some GPUs; for all if None."""
        ...


def filter_rows(evaluation: Evaluation, rows: Rows | None) -> FilterResults:
    """Run all checks on some GPUs of the evaluation's snapshot; on all if None."""
    gpus = evaluation.snapshot.gpus
    return run_filters(evaluation, gpus if rows is None else gpus.take(rows))


class CachedEvaluation:
    """Results of one request shape: the checks of every GPU, and the best GPUs of every node.

    Args:
        pod_request: The request.
        config: Configuration of the site.
        snapshot: The cluster.
        filter_runner: Runs the checks.
    """

    def __init__(
        self,
        pod_request: PodRequest,
        config: SchedulerConfig,
        snapshot: Snapshot,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._run, self.config = filter_runner, config
        self.policy = config.policy_for(pod_request)
        limits = config.limits_for(pod_request)
        self.evaluation = Evaluation(snapshot, pod_request, config.slots, limits, empty_results(0))
        self.best = BestPerNode(pod_request.demand.gpus)
        self._node_of: NDArray[np.int32] = snapshot.gpus.node[:0]
        self.update(snapshot, None)

    def update(self, snapshot: Snapshot, changed: Rows | None) -> None:
        """Move on to a newer snapshot.

        Args:
            snapshot: The cluster now.
            changed: Rows that have changed since, in rising order; all if None.
        """
        evaluation, gpus = self.evaluation, len(snapshot.gpus.alive)
        evaluation.snapshot = snapshot
        self.best.resize(len(snapshot.node_names))
        if changed is None or changed.size > MAX_INCREMENTAL * gpus:
            evaluation.results = self._run(evaluation, None)
            self._node_of = snapshot.gpus.node.copy()
            self.best.put_all(select(evaluation, self.policy))
        elif changed.size:
            self._update_rows(changed, gpus)

    def _update_rows(self, changed: Rows, gpus: int) -> None:
        evaluation, snapshot = self.evaluation, self.evaluation.snapshot
        if len(self._node_of) < gpus:
            evaluation.results, self._node_of = evaluation.results.resized(gpus), np.resize(self._node_of, gpus)
        evaluation.results.put(changed, self._run(evaluation, changed))
        nodes = np.zeros(len(snapshot.node_names), np.bool_)
        nodes[self._node_of[changed]] = True  # a row may have moved to another node
        nodes[snapshot.gpus.node[changed]] = True
        self._node_of[changed] = snapshot.gpus.node[changed]
        if self.policy.is_local:
            self.best.put(nodes, select(evaluation, self.policy, snapshot.grid.only(nodes)))
        else:
            self.best.put_all(select(evaluation, self.policy))


class EvaluationCache:
    """Returns evaluations that are up to date with the cluster.

    Args:
        cluster: The cluster.
        config: Configuration of the site.
        max_entries: Request shapes that are cached.
        filter_runner: Runs the checks.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        config: SchedulerConfig,
        max_entries: int = MAX_ENTRIES,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._cluster, self._config, self._run = cluster, config, filter_runner
        self._entries: LRUCache[bytes, tuple[int, CachedEvaluation]] = LRUCache(max_entries)

    def of(self, pod_request: PodRequest) -> CachedEvaluation:
        """Return the evaluation of a request on the cluster as it is now; it is valid until the next `await`."""
        snapshot = self._cluster.snapshot()
        generation, cached = self._entries.get(pod_request.shape, (0, None))
        if cached is None:
            cached = CachedEvaluation(pod_request, self._config, snapshot, self._run)
        else:
            cached.update(snapshot, self._cluster.changed_since(generation))
        self._entries[pod_request.shape] = (self._cluster.generation, cached)
        return cached
