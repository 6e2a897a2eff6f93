"""`python -m carpool_research`: fits and evaluates the shipped models, runs experiments, traces the catalog."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import click
from carpool_predictor.features import MalformedError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from carpool_research.catalog_sweep import pack_command, sweep
from carpool_research.finetuning import finetuning
from carpool_research.measured import measured
from carpool_research.published import published
from carpool_research.report import Report, markdown
from carpool_research.tables import DataError, check_header

SUITES = ("memory", "activity", "step-time", "slowdown")
"""Suites in the order of `--suite all`."""


class InputError(click.ClickException):
    """The command's input is wrong."""

    exit_code = 2


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current item: one changing line on a terminal, one line per item elsewhere."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda item: console.print(f"  {item}", highlight=False, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield lambda item: status.update(escape(item))


_DATA = click.option(
    "--data",
    required=True,
    envvar="CARPOOL_DATA",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Folder of measurements.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Evaluate and fit the models that Carpool ships."""


def suites() -> dict[str, ModuleType]:
    """Import the module of each suite.

    A module has `inputs(is_whole)`, the columns of each file that it reads, and `run(data, out, progress)`: it writes
    the model card and its figures. `frozen(data)` evaluates the shipped model without fitting.
    """
    from carpool_research.activity import report as activity
    from carpool_research.memory import report as memory
    from carpool_research.slowdown import report as slowdown
    from carpool_research.step_time import report as step_time

    return dict(zip(SUITES, (memory, activity, step_time, slowdown), strict=True))


def check_inputs(data: Path, chosen: Iterable[ModuleType], *, is_whole: bool) -> None:
    """Check the headers of all files that suites read, before anything is fitted.

    Args:
        data: The data folder.
        chosen: Modules of suites.
        is_whole: Whether to check the files that only the evaluation reads, too.

    Raises:
        DataError: A file or a column is missing; the message names it.
    """
    for suite in chosen:
        for path, columns in suite.inputs(is_whole=is_whole).items():
            check_header(data / path, columns)


@main.command(short_help="Evaluate the predictors on measurements, and write the model cards.")
@_DATA
@click.option("--suite", type=click.Choice(["all", *SUITES]), default="all", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/model-cards"),
    show_default=True,
    help="Folder of the model cards.",
)
@click.option(
    "--frozen", is_flag=True, help="Evaluate the shipped models on rows that they never saw; fit and write nothing."
)
def evaluate(data: Path, suite: str, out: Path, frozen: bool) -> None:
    """Evaluate the predictors on measurements, and write the model cards with every table and figure."""
    chosen = {name: module for name, module in suites().items() if suite in ("all", name)}
    try:
        if not frozen:
            check_inputs(data, chosen.values(), is_whole=True)
        for number, (name, module) in enumerate(chosen.items(), start=1):
            click.echo(f"suite {name} ({number} of {len(chosen)}) ...", err=True)
            if frozen:
                report = module.frozen(data)
            else:
                with show_progress() as progress:
                    report = module.run(data, out, progress)
            Console().print(_table(report))
    except (DataError, MalformedError) as e:
        raise InputError(str(e)) from e


def _table(report: Report) -> Table:
    table = Table(title=report.suite, title_justify="left")
    for column in ("metric", "value", "target", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for metric in report.metrics:
        met = "" if metric.met is None else "yes" if metric.met else "no"
        table.add_row(metric.name, f"{metric.value:,.4g}", metric.target, met)
    return table


@main.command(short_help="Fit the shipped models to the measurements.")
@_DATA
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the artifacts.")
def train(data: Path, out: Path) -> None:
    """Fit the shipped models to the measurements; the same data give the same bytes."""
    from carpool_research.activity.fit import train_activity
    from carpool_research.memory.fit import train_memory
    from carpool_research.slowdown.fit import train_slowdown
    from carpool_research.step_time.fit import train_step_time

    try:
        check_inputs(data, suites().values(), is_whole=False)
        paths = [build(data, out) for build in (train_memory, train_activity, train_step_time, train_slowdown)]
    except DataError as e:
        raise InputError(str(e)) from e
    for path in paths:
        click.echo(f"wrote {path} ({path.stat().st_size:,} bytes)")


@main.command(short_help="Run published workloads in the simulator, and write docs/experiments.md.")
@_DATA
@click.option(
    "--only",
    multiple=True,
    help="Experiment to run; all by default. Repeatable. Without results of the others the document stays as it is, "
    "and the tables of the groups slowdowns and estimators are printed.",
)
@click.option("--group", "groups", multiple=True, help="Group of runs beside the published strategies. Repeatable.")
@click.option("--seeds", type=click.IntRange(1), help="Seeds of each strategy; by default 10, or 1 of a whole trace.")
@click.option(
    "--workers", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes; by default one per core."
)
@click.option(
    "--results", type=click.Path(path_type=Path, file_okay=False), default=Path("out/experiments"), show_default=True
)
@click.option(
    "--document",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("docs/experiments.md"),
    show_default=True,
)
@click.option("--no-run", is_flag=True, help="Write the document from the results of earlier runs.")
def experiments(
    data: Path,
    only: tuple[str, ...],
    groups: tuple[str, ...],
    *,
    seeds: int | None,
    workers: int,
    results: Path,
    document: Path,
    no_run: bool,
) -> None:
    """Run published workloads under published strategies and Carpool's, and write the document of their tables."""
    from carpool_simulator.truth import WorkloadError

    from carpool_research.experiments import document as page
    from carpool_research.experiments import runs

    try:
        chosen = [_known(name, runs.EXPERIMENTS, "experiment") for name in only or runs.EXPERIMENTS]
        of_groups = [_known(name, runs.GROUPS, "group") for name in groups or runs.GROUPS]
        results.mkdir(parents=True, exist_ok=True)
        for name in () if no_run else chosen:
            found = runs.run(runs.EXPERIMENTS[name], data, of_groups, seeds, workers, click.echo)
            found.write(results, name)
        if only and any(not (results / f"{name}.csv").exists() for name in runs.EXPERIMENTS):
            of = {name: page.Table(runs.Results.read(results, name)) for name in chosen}
            for rows in (page.slowdowns(of), page.estimators(of)):
                click.echo(markdown(rows) if rows else "Not run.")
            return
        page.write(results, document)
    except WorkloadError as e:
        raise InputError(str(e)) from e
    click.echo(f"wrote {document}")


def _known(name: str, names: Iterable[str], what: str) -> str:
    if name not in names:
        raise InputError(f"expected one of {', '.join(names)} as {what}, found {name}")
    return name


main.add_command(sweep)
main.add_command(pack_command)
main.add_command(published)
main.add_command(measured)
main.add_command(finetuning)

if __name__ == "__main__":
    main(prog_name="python -m carpool_research")
