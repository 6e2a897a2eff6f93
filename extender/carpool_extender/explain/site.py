"""The settings that a cluster decides by, read from its own Deployments with the rights of whoever asks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

import click
import msgspec
from carpool_core.kube.api import DEPLOYMENTS, KubeApi
from carpool_core.kube.errors import Forbidden, Invalid, NotFound
from carpool_core.settings import Setting, SettingsError, load, settings_of
from carpool_predictor.calibration.store import parse_config_map_name
from click.core import ParameterSource

from carpool_extender.framework.scores import UnknownPolicyError, find_policy
from carpool_extender.settings import AskSettings


class _Wire(msgspec.Struct, frozen=True, rename="camel"):
    """Camel-cased, partial snapshot of an object."""


class _Variable(_Wire, frozen=True):
    name: str
    value: str = ""
    value_from: dict[str, Any] | None = None


class _Container(_Wire, frozen=True):
    name: str
    command: list[str] = []
    args: list[str] = []
    env: list[_Variable] = []
    env_from: list[dict[str, Any]] = []

    @property
    def line(self) -> list[str]:
        """What it is started with, as far as that stands here: the image begins where there is no command."""
        return [*self.command, *self.args]


class _PodSpec(_Wire, frozen=True):
    containers: list[_Container] = []


class _Template(_Wire, frozen=True):
    spec: _PodSpec = _PodSpec()


class _DeploymentSpec(_Wire, frozen=True):
    template: _Template = _Template()


class _Deployment(_Wire, frozen=True):
    spec: _DeploymentSpec = _DeploymentSpec()


class _UntoldError(Exception):
    """A Deployment does not tell the site's settings; `str()` says why."""


@dataclass(frozen=True, slots=True)
class _Process:
    """One of the site's processes whose settings count for a decision."""

    deployment: str
    """How its Deployment's name ends."""
    container: str
    """Name of its container, and the word after `carpool` that starts it."""
    fields: tuple[str, ...]
    """Of `AskSettings`, those that it is told."""
    absent: Mapping[str, str]
    """What variables mean to the process where they are left out, if that is not what they mean to an asker."""


_EXTENDER = _Process(
    "scheduler", "extender", ("policy", "job_policies", "count_peaks", "slots_per_gpu", "queue_order", "conditions"), {}
)
_OPERATOR = _Process("operator", "operator", ("calibration", "share_unmeasured"), {"CARPOOL_CALIBRATION": ""})
"""It keeps nothing where it is told no ConfigMap; an asker looks for the one that the chart makes."""


_SITE = "--site (CARPOOL_SITE): expected NAMESPACE/NAME, such as carpool-system/carpool, or nothing"
_LONGEST_LINE = 80
"""Characters of what a container is started with that are told."""


class Told(NamedTuple):
    """By which settings an answer was found."""

    settings: AskSettings
    note: str
    """Says in a sentence which ones hold, and where they came from."""


def given(context: click.Context) -> frozenset[str]:
    """Return the flags that a command was told, on its line or by the caller's own variables."""
    told = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return frozenset(p.opts[0] for p in context.command.params if context.get_parameter_source(p.name or "") in told)


async def settled(api: KubeApi, asked: AskSettings, flags: frozenset[str], *, predicts: bool) -> Told:
    """Take the site's settings for those that nobody gave.

    Args:
        api: The Kubernetes API, with the asker's rights.
        asked: What the command was told, and defaults.
        flags: Those that were given, which win.
        predicts: Whether what the operator is told counts, too.

    Raises:
        SettingsError: `asked.site` names no installation.
        KubeError: The API server could not be asked.
    """
    processes = (_EXTENDER, _OPERATOR) if predicts else (_EXTENDER,)
    relevant = [one for process in processes for one in _of(process)]
    ours = [_flag(one, asked) for one in relevant if one.flag in flags]
    place = parse_config_map_name(asked.site, _SITE)
    if place is None:
        return Told(asked, _note(ours, [], "", []))
    found, names, theirs, unknown = asked, list[str](), list[str](), dict[str, list[str]]()
    for process in processes:
        name = f"{place[1]}-{process.deployment}"
        try:
            site = await _told_to(api, process, place[0], name)
        except _UntoldError as why:
            unknown.setdefault(str(why), []).append(name)
            continue
        names.append(name)
        open_ = [one for one in _of(process) if one.flag not in flags]
        found = _merged(found, site, [one.path for one in open_])
        theirs += [_flag(one, site) for one in open_ if _value(site, one.path) != one.default]
    doubts = [f"{_deployments(of, place[0])} {why}" for why, of in unknown.items()]
    return Told(found, _note(ours, theirs, _deployments(names, place[0]), doubts))


