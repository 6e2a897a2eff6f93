"""Experiments: published workloads, the strategies that run on them, and a table of results with one row per seed."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import msgspec
import pandas as pd
from carpool_core.clock import SystemClock
from carpool_core.durations import format_duration
from carpool_core.values import SharingMode, WhenSlowed
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.framework.scores import POLICIES
from carpool_extender.queue.order import QueueOrder
from carpool_predictor.models import slowdown
from carpool_simulator import philly
from carpool_simulator.progress import Provenance, provenance
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.sweep import ARRIVAL, DEFAULT, LONGEST_FIRST, figures_of
from carpool_simulator.truth import Draw, MeasuredPairs, WorkloadError, with_fragmentation

from carpool_research.experiments import alibaba, hotcloud, radrm
from carpool_research.experiments.ablations import Ablation, Piece, ablate, simulate, with_failures
from carpool_research.experiments.estimators import estimated
from carpool_research.experiments.simulation import PublishedStrategy, PublishedWorkload, extended

SEEDS = 10
TRACE_SEEDS = 1
"""A run of a whole trace takes minutes."""
FAILS_EVERY_H = 8.0
"""Mean hours between two failures of one GPU, where GPUs fail: far more often than real ones."""
ERRORS = (0.10, 0.25, 0.50)
"""Errors of predictions, where they are varied: standard deviation of the logarithm of their factor."""
SILENT_SHARE = 0.5
STEPS_ERROR = 0.7
PIECES = (0.05, 0.1)
"""Shares of a shared GPU's memory that fragmentation costs, where it is varied."""
AS_ASSUMED = "as assumed"

