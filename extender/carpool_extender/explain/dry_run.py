"""A dry run of a job's workers: the scheduler's own decision on a snapshot, and why its place is the best."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from carpool_core.demand import Demand
from carpool_core.durations import format_duration
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_extender.cache.gpu_table import Bools, NodeGrid
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.counterfactual import Scenario, advice
from carpool_extender.framework.diagnosis import PREFIX
from carpool_extender.framework.evaluation_cache import CachedEvaluation, EvaluationCache
from carpool_extender.framework.filters import Evaluation, pluralize
from carpool_extender.framework.gang import ClusterState, Gangs, infeasible_when_empty, place_workers
from carpool_extender.framework.scores import Candidates, Policy, SchedulerConfig, best_of, select, ties
from carpool_extender.framework.selection import Placement, filter_nodes

MAX_DRY_RUN_WORKERS = 128
"""Workers that a dry run places one by one. Placing more takes seconds, and the answer repeats itself."""
MAX_RANKED_LINES = 4
"""Lines of a ranking, including the winner's."""
READY = 1.0
"""Readiness of GPUs that all run a tenant already."""
UNCHECKED = (
    "not checked by Carpool: taints, node selectors and affinity, CPU and memory of nodes, volumes, host ports; "
    "kube-scheduler checks these"
)


