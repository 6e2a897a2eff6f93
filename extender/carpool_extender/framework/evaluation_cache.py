"""What was found about demands that came lately, kept true from change to change instead of found again."""

from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Rows, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import Evaluation, FilterResults, empty_results, run_filters
from carpool_extender.framework.scores import Best, SchedulerConfig, select

REMEMBERED = 24
"""Demands whose assessments are kept: 1.3 MiB each with 40,000 GPUs."""
MOST_AGAIN = 0.25
"""Share of rows up to which only those that changed are looked at again; beyond, looking at all is as quick."""


class FilterRunner(Protocol):
    """Runs all checks."""

    def __call__(self, asked: Evaluation, rows: Rows | None) -> FilterResults:
        """Return what is found of some GPUs; of all where None."""
        ...


def filter_rows(asked: Evaluation, rows: Rows | None) -> FilterResults:
    """Run all checks on some GPUs; on all where None."""
    columns = asked.snapshot.gpus
    return run_filters(asked, columns if rows is None else columns.take(rows))


class CachedEvaluation:
    """What was found about one demand: of every GPU, and of every node.

    Args:
        pod_request: Whoever has this demand.
        rules: What the site has chosen.
        snapshot: The cluster.
        filter_runner: Runs the checks.
    """

    def __init__(
        self,
        pod_request: PodRequest,
        rules: SchedulerConfig,
        snapshot: Snapshot,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._inspect = filter_runner
        self.policy = rules.policy_for(pod_request)
        self.evaluation = Evaluation(
            snapshot, pod_request, rules.slots, rules.limits_for(pod_request), empty_results(0)
        )
        self.best = Best(pod_request.demand.gpus)
        self._node_of: NDArray[np.int32] = snapshot.gpus.node[:0]
        self.follow(snapshot, None)

    def follow(self, snapshot: Snapshot, changed: Rows | None) -> None:
        """Look again at the rows that changed, in rising order; at all where None."""
        evaluation, gpus = self.evaluation, len(snapshot.gpus.alive)
        evaluation.snapshot = snapshot
        self.best.make_room(len(snapshot.node_names))
        if changed is None or changed.size > MOST_AGAIN * gpus:
            evaluation.results = self._inspect(evaluation, None)
            self._node_of = snapshot.gpus.node.copy()
            self.best.put_all(select(evaluation, self.policy))
        elif changed.size:
            self._look_again(changed, gpus)

    def _look_again(self, changed: Rows, gpus: int) -> None:
        evaluation, columns = self.evaluation, self.evaluation.snapshot.gpus
        if len(self._node_of) < gpus:
            evaluation.results, self._node_of = evaluation.results.resized(gpus), np.resize(self._node_of, gpus)
        evaluation.results.put(changed, self._inspect(evaluation, changed))
        nodes = np.zeros(len(evaluation.snapshot.node_names), np.bool_)
        nodes[self._node_of[changed]] = True  # a row may have been another node's
        nodes[columns.node[changed]] = True
        self._node_of[changed] = columns.node[changed]
        if self.policy.is_local:
            self.best.put(nodes, select(evaluation, self.policy, evaluation.snapshot.grid.only(nodes)))
        else:
            self.best.put_all(select(evaluation, self.policy))


class EvaluationCache:
    """Remembers assessments, and brings one up to date when it is asked for.

    Args:
        cluster: What decisions are made on.
        rules: What the site has chosen.
        remembered: Demands whose assessments are kept.
        filter_runner: Runs the checks.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        rules: SchedulerConfig,
        remembered: int = REMEMBERED,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._cluster, self._rules, self._remembered, self._inspect = cluster, rules, remembered, filter_runner
        self._known: OrderedDict[bytes, tuple[int, CachedEvaluation]] = OrderedDict()

    def of(self, pod_request: PodRequest) -> CachedEvaluation:
        """Return the assessment of a demand as of this moment; use it before anything is waited for."""
        snapshot = self._cluster.snapshot()
        generation, known = self._known.pop(pod_request.shape, (0, None))
        if known is None:
            known = CachedEvaluation(pod_request, self._rules, snapshot, self._inspect)
        else:
            known.follow(snapshot, self._cluster.changed_since(generation))
        self._known[pod_request.shape] = (self._cluster.generation, known)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return known
