"""Settings as frozen dataclasses. Each field defines its flag and its environment variable once."""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, TypeVar

import click

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

_SETTING = "carpool.setting"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class SettingsError(ValueError):
    """The value of a setting is invalid; the message names the variable."""


class InputError(click.ClickException):
    """The input of a command is invalid. It exits with 2, as click does on invalid options."""

    exit_code = 2


class MisconfiguredError(InputError):
    """The settings of a process do not work together."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: what its flag, its environment variable and its documentation have in common."""

    path: tuple[str, ...]
    """Field names from the outermost dataclass to this setting."""
    flag: str
    env: str
    help: str
    """Effect, with the unit and the meaning of an empty value."""
    type: Any
    """`bool`, `int`, `float`, `str`, `Path` or an Enum, without `| None`."""
    default: Any
    minimum: float | None = None
    """Smallest value of a number."""
    maximum: float | None = None
    """Largest value of a number."""
    allow_empty: bool = False
    """Whether an empty environment variable is a value; otherwise it counts as unset."""

    @property
    def description(self) -> str:
        """Help with the bounds of a number."""
        return self.help if self._bounds is None else f"{self.help} {self._bounds.capitalize()}."

    def invalid_reason(self, value: Any) -> str | None:
        """Return why a number is out of bounds; None if it is not."""
        low, high = self.minimum, math.inf if self.maximum is None else self.maximum
        if low is None or value is None or low <= value <= high:
            return None
        return f"expected a number {self._bounds}, found {value:g}"

    @property
    def _bounds(self) -> str | None:
        if self.minimum is None:
            return None
        return f"from {self.minimum:g} on" if self.maximum is None else f"from {self.minimum:g} to {self.maximum:g}"


def setting(
    default: Any,
    *,
    help: str,  # noqa: A002  # click's and argparse's word
    flag: str = "",
    env: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    allow_empty: bool = False,
) -> Any:
    """Return a field of a settings dataclass.

    Args:
        default: Value without flag and variable.
        help: One sentence with the unit and the meaning of None.
        flag: Command-line flag; that of the field's name if empty, such as `--metrics-port` of `metrics_port`.
        env: Environment variable; that of the flag if empty, such as `CARPOOL_METRICS_PORT`.
        minimum: Smallest value of a number; unbounded when None.
        maximum: Largest value; unbounded when None. It needs a `minimum`.
        allow_empty: Whether an empty variable is a value; otherwise it counts as unset.
    """
    keys = {"flag": flag, "env": env, "help": help, "minimum": minimum, "maximum": maximum, "allow_empty": allow_empty}
    return dataclasses.field(default=default, metadata={_SETTING: keys})


def metrics_port(default: int) -> Any:
    """Return the field for the port of metrics and health, the same in every process."""
    return setting(
        default, minimum=0, maximum=65535, help="TCP port of /metrics, /healthz and /readyz; 0 takes a free one."
    )


MPS_CLIENTS = 48
"""Clients that an MPS server accepts on a GPU since Volta (NVIDIA's MPS guide); some newer drivers accept more."""


def slots_per_gpu() -> Any:
    """Return the field for the number of tenants of a GPU, on which scheduler and agents must agree."""
    return setting(
        8,
        minimum=1,
        maximum=MPS_CLIENTS,
        help="Most pods that may share one GPU; set the same for the scheduler and all agents.",
    )


def autoscaling() -> Any:
    """Return the field for the support of cluster autoscalers, on which all processes must agree."""
    return setting(
        False,
        help="Whether cluster autoscalers see the jobs that wait for GPUs, also those that no present GPU can hold, "
        "and see GPUs that one pod uses alone as full; set the same for operator, extender and all agents.",
    )