PUBLISHED, QUEUE, CARPOOL, ORDER = "published", "queue", "carpool", "order"
KNOWLEDGE, ERRED, POLICY, CASES, FAILURES = "knowledge", "errors", "policies", "cases", "failures"
SLOWDOWNS, ESTIMATORS = "slowdowns", "estimators"
GROUPS = {
    PUBLISHED: "strategies as published, with their own queue discipline",
    QUEUE: "the same strategies under Carpool's queue",
    CARPOOL: "Carpool's variants, and an oracle",
    ORDER: "Carpool where its queue has less information",
    KNOWLEDGE: "Carpool with parts of its predictions replaced by the truth",
    ERRED: "Carpool with wrong or missing predictions",
    POLICY: "Carpool with each placement policy",
    ESTIMATORS: "published strategies with estimators of memory or utilization",
    SLOWDOWNS: "Carpool with slowdowns from the prior, learned online, or true",
    CASES: "other values of what was not published",
    FAILURES: "failing GPUs",
}
ORACLE = "oracle, slowdown ≤ 1.5"
EVERYTHING = "all of them"
UNLEARNED = "Carpool, nothing learned"
EAGER = "Carpool, sharing before anything was measured"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published workload and its strategies."""

    name: str
    draw: Draw
    """Returns the workload of a seed."""
    published: Sequence[Strategy]
    """The first one is the baseline: one job per GPU."""
    mode: SharingMode
    """Sharing mode of Carpool's strategies."""
    cases: Mapping[str, Draw] = field(default_factory=dict)
    """Draws of the workload with other values of what was not published."""
    beside: Sequence[str] = ()
    """Published strategies that also run on these cases."""
    estimating: Sequence[PublishedStrategy] = ()
    """Published strategies with an estimator each."""
    is_trace: bool = False
    """Whether only `published` runs, because the trace is large and its jobs say nothing of what they train."""

    @property
    def default(self) -> Strategy:
        """Carpool as it ships."""
        return Strategy(
            DEFAULT, "least-slowdown", Knowledge.PREDICTED, self.mode, max_slowdown=1.5, order=QueueOrder.ALTERNATE,
            learns=True, learns_slowdowns=True, settles=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy on one workload."""

    group: str
    strategy: Strategy
    draw: Draw
    case: str = AS_ASSUMED


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "hotcloud", hotcloud.hotcloud, hotcloud.STRATEGIES, SharingMode.TIME_SLICING, hotcloud.OTHERWISE,
            ("proactive",), hotcloud.ESTIMATING,
        ),
        *(
            Experiment(
                f"radrm-{tasks}", partial(radrm.radrm, tasks=tasks), radrm.STRATEGIES, SharingMode.MPS,
                radrm.otherwise(tasks), radrm.BESIDE, radrm.ESTIMATING,
            )
            for tasks in radrm.MIXES
        ),
        Experiment("philly", philly.philly, philly.STRATEGIES, SharingMode.TIME_SLICING, is_trace=True),
        Experiment("alibaba", alibaba.alibaba, alibaba.STRATEGIES, SharingMode.TIME_SLICING, is_trace=True),
        Experiment("alibaba-few", alibaba.few, alibaba.STRATEGIES, SharingMode.TIME_SLICING, is_trace=True),
        Experiment("alibaba-full", alibaba.full, alibaba.STRATEGIES, SharingMode.TIME_SLICING, is_trace=True),
    )
}  # fmt: skip


def under_carpools_queue(strategy: Strategy) -> Strategy:
    """Return a published strategy whose jobs wait in Carpool's queue: what it gains then is placement alone."""
    policy = "first-fit" if POLICIES[strategy.policy].decreasing else strategy.policy
    return replace(strategy, policy=policy, in_order=False, order=QueueOrder.ALTERNATE)


def variants(base: Strategy) -> list[Strategy]:
    """Return Carpool as it ships, variants with one change each, and an oracle of memory, activity and speed."""
    oracle = replace(base, name=ORACLE, knowledge=Knowledge.TRUTH, learns=False, settles=False)
    upper = AdmissionLimits(quantile=Quantile.UPPER)
    return [
        base,
        replace(base, name="Carpool, slowdown ≤ 2", max_slowdown=2.0),
        replace(base, name="Carpool, best fit", policy="best-fit"),
        replace(base, name="Carpool, fewest watts", policy="energy"),
        replace(base, name=ARRIVAL, order=QueueOrder.ARRIVAL),
        replace(base, name=LONGEST_FIRST, order=QueueOrder.LONGEST_FIRST),
        replace(base, name="Carpool, limits by the upper quantile", conditions=upper),
        replace(base, name="Carpool, nothing measured", measure=False, settles=False),
        replace(base, name=UNLEARNED, learns=False, settles=False),
        replace(base, name="Carpool, own peaks not counted", settles=False),
        replace(base, name=EAGER, strict=False),
        extended(base, PublishedStrategy, name="Carpool, 60 s for each change of mode", mode_change_s=60.0),
        replace(base, name="Carpool, peaks stable after 30 min", steady_s=1800.0),
        oracle,
        replace(oracle, name="oracle, slowdown ≤ 2", max_slowdown=2.0),
    ]


def with_less_information(base: Strategy) -> list[Strategy]:
    """Return Carpool where jobs do not declare their steps, or wrong ones."""
    wrong = f"declared steps wrong by a factor of about {math.exp(STEPS_ERROR):.0f}"
    return [
        ablate(base, name=f"{SILENT_SHARE:.0%} of the jobs declare no steps", silent_share=SILENT_SHARE),
        ablate(base, name="no job declares its steps", silent_share=1.0),
        ablate(base, name=wrong, steps_error=STEPS_ERROR),
    ]


def with_true(base: Strategy) -> list[Strategy]:
    """Return Carpool with parts of its predictions replaced by the truth, and with all of them."""
    known = {
        "memory": {Piece.MEMORY},
        "activity": {Piece.ACTIVITY},
        "slowdowns": {Piece.SLOWDOWNS},
        "durations, longest first": {Piece.DURATIONS},
        "memory and activity": {Piece.MEMORY, Piece.ACTIVITY},
        EVERYTHING: set(Piece),
    }
    return [ablate(base, name=name, oracle=frozenset(pieces)) for name, pieces in known.items()]


EARLIER = 3
EARLIER_SEEDS = 1000
"""Seed of the first of a seed's earlier workloads, which no run of its own has."""


def with_slowdowns(base: Strategy) -> list[Strategy]:
    """Return Carpool without learning, with the slowdown prior alone, with slowdowns learned online, and true ones."""
    prior = replace(base, name="prior only", learns_slowdowns=False)
    upper = AdmissionLimits(quantile=Quantile.UPPER)
    return [
        replace(prior, name="nothing learned", learns=False, settles=False),
        prior,
        replace(base, name="online"),
        ablate(base, name=f"online, after {EARLIER} earlier workloads", earlier=EARLIER),
        ablate(base, name="the same, jobs move", earlier=EARLIER, when_slowed=WhenSlowed.MOVE),
        ablate(
            base,
            name="the same, jobs move at checkpoints",
            earlier=EARLIER,
            when_slowed=WhenSlowed.MOVE_AT_CHECKPOINT,
        ),
        ablate(base, name="the same, limits by the upper quantile", earlier=EARLIER, conditions=upper),
        ablate(prior, name="oracle of slowdowns", oracle=frozenset({Piece.SLOWDOWNS})),
    ]


def with_errors(base: Strategy) -> list[Strategy]:
    """Return Carpool with wrong predictions, with and without learning, and without predictions."""
    off = [ablate(base, name=f"wrong by {error:.0%}, learning", error=error) for error in ERRORS]
    unlearned = replace(base, learns=False, settles=False)
    off += [ablate(unlearned, name=f"wrong by {error:.0%}, not learning", error=error) for error in ERRORS]
    silent = ablate(unlearned, name="no prediction", abstain=True)
    return [*off, silent, replace(silent, name="no prediction, own peaks counted", settles=True)]


def runs_of(experiment: Experiment, groups: Sequence[str] = tuple(GROUPS)) -> Iterator[Run]:
    """Yield all runs of an experiment.

    Args:
        experiment: The experiment.
        groups: Names of groups of runs, of `GROUPS`; the published strategies always run.
    """
    draw, base = experiment.draw, experiment.default
    yield from (Run(PUBLISHED, one, draw) for one in experiment.published)
    if experiment.is_trace:
        return
    of_group: dict[str, list[Strategy]] = {
        QUEUE: [under_carpools_queue(one) for one in experiment.published],
        CARPOOL: variants(base),
        ORDER: with_less_information(base),
        KNOWLEDGE: with_true(base),
        ERRED: with_errors(base),
        POLICY: [replace(base, name=name, policy=name) for name, policy in POLICIES.items() if not policy.exclusive],
    }
    yield from (Run(group, one, draw) for group, found in of_group.items() if group in groups for one in found)
    first = experiment.published[0]
    if CASES in groups:
        pieces = {f"{share:.0%} of shared memory fragmented": _fragmented(draw, share) for share in PIECES}
        beside = [one for one in experiment.published if one is first or one.name in experiment.beside]
        for case, drawn in {**experiment.cases, **pieces}.items():
            yield from (Run(CASES, one, drawn, case) for one in (*beside, base))
    if ESTIMATORS in groups:
        yield from (Run(ESTIMATORS, one, estimated(draw)) for one in experiment.estimating)
    if SLOWDOWNS in groups:
        yield from (Run(SLOWDOWNS, one, draw) for one in with_slowdowns(base))
        for case, drawn in experiment.cases.items():
            if case == radrm.BEHIND_MPS:
                yield from (Run(SLOWDOWNS, one, drawn, case) for one in (first, *with_slowdowns(base)))
    if FAILURES in groups:
        case = f"each GPU fails every {format_duration(3600 * FAILS_EVERY_H)}"
        yield from (Run(FAILURES, one, _failing(draw), case) for one in (first, base))


def _fragmented(draw: Draw, share: float) -> Draw:
    return lambda data, seed: with_fragmentation(draw(data, seed), share)


def _failing(draw: Draw) -> Draw:
    return lambda data, seed: with_failures(draw(data, seed), FAILS_EVERY_H, seed)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the results of one experiment, stored beside them."""

    title: str
    jobs: int
    seeds: int
    assumptions: list[str]
    cpu_s: float
    """Processor time of one run of the slowest strategy, in seconds."""
    made: Provenance


class Results:
    """Results of one experiment.

    Attributes:
        about: Facts about them.
        rows: One row per run and seed: group, case, strategy, seed and the fields of `Figures`.
    """

    def __init__(self, about: About, rows: pd.DataFrame) -> None:
        self.about, self.rows = about, rows

    def write(self, out: Path, name: str) -> None:
        """Write `name.csv` and `name.json`."""
        (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.about)) + b"\n")
        self.rows.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")

    @classmethod
    def read(cls, out: Path, name: str) -> "Results":
        """Read results.

        Raises:
            WorkloadError: They are missing, incomplete or of another version.
        """
        try:
            about = msgspec.json.decode((out / f"{name}.json").read_bytes(), type=About)
            rows = pd.read_csv(out / f"{name}.csv", keep_default_na=False)
        except (OSError, ValueError) as error:
            raise WorkloadError(
                f"expected results of {name} in {out}, found {error}; run `python -m carpool_research experiments`"
            ) from error
        counts = rows.groupby(["group", "case", "strategy"])["seed"].nunique()
        if short := [f"{'/'.join(key)}: {count}" for key, count in counts.items() if count != about.seeds]:
            raise WorkloadError(
                f"{out / name}.csv: expected {about.seeds} seeds of each strategy, found {', '.join(short)}"
            )
        return cls(about, rows)


def run(
    experiment: Experiment,
    data: Path,
    groups: Sequence[str],
    seeds: int | None,
    workers: int,
    tell: Callable[[str], None],
) -> Results:
    """Run an experiment.

    Args:
        experiment: The experiment.
        data: Folder of measurements.
        groups: Groups of runs.
        seeds: Seeds of each run; by default 10, or 1 of a whole trace.
        workers: Processes.
        tell: Receives a line per finished run.

    Raises:
        WorkloadError: A measurement is missing; found before anything runs.
    """
    seeds = seeds or (TRACE_SEEDS if experiment.is_trace else SEEDS)
    todo = list(runs_of(experiment, groups))
    drawn = {id(one.draw): one.draw(data, 0) for one in todo}
    workload = drawn[id(experiment.draw)]
    rows, slowest_s = list[dict[str, object]](), 0.0
    with get_context("fork").Pool(workers, _Worker.start, (todo, data, seeds)) as pool:
        for one, (found, cpu_s) in zip(todo, pool.imap(_Worker.run, range(len(todo))), strict=True):
            rows += found
            slowest_s = max(slowest_s, cpu_s / seeds)
            tell(f"{experiment.name}, {one.group}, {one.case}, {one.strategy.name}: {cpu_s:.0f} s")
    about = About(
        title=workload.title,
        jobs=len(workload.jobs),
        seeds=seeds,
        assumptions=list(workload.assumptions),
        cpu_s=round(slowest_s, 1),
        made=provenance(SystemClock()),
    )
    return Results(about, pd.DataFrame(rows))


@contextmanager
def _held_out_prior(run: Run, data: Path) -> Iterator[None]:
    """Decide with a slowdown model that was not fitted to Gavel's pairs where these are the truth."""
    if (run.group, run.case) != (SLOWDOWNS, radrm.BEHIND_MPS):
        yield
        return
    from carpool_research.slowdown.fit import without_gavel

    with mock.patch.object(slowdown, "shipped", return_value=without_gavel(data)):
        yield


class _Worker:
    """State of a forked process; forking shares the draws, which cannot be pickled."""

    todo: Sequence[Run]
    data: Path
    seeds: int

    @classmethod
    def start(cls, todo: Sequence[Run], data: Path, seeds: int) -> None:
        cls.todo, cls.data, cls.seeds = todo, data, seeds

    @classmethod
    def run(cls, number: int) -> tuple[list[dict[str, object]], float]:
        """Return one row per seed, and the processor time in seconds."""
        one, begin_s, rows = cls.todo[number], time.process_time(), []
        for seed in range(cls.seeds):
            workload = one.draw(cls.data, seed)
            behind_mps = workload.behind_mps if isinstance(workload, PublishedWorkload) else None
            truth = MeasuredPairs(cls.data / "lucid", seed, behind_mps)
            before = one.strategy.earlier if isinstance(one.strategy, Ablation) else 0
            earlier = [one.draw(cls.data, EARLIER_SEEDS + seed * before + number) for number in range(before)]
            with _held_out_prior(one, cls.data):
                figures = figures_of(simulate(workload, one.strategy, truth, seed, earlier))
            key = {"group": one.group, "case": one.case, "strategy": one.strategy.name, "seed": seed}
            rows.append({**key, **asdict(figures)})
        return rows, time.process_time() - begin_s
