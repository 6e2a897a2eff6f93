"""A dry run of a job's workers: the scheduler's own decision on a snapshot, and why its place is the best."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from carpool_core.demand import Demand
from carpool_core.durations import format_duration
from carpool_core.resources.node import Device, Reservation
from carpool_core.values import GpuUuid, SharingMode, pluralize

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import NodeGrid
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.counterfactual import Scenario, advice
from carpool_extender.explain.queue_forecast import no_room
from carpool_extender.framework.gang import WorkerPlace, infeasible_when_empty, max_workers, place_workers
from carpool_extender.framework.scores import Policy, SchedulerConfig, best_of, select, ties
from carpool_extender.framework.selection import CachedEvaluation, EvaluationCache, Placement

MAX_LISTED_WORKERS = 128
"""Workers whose places are described; describing more takes seconds, and the lines repeat themselves."""
MAX_RANKED_LINES = 4
"""Lines of a ranking, including the winner's."""
READY = 1.0
"""Readiness of GPUs that all run a tenant already."""
UNCHECKED = (
    "not checked by Carpool: CPU and memory of nodes, affinity to pods, topology spread, volumes, host ports; "
    "kube-scheduler checks these"
)


class DryRun:
    """Places the wanted workers of one job on a snapshot, which stays as it is.

    `steps` are the training steps of the job; None if it does not name them. `notes` are sentences on parts of the job
    that could not be checked.

    Attributes:
        unchecked: Sentences on everything that was not checked.
        fits: Whether all of them would get places now.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        request: PodRequest,
        config: SchedulerConfig,
        wanted: int,
        steps: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._cluster, self._request, self._config = cluster, request, config
        self._wanted, self._steps = wanted, steps
        self._evaluated = CachedEvaluation(request, config, cluster.snapshot())
        self.fits = max_workers(self._evaluated) >= wanted
        self.unchecked = [*notes, UNCHECKED]

    def never(self, *, is_complete: bool) -> list[str] | None:
        """Return why the workers could not run even on empty GPUs, and what would help; None if they could.

        `is_complete` is whether all GPUs are known: a node that cannot be read may have suitable ones.
        """
        reason = infeasible_when_empty(self._evaluated.evaluation, self._wanted)
        if reason is None:
            return None
        where = "here" if is_complete else "on the GPUs that are known"
        return [f"could never run {where}: {reason}", *self.unchecked, *self.hints()]

    def hints(self) -> list[str]:
        """Return the best places if all workers fit, and what would have to change otherwise."""
        if self.fits:
            return ranking_lines(self._evaluated)
        return advice(Scenario(self._request, self._config, self._cluster, self._wanted))

    def outcome(self, waits: str | None = None) -> list[str]:
        """Return where the workers would go now and how the place was chosen, or why they would wait.

        `waits` is why the queue would not admit the job now, although there may be room; None if it would.
        """
        if waits is None and not self.fits:
            waits = self._no_room()
        decided = self._would_go() if waits is None else [f"would have to wait now: {waits}"]
        return [*decided, *self.unchecked, *self.hints()]

    def again(self, own: Collection[frozenset[GpuUuid]]) -> list[str]:
        """Return how a decision made now compares with the places that the job has, on a cluster without the job.

        `own` has the GPUs of each of its places.
        """
        it = f"it keeps its place; decided now with policy {self._evaluated.policy.name} it would"
        if len(own) != self._wanted:
            had, needed = pluralize(len(own), "place"), pluralize(self._wanted, "worker")
            line = f"it has {had} for {needed} until an ended worker's reservation is released; not compared"
            return [line, *self.unchecked]
        if not self.fits:
            return [f"{it} have to wait: {self._no_room()}", *self.unchecked]
        first, *others = self._would_go()
        if Counter(own) == Counter(frozenset(one.placement.gpu_uuids) for one in self._places()):
            first, others = f"{it} go there again", []
        elif others:
            first = f"{it} go elsewhere: {first}"
        else:
            first = first.replace("would", it, 1)
        return [first, *others, *self.unchecked, *self.hints()]

    def _no_room(self) -> str:
        evaluations = EvaluationCache(self._cluster, self._config)
        return no_room(self._request, self._wanted, evaluations)

    def _places(self, most: int | None = None) -> list[WorkerPlace]:
        wanted = self._wanted if most is None else min(most, self._wanted)
        return place_workers(self._evaluated, wanted, with_reason=most is not None)

    def _would_go(self) -> list[str]:
        lines = [self._describe(one) for one in self._places(MAX_LISTED_WORKERS)]
        if self._wanted == 1:
            return [f"would go to {lines[0]}"]
        more = self._wanted - len(lines)
        rest = [f"  the places of {pluralize(more, 'more worker')} are not listed"] if more else []
        return [f"all {self._wanted} workers would get places now", *_grouped(lines), *rest]

    def _describe(self, one: WorkerPlace) -> str:
        devices = self._cluster.nodes[one.node].status.devices
        step_time = step_time_at(self._request.demand, one.placement, devices, self._steps)
        return f"{one.node}{step_time}: {one.placement.reason}"


_GPUS = re.compile(r"(?<= on GPU )[0-9, ]+(?= of )")
"""The GPU numbers in a placement's reason."""


def _grouped(lines: Sequence[str]) -> Iterator[str]:
    """Yield one line for consecutive workers whose lines differ in GPU numbers only."""
    for _, group in groupby(lines, lambda line: _GPUS.sub("", line, count=1)):
        members = [*group]
        line = members[0]
        if len(members) > 1:
            gpus = " and ".join(found[0] for one in members if (found := _GPUS.search(one)) is not None)
            line = _GPUS.sub(gpus, line, count=1)
        yield f"  {pluralize(len(members), 'worker')} would go to {line}"


