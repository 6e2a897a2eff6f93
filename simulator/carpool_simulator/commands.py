"""`carpool simulate`."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import click
from carpool_core.clock import SystemClock
from carpool_core.settings import SettingsError, click_options
from carpool_extender.framework.scores import UnknownPolicyError
from carpool_extender.queue.order import QueueOrder
from carpool_extender.settings import ConditionSettings
from click.core import ParameterSource
from rich.console import Console

from carpool_simulator import philly, trials
from carpool_simulator.progress import provenance
from carpool_simulator.reports import document
from carpool_simulator.sweep import EXPERIMENTS, PUBLISHED, SMALL, Experiment
from carpool_simulator.trials import SEEDS, WHOLE_SEEDS, Runs, Trial
from carpool_simulator.truth import WorkloadError, in_pieces


class NothingPlacedError(click.ClickException):
    """Nothing came of a run: no job ever had a place; ends with 1."""


class BadInputError(click.ClickException):
    """What was given cannot be simulated; ends with 2, as click does on wrong options."""

    exit_code = 2


@click.command(short_help="Run a workload under several policies on a virtual clock.")
@click.option(
    "--workload",
    type=click.Choice([*EXPERIMENTS, "all"]),
    help="A published experiment; all: the small ones, with wrong predictions and failures.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="A trace of your own: timestamp, duration, num_gpus.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="The cluster for a trace, YAML; Philly's when left out."
)
@click.option(
    "--policies",
    default=PUBLISHED,
    show_default=True,
    help="published: the experiment's own strategies and Carpool's; all, or names: policies of the table, compared, "
    "each with all that Carpool knows.",
)
@click.option("--policy", help="The same as --policies.")
@click.option(
    "--fragmentation",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of a shared GPU's memory that is lost in pieces, which no decision knows.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    show_default=f"{SEEDS}; {WHOLE_SEEDS} of a whole trace",
    help="Runs of each strategy.",
)
@click.option(
    "--learn",
    is_flag=True,
    help="Let Carpool learn from the jobs of a trace, as on a cluster; takes minutes with tens of thousands of them.",
)
@click.option(
    "--steps",
    is_flag=True,
    help="Let the jobs of a trace say how many steps they have, as their durations tell; otherwise none does, and "
    "every --queue-order is that of arrival.",
)
@click.option(
    "--queue-order",
    type=click.Choice([one.value for one in QueueOrder]),
    default=QueueOrder.ALTERNATE.value,
    show_default=True,
    help="Which of the jobs that wait is served first on the lines that go by Carpool's queue, of a trace or of "
    "policies: as the extender's own --queue-order.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
@click.option(
    "--pictures/--no-pictures",
    "drawn",
    default=True,
    show_default=True,
    help="Draw them; needs carpool[simulate]. Who ran where is drawn of the first line and of Carpool's default only.",
)
@click.option(
    "--document",
    "document_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this document from all results in --out; alone, nothing is run.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="CARPOOL_DATA",
    show_envvar=True,
    help="Folder of measurements by others (lucid, gavel, radrm, traces).",
)
@click_options(ConditionSettings)
def simulate(
    settings: ConditionSettings,
    workload: str | None,
    trace: Path | None,
    cluster: Path | None,
    policies: str,
    policy: str | None,
    *,
    fragmentation: float,
    seeds: int | None,
    learn: bool,
    steps: bool,
    queue_order: str,
    out: Path,
    drawn: bool,
    document_path: Path | None,
    data: Path | None,
) -> None:
    """Run a workload under several policies on a virtual clock, with the scheduler's own decisions.

    What a GPU must be like, and which slowdown counts, can be said with --policies all, or names: the published
    strategies have preconditions of their own.
    """
    console = Console(stderr=True)
    empty: list[str] = []
    try:
        if math.isnan(fragmentation):  # lies outside of no range
            raise WorkloadError("expected a --fragmentation from 0 to below 1, found nan")
        if document_path is None or workload is not None or trace is not None:
            chosen = {
                name: replace(one, draw=in_pieces(one.draw, fragmentation))
                for name, one in _experiments(workload, trace, cluster, learn=learn, steps=steps).items()
            }
            conditions, policies = settings.conditions(), _policies(policies, policy)
            if data is None:
                raise WorkloadError("expected a folder of measurements, found none; set CARPOOL_DATA, or --data")
            if drawn and importlib.util.find_spec("matplotlib") is None:
                raise WorkloadError("pictures need matplotlib: pip install 'carpool[simulate]', or --no-pictures")
            runs = Runs(
                policies,
                conditions,
                seeds,
                out,
                data,
                drawn,
                console,
                provenance(SystemClock()),
                is_own=trace is not None,
                order=QueueOrder(queue_order),
            )
            ready = [trials.ready(Trial(name, experiment, runs)) for name, experiment in chosen.items()]
            out.mkdir(parents=True, exist_ok=True)
            parts = [part for one in ready for part in trials.run(one, empty.append)]
            target = out / f"{workload or 'trace'}.md"
            target.write_text("\n".join(parts) + "\n", encoding="utf-8")
            console.print(f"written: {target}")
        if document_path is not None:
            document.write(out, document_path)
            console.print(f"written: {document_path}")
    except (WorkloadError, UnknownPolicyError, SettingsError) as error:
        raise BadInputError(str(error)) from error
    except OSError as error:
        raise BadInputError(f"expected to read and write files: {error}; look at --out and --document") from error
    if empty:
        raise NothingPlacedError("\n".join(empty))


def _policies(policies: str, policy: str | None) -> str:
    """Return what was named by the one option or the other."""
    if policy is None:
        return policies
    if click.get_current_context().get_parameter_source("policies") is not ParameterSource.DEFAULT:
        raise WorkloadError("expected --policies or --policy, which mean the same, found both; leave one of them out")
    return policy


def _experiments(
    workload: str | None, trace: Path | None, cluster: Path | None, *, learn: bool, steps: bool
) -> dict[str, Experiment]:
    if workload is not None and trace is not None:
        raise WorkloadError("expected either --workload or --trace, found both; leave one of them out")
    if workload is None and trace is None:
        raise WorkloadError(
            "expected either --workload or --trace, found neither; name a published workload, or a trace of your own"
        )
    if workload is not None and cluster is not None:
        raise WorkloadError(f"expected --cluster beside --trace only: {workload} has a cluster of its own")
    if workload is not None and learn:
        raise WorkloadError("expected --learn beside --trace only: whether a published workload is learned is its own")
    if workload is not None and steps:
        raise WorkloadError("expected --steps beside --trace only: whose jobs say steps is a published workload's own")
    if workload == "all":
        return {name: EXPERIMENTS[name] for name in SMALL}
    if workload is not None:
        return {workload: EXPERIMENTS[workload]}
    nodes = philly.default_cluster() if cluster is None else philly.read_cluster(cluster)
    given = Path(trace or "")
    return {
        "trace": Experiment(
            lambda data, seed: philly.from_trace(data, given, nodes, seed, is_learned=learn, says_steps=steps),
            philly.learning(philly.STRATEGIES) if learn else philly.STRATEGIES,
            EXPERIMENTS["philly"].mode,
            whole=True,
        )
    }
