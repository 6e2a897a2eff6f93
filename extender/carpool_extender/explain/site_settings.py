"""The settings that a cluster decides by, read from the ConfigMap that the chart writes, with the caller's rights."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
import msgspec
from carpool_core.kube.api import CONFIG_MAPS, KubeApi
from carpool_core.kube.errors import Forbidden, Invalid, NotFound
from carpool_core.settings import Setting, SettingsError, load, settings_of
from carpool_predictor.calibration.store import parse_config_map_name
from click.core import ParameterSource

from carpool_extender.framework.scores import UnknownPolicyError, find_policy
from carpool_extender.settings import AskSettings

_SITE = "--site (CARPOOL_SITE): expected NAMESPACE/NAME, such as carpool-system/carpool, or nothing"
_OWN = ("site", "kube")
"""Fields of `AskSettings` that only the caller sets."""


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] = {}


class SiteSettings(NamedTuple):
    """The settings that hold for an answer."""

    settings: AskSettings
    note: str
    """A sentence with the settings that differ from the defaults, and their source."""


def given(context: click.Context) -> frozenset[str]:
    """Return the flags that the caller set, on the command line or by environment variables."""
    sources = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return frozenset(p.opts[0] for p in context.command.params if context.get_parameter_source(p.name or "") in sources)


async def read_site_settings(api: KubeApi, asked: AskSettings, flags: frozenset[str]) -> SiteSettings:
    """Return the caller's settings, and the site's for all that the caller did not set.

    Args:
        api: The Kubernetes API, with the caller's rights.
        asked: The caller's settings and defaults.
        flags: Flags that the caller set; these win.

    Raises:
        SettingsError: `asked.site` is not a NAMESPACE/NAME.
        KubeError: The API server could not be reached.
    """
    decisive = [one for one in settings_of(AskSettings) if one.path[0] not in _OWN]
    ours = [_flag(one, asked) for one in decisive if one.flag in flags]
    installation = parse_config_map_name(asked.site, _SITE)
    if installation is None:
        return SiteSettings(asked, _note(ours, [], "", ""))
    namespace, name = installation[0], f"{installation[1]}-settings"
    where = f"ConfigMap {name} in {namespace}"
    try:
        found = await api.get(CONFIG_MAPS, name, _ConfigMap, namespace=namespace)
        merged = load(
            AskSettings, {**found.data, **{one.env: _text(asked, one) for one in decisive if one.flag in flags}}
        )
        find_policy(merged.policy)
        merged.conditions.conditions()
    except Forbidden:
        return SiteSettings(asked, _note(ours, [], "", f"you may not read {where}"))
    except NotFound:
        return SiteSettings(asked, _note(ours, [], "", f"{where} does not exist (--site names another installation)"))
    except (Invalid, SettingsError, UnknownPolicyError) as error:
        return SiteSettings(asked, _note(ours, [], "", f"{where} is invalid for this version: {error}"))
    changed = [one for one in decisive if one.flag not in flags and _value(merged, one.path) != one.default]
    merged = dataclasses.replace(merged, site=asked.site, kube=asked.kube)
    return SiteSettings(merged, _note(ours, [_flag(one, merged) for one in changed], where, ""))


def _value(settings: Any, path: Sequence[str]) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


def _text(settings: AskSettings, one: Setting) -> str:
    """Return the value of a setting as its environment variable has it; empty if it is unset."""
    value = _value(settings, one.path)
    return "" if value is None else str(value)


def _flag(one: Setting, settings: AskSettings) -> str:
    """Return a setting as the flag that would set it."""
    value = _value(settings, one.path)
    if one.type is bool:
        return one.flag if value else f"--no-{one.flag.removeprefix('--')}"
    return f"{one.flag} {value}" if value != "" else f"{one.flag} ''"


def _note(ours: Sequence[str], theirs: Sequence[str], where: str, unknown: str) -> str:
    parts = [f"{' '.join(ours)} as given"] if ours else []
    parts += [f"{' '.join(theirs)} by {where}"] if theirs else []
    others = "the others as shipped" if parts else "as shipped"
    parts.append(f"{others}, by {where}" if where and not theirs else others)
    parts += [f"the site's may differ: {unknown}"] if unknown else []
    return f"settings: {'; '.join(parts)}"