def step_time_at(demand: Demand, place: Placement | Reservation, devices: Iterable[Device], steps: int | None) -> str:
    """Return the predicted step time at a place in brackets, with the duration of the training if steps are known.

    The slowest product counts, because the others wait for it. The text is empty if no step time is predicted, and for
    MIG: predictions are for whole GPUs.
    """
    products = {device.product for device in devices if device.uuid in place.gpu_uuids}
    times = [p.step_time_seconds.median for p in map(demand.prediction_on, products) if p is not None]
    if place.mode is SharingMode.MIG or not times or len(times) < len(products):
        return ""
    step_s = max(times) * place.expected_slowdown
    whole = "" if steps is None else f", {pluralize(steps, 'step')} {format_duration(steps * step_s)}"
    return f" (a step takes about {format_duration(step_s)} there{whole})"


class RankedPlace(NamedTuple):
    """GPUs that one worker could have."""

    rows: tuple[int, ...]
    """Rows of the snapshot's GPU table."""
    cost: float
    """Mean cost of these GPUs by the policy."""
    is_tied: bool
    """Whether the cost is within the policy's tolerance of the best node's."""
    ready: float
    """1 for GPUs in use, 0.5 for idle ones, 0 where the sharing mode has to change."""
    left_mib: float
    """Memory that would be left on all of them, in MiB."""
    is_linked: bool
    """Whether NVLink connects them."""


def ranking(cached: CachedEvaluation) -> list[RankedPlace]:
    """Return the places for one worker in the order of selection: single GPUs, or the best set of each node."""
    evaluation, policy = cached.evaluation, cached.policy
    of_nodes = select(evaluation, policy)
    if not of_nodes.node.size:
        return []
    best = np.flatnonzero(ties(of_nodes, policy))
    winner = tuple(of_nodes.rows[best_of(of_nodes, best)].tolist())
    # A node may offer a costlier GPU than its cheapest one, so the tolerance counts from the best node's cost.
    limit, places = of_nodes.cost[best].min() + policy.tolerance, of_nodes
    if len(winner) == 1:
        rows = np.flatnonzero(evaluation.ok)
        nodes = evaluation.snapshot.gpus.node[rows].astype(np.intp)
        places = select(evaluation, policy, NodeGrid(rows[None, :], nodes, False))
    is_tied = (places.cost <= limit) & (places.is_linked == of_nodes.is_linked[best[0]])
    cost = np.where(is_tied, -np.inf, places.cost)
    order = np.lexsort((places.node, places.left_mib, -places.ready, cost, ~places.is_linked))
    columns = (places.cost, is_tied, places.ready, places.left_mib, places.is_linked)
    found = [RankedPlace(tuple(places.rows[at].tolist()), *(of[at].item() for of in columns)) for at in order.tolist()]
    return sorted(found, key=lambda one: one.rows != winner)


def ranking_lines(cached: CachedEvaluation) -> list[str]:
    """Return the policy's goal and its best places with their scores; no lines if nothing fits."""
    places, policy = ranking(cached), cached.policy
    if not places:
        return []
    texts = [_score(policy, places[0], one) for one in places]
    starts = [0, *(place for place, (one, after) in enumerate(pairwise(texts), start=1) if one != after), len(texts)]
    groups = [*pairwise(starts)]
    what = "node" if len(places[0].rows) > 1 else "GPU"
    lines = [_goal(policy, len(places[0].rows))]
    for number, (begin, end) in enumerate(groups[:MAX_RANKED_LINES], start=1):
        more = f" and {pluralize(end - begin - 1, what)} like it" if end - begin > 1 else ""
        lines.append(f"  {number}. {cached.evaluation.snapshot.place(*places[begin].rows)}{more}: {texts[begin]}")
    if len(groups) > MAX_RANKED_LINES:
        lines.append(f"  and {pluralize(len(places) - groups[MAX_RANKED_LINES][0], 'place')} more")
    return lines


def _goal(policy: Policy, gpus: int) -> str:
    within = f"; within {policy.score.amount(policy.tolerance)} is a tie" if policy.score and policy.tolerance else ""
    mean = f"; mean of its {gpus} GPUs" if policy.score and gpus > 1 else ""
    return f"places by {policy.name} ({policy.meaning}{within}{mean}):"


def _score(policy: Policy, best: RankedPlace, one: RankedPlace) -> str:
    """Return the score of a place, and why the best one is preferred."""
    score = f"{policy.score.text(one.cost)}; " if policy.score else ""
    if one is best:
        return score.removesuffix("; ") or "the best"
    if best.is_linked and not one.is_linked:
        return f"{score}not all linked by NVLink"
    if not one.is_tied:
        return score + (policy.score.behind(one.cost, best.cost) if policy.score else "")
    if best.ready < one.ready or (best.ready == one.ready and best.left_mib > one.left_mib):
        because = "its node offers another GPU first"
    elif best.ready > one.ready:
        because = f"the first place is {'in use, and idle GPUs stay free' if best.ready == READY else 'readier'}"
    elif best.left_mib < one.left_mib:
        because = f"the first place leaves {one.left_mib - best.left_mib:,.0f} MiB less"
    else:
        because = "the first place comes first in order"
    return f"{score}a tie, but {because}"
