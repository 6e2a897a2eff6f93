"""Runs an experiment under its strategies, with all that is tried of it besides, and keeps what came out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.diagnosis import pluralize
from carpool_extender.framework.filters import NO_LIMITS
from carpool_extender.queue.order import QueueOrder
from rich.console import Console

from carpool_simulator import progress
from carpool_simulator.progress import Provenance
from carpool_simulator.reports import ordering, otherwise, pictures, results, tables
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.sweep import (
    ARRIVAL,
    LONGEST_FIRST,
    PUBLISHED,
    Experiment,
    Line,
    attributed,
    contest,
    failing,
    named,
    policed,
    shipped,
    strategies_of,
    varied,
    wrong,
)
from carpool_simulator.truth import Workload, WorkloadError

SEEDS = 10
WHOLE_SEEDS = 1
"""Each run of a trace as long as months takes minutes."""


@dataclass(frozen=True, slots=True)
class Runs:
    """How experiments are run."""

    policies: str
    """`PUBLISHED`, or what `named` takes."""
    conditions: AdmissionLimits
    seeds: int | None
    """None: as many as the experiment needs."""
    out: Path
    data: Path
    pictures: bool
    console: Console
    made: Provenance
    is_own: bool = False
    """Whether the trace is somebody's own."""
    order: QueueOrder = QueueOrder.ALTERNATE
    """How Carpool's queue is sorted, where a table does not compare orders itself."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment, and how it is run."""

    name: str
    experiment: Experiment
    runs: Runs

    @property
    def strategies(self) -> list[Strategy]:
        """Its own strategies, or the policies that were named.

        Raises:
            WorkloadError: There are preconditions, or an order of the queue, beside strategies that have their own.
            UnknownPolicyError: There is no policy of a name.
        """
        policies, conditions, order = self.runs.policies, self.runs.conditions, self.runs.order
        if policies != PUBLISHED:
            return named(policies, replace(shipped(self.experiment), order=order), conditions)
        if conditions != NO_LIMITS:
            raise WorkloadError(
                "expected preconditions beside --policies all, or names; found them beside the published strategies, "
                f"which have their own: {conditions}"
            )
        if self.runs.is_own:
            return [_by(order, one) for one in strategies_of(self.experiment)]
        if order is not QueueOrder.ALTERNATE:
            raise WorkloadError(
                f"expected --queue-order beside --trace, or beside --policies all, or names; found {order} beside the "
                "published strategies, each of which has its own"
            )
        return strategies_of(self.experiment)

    @property
    def tries_more(self) -> bool:
        """Whether all that can be tried besides is tried, too."""
        return self.runs.policies == PUBLISHED and not self.experiment.whole

    def cases(self, workload: Workload) -> list[Experiment]:
        """Return the experiment where what is assumed is otherwise, each case drawn once: what it needs is there.

        Raises:
            WorkloadError: Of a case something is missing.
        """
        found = otherwise.cases(self.name, self.experiment) if self.tries_more and not workload.fragmented else []
        for case in found:
            case.draw(self.runs.data, 0)
        return found

    def run(self, strategies: list[Strategy], of: str = "", experiment: Experiment | None = None) -> list[Line]:
        """Run strategies, and show how far they are.

        Args:
            strategies: Who is let loose.
            of: What follows the name, where it is not the experiment itself.
            experiment: On what, where it is not that.
        """
        runs, draw = self.runs, (experiment or self.experiment).draw
        seeds = runs.seeds or (WHOLE_SEEDS if self.experiment.whole else SEEDS)
        runs.console.rule(self.name + of)
        tell: Callable[[str], None] = runs.console.print
        with progress.shown(runs.console, self.name) as show:
            return contest(lambda seed: draw(runs.data, seed), strategies, seeds, runs.data, tell, show)


def _by(order: QueueOrder, strategy: Strategy) -> Strategy:
    """Return a strategy with its queue sorted so, if it goes by Carpool's; it is called the default by no other order.

    Args:
        order: How the queue is sorted.
        strategy: One of those that a trace is run under.
    """
    names = {QueueOrder.ARRIVAL: ARRIVAL, QueueOrder.LONGEST_FIRST: LONGEST_FIRST}
    if strategy.order is not QueueOrder.ALTERNATE or order not in names:
        return strategy
    return replace(strategy, order=order, name=names[order])


class Ready(NamedTuple):
    """A trial with all that it needs."""

    trial: Trial
    workload: Workload
    """Its first seed's."""
    cases: list[Experiment]
    """The experiment where what is assumed is otherwise."""


def ready(trial: Trial) -> Ready:
    """Draw what is run first, so that what is missing, or makes no sense, is told before anything runs.

    Raises:
        WorkloadError: Something is missing, or makes no sense.
        UnknownPolicyError: There is no policy of a name.
    """
    _ = trial.strategies
    workload = trial.experiment.draw(trial.runs.data, 0)
    workload = replace(workload, assumptions=(*workload.assumptions, *_in_common(trial)))
    return Ready(trial, workload, trial.cases(workload))


