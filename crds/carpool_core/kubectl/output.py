"""Options, output formats, errors and exit codes that the commands for people share."""

import asyncio
import re
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

import click
import msgspec

from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_TRAINING_JOBS, KubeApi, Selector, list_all
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import Forbidden, KubeError, Unreachable
from carpool_core.resources.meta import ObjectMeta
from carpool_core.settings import InputError, KubeSettings

T = TypeVar("T")

OTHER_JOBS = "; -n names another namespace, and kubectl carpool status -A lists all jobs"
"""Remedy that follows the message of a missing job."""


class Format(StrEnum):
    """Form of an answer."""

    TABLE = "table"
    WIDE = "wide"
    """A table with more columns."""
    JSON = "json"
    YAML = "yaml"

    @property
    def is_document(self) -> bool:
        """Whether programs read it: docs/reference/output.md describes its fields."""
        return self in (Format.JSON, Format.YAML)


FORMAT = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice([form.value for form in Format]),
    default=Format.TABLE.value,
    show_default=True,
    callback=lambda _, __, value: Format(value),
    help="Form of the answer; wide has more columns, and docs/reference/output.md describes json and yaml.",
)


_GAP = " " * 3
"""Space between two columns."""
_LEAST_WIDTH = 40
"""Least width to which the last column of a table is wrapped."""


class UnansweredError(InputError):
    """The question cannot be answered: exit code 2, as for invalid options. A negative answer exits with 1."""


_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


_PREFIX = re.compile(r"(gtj|gputrainingjobs?)(\.carpool\.dev)?/")
"""Kind before the name of a job, as `kubectl get -o name` prints it."""


def _valid_name(_: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None and parameter.name == "job":
        name = _PREFIX.sub("", name, count=1)
    if name is None or _NAME.fullmatch(name):
        return name
    what = "a job" if parameter.name == "job" else "a namespace"
    first, slash, last = name.partition("/")
    hint = f"; did you mean {last} -n {first}?" if slash and what == "a job" else ""
    raise click.BadParameter(f"expected the name of {what}, of small letters, digits, - and ., found {name!r}{hint}")


class _Named(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


def _job_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that a shell offers; none if the cluster cannot be read, because a shell shows no errors."""
    given = context.params

    async def names() -> list[_Named]:
        kube = KubeSettings(given.get("setting__kubeconfig"), given.get("setting__context"))
        async with connect(kube) as api:
            return await list_all(api, GPU_TRAINING_JOBS, _Named, Selector(given.get("namespace") or api.namespace))

    try:
        found = asyncio.run(asyncio.wait_for(names(), timeout=3))
    except (KubeError, KubeConfigError, TimeoutError):
        return []
    return [one.metadata.name for one in found if one.metadata.name.startswith(incomplete)]


def job_argument(*, required: bool = True) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return the argument JOB, which shells complete."""
    return click.argument("job", required=required, callback=_valid_name, shell_complete=_job_names)


def namespace_option(meaning: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return the option -n, whose value is checked."""
    return click.option("-n", "--namespace", callback=_valid_name, help=meaning)


NAMESPACE = namespace_option("The job's namespace; that of the kubeconfig's context when left out.")
ALL_NAMESPACES = click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all namespaces.")


def ask(
    settings: KubeSettings,
    question: Callable[[KubeApi], Awaitable[T]],
    *,
    clock: Clock | None = None,
    rights_remedy: str = "",
) -> T:
    """Return the answer of the cluster.

    Args:
        settings: The API server.
        question: Reads the answer.
        clock: Clock that is compared with the server's; the system's when None.
        rights_remedy: Remedy for a missing right, added to its message.

    Raises:
        UnansweredError: The cluster cannot be reached, or the caller lacks a right.
    """

    async def run() -> T:
        async with connect(settings, clock=clock) as api:
            return await question(api)

    try:
        return asyncio.run(run())
    except Forbidden as error:
        remedy = "sign in again: the credentials of the kubeconfig are wrong or have expired"
        remedy = remedy if error.status == 401 else rights_remedy
        raise UnansweredError(f"{error}{f'; {remedy}' if remedy else ''}") from error
    except Unreachable as error:
        raise UnansweredError(f"the cluster could not be reached: {error}") from error
    except KubeError as error:
        raise UnansweredError(f"the API server answered {error}") from error
    except KubeConfigError as error:
        raise UnansweredError(str(error)) from error


def print_document(document: msgspec.Struct, form: Format) -> None:
    """Print a document as JSON or YAML."""
    if form is Format.JSON:
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        click.echo(msgspec.yaml.encode(document).decode(), nl=False)


def wrapped(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return rows whose last cell goes on in further rows, as far as a table of all rows exceeds a terminal's width."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    others = sum(widths[:-1]) + len(_GAP) * (len(columns) - 1)
    found = []
    for *cells, last in rows:
        first, *more = textwrap.wrap(last, max(width - others, _LEAST_WIDTH), break_long_words=False) or [""]
        found += [[*cells, first], *([*[" "] * len(cells), part] for part in more)]
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as kubectl prints it, without colours. An empty cell is `-`."""
    cells = [columns, *([cell or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_GAP.join(map(str.ljust, row, widths)).rstrip() for row in cells)
