"""Runs every strategy of an experiment on the same workloads, and sums each run up in a few figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev

from carpool_core.values import SharingMode
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.filters import NO_LIMITS
from carpool_extender.framework.scores import POLICIES, UnknownPolicyError, find_policy

from carpool_simulator.engine import Finished, Outcome, Simulation
from carpool_simulator.strategy import Strategy
from carpool_simulator.truth import MeasuredPairs, Workload

ALL, PUBLISHED = "all", "published"
"""In place of names of policies: the whole table, and the strategies that the experiment was published with."""
SLOWED = 1.5
"""A job that took more than so many times its time alone counts as slowed: what `maxSlowdown` is by default."""
FAILS_EVERY_H = 8.0
"""Hours between two failures of one GPU in the experiments with failures: far more often than real ones."""
_ROUNDING = 1e-9
"""Times are sums of many small ones."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    makespan_min: float
    """From the first submission to the last end."""
    utilization_percent: float
    """Mean over GPUs and time (nvidia-smi)."""
    completion_min: float
    """Mean time from submission to end."""
    running_s: float
    """Mean time from the start that succeeded to the end."""
    slowed_percent: float
    """Jobs that took more than `SLOWED` times as long from that start to the end as they would have alone."""
    oom: float
    """Times that a job died of GPU memory."""
    energy_mj: float
    killed: float
    """Times that a job died with its GPU."""
    unplaced: float
    """Jobs that no GPU ever took."""
    waiting_min: float
    """Mean time from submission to the start that succeeded."""
    gpus_in_use: float
    """Mean over time of the GPUs that have jobs."""
    unused_percent: float
    """Memory that nobody uses on GPUs that have jobs: room in pieces. Mean over GPUs and time."""
    memory_percent: float
    """Memory in use of all GPUs. Mean over GPUs and time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy over all seeds."""

    strategy: Strategy
    runs: list[Figures]
    example: Outcome | None = None
    """The first seed's run, for pictures."""
    cpu_s: float = 0.0
    """Processor time of all runs, in seconds."""

    def mean(self, name: str) -> float:
        """Mean of a figure over the seeds."""
        return fmean(getattr(run, name) for run in self.runs)

    @property
    def has_placed(self) -> bool:
        """Whether any job ever ran: one that ended at once counts, too."""
        ended = self.example is not None and bool(self.example.finished)
        return ended or any(run.gpus_in_use or run.oom for run in self.runs)

    def spread(self, name: str) -> float:
        """Standard deviation of a figure over the seeds, of which there must be two."""
        return float(stdev(getattr(run, name) for run in self.runs))


@dataclass(frozen=True, slots=True)
class Experiment:
    """A workload of which many seeds can be drawn, and who is let loose on it."""

    draw: Callable[[Path, int], Workload]
    published: Sequence[Strategy]
    mode: SharingMode
    whole: bool = False
    """Whether the strategies above are all, because the workload is too large, or nothing of it is predicted."""


DEFAULT_POLICY = "least-slowdown"
DEFAULT = "Carpool, slowdown ≤ 1.5 (default)"
ARRIVAL = "Carpool, in order of arrival"
LONGEST_FIRST = "Carpool, longest first"


def named(policies: str, base: Strategy, conditions: AdmissionLimits = NO_LIMITS) -> list[Strategy]:
    """Strategies for policies by name that differ in nothing else; `all` takes the table.

    Args:
        policies: Names, with commas between.
        base: What they know and accept.
        conditions: What a GPU must be like before a policy looks at it.

    Raises:
        UnknownPolicyError: There is no policy of a name, or what means several stands beside others.
    """
    names = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    if names == [ALL]:
        names = sorted(POLICIES, key=lambda name: not POLICIES[name].alone)  # the rest is compared with the first line
    elif several := [name for name in names if name in (ALL, PUBLISHED)]:
        raise UnknownPolicyError(f"expected {several[0]} alone, or names of policies, found {policies}; leave one out")
    names = [find_policy(name).name for name in names]
    return [replace(base, name=name, policy=name, conditions=conditions) for name in names]


