"""Runs strategies on the same workloads, and summarises each run in a few figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev

from carpool_extender.framework.filters import NO_LIMITS, AdmissionLimits
from carpool_extender.framework.scores import POLICIES, UnknownPolicyError, find_policy

from carpool_simulator.engine import Finished, Outcome, Simulation
from carpool_simulator.strategy import Strategy
from carpool_simulator.truth import MeasuredPairs, PredictedSlowdowns, Workload

ALL, PUBLISHED = "all", "published"
"""Values of `--policies`: every policy; or whole GPUs beside Carpool's default."""
SLOWED = 1.5
"""A job counts as slowed if it ran longer than this multiple of its solo time; the default of `maxSlowdown`."""
_ROUNDING = 1e-9
"""Relative tolerance: times are sums of many small numbers."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run."""

    makespan_min: float
    """From the first submission to the last end."""
    utilization_percent: float
    """Mean over GPUs and time (nvidia-smi)."""
    completion_min: float
    """Mean time from submission to end."""
    running_s: float
    """Mean time from the successful start to the end."""
    slowed_percent: float
    """Share of finished jobs that ran longer than `SLOWED` times their solo time."""
    oom: float
    """Out-of-memory deaths."""
    energy_mj: float
    unplaced: float
    """Jobs never placed."""
    waiting_min: float
    """Mean time from submission to the successful start."""
    gpus_in_use: float
    """Mean number of GPUs with jobs, over time."""
    unused_percent: float
    """Unused memory of GPUs with jobs; mean over GPUs and time."""
    memory_percent: float
    """Memory in use of all GPUs; mean over GPUs and time."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Results of one strategy over all seeds."""

    strategy: Strategy
    runs: list[Figures]
    example: Outcome | None = None
    """The first seed's run, for pictures."""
    cpu_s: float = 0.0
    """Processor time of all runs, in seconds."""

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the seeds."""
        return fmean(getattr(run, name) for run in self.runs)

    @property
    def has_placed(self) -> bool:
        """Whether any job ever ran; a job that ended at once counts."""
        ended = self.example is not None and bool(self.example.finished)
        return ended or any(run.gpus_in_use or run.oom for run in self.runs)

    def spread(self, name: str) -> float:
        """Return the standard deviation of a figure over at least two seeds."""
        return float(stdev(getattr(run, name) for run in self.runs))


DEFAULT_POLICY = "least-slowdown"
DEFAULT = "Carpool, slowdown ≤ 1.5 (default)"
ARRIVAL = "Carpool, in order of arrival"
LONGEST_FIRST = "Carpool, longest first"


def named(policies: str, base: Strategy, conditions: AdmissionLimits = NO_LIMITS) -> list[Strategy]:
    """Return a strategy for each policy; they differ in nothing else.

    `policies` are names separated by commas, or `all`. A GPU must meet `conditions` before a policy scores it.

    Raises:
        UnknownPolicyError: A policy is unknown, or `all` or `published` is combined with names.
    """
    names = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    if names == [ALL]:
        names = sorted(
            POLICIES, key=lambda name: not POLICIES[name].exclusive
        )  # the rest is compared with the first line
    elif several := [name for name in names if name in (ALL, PUBLISHED)]:
        raise UnknownPolicyError(f"expected {several[0]} alone, or names of policies, found {policies}; leave one out")
    names = [find_policy(name).name for name in names]
    return [replace(base, name=name, policy=name, conditions=conditions) for name in names]


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of one run."""
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
        unplaced=float(outcome.unplaced),
        waiting_min=fmean(one.start_s - one.job.arrival_s for one in finished) / 60 if finished else 0.0,
        gpus_in_use=in_use_s / span_s,
        unused_percent=100 * (1 - used_s / in_use_s) if in_use_s else 0.0,
        memory_percent=100 * used_s / len(outcome.gpus) / span_s,
    )


def _is_slowed(one: Finished) -> bool:
    return one.ran_s > SLOWED * one.job.work_s * (1 + _ROUNDING)


def sweep(
    draw: Callable[[int], Workload],
    strategies: Sequence[Strategy],
    seeds: int,
    data: Path | None,
    tell: Callable[[str], None],
    watch: Callable[[str], None] = lambda _: None,
    cpu: Callable[[], float] = time.process_time,
) -> list[PolicyResult]:
    """Run every strategy on the workload that `draw` returns for each seed.

    `data` is the folder of measurements; if it is None, jobs behave as predicted. `tell` receives a summary of each
    finished strategy, and `watch` the progress of a run. `cpu` returns processor time in seconds.
    """
    drawn = [draw(seed) for seed in range(seeds)]
    truths = [PredictedSlowdowns() if data is None else MeasuredPairs(data / "lucid", seed) for seed in range(seeds)]
    lines = []
    for strategy in strategies:
        begin_s = cpu()
        runs, example = [], None
        for seed, (workload, truth) in enumerate(zip(drawn, truths, strict=True)):
            outcome = Simulation(workload, strategy, truth).run(
                _watched(watch, f"{strategy.name}, run {seed + 1} of {seeds}")
            )
            runs.append(figures_of(outcome))
            example = example or outcome
        line = PolicyResult(strategy, runs, example, cpu() - begin_s)
        tell(_progress(line, fmean(len(workload.jobs) for workload in drawn)))
        lines.append(line)
    return lines


def _watched(watch: Callable[[str], None], run: str) -> Callable[[float], None]:
    return lambda done: watch(f"{run}: {done:.0%}")


def _progress(line: PolicyResult, jobs: float) -> str:
    """Summarise a strategy; figures are means over the seeds."""
    text = f"{line.strategy.name}: makespan {line.mean('makespan_min'):.0f} min, {line.mean('oom'):.1f} OOM"
    if slowed := line.mean("slowed_percent"):
        text += f", {slowed:.0f}% slowed beyond {SLOWED:g}"
    if unplaced := line.mean("unplaced"):
        what = "never placed, or abandoned after running out of memory," if line.mean("oom") else "never placed"
        text += f", {what} {_short(unplaced)} of {_short(jobs)} jobs"
    return text


def _short(number: float) -> str:
    """Format a mean of whole numbers without a zero fraction."""
    return f"{number:,.1f}".removesuffix(".0")


FIGURES = tuple(one.name for one in fields(Figures))
