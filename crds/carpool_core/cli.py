"""The `carpool` command, which kubectl runs as `kubectl carpool`."""

import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import ShellComplete, get_completion_class

from carpool_core import crdgen
from carpool_core.settings import InputError


class Subcommand(NamedTuple):
    """Place of a subcommand, which is imported when it is used."""

    module: str
    attribute: str
    extra: str = ""
    """Extra of the distribution that its dependencies need; empty if they are always installed."""


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "agent": Subcommand("carpool_deviceplugin.commands", "agent", "agent"),
    "board": Subcommand("carpool_board.commands", "board", "cli,board"),
    "completion": Subcommand("carpool_core.cli", "completion"),
    "crds": Subcommand("carpool_core.cli", "crds"),
    "diagnose": Subcommand("carpool_core.kubectl.commands", "diagnose"),
    "explain": Subcommand("carpool_extender.explain.commands", "explain_command", "cli"),
    "extender": Subcommand("carpool_extender.commands", "extender", "extender"),
    "graph": Subcommand("carpool_predictor.cli", "graph", "trace"),
    "logs": Subcommand("carpool_core.kubectl.commands", "logs"),
    "node": Subcommand("carpool_deviceplugin.commands", "node", "agent"),
    "operator": Subcommand("carpool_operator.commands", "operator", "operator"),
    "predict": Subcommand("carpool_predictor.cli", "predict", "cli"),
    "profile": Subcommand("carpool_predictor.profiler.session", "profile", "profile"),
    "queue": Subcommand("carpool_extender.explain.commands", "queue", "cli"),
    "simulate": Subcommand("carpool_simulator.commands", "simulate", "simulate"),
    "status": Subcommand("carpool_core.kubectl.commands", "status"),
    "top": Subcommand("carpool_core.kubectl.commands", "top"),
    "what-if": Subcommand("carpool_extender.explain.commands", "what_if", "cli"),
}
"""Subcommands by name."""


class LazyGroup(click.Group):
    """Imports the package of a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the name of every subcommand, also of those whose dependencies are missing."""
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand; if a dependency is missing, one that fails and names the extra to install."""
        return load_command(cmd_name, SUBCOMMANDS[cmd_name]) if cmd_name in SUBCOMMANDS else None


def load_command(name: str, place: Subcommand) -> click.Command:
    """Return the click command at a place; if a dependency is missing, one that names the extra to install."""
    try:
        command: click.Command = getattr(import_module(place.module), place.attribute)
    except ModuleNotFoundError as error:
        return _missing(name, place, error)
    return command


def _missing(name: str, place: Subcommand, error: ModuleNotFoundError) -> click.Command:
    advice = f"install it from a checkout of Carpool: pip install '.[{place.extra}]'"

    def fail() -> None:
        raise InputError(f"`carpool {name}` needs the Python module {error.name!r}; {advice}")

    return click.Command(
        name,
        callback=fail,
        short_help=f"(not installed: {advice})",
        help=f"Not installed: {advice}.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def commit() -> str:
    """Return the commit that this program was built from, or that is checked out; `unknown` if neither is recorded."""
    built = files("carpool_core").joinpath("COMMIT")
    if built.is_file():
        return built.read_text().strip()
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    # Another repository may contain the virtual environment of an installed package.
    return done.stdout.strip() if done.returncode == 0 and here.parent.name == "crds" else "unknown"


def _print_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        click.echo(f"carpool {version('carpool')} (commit {commit()})")
        context.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version with its commit and exit.",
)
def main() -> None:
    """Carpool: deep-learning jobs that share GPUs, placed by prediction.

    Exit codes: 0 success; 1 a negative answer; 2 invalid input, or no answer.
    """


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

    The chart installs and updates them. For a chart with `crds.enabled=false`, apply them with
    `carpool crds | kubectl apply --server-side -f -`.
    """
    for folder in folders:
        for file in crdgen.write(folder):
            click.echo(f"wrote {file}", err=True)
    if not folders:
        click.echo("---\n".join(crdgen.as_yaml(definition) for definition in crdgen.DEFINITIONS), nl=False)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL.

    `source <(carpool completion bash)` completes `carpool`. kubectl completes `kubectl carpool` by the program
    kubectl_complete-carpool, which is installed beside it.
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"expected a shell that click completes, found {shell}")
    click.echo(found(main, {}, "carpool", "_CARPOOL_COMPLETE").source())


def complete_for_kubectl() -> None:
    """Print the completions of the last argument, as kubectl 1.26 and later asks a plugin for them."""
    # Source: https://kubernetes.io/docs/reference/kubectl/generated/kubectl_plugin (kubectl_complete-NAME); the last
    # line is a directive of Cobra: 4 means no files.
    *before, last = sys.argv[1:] or [""]
    for item in ShellComplete(main, {}, "carpool", "_CARPOOL_COMPLETE").get_completions(before, last):
        click.echo(f"{item.value}\t{item.help}" if item.help else item.value)
    click.echo(":4")
