"""The `carpool` command. Each package adds subcommands through entry points of the group `carpool.commands`."""

from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click

from carpool_core import crdgen

GROUP = "carpool.commands"


class LazyGroup(click.Group):
    """Imports the package of a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the name of every subcommand, also of those whose dependencies are missing."""
        return sorted({*super().list_commands(ctx), *(point.name for point in entry_points(group=GROUP))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand; if a dependency is missing, one that fails and names the extra to install."""
        if found := super().get_command(ctx, cmd_name):
            return found
        for point in entry_points(group=GROUP, name=cmd_name):
            return load_command(point)
        return None


def load_command(point: EntryPoint) -> click.Command:
    """Return the click command of an entry point; if a dependency is missing, one that names the extra to install."""
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        return _missing(point, error)
    if not isinstance(command, click.Command):
        raise TypeError(f"entry point {point.name} = {point.value}: expected a click command, found {command!r}")
    return command


def _missing(point: EntryPoint, error: ModuleNotFoundError) -> click.Command:
    extra = ",".join(point.extras)
    advice = f"install it with: pip install 'carpool[{extra}]'" if extra else f"it should be in {point.module}"

    def fail() -> None:
        raise click.ClickException(f"`carpool {point.name}` needs the Python module {error.name!r}; {advice}")

    return click.Command(
        point.name,
        callback=fail,
        short_help=f"(not installed: {advice})",
        help=f"Not installed: {advice}.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(version("carpool"), prog_name="carpool")
def main() -> None:
    """Carpool: deep-learning jobs that share GPUs, placed by prediction."""


@click.command()
@click.option(
    "--out",
    "folders",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Folder for carpool.dev_*.yaml; may be given several times. Without it the CRDs are printed.",
)
def crds(folders: tuple[Path, ...]) -> None:
    """Print the CustomResourceDefinitions, or write them into folders.

    `carpool crds | kubectl apply --server-side --force-conflicts -f -` installs them, and updates those that Helm
    installed.
    """
    for folder in folders:
        for file in crdgen.write(folder):
            click.echo(f"wrote {file}", err=True)
    if not folders:
        click.echo("---\n".join(crdgen.as_yaml(definition) for definition in crdgen.DEFINITIONS), nl=False)
