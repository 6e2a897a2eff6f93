"""`carpool simulate`."""

import importlib.util
from pathlib import Path

import click
from rich.console import Console

from carpool_extender.policies import UnknownPolicyError
from carpool_extender.simulation import philly, report, slowdown_report
from carpool_extender.simulation.contest import EXPERIMENTS, Experiment, Line, contest, named, ours, wrong
from carpool_extender.simulation.strategy import Strategy
from carpool_extender.simulation.workload import WorkloadError

_DATA = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="CARPOOL_DATA",
    required=True,
    show_envvar=True,
    help="Folder of measurements by others (lucid, radrm, traces, gavel).",
)


@click.command()
@click.option("--workload", type=click.Choice([*EXPERIMENTS, "all"]), help="A published experiment, or all small ones.")
@click.option("--trace", type=click.Path(path_type=Path), help="A trace of your own: timestamp, duration, num_gpus.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="The cluster for a trace, YAML; Philly's when left out."
)
@click.option(
    "--policies",
    default="published",
    show_default=True,
    help="published: the experiment's own strategies and Carpool's; all, or names: policies of the table, compared.",
)
@click.option("--policy", "policies", help="The same as --policies.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=10, show_default=True, help="Runs of each strategy.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
@click.option("--pictures/--no-pictures", default=True, show_default=True, help="Draw them; needs carpool[simulate].")
@_DATA
def simulate(
    workload: str | None,
    trace: Path | None,
    cluster: Path | None,
    policies: str,
    *,
    seeds: int,
    out: Path,
    pictures: bool,
    data: Path,
) -> None:
    """Run a workload under several policies on a virtual clock, with the scheduler's own decisions."""
    console = Console(stderr=True)
    try:
        chosen = _experiments(workload, trace, cluster)
        out.mkdir(parents=True, exist_ok=True)
        parts = _head(seeds, data) if workload == "all" else []
        for name, experiment in chosen.items():
            parts += _one(
                name, experiment, policies, seeds=seeds, out=out, data=data, pictures=pictures, console=console
            )
    except (WorkloadError, UnknownPolicyError) as error:
        raise click.ClickException(str(error)) from error
    target = out / f"{workload or 'trace'}.md"
    target.write_text("\n".join(parts) + "\n", encoding="utf-8")
    console.print(f"written: {target}")


def _experiments(workload: str | None, trace: Path | None, cluster: Path | None) -> dict[str, Experiment]:
    if (workload is None) == (trace is None):
        raise WorkloadError("expected either --workload or --trace, found both or neither")
    if workload == "all":
        return {name: one for name, one in EXPERIMENTS.items() if name != "philly"}
    if workload is not None:
        return {workload: EXPERIMENTS[workload]}
    nodes = philly.default_cluster() if cluster is None else philly.read_cluster(cluster)
    given = Path(trace or "")
    return {
        "trace": Experiment(
            lambda data, seed: philly.from_trace(data, given, nodes, seed),
            philly.STRATEGIES,
            EXPERIMENTS["philly"].mode,
        )
    }


def _strategies(experiment: Experiment, policies: str) -> list[Strategy]:
    if policies != "published":
        return named(policies, experiment.mode)
    carpool = [] if experiment.published is philly.STRATEGIES else ours(experiment.mode)
    return [*experiment.published, *carpool]


def _one(
    name: str,
    experiment: Experiment,
    policies: str,
    *,
    seeds: int,
    out: Path,
    data: Path,
    pictures: bool,
    console: Console,
) -> list[str]:
    def run(strategies: list[Strategy]) -> list[Line]:
        return contest(lambda seed: experiment.draw(data, seed), strategies, seeds, data, console.print)

    console.rule(name)
    lines = run(_strategies(experiment, policies))
    parts = report.section(experiment.draw(data, 0), lines, seeds)
    report.write_csv(out / f"{name}.csv", lines)
    if policies == "published" and experiment.published is not philly.STRATEGIES:
        off = run(wrong(experiment.mode))
        report.write_csv(out / f"{name}-wrong-predictions.csv", off)
        parts += ["Carpool (slowdown ≤ 1.5) when its predictions are off, against the first line above:", ""]
        parts += [*report.markdown([lines[0], *off]), ""]
    if pictures and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("pictures need matplotlib: pip install 'carpool[simulate]', or --no-pictures")
    if pictures:
        from carpool_extender.simulation.pictures import draw

        draw(out, name, lines)
    return parts


def _head(seeds: int, data: Path) -> list[str]:
    return [
        "# Experiments",
        "",
        f"`carpool simulate --workload all --seeds {seeds}` wrote this. The simulator runs the scheduler's own "
        f"decisions "
        "(checks, policies, ledger) on a virtual clock. What is true in it (memory, solo speed, slowdown) was "
        "measured by "
        "others and never comes from the model that decides; predictions are the shipped predictor's, on features that "
        "were traced without a GPU, with whatever errors it makes.",
        "",
        "## Slowdown of pairs that take turns",
        "",
        "Lucid's 676 pairs on an RTX 3090: 1,352 slowdowns, used to evaluate only. The learned exponent comes from "
        "Gavel's "
        "pairs on older GPUs, which have no utilization of their own.",
        "",
        *slowdown_report.table(slowdown_report.scores(data)),
        "",
    ]
