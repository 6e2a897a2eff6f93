"""Pages of the commands: the help of each, and the documents that they print."""

from collections.abc import Mapping

import click
import msgspec
from carpool_core.cli import SUBCOMMANDS, load_command, main
from carpool_core.crdgen import object_schema
from carpool_core.kubectl.views import Diagnosis, GpuViewList, JobViewList
from carpool_core.resources.schema import Resource
from carpool_extender.explain.commands import AnswerView
from carpool_extender.explain.queue_forecast import QueueView
from click.testing import CliRunner

from carpool_docs import code, fence, table
from carpool_docs import page as page_of
from carpool_docs.resources import fields

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


_OUTPUT = """`carpool COMMAND -o json` and `-o yaml` print one document. A field with its default (an empty text
or list, 0, false) is left out, except at the top. New fields may be added in any version; a field is renamed or removed
in a new minor version only."""

DOCUMENTS: Mapping[str, type[Resource]] = {
    "status": JobViewList,
    "top": GpuViewList,
    "queue": QueueView,
    "explain and what-if": AnswerView,
    "diagnose": Diagnosis,
}
"""Documents by the commands that print them."""


def output_page() -> str:
    """Return the page of the documents that `-o json` and `-o yaml` print, read from their types."""
    parts = [_OUTPUT]
    for name, type_ in DOCUMENTS.items():
        info = msgspec.inspect.type_info(type_)
        if not isinstance(info, msgspec.inspect.StructType):
            raise TypeError(f"expected a msgspec Struct, found {type_!r}")
        rows = [
            (code(one.path), _type(one.schema), one.schema.get("description") or "")
            for one in fields(object_schema(info, with_defaults=False))
        ]
        parts += [f"## carpool {name}", table(("Field", "Type", "Meaning"), rows)]
    return page_of("Output of commands", *parts)


def _type(schema: Mapping[str, object]) -> str:
    enum = schema.get("enum")
    if isinstance(enum, list):
        return ", ".join(code(str(value)) for value in enum)
    return str(schema.get("type", "any"))
