"""For how many workers of a job there is room at once, on however many GPUs."""

from dataclasses import replace

import numpy as np

from carpool_extender.placement.assessments import Assessment
from carpool_extender.placement.checks import Verdict, look
from carpool_extender.placement.choices import select
from carpool_extender.placement.modes import MIG
from carpool_extender.placement.policies import Policy
from carpool_extender.state.aggregates import work_out
from carpool_extender.state.grid import grid_of
from carpool_extender.state.view import MODES, NOBODY, Rows


def room(assessment: Assessment, rows: Rows, wanted: int) -> int:
    """Say how many workers would find a place at once, at most as many as are wanted.

    Args:
        assessment: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.
    """
    apart = _sets_apart(assessment.verdict, rows)
    return wanted if apart >= wanted else len(places_for(assessment, rows, wanted))


def places_for(assessment: Assessment, rows: Rows, wanted: int) -> Rows:
    """Find places for as many workers at once as there are, or there is room for.

    Workers meet on GPUs, and those of several GPUs on nodes. So each GPU, or each node, takes one more of them on paper
    at the same time, until none does: as many rounds as one of them takes workers, where workers that are placed one
    after the other are many more. Neighbours count with what they were measured to do before anybody joined.

    Args:
        assessment: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.

    Returns:
        GPUs of each worker by their rows, shape (workers, GPUs of each), in each round the best first.
    """
    paper, wanted_gpus = _on_paper(assessment.verdict, rows), assessment.verdict.applicant.demand.gpus
    found, rounds = 0, [np.zeros((0, wanted_gpus), np.intp)]
    while found < wanted:
        taken = _taken(paper, assessment.policy)
        if not taken.size:
            break
        found += len(taken)
        rounds.append(rows[taken])
        if found < wanted:
            _join(paper, taken.ravel())
            paper.found = look(paper, paper.view.columns)
    return np.concatenate(rounds)[:wanted]


def _sets_apart(verdict: Verdict, rows: Rows) -> int:
    """How many workers find GPUs that no other of them uses."""
    gpus = verdict.applicant.demand.gpus
    if gpus == 1:
        return int(rows.size)
    team = verdict.view.columns.node[rows].astype(np.int64) * len(MODES) + verdict.found.mode[rows]
    return int((np.unique(team, return_counts=True)[1] // gpus).sum())


def _on_paper(verdict: Verdict, rows: Rows) -> Verdict:
    """Copy some GPUs, with what was found of them."""
    columns = verdict.view.columns.take(rows)
    view = replace(verdict.view, columns=columns, grid=grid_of(columns.alive, columns.node))
    return replace(verdict, view=view, found=verdict.found.of(rows))


def _taken(paper: Verdict, policy: Policy) -> Rows:
    """Return the GPUs of one more worker on each GPU that takes one, or each node, shape (workers, GPUs of each)."""
    if paper.applicant.demand.gpus > 1:
        choices = select(paper, policy)
        return choices.rows[np.argsort(choices.cost, kind="stable")]
    able = np.flatnonzero(paper.ok)
    return able[np.argsort(policy.cost(paper, able), kind="stable")][:, None]


def _join(paper: Verdict, rows: Rows) -> None:
    """Write a worker beside the tenants of some GPUs, as far as the next one of the same job looks at it."""
    columns, (facts, _, _, need_mib), demand = paper.view.columns, paper.openings, paper.applicant.demand
    of, mode, place = columns.device_class[rows], paper.found.mode[rows], columns.count[rows]
    columns.memory_mib[rows, place] = need_mib.take(columns.kind[rows])
    columns.util[rows, place] = facts.util[of]
    columns.sm[rows, place] = facts.sm[of]
    columns.dram[rows, place] = facts.dram[of]
    columns.max_slowdown[rows, place] = demand.max_slowdown
    columns.namespace[rows, place] = paper.view.namespaces.get(demand.namespace, NOBODY)
    instances = mode == MIG
    columns.mig_gb[rows[instances]] += facts.mig[of[instances], 0]
    columns.mig_slices[rows[instances]] += facts.mig[of[instances], 1]
    columns.mode[rows] = mode
    columns.count[rows] += 1
    work_out(columns, rows)