def _deployments(names: Sequence[str], namespace: str) -> str:
    return f"Deployment{'s' if len(names) > 1 else ''} {' and '.join(names)} in {namespace}" if names else ""


def _of(process: _Process) -> Iterator[Setting]:
    return (one for one in settings_of(AskSettings) if one.path[0] in process.fields)


async def _told_to(api: KubeApi, process: _Process, namespace: str, name: str) -> AskSettings:
    """Read what a process of the site is told. Raises `_UntoldError` where that cannot be known."""
    try:
        deployment = await api.get(DEPLOYMENTS, name, _Deployment, namespace=namespace)
    except Forbidden as error:
        raise _UntoldError("may not be read by you") from error
    except NotFound as error:
        raise _UntoldError("not found (--site names another installation)") from error
    except Invalid as error:
        raise _UntoldError(f"cannot be read: {error}") from error
    container = next((c for c in deployment.spec.template.spec.containers if c.name == process.container), None)
    if container is None:
        raise _UntoldError(f"has no container {process.container}")
    wanted = {one.env for one in _of(process)}
    variables = [one for one in container.env if one.name in wanted]
    elsewhere = [one.name for one in variables if one.value_from is not None or "$(" in one.value]
    elsewhere += ["envFrom"] if container.env_from else []
    if container.line not in ([], [process.container], ["carpool", process.container]):
        elsewhere.append(shorten(" ".join(container.line), _LONGEST_LINE, placeholder=" ..."))
    if elsewhere:
        raise _UntoldError(f"tells settings otherwise than by the value of a variable: {', '.join(elsewhere)}")
    try:
        told = load(AskSettings, {**process.absent, **{one.name: one.value for one in variables}})
        find_policy(told.policy)
        told.conditions.conditions()
    except (SettingsError, UnknownPolicyError) as error:
        raise _UntoldError(f"makes no sense to this version: {error}") from error
    return told


def _merged(settings: Any, others: Any, paths: Sequence[tuple[str, ...]]) -> Any:
    """Return settings with some values of others, by the names of the fields that lead to them."""
    changes = {}
    for name in {path[0] for path in paths}:
        below = [path[1:] for path in paths if path[0] == name and path[1:]]
        mine, its = getattr(settings, name), getattr(others, name)
        changes[name] = _merged(mine, its, below) if below else its
    return dataclasses.replace(settings, **changes)


def _value(settings: Any, path: Sequence[str]) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


def _flag(one: Setting, settings: AskSettings) -> str:
    """Write a setting as the flag that would give it."""
    value = _value(settings, one.path)
    if one.type is bool:
        return one.flag if value else f"--no-{one.flag.removeprefix('--')}"
    return f"{one.flag} {value}" if value != "" else f"{one.flag} ''"


def _note(ours: Sequence[str], theirs: Sequence[str], where: str, unknown: Sequence[str]) -> str:
    told = [f"{' '.join(ours)} as given"] if ours else []
    told += [f"{' '.join(theirs)}, says {where}"] if theirs else []
    others = "the others as shipped" if told else "as shipped"
    told.append(f"{others}, says {where}" if where and not theirs else others)
    told += [f"the site's may differ: {why}" for why in unknown]
    return f"settings: {'; '.join(told)}"