def run(what: Ready, warn: Callable[[str], None]) -> list[str]:
    """Run an experiment; write its results and pictures, and return its part of a report.

    Args:
        what: The experiment.
        warn: Hears of a run that nothing came of.
    """
    (trial, workload, cases), runs = what, what.trial.runs
    for note in workload.notes:
        runs.console.print(note)
    lines = trial.run(trial.strategies)
    results.write(runs.out, trial.name, workload, lines, runs.made)
    parts = tables.section(workload.title, workload.assumptions, lines, workload.shown)
    if trial.tries_more:
        parts += _besides(trial, workload, lines[0])
        parts += _otherwise(trial, workload, cases)
        parts += _failing(trial)
    _draw(trial, len(workload.jobs), lines, warn)
    if runs.is_own and any(_could_learn(line) for line in lines):
        runs.console.print(tables.UNLEARNED)
        parts += [tables.UNLEARNED, ""]
    return parts


def _could_learn(line: Line) -> bool:
    """Whether jobs were slowed on a line that goes by predictions and learns nothing, as it would on a cluster."""
    strategy = line.strategy
    return strategy.knowledge is Knowledge.PREDICTED and not strategy.learns and line.mean("slowed_percent") > 0


def _in_common(trial: Trial) -> tuple[str, ...]:
    """Say what the lines of policies that were named have in common."""
    runs = trial.runs
    if runs.policies == PUBLISHED:
        return ()
    base = shipped(trial.experiment)
    told = f"Each policy is told what Carpool knows, and every job accepts a slowdown of {base.max_slowdown:g}."
    return (told, *([f"Preconditions: {runs.conditions}."] if runs.conditions != NO_LIMITS else []))


def _besides(trial: Trial, workload: Workload, first: Line) -> list[str]:
    """Run Carpool with wrong predictions, other policies, other knowledge and other assumptions."""
    experiment, mode = trial.experiment, trial.experiment.mode
    parts: list[str] = []
    for suffix, told, strategies in (
        (results.WRONG, tables.WRONG, wrong(mode)),
        (results.POLICED, tables.POLICED, policed(experiment)),
        (results.ORDER, ordering.MEANS, ordering.hanging(experiment)),
        (results.ATTRIBUTED, tables.ATTRIBUTED, attributed(mode)),
        (results.VARIED, tables.VARIED, varied(mode)),
    ):
        lines = trial.run(strategies, suffix)
        results.write(trial.runs.out, trial.name + suffix, workload, lines, trial.runs.made)
        parts += [told, "", *tables.markdown([first, *lines]), ""]
    return parts


def _otherwise(trial: Trial, workload: Workload, cases: list[Experiment]) -> list[str]:
    """Run it where what is assumed is otherwise; without cases those of an earlier run go, which are of another one."""
    name = trial.name + results.OTHERWISE
    results.remove(trial.runs.out, name)
    lines = [line for one in cases for line in trial.run(list(one.published), results.OTHERWISE, one)]
    if not lines:
        return []
    results.write(trial.runs.out, name, workload, lines, trial.runs.made)
    return otherwise.section({trial.name: lines})


def _failing(trial: Trial) -> list[str]:
    broken = failing(trial.experiment)
    lines = trial.run(list(broken.published), results.FAILING, broken)
    name, drawn = trial.name + results.FAILING, broken.draw(trial.runs.data, 0)
    results.write(trial.runs.out, name, drawn, lines, trial.runs.made)
    return ["When GPUs fail:", "", *tables.markdown(lines), ""]


def _draw(trial: Trial, jobs: int, lines: list[Line], warn: Callable[[str], None]) -> None:
    runs = trial.runs
    pictures.remove(runs.out, trial.name)
    if not any(line.has_placed for line in lines):
        warn(_nothing_placed(trial.name, jobs, runs.conditions))
    elif runs.pictures and not any("gantt" in path.name for path in pictures.draw(runs.out, trial.name, lines)):
        ended = any(line.example is not None and line.example.finished for line in lines)
        why = f"there are more than {pictures.MOST_GPUS} GPUs" if ended else "nothing ended"
        runs.console.print(f"no chart of who ran where: {why}")


def _nothing_placed(name: str, jobs: int, conditions: AdmissionLimits) -> str:
    asked = f" that meets the preconditions ({conditions})" if conditions != NO_LIMITS else " that could hold one"
    todo = "ask for less" if conditions != NO_LIMITS else "name a larger cluster"
    return (
        f"{name}: expected a GPU for at least one of {pluralize(jobs, 'job')}, found none{asked} under any strategy, "
        f"so that its figures mean nothing; {todo}"
    )