class DryRun:
    """Places the workers of one job on a copy of the cluster.

    Args:
        seen: The cluster. `outcome`, `rest` and `again` place workers in it, so call the other methods first.
        pod_request: The request of each worker.
        config: The site's configuration.
        steps: Training steps of the job; None where the job does not name them.
        notes: Sentences on parts of the job that could not be checked.

    Attributes:
        wanted: Workers that still need a place.
        unchecked: Sentences on everything that was not checked.
    """

    def __init__(
        self,
        seen: ClusterState,
        pod_request: PodRequest,
        config: SchedulerConfig,
        steps: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.pod_request = pod_request
        job_uid = pod_request.demand.job_uid
        placed_or_done = seen.succeeded(job_uid, PodUid("")) + len(seen.cluster.pods_of_job(job_uid))
        self.wanted = max(0, pod_request.workers - placed_or_done)
        self.unchecked = [*notes, UNCHECKED]
        self._seen, self._config, self._steps = seen, config, steps

    def gang(self) -> str | None:
        """Return why the job waits until all its workers fit at once; None where they do."""
        gangs = Gangs(self._seen, EvaluationCache(self._seen.cluster, self._config), self._config)
        return gangs.refusal(self.pod_request, PodUid(""))

    def infeasible(self) -> str | None:
        """Return why the workers could not run even on empty GPUs; None where they could."""
        return infeasible_when_empty(self._evaluated().evaluation, self._config.slots, self.wanted)

    def ranking(self) -> list[str]:
        """Return the places that the policy chooses from for one worker, best first."""
        return ranking_lines(self._evaluated())

    def advice(self, *, whole_gang: bool = False) -> list[str]:
        """Return what would have to change for a place.

        Args:
            whole_gang: Whether all workers must find places at once.
        """
        wanted = self.wanted if whole_gang else 1
        scenario = Scenario(self.pod_request, self._config, self._seen.cluster, wanted=wanted, whole_gang=whole_gang)
        return advice(scenario)

    def outcome(self) -> list[str]:
        """Return where the workers would go now and how the place was chosen, or why they would wait."""
        if waits := self.gang():
            return [f"would have to wait now: {waits}", *self.unchecked, *self.advice(whole_gang=True)]
        ranking, places = self.ranking(), self._place()
        if not places:
            return [f"would have to wait now{self._refusal()}", *self.unchecked, *self.advice()]
        return [*self._placed_lines(places), *self.unchecked, *ranking]

    def rest(self) -> list[str]:
        """Return the same for the workers without a place, where others of the job have theirs."""
        decided = f"decided now with policy {self._config.policy_for(self.pod_request).name}"
        ranking, places = self.ranking(), self._place()
        if not places:
            they = "it" if self.wanted == 1 else "they"
            return [f"{decided} {they} would have to wait{self._refusal()}", *self.unchecked, *self.advice()]
        first, *others = self._placed_lines(places, numbered=False)
        return [f"{decided} {'it' if self.wanted == 1 else 'of these'} {first}", *others, *self.unchecked, *ranking]

    def again(self, own: Collection[frozenset[GpuUuid]]) -> list[str]:
        """Return how a decision made now compares with the places that the job has, on a cluster without the job.

        Args:
            own: GPUs of each of its places.
        """
        ranking = self.ranking()
        lines, is_placed = self._compared(own)
        return [*lines, *self.unchecked, *(ranking if is_placed else [])]

    def _compared(self, own: Collection[frozenset[GpuUuid]]) -> tuple[list[str], bool]:
        it = f"it keeps its place; decided now with policy {self._config.policy_for(self.pod_request).name} it would"
        if len(own) != self.wanted:
            had, needed = pluralize(len(own), "place"), pluralize(self.wanted, "worker")
            return [f"it has {had} for {needed} until an ended worker's reservation is released; not compared"], False
        if waits := self.gang():
            return [f"{it} have to wait: {waits}"], False
        places = self._place()
        if not places:
            return [f"{it} have to wait{self._refusal()}"], False
        first, *others = self._placed_lines(places)
        if len(places) < min(self.wanted, MAX_DRY_RUN_WORKERS):
            return [f"{it} not get all of them again: {first}", *others], True
        if self.wanted > MAX_DRY_RUN_WORKERS:
            return [f"{it} get places; not compared, a dry run places at most {MAX_DRY_RUN_WORKERS} workers"], True
        if Counter(own) == Counter(frozenset(place.gpu_uuids) for _, place in places):
            return [f"{it} go there again"], True
        return [first.replace("would", it, 1) if not others else f"{it} go elsewhere: {first}", *others], True

    def _evaluated(self) -> CachedEvaluation:
        return CachedEvaluation(self.pod_request, self._config, self._seen.cluster.snapshot())

    def _refusal(self) -> str:
        """Return the sentence by which filter would refuse one worker, after a colon."""
        names = sorted(self._seen.cluster.nodes)
        found = filter_nodes(self._evaluated(), names)
        message = next(iter((found.refused | found.unsuitable).values()), "")
        return f": {message.removeprefix(PREFIX)}" if message else ""

    def _place(self) -> list[tuple[str, Placement]]:
        workers = min(self.wanted, MAX_DRY_RUN_WORKERS)
        return list(place_workers(self._evaluated(), workers, with_reason=True))

    def _placed_lines(self, places: Sequence[tuple[str, Placement]], *, numbered: bool = True) -> list[str]:
        lines = [self._placed_line(*place) for place in places]
        if self.wanted == 1:
            return [f"would go to {lines[0]}"]
        summary = _gang_summary(len(places), min(self.wanted, MAX_DRY_RUN_WORKERS), self.wanted)
        return [summary, *_grouped(lines, numbered=numbered)]

    def _placed_line(self, name: str, place: Placement) -> str:
        devices = self._seen.cluster.nodes[name].status.devices
        return f"{name}{step_time_at(self.pod_request.demand, place, devices, self._steps)}: {place.reason}"


def _gang_summary(placed: int, tried: int, workers: int) -> str:
    if placed == workers:
        return f"all {workers} workers would get places now"
    if placed == tried:
        return f"the first {tried} of {workers} workers would get places now; more were not tried"
    others = pluralize(workers - placed, "worker")
    return f"only {placed} of {workers} workers would get places now; {others} would have to wait"


_GPUS = re.compile(r"(?<= on GPU )[0-9, ]+(?= of )")
"""The GPU numbers in a placement's reason."""


def _grouped(lines: Sequence[str], *, numbered: bool) -> Iterator[str]:
    """Yield one line for consecutive workers whose lines differ in GPU numbers only.

    Args:
        lines: One line for each worker, in order.
        numbered: Whether `lines` covers all workers of the job, so that their numbers are known.
    """
    for _, group in groupby(enumerate(lines), lambda one: _GPUS.sub("", one[1], count=1)):
        members = [*group]
        first, line = members[0]
        if len(members) > 1:
            gpus = " and ".join(found[0] for _, one in members if (found := _GPUS.search(one)) is not None)
            line = _GPUS.sub(gpus, line, count=1)
        who = f"worker {first}" if len(members) == 1 else f"workers {first} to {members[-1][0]}"
        yield f"  {who if numbered else pluralize(len(members), 'worker')} would go to {line}"


class Placed(Protocol):
    """A place on one node: a `Placement` or a `Reservation`."""

    @property
    def gpu_uuids(self) -> Sequence[GpuUuid]:
        """Its GPUs."""
        ...

    @property
    def mode(self) -> SharingMode:
        """Sharing mode of these GPUs."""
        ...

    @property
    def expected_slowdown(self) -> float:
        """Predicted slowdown of the worker, from 1."""
        ...


def step_time_at(demand: Demand, place: Placed, devices: Iterable[Device], steps: int | None) -> str:
    """Return the predicted step time at a place in brackets, with the duration of the training where steps are known.

    Args:
        demand: The job's demand.
        place: GPUs of one node. The slowest product counts, because the others wait for it.
        devices: The node's GPUs.
        steps: Training steps of the job, or None.

    Returns:
        An empty string where no step time is predicted, and for MIG: predictions are for whole GPUs.
    """
    products = {device.product for device in devices if device.uuid in place.gpu_uuids}
    known = [p.step_time_seconds.median for p in map(demand.prediction_on, products) if p is not None]
    if place.mode is SharingMode.MIG or not known or len(known) < len(products):
        return ""
    step_s = max(known) * place.expected_slowdown
    whole = "" if steps is None else f", {pluralize(steps, 'step')} {format_duration(steps * step_s)}"
    return f" (a step takes about {format_duration(step_s)} there{whole})"


@dataclass(frozen=True, slots=True)
class RankedPlace:
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


def ranking(cached_evaluation: CachedEvaluation, among: Bools | None = None) -> list[RankedPlace]:
    """Return the places for one worker in the order of selection: single GPUs, or the best set of each node.

    Args:
        cached_evaluation: Evaluation of the request.
        among: Mask of the GPUs to rank, shape (gpus,); None ranks all.
    """
    evaluation, policy = cached_evaluation.evaluation, cached_evaluation.policy
    of_nodes = select(evaluation, policy, among=among)
    if not of_nodes.node.size:
        return []
    best = np.flatnonzero(ties(of_nodes, policy))
    winner = of_nodes.rows[best_of(of_nodes, best)]
    # A node may offer a costlier GPU than its cheapest one, so the tolerance counts from the best node's cost.
    limit = of_nodes.cost[best].min() + policy.tolerance
    candidates = _each_gpu(evaluation, policy, among) if winner.size == 1 else of_nodes
    is_tied = (candidates.cost <= limit) & (candidates.is_linked == of_nodes.is_linked[best[0]])
    return sorted(_in_order(candidates, is_tied), key=lambda one: one.rows != tuple(winner.tolist()))


def _each_gpu(evaluation: Evaluation, policy: Policy, among: Bools | None) -> Candidates:
    """Return every GPU that fits as a candidate of its own."""
    rows = np.flatnonzero(evaluation.ok if among is None else evaluation.ok & among)
    nodes = evaluation.snapshot.gpus.node[rows].astype(np.intp)
    return select(evaluation, policy, NodeGrid(rows[None, :], nodes, False))


def _in_order(candidates: Candidates, is_tied: Bools) -> Iterator[RankedPlace]:
    cost = np.where(is_tied, -np.inf, candidates.cost)
    keys = (candidates.node, candidates.left_mib, -candidates.ready, cost, ~candidates.is_linked)
    for place in np.lexsort(keys).tolist():
        yield RankedPlace(
            rows=tuple(candidates.rows[place].tolist()),
            cost=float(candidates.cost[place]),
            is_tied=bool(is_tied[place]),
            ready=float(candidates.ready[place]),
            left_mib=float(candidates.left_mib[place]),
            is_linked=bool(candidates.is_linked[place]),
        )


def ranking_lines(cached_evaluation: CachedEvaluation, among: Bools | None = None) -> list[str]:
    """Return the policy's goal and its best places with their scores; no lines where nothing fits."""
    places, policy = ranking(cached_evaluation, among), cached_evaluation.policy
    if not places:
        return []
    entries = [_entry(policy, places[0], one) for one in places]
    groups = _equal_runs([one.text for one in entries])
    if len(groups) > MAX_RANKED_LINES:
        groups = _equal_runs([one.kind for one in entries])
    lines = [_goal(policy, cached_evaluation.evaluation.pod_request.demand.gpus)]
    for number, (begin, end) in enumerate(groups[:MAX_RANKED_LINES], start=1):
        is_equal = all(one.text == entries[begin].text for one in entries[begin:end])
        what = "node" if len(places[begin].rows) > 1 else "GPU"
        more = f" and {pluralize(end - begin - 1, what)} {'like it' if is_equal else 'more'}" if end - begin > 1 else ""
        text = entries[begin].text if is_equal else entries[begin].text_of_group
        lines.append(f"  {number}. {_name(cached_evaluation.evaluation, places[begin])}{more}: {text}")
    if len(groups) > MAX_RANKED_LINES:
        lines.append(f"  and {pluralize(len(places) - groups[MAX_RANKED_LINES - 1][1], 'place')} more")
    return lines


def _equal_runs(keys: Sequence[str]) -> list[tuple[int, int]]:
    """Return begin and end of each run of equal keys."""
    starts = [place for place, (one, next_) in enumerate(pairwise(keys), start=1) if one != next_]
    return [*pairwise([0, *starts, len(keys)])]


def _goal(policy: Policy, gpus: int) -> str:
    within = f"; within {policy.score.amount(policy.tolerance)} is a tie" if policy.score and policy.tolerance else ""
    mean = f"; mean of its {gpus} GPUs" if policy.score and gpus > 1 else ""
    return f"places by {policy.name} ({policy.meaning}{within}{mean}):"


def _name(evaluation: Evaluation, one: RankedPlace) -> str:
    snapshot, (first, *others) = evaluation.snapshot, one.rows
    if not others:
        return snapshot.place(first)
    numbers = ", ".join(str(int(snapshot.gpus.gpu_index[row])) for row in one.rows)
    return f"GPUs {numbers} of {snapshot.node_names[int(snapshot.gpus.node[first])]}"


class _Entry(NamedTuple):
    """The text of one ranked place."""

    kind: str
    """Equal for places that lost a tie for the same reason, whatever the amounts."""
    text: str
    text_of_group: str
    """The text for the first of several places of one kind."""


def _entry(policy: Policy, best: RankedPlace, one: RankedPlace) -> _Entry:
    score = f"{policy.score.text(one.cost)}; " if policy.score else ""
    if one is best:
        text = score.removesuffix("; ") or "the best"
        return _Entry(text, text, text)
    if best.is_linked and not one.is_linked:
        text = f"{score}not all linked by NVLink"
        return _Entry(text, text, text)
    if not one.is_tied:
        text = score + (policy.score.behind(one.cost, best.cost) if policy.score else "")
        return _Entry(text, text, text)
    because, amount = _tie_break(best, one)
    text, of_group = because.format(amount), because.format(f"at least {amount}")
    return _Entry(because, f"{score}a tie, but {text}", f"a tie, but {of_group}")


def _tie_break(best: RankedPlace, one: RankedPlace) -> tuple[str, str]:
    """Return the reason by which the best place won a tie, and the amount to put into it."""
    if best.ready < one.ready or (best.ready == one.ready and best.left_mib > one.left_mib):
        return "its node offers another GPU first", ""
    if best.ready > one.ready:
        is_used = best.ready == READY
        return f"the first place is {'in use, and idle GPUs stay free' if is_used else 'readier'}", ""
    if best.left_mib < one.left_mib:
        return "the first place leaves {} less", f"{one.left_mib - best.left_mib:,.0f} MiB"
    return "the first place comes first in order", ""
