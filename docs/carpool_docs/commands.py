"""Page of the commands, with the help of each."""

import click
from carpool_core.cli import SUBCOMMANDS, load_command, main
from click.testing import CliRunner

from carpool_docs.markdown import code, fence
from carpool_docs.markdown import page as page_of

WIDTH = 100
"""Columns of the help."""

_INTRODUCTION = """kubectl runs the same program as `kubectl carpool`: see [kubectl](../kubectl.md). A command without
its dependencies is listed too, and its help names the extra to install. Exit codes: 0 success; 1 a negative answer,
such as a job that could never run; 2 invalid input, or a question that could not be answered (a missing right)."""


def subcommands(name: str) -> list[str]:
    """Return the names of a command's subcommands."""
    command = load_command(name, SUBCOMMANDS[name])
    return sorted(command.commands) if isinstance(command, click.Group) else []


def help_of(*command: str) -> str:
    """Return the output of `carpool COMMAND --help`.

    Raises:
        RuntimeError: The command failed; the message has its output.
    """
    done = CliRunner(env={"COLUMNS": str(WIDTH)}).invoke(
        main, [*command, "--help"], prog_name="carpool", terminal_width=WIDTH
    )
    if done.exit_code != 0 or "Not installed" in done.output:
        raise RuntimeError(f"carpool {' '.join(command)} --help: expected the command's help, found: {done.output}")
    return done.output


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, fence(help_of())]
    for name, place in SUBCOMMANDS.items():
        parts += [f"## carpool {name}", *([f"Needs {code(f'carpool[{place.extra}]')}."] if place.extra else [])]
        parts.append(fence(help_of(name)))
        for below in subcommands(name):
            parts += [f"### carpool {name} {below}", fence(help_of(name, below))]
    return page_of("Commands", *parts)
