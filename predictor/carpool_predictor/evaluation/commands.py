"""`carpool evaluate` and `carpool train`."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from carpool_predictor.cli import telling
from carpool_predictor.evaluation.inputs import check_inputs
from carpool_predictor.evaluation.suites import SUITES, DataError, Report, load, load_frozen
from carpool_predictor.features import MalformedError


class InputError(click.ClickException):
    """The command's input is wrong."""

    exit_code = 2


_DATA = click.option(
    "--data",
    required=True,
    envvar="CARPOOL_DATA",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Folder of measurements.",
)


@click.command(short_help="Judge the predictors on measurements, and write the model cards.")
@_DATA
@click.option("--suite", type=click.Choice(["all", *SUITES]), default="all", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/model-cards"),
    show_default=True,
    help="Folder of the model cards.",
)
@click.option("--frozen", is_flag=True, help="Judge what is shipped on rows that it never saw; fit and write nothing.")
def evaluate(data: Path, suite: str, out: Path, frozen: bool) -> None:
    """Evaluate the predictors on measurements, and write the model cards with every table and figure."""
    names = list(SUITES) if suite == "all" else [suite]
    judges = {name: load_frozen(name) for name in names} if frozen else {}
    if frozen and not any(judges.values()):
        raise InputError(f"suite {suite!r} cannot judge what is shipped without fitting; leave out --frozen")
    try:
        check_inputs(data, [name for name in names if not frozen or judges[name]], is_whole=not frozen)
        for number, name in enumerate(names, start=1):
            # On its own stream, so that a table in a file stays one, and whoever waits for an hour sees for what.
            click.echo(f"suite {name} ({number} of {len(names)}) ...", err=True)
            if not frozen:
                with telling() as tell:
                    report = load(name)(data, out, tell)
                Console().print(_table(report))
            elif judge := judges[name]:
                Console().print(_table(judge(data)))
    except (DataError, MalformedError) as e:
        raise InputError(str(e)) from e


def _table(report: Report) -> Table:
    table = Table(title=report.suite, title_justify="left")
    for column in ("figure", "value", "target", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in report.figures:
        met = "" if figure.met is None else "yes" if figure.met else "no"
        table.add_row(figure.name, f"{figure.value:,.4g}", figure.target, met)
    return table


@click.command(short_help="Rebuild what is shipped from the measurements.")
@_DATA
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the artifacts.")
def train(data: Path, out: Path) -> None:
    """Rebuild what is shipped from the measurements; the same data give the same bytes."""
    # Imported here, so that `--help` does not wait for what fits the models.
    from carpool_predictor.evaluation.activity.train import train_activity
    from carpool_predictor.evaluation.memory.train import train_memory
    from carpool_predictor.evaluation.slowdown.train import train_slowdown
    from carpool_predictor.evaluation.step_time.train import train_step_time
    from carpool_predictor.models.artifacts import write_sums

    try:
        check_inputs(data, SUITES, is_whole=False)
        paths = [build(data, out) for build in (train_memory, train_activity, train_step_time, train_slowdown)]
    except DataError as e:
        raise InputError(str(e)) from e
    for path in [*paths, write_sums(paths)]:
        click.echo(f"wrote {path} ({path.stat().st_size:,} bytes)")
