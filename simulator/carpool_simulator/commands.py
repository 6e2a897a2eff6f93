"""`carpool simulate`: how placement policies would run a trace of jobs on a cluster."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import click
from carpool_core.clock import SystemClock
from carpool_core.settings import InputError, click_options
from carpool_core.values import pluralize
from carpool_extender.framework.filters import NO_LIMITS, AdmissionLimits
from carpool_extender.framework.scores import UnknownPolicyError
from carpool_extender.queue.order import QueueOrder
from rich.console import Console

from carpool_simulator import philly, pictures, progress, report
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import ARRIVAL, LONGEST_FIRST, PUBLISHED, named, sweep
from carpool_simulator.truth import Workload, WorkloadError, with_fragmentation


class NothingPlacedError(click.ClickException):
    """No strategy ever placed a job; exit code 1."""


@click.command(short_help="Run a trace of jobs under several policies on a virtual clock.")
@click.option(
    "--trace",
    required=True,
    type=click.Path(path_type=Path),
    help="The trace, CSV with the columns timestamp, duration and num_gpus.",
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    help="The cluster: YAML, or what `kubectl get gpunodes --output yaml` prints. Philly's when left out.",
)
@click.option(
    "--policies",
    "--policy",
    "policies",
    default=PUBLISHED,
    show_default=True,
    help="published: whole GPUs, and Carpool's default; all, or names: policies, compared with the same predictions.",
)
@click.option(
    "--fragmentation",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of a shared GPU's memory that is lost to fragmentation, which no policy expects.",
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Runs of each strategy.")
@click.option(
    "--learn",
    is_flag=True,
    help="Let Carpool learn from the jobs, as on a cluster; takes minutes with tens of thousands of jobs.",
)
@click.option(
    "--steps",
    is_flag=True,
    help="Derive the steps that jobs declare from their durations; otherwise no job declares steps, and every "
    "--queue-order is that of arrival.",
)
@click.option(
    "--queue-order",
    type=click.Choice([one.value for one in QueueOrder]),
    default=QueueOrder.ALTERNATE.value,
    show_default=True,
    help="Order of Carpool's queue, as the extender's --queue-order.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
@click.option(
    "--pictures/--no-pictures",
    "drawn",
    default=True,
    show_default=True,
    help="Draw figures; needs the extra simulate. Gantt charts cover only the first line and Carpool's default.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="CARPOOL_DATA",
    show_envvar=True,
    help="Folder of Lucid's measurements, which jobs then behave like; otherwise they behave as predicted.",
)
@click_options(AdmissionLimits)
def simulate(
    settings: AdmissionLimits,
    trace: Path,
    cluster: Path | None,
    policies: str,
    *,
    fragmentation: float,
    seeds: int,
    learn: bool,
    steps: bool,
    queue_order: str,
    out: Path,
    drawn: bool,
    data: Path | None,
) -> None:
    """Run a trace of jobs under several policies on a virtual clock, with the scheduler's own decisions.

    The table compares makespan, utilization, waiting, out-of-memory deaths and energy. The conditions below apply with
    --policies all, or names.
    """
    console = Console(stderr=True)
    try:
        if math.isnan(fragmentation):  # click's range accepts it
            raise WorkloadError("expected a --fragmentation from 0 to below 1, found nan")
        if drawn and importlib.util.find_spec("matplotlib") is None:
            advice = "install it from a checkout of Carpool: pip install '.[simulate]', or give --no-pictures"
            raise WorkloadError(f"pictures need matplotlib; {advice}")
        strategies = _strategies(policies, settings, QueueOrder(queue_order), learn=learn)
        nodes = philly.default_cluster() if cluster is None else philly.read_cluster(cluster)

        def draw(seed: int) -> Workload:
            workload = philly.from_trace(data, trace, nodes, seed, is_learned=learn, has_steps=steps)
            return with_fragmentation(workload, fragmentation)

        workload = draw(0)
        out.mkdir(parents=True, exist_ok=True)
        for note in workload.notes:
            console.print(note)
        console.rule("trace")
        with progress.progress(console, "trace") as show:
            results = sweep(draw, strategies, seeds, data, console.print, show)
        report.write(out, "trace", workload, results, progress.provenance(SystemClock()))
        shared = () if policies == PUBLISHED else _in_common(strategies[0], settings)
        text = report.section(workload, (*workload.assumptions, *shared), results)
        target = out / "trace.md"
        target.write_text("\n".join(text) + "\n", encoding="utf-8")
        pictures.remove(out, "trace")
        if not any(one.has_placed for one in results):
            raise NothingPlacedError(_nothing_placed(len(workload.jobs), settings))
        if drawn and not any("gantt" in path.name for path in pictures.draw(out, "trace", results)):
            ended = any(one.example is not None and one.example.finished for one in results)
            why = f"there are more than {pictures.MAX_GPUS} GPUs" if ended else "no job ended"
            console.print(f"no Gantt chart: {why}")
        console.print(f"written: {target}")
    except (WorkloadError, UnknownPolicyError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"expected to read and write files: {error}; check --out") from error


def _strategies(policies: str, conditions: AdmissionLimits, order: QueueOrder, *, learn: bool) -> list[Strategy]:
    """Return the lines of the table: whole GPUs and Carpool's default, or the named policies."""
    lines = philly.learning(philly.STRATEGIES) if learn else list(philly.STRATEGIES)
    if policies != PUBLISHED:
        return named(policies, replace(lines[-1], order=order), conditions)
    if conditions != NO_LIMITS:
        raise WorkloadError(
            "expected conditions beside --policies all, or names; found them beside the published strategies, which "
            f"have their own: {conditions}"
        )
    names = {QueueOrder.ARRIVAL: ARRIVAL, QueueOrder.LONGEST_FIRST: LONGEST_FIRST}
    return [
        replace(one, order=order, name=names.get(order, one.name)) if one.order is QueueOrder.ALTERNATE else one
        for one in lines
    ]


def _in_common(strategy: Strategy, conditions: AdmissionLimits) -> tuple[str, ...]:
    """Return sentences on what the named policies share."""
    text = f"Every policy uses Carpool's predictions, and every job accepts a slowdown of {strategy.max_slowdown:g}."
    return (text, *([f"Conditions: {conditions}."] if conditions != NO_LIMITS else []))


def _nothing_placed(jobs: int, conditions: AdmissionLimits) -> str:
    asked = f" that meets the conditions ({conditions})" if conditions != NO_LIMITS else " that could hold one"
    advice = "relax the conditions" if conditions != NO_LIMITS else "name a larger cluster"
    return (
        f"expected a GPU for at least one of {pluralize(jobs, 'job')}, found none{asked} under any strategy; {advice}"
    )