def figures_of(outcome: Outcome) -> Figures:
    """Sum a run up."""
    span_s = max(outcome.span_s, 1e-9)
    finished = outcome.finished
    in_use_s, used_s = (sum(getattr(gpu, name) for gpu in outcome.gpus) for name in ("in_use_s", "used_s"))
    return Figures(
        makespan_min=outcome.makespan_s / 60,
        utilization_percent=100 * sum(gpu.util_s for gpu in outcome.gpus) / len(outcome.gpus) / span_s,
        completion_min=fmean(one.end_s - one.job.arrival_s for one in finished) / 60 if finished else 0.0,
        running_s=fmean(one.end_s - one.start_s for one in finished) if finished else 0.0,
        slowed_percent=100 * fmean(_is_slowed(one) for one in finished) if finished else 0.0,
        oom=float(outcome.ooms),
        energy_mj=sum(gpu.energy_j for gpu in outcome.gpus) / 1e6,
        killed=float(outcome.killed),
        unplaced=float(outcome.unplaced),
        waiting_min=fmean(one.start_s - one.job.arrival_s for one in finished) / 60 if finished else 0.0,
        gpus_in_use=in_use_s / span_s,
        unused_percent=100 * (1 - used_s / in_use_s) if in_use_s else 0.0,
        memory_percent=100 * used_s / len(outcome.gpus) / span_s,
    )


def _is_slowed(one: Finished) -> bool:
    return one.end_s - one.start_s > SLOWED * one.job.work_s * (1 + _ROUNDING)


def contest(
    draw: Callable[[int], Workload],
    strategies: Sequence[Strategy],
    seeds: int,
    data: Path,
    tell: Callable[[str], None],
    watch: Callable[[str], None] = lambda _: None,
    cpu: Callable[[], float] = time.process_time,
) -> list[Line]:
    """Run every strategy on every seed's workload; `tell` hears of each that has ended, `watch` how far it is."""
    drawn = [draw(seed) for seed in range(seeds)]
    truths = [MeasuredPairs(data / "lucid", seed, one.behind_mps) for seed, one in enumerate(drawn)]
    lines = []
    for strategy in strategies:
        begin_s = cpu()
        runs, example = [], None
        for seed, (workload, truth) in enumerate(zip(drawn, truths, strict=True)):
            outcome = Simulation(workload, strategy, truth, seed).run(
                _watched(watch, f"{strategy.name}, run {seed + 1} of {seeds}")
            )
            runs.append(figures_of(outcome))
            example = example or outcome
        line = Line(strategy, runs, example, cpu() - begin_s)
        tell(_progress(line, fmean(len(workload.jobs) for workload in drawn)))
        lines.append(line)
    return lines


def _watched(watch: Callable[[str], None], run: str) -> Callable[[float], None]:
    return lambda done: watch(f"{run}: {done:.0%}")


def _progress(line: Line, jobs: float) -> str:
    """Sum a line up for whoever waits; of several seeds everything is a mean."""
    told = f"{line.strategy.name}: makespan {line.mean('makespan_min'):.0f} min, {line.mean('oom'):.1f} OOM"
    if slowed := line.mean("slowed_percent"):
        told += f", {slowed:.0f}% slowed beyond {SLOWED:g}"
    if unplaced := line.mean("unplaced"):
        what = "never placed, or given up after deaths of memory," if line.mean("oom") else "never placed"
        told += f", {what} {_short(unplaced)} of {_short(jobs)} jobs"
    return told


def _short(number: float) -> str:
    """Write a mean of whole numbers, without a fraction where there is none."""
    return f"{number:,.1f}".removesuffix(".0")


FIGURES = tuple(one.name for one in fields(Figures))
