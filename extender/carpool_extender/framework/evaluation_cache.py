"""What was found about demands that came lately, kept true from change to change instead of found again."""

from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from carpool_extender.cache.cluster import Cluster
from carpool_extender.cache.gpu_table import Rows, View
from carpool_extender.cache.pod_request import Applicant
from carpool_extender.framework.candidates import Best, select
from carpool_extender.framework.filters import Findings, Verdict, empty_findings, look
from carpool_extender.framework.scheduler_config import Rules

REMEMBERED = 24
"""Demands whose assessments are kept: 1.3 MiB each with 40,000 GPUs."""
MOST_AGAIN = 0.25
"""Share of rows up to which only those that changed are looked at again; beyond, looking at all is as quick."""


class Inspector(Protocol):
    """Runs all checks."""

    def __call__(self, asked: Verdict, rows: Rows | None) -> Findings:
        """Return what is found of some GPUs; of all where None."""
        ...


def inspect(asked: Verdict, rows: Rows | None) -> Findings:
    """Run all checks on some GPUs; on all where None."""
    columns = asked.view.columns
    return look(asked, columns if rows is None else columns.take(rows))


class Assessment:
    """What was found about one demand: of every GPU, and of every node.

    Args:
        applicant: Whoever has this demand.
        rules: What the site has chosen.
        view: The cluster.
        inspector: Runs the checks.
    """

    def __init__(self, applicant: Applicant, rules: Rules, view: View, inspector: Inspector = inspect) -> None:
        self._inspect = inspector
        self.policy = rules.policy_for(applicant)
        self.verdict = Verdict(view, applicant, rules.slots, rules.conditions_for(applicant), empty_findings(0))
        self.best = Best(applicant.demand.gpus)
        self._node_of: NDArray[np.int32] = view.columns.node[:0]
        self.follow(view, None)

    def follow(self, view: View, changed: Rows | None) -> None:
        """Look again at the rows that changed, in rising order; at all where None."""
        verdict, gpus = self.verdict, len(view.columns.alive)
        verdict.view = view
        self.best.make_room(len(view.node_names))
        if changed is None or changed.size > MOST_AGAIN * gpus:
            verdict.found = self._inspect(verdict, None)
            self._node_of = view.columns.node.copy()
            self.best.put_all(select(verdict, self.policy))
        elif changed.size:
            self._look_again(changed, gpus)

    def _look_again(self, changed: Rows, gpus: int) -> None:
        verdict, columns = self.verdict, self.verdict.view.columns
        if len(self._node_of) < gpus:
            verdict.found, self._node_of = verdict.found.resized(gpus), np.resize(self._node_of, gpus)
        verdict.found.put(changed, self._inspect(verdict, changed))
        nodes = np.zeros(len(verdict.view.node_names), np.bool_)
        nodes[self._node_of[changed]] = True  # a row may have been another node's
        nodes[columns.node[changed]] = True
        self._node_of[changed] = columns.node[changed]
        if self.policy.is_local:
            self.best.put(nodes, select(verdict, self.policy, verdict.view.grid.only(nodes)))
        else:
            self.best.put_all(select(verdict, self.policy))


class Assessments:
    """Remembers assessments, and brings one up to date when it is asked for.

    Args:
        cluster: What decisions are made on.
        rules: What the site has chosen.
        remembered: Demands whose assessments are kept.
        inspector: Runs the checks.
    """

    def __init__(
        self, cluster: Cluster, rules: Rules, remembered: int = REMEMBERED, inspector: Inspector = inspect
    ) -> None:
        self._cluster, self._rules, self._remembered, self._inspect = cluster, rules, remembered, inspector
        self._known: OrderedDict[bytes, tuple[int, Assessment]] = OrderedDict()

    def of(self, applicant: Applicant) -> Assessment:
        """Return the assessment of a demand as of this moment; use it before anything is waited for."""
        view = self._cluster.view()
        generation, known = self._known.pop(applicant.shape, (0, None))
        if known is None:
            known = Assessment(applicant, self._rules, view, self._inspect)
        else:
            known.follow(view, self._cluster.changed_since(generation))
        self._known[applicant.shape] = (self._cluster.generation, known)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return known
