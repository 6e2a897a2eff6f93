"""What the commands of `carpool node` are told, beside their options."""

import os

import click
from carpool_core import logs
from carpool_core.settings import SettingsError, load

from carpool_deviceplugin.settings import AgentSettings


class InputError(click.ClickException):
    """What was asked for cannot be done here; nothing was changed."""

    exit_code = 2


def node_settings() -> AgentSettings:
    """Read the agent's settings from the environment, and keep logs out of what is printed.

    Raises:
        InputError: A variable holds a value of the wrong kind.
    """
    try:
        settings = load(AgentSettings, os.environ)
    except SettingsError as e:
        raise InputError(str(e)) from e
    logs.configure(settings.log, "node")
    return settings
