"""`carpool evaluate` and `carpool train`."""

from importlib import util
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from carpool_predictor.evaluation.suites import SUITES, DataError, Report, load


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


@click.command()
@_DATA
@click.option("--suite", type=click.Choice(["all", *SUITES]), default="all", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/model-cards"),
    show_default=True,
    help="Folder of the model cards.",
)
def evaluate(data: Path, suite: str, out: Path) -> None:
    """Evaluate the predictors on measurements, and write the model cards with every table and figure."""
    for name in SUITES if suite == "all" else (suite,):
        if util.find_spec(SUITES[name].partition(":")[0]) is None:
            raise InputError(f"this version has no suite {name!r} yet")
        try:
            report = load(name)(data, out)
        except DataError as e:
            raise InputError(str(e)) from e
        Console().print(_table(report))


def _table(report: Report) -> Table:
    table = Table(title=report.suite, title_justify="left")
    for column in ("figure", "value", "target", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in report.figures:
        met = "" if figure.met is None else "yes" if figure.met else "no"
        table.add_row(figure.name, f"{figure.value:,.4g}", figure.target, met)
    return table


@click.command()
@_DATA
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the artifacts.")
def train(data: Path, out: Path) -> None:
    """Rebuild what is shipped from the measurements: memory, activity, step time; the same data give the same bytes."""
    # Imported here, so that `--help` does not wait for what fits the models.
    from carpool_predictor.activity_train import train_activity
    from carpool_predictor.step_time_train import train_step_time
    from carpool_predictor.training import train_memory

    try:
        paths = [build(data, out) for build in (train_memory, train_activity, train_step_time)]
    except DataError as e:
        raise InputError(str(e)) from e
    for path in paths:
        click.echo(f"wrote {path} ({path.stat().st_size:,} bytes)")