def settings_of(cls: type[Any], _path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yield every setting of a settings dataclass and of its nested groups."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, type_ = (*_path, field.name), hints[field.name]
        if dataclasses.is_dataclass(type_) and isinstance(type_, type):
            yield from settings_of(type_, path)
        elif _SETTING in field.metadata:
            given = dict(field.metadata[_SETTING])
            given["flag"] = given["flag"] or f"--{field.name.replace('_', '-')}"
            given["env"] = given["env"] or f"CARPOOL_{given['flag'].removeprefix('--').replace('-', '_').upper()}"
            yield Setting(path=path, type=_without_none(type_), default=field.default, **given)
        else:
            raise TypeError(f"{cls.__name__}.{field.name}: expected a `setting(…)` or a settings dataclass")


def load(cls: type[S], environ: Mapping[str, str]) -> S:
    """Return settings from environment variables alone.

    Raises:
        SettingsError: A variable holds an invalid value.
    """
    given = (s for s in settings_of(cls) if environ.get(s.env) or (s.allow_empty and s.env in environ))
    return _build(cls, {s.path: _parse(s, environ[s.env]) for s in given})


class _AllowEmpty(click.Option):
    """An option with `allow_empty`: click itself ignores an empty variable."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return os.environ.get(str(self.envvar))


def click_options(cls: type[Any]) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting to a click command with a parameter `settings`."""
    fields = list(settings_of(cls))

    def decorate(function: F) -> F:
        def call(*args: Any, **kwargs: Any) -> Any:
            values = {s.path: _typed(s, kwargs.pop(_parameter(s))) for s in fields}
            try:
                settings = _build(cls, values)
            except SettingsError as error:
                raise InputError(str(error)) from error
            return function(*args, settings=settings, **kwargs)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__dict__.update(function.__dict__)
        for one in reversed(fields):
            off = f"/--no-{one.flag.removeprefix('--')}" if one.type is bool else ""
            call = click.option(one.flag + off, _parameter(one), **_option(one))(call)
        return typing.cast("F", call)

    return decorate


def _parameter(one: Setting) -> str:
    return "__".join(("setting", *one.path))


def _option(one: Setting) -> dict[str, Any]:
    kinds: dict[Any, Any] = {int: click.INT, float: click.FLOAT, str: click.STRING, bool: click.BOOL}
    kinds[Path] = click.Path(path_type=Path)
    # By value: click itself would offer the names of the enumeration's members.
    kind = click.Choice([str(m.value) for m in one.type]) if issubclass(one.type, Enum) else kinds[one.type]
    return {
        "cls": _AllowEmpty if one.allow_empty else click.Option,
        "type": kind,
        "default": one.default.value if isinstance(one.default, Enum) else one.default,
        "envvar": one.env,
        "help": one.description,
        "callback": lambda ctx, param, value: _checked(one, ctx, param, value),
        # The help describes an empty setting.
        "show_default": one.default not in (None, ""),
        "show_envvar": True,
    }


def _checked(one: Setting, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if (why := one.invalid_reason(value)) is not None:
        raise click.BadParameter(why, ctx, param)
    return value


def _typed(one: Setting, value: Any) -> Any:
    return one.type(value) if value is not None and issubclass(one.type, Enum) else value


def _without_none(type_: Any) -> Any:
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        return next(arm for arm in typing.get_args(type_) if arm is not type(None))
    return type_


def _parse(one: Setting, text: str) -> Any:
    if one.type is bool:
        if text.casefold() in _TRUE + _FALSE:
            return text.casefold() in _TRUE
        raise SettingsError(f"{one.env}: expected true or false, found {text!r}")
    try:
        value = one.type(text)
    except ValueError as error:
        wanted = (
            " or ".join(one.type) if issubclass(one.type, StrEnum) else {int: "an integer"}.get(one.type, "a number")
        )
        raise SettingsError(f"{one.env}: expected {wanted}, found {text!r}") from error
    if (why := one.invalid_reason(value)) is not None:
        raise SettingsError(f"{one.env}: {why}")
    return value


def _build(cls: type[S], values: Mapping[tuple[str, ...], Any]) -> S:
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for name, type_ in hints.items():
        if dataclasses.is_dataclass(type_) and isinstance(type_, type):
            inner = {path[1:]: value for path, value in values.items() if path[0] == name}
            arguments[name] = _build(type_, inner)
        elif (name,) in values:
            arguments[name] = values[name,]
    return cls(**arguments)


class LogFormat(StrEnum):
    """Format of log events."""

    JSON = "json"
    """One JSON object on each line, for collectors."""
    CONSOLE = "console"
    """Aligned and coloured."""


class LogLevel(StrEnum):
    """Lowest severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class KubeSettings:
    """Access to the Kubernetes API."""

    kubeconfig: str | None = setting(
        None,
        env="KUBECONFIG",
        help="Kubeconfig file, or several as kubectl takes them; when left out the pod's ServiceAccount, and outside "
        "of pods ~/.kube/config.",
    )
    context: str | None = setting(
        None, help="Context of the kubeconfig; the kubeconfig's current context when left out."
    )


@dataclass(frozen=True)
class LogSettings:
    """Logging."""

    level: LogLevel = setting(LogLevel.INFO, flag="--log-level", help="Lowest severity that is logged.")
    format: LogFormat = setting(
        LogFormat.CONSOLE, flag="--log-format", help="Format of log events: json for collectors, console for people."
    )
