"""What the commands of `carpool node` are told, beside their options."""

import os

import click
from carpool_core import logs
from carpool_core.settings import SettingsError, load
from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.nvml.mig import read_mig_devices
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.settings import AgentSettings

_LONGEST_INDEX = 4
"""In digits."""


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


def no_gpus(error: NoDevicesError, settings: AgentSettings) -> InputError:
    """Say why there are no GPUs to a command that only hardware has something for."""
    hint = "; CARPOOL_SIMULATED_GPUS is for the agent, and this command needs NVIDIA's driver"
    return InputError(f"{error}{hint if settings.simulated_gpus else ''}")


def find_gpu(devices: NvmlDevices, said: str) -> GpuUuid:
    """Find the GPU that is meant: by its index, its UUID, or the UUID of a MIG device on it; raises DeviceError."""
    uuids = devices.uuids
    if said in uuids:
        return GpuUuid(said)
    if said.isdecimal() and len(said) <= _LONGEST_INDEX and int(said) < len(uuids):
        return uuids[int(said)]
    if said.startswith("MIG-"):
        for uuid in uuids:
            if devices.identity(uuid).mig_enabled and said in {d.uuid for d in read_mig_devices(devices.session, uuid)}:
                return uuid
    raise DeviceError(
        f"--gpu: expected a GPU from 0 to {len(uuids) - 1}, its UUID, or that of a MIG device on it, found "
        f"{quoted(said)}; `carpool node inspect` names them"
    )
