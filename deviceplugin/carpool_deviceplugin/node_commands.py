"""`carpool node`: a node's GPUs, without Kubernetes."""

import time
from pathlib import Path

import click
from carpool_core.values import GpuUuid

from carpool_deviceplugin.app import real_devices
from carpool_deviceplugin.battery.command import battery
from carpool_deviceplugin.devices import NoDevicesError
from carpool_deviceplugin.gpu import DeviceError
from carpool_deviceplugin.inspection import inspect_node
from carpool_deviceplugin.mig.planner import MigRefusal, plan_mig
from carpool_deviceplugin.mig.profiles import MigTable, Profile, UnknownProfileError
from carpool_deviceplugin.mps import Mps
from carpool_deviceplugin.mps_host import MpsHost
from carpool_deviceplugin.mps_program import MpsProgram
from carpool_deviceplugin.node_input import InputError, node_settings
from carpool_deviceplugin.nvidia_cdi import NvidiaCdi
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.nvml.library import NvmlLibrary, installed
from carpool_deviceplugin.nvml.mig import read_table
from carpool_deviceplugin.nvml.mig_run import run_plan
from carpool_deviceplugin.settings import AgentSettings

_PREFIX = "mig:"


def _devices(context: click.Context, settings: AgentSettings) -> NvmlDevices:
    """The node's GPUs; tests put others, or another library, into the context."""
    if isinstance(context.obj, NvmlDevices):
        return context.obj
    library: NvmlLibrary = installed() if context.obj is None else context.obj
    try:
        return real_devices(settings, library, may_write=False)
    except NoDevicesError as e:
        raise InputError(str(e)) from e


@click.group()
def node() -> None:
    """Look at a node's GPUs, and divide them, without Kubernetes."""


node.add_command(battery)


@node.command()
@click.pass_context
def inspect(context: click.Context) -> None:
    """Print what the agent sees on this node, and what it could do."""
    settings = node_settings()
    devices = _devices(context, settings)
    try:
        for line in inspect_node(devices, NvidiaCdi((Path("/etc/cdi"), settings.cdi_dir))):
            click.echo(line)
    except DeviceError as e:
        raise InputError(str(e)) from e


@node.command(short_help="Print the steps that divide a GPU; --apply takes them.")
@click.option("--gpu", type=int, required=True, help="Index of the GPU, as `carpool node inspect` prints it.")
@click.option("--to", "target", required=True, help="What it should be: mig:PROFILE[,PROFILE…]; mig: alone for none.")
@click.option("--apply", "is_applied", is_flag=True, help="Take the steps; otherwise they are only printed.")
@click.pass_context
def plan(context: click.Context, gpu: int, target: str, is_applied: bool) -> None:
    """Print the steps that divide a GPU as wanted, touching nothing in use; --apply takes them."""
    devices = _devices(context, node_settings())
    try:
        _plan(devices, _gpu(devices, gpu), target, is_applied)
    except (DeviceError, UnknownProfileError) as e:
        raise InputError(str(e)) from e


@node.command("mps-host", short_help="Start MPS daemons for the agent.")
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="Where the agent asks for daemons.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=AgentSettings().state_dir,
    envvar="CARPOOL_STATE_DIR",
    show_default=True,
    show_envvar=True,
    help="The agent's state directory.",
)
def mps_host(socket: Path, state_dir: Path) -> None:
    """Start MPS daemons for the agent, in a container that outlives the agent's."""
    node_settings()
    if lacking := MpsProgram.missing():
        raise InputError(f"expected what MPS takes, found missing: {lacking}")
    with listening(socket, state_dir) as host:
        host.serve_forever()


def listening(socket: Path, state_dir: Path) -> MpsHost:
    """Open the socket on which daemons are asked for; raises InputError."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--state-dir: expected a directory, or to make one, found {e}") from e
    try:
        return MpsHost(socket, Mps(MpsProgram(), state_dir / "mps"))
    except OSError as e:
        raise InputError(f"--socket: expected to listen on {socket}, found {e}; its directory must be there") from e


def _gpu(devices: NvmlDevices, index: int) -> GpuUuid:
    if not 0 <= index < len(devices.uuids):
        raise DeviceError(f"expected a GPU from 0 to {len(devices.uuids) - 1}, found {index}")
    return devices.uuids[index]


def _wanted(table: MigTable, target: str) -> list[Profile]:
    if not target.startswith(_PREFIX):
        raise DeviceError(
            f"expected --to {_PREFIX}PROFILE[,PROFILE…], found {target!r}; other modes need no preparation"
        )
    return [table.find(name.strip()) for name in target.removeprefix(_PREFIX).split(",") if name.strip()]


def _plan(devices: NvmlDevices, uuid: GpuUuid, target: str, is_applied: bool) -> None:
    session, known = devices.session, devices.identity(uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    if table is None:
        raise DeviceError(f"GPU {uuid}: expected a GPU with MIG, found {known.product}")
    wanted = _wanted(table, target)
    parts = devices.actual(uuid).parts
    in_use = {p.instance.id for p in parts if p.is_used or p.pod_uid}  # a promise counts before its pod has begun
    found = plan_mig(table, [p.instance for p in parts], in_use, wanted)
    if isinstance(found, MigRefusal):
        raise DeviceError(f"GPU {uuid}: {found.message}")
    for step in found.steps:
        click.echo(str(step))
    if not found.steps:
        click.echo("nothing to do")
    if not known.mig_enabled:
        note = (
            f"MIG is switched off. Switching it on takes a GPU that nobody uses, and on Ampere a reset: nvidia-smi -i "
            f"{known.index} -mig 1"
        )
        if is_applied:
            raise DeviceError(note)
        click.echo(f"before: {note}")
    elif is_applied:
        try:
            run_plan(session, uuid, table, found, time.monotonic)
        except DeviceError as e:
            raise click.ClickException(str(e)) from e  # not the input: the GPU has said no, half-way or at once
        click.echo("done")
