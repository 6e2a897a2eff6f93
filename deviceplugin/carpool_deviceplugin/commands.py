"""The commands `carpool agent` and `carpool node`."""

import asyncio
import gc
import signal
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import click
import structlog
from carpool_core import logs, metrics
from carpool_core.clock import SystemClock
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.settings import MisconfiguredError, SettingsError, click_options
from carpool_core.values import GpuUuid
from prometheus_client import CollectorRegistry

from carpool_deviceplugin.app import build, find_devices, real_devices
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.check import check
from carpool_deviceplugin.gpu import DeviceError, NoDevicesError
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.mig import (
    Create,
    Destroy,
    Instance,
    MigRefusal,
    MigTable,
    Profile,
    UnknownProfileError,
    plan_mig,
)
from carpool_deviceplugin.mig_instances import apply_plan, read_table
from carpool_deviceplugin.mps import Mps, MpsHost, MpsProgram, SharedMemory
from carpool_deviceplugin.nvlib import NvmlLibrary, load_nvml
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.preflight import InputError, find_gpu, inspect_node, no_gpus, node_settings
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.settings import AgentSettings


async def serve(settings: AgentSettings) -> None:
    """Run one agent until SIGTERM or SIGINT."""
    clock, registry = SystemClock(), CollectorRegistry()
    devices = find_devices(settings)
    async with connect(settings.kube) as api:
        agent = build(settings, api, clock, devices)
        registry.register(AgentCollector(agent))
        metrics.build_info(registry, "agent", version("carpool"))
        server = await metrics.serve(registry, settings.metrics_port, readiness=agent.unready)
        structlog.get_logger().info(
            "agent started", gpus=len(devices.uuids), simulated=devices.simulated, metrics_port=server.port
        )
        gc.collect()
        gc.freeze()  # the collector skips the objects of the start, which live as long as the agent
        running = asyncio.ensure_future(agent.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            structlog.get_logger().info("agent stopped")
        finally:
            await server.close()


@click.command(short_help="Run the node agent, which looks after a node's GPUs.")
@click_options(AgentSettings)
def agent(settings: AgentSettings) -> None:
    """Run the node agent: GPUs, their partitions, the kubelet's device plugin, metrics."""
    logs.configure(settings.log, "agent")
    try:
        asyncio.run(serve(settings))
    except (NoDevicesError, KubeConfigError, SettingsError) as e:
        raise MisconfiguredError(str(e)) from e


_UNASSIGNED_NOTE = (
    "note: Carpool's agent creates its own instances and assigns none of these to a pod; "
    "--to mig: --destroy-others removes them"
)


def _devices(context: click.Context, settings: AgentSettings) -> NvmlDevices:
    """Return the node's GPUs; tests put fake GPUs or a fake library into the context."""
    if isinstance(context.obj, NvmlDevices):
        return context.obj
    library: NvmlLibrary = load_nvml() if context.obj is None else context.obj
    try:
        return real_devices(settings, library, may_write=False)
    except NoDevicesError as e:
        raise no_gpus(e, settings) from e


@click.group()
def node() -> None:
    """Inspect and partition a node's GPUs, without Kubernetes."""


node.add_command(check)


@node.command()
@click.pass_context
def inspect(context: click.Context) -> None:
    """Print the node's GPUs, their state, and missing requirements."""
    settings = node_settings()
    devices = _devices(context, settings)
    try:
        cdi = NvidiaCdi((Path("/etc/cdi"), settings.cdi_dir))
        for line in inspect_node(devices, cdi, mps_host=settings.mps_host):
            click.echo(line)
    except DeviceError as e:
        raise InputError(str(e)) from e


@node.command(short_help="Print the steps that partition a GPU; --apply runs them.")
@click.option(
    "--gpu",
    required=True,
    help="Index or UUID of the GPU, or UUID of a MIG device on it, as `carpool node inspect` prints them.",
)
@click.option("--to", "target", required=True, help="Wanted instances: mig:PROFILE[,PROFILE…]; mig: alone for none.")
@click.option("--apply", "is_applied", is_flag=True, help="Run the steps; otherwise they are only printed.")
@click.option("--destroy-others", is_flag=True, help="Also destroy idle instances that Carpool's agent did not make.")
@click.pass_context
def plan(context: click.Context, gpu: str, target: str, is_applied: bool, destroy_others: bool) -> None:
    """Print the steps that create the wanted MIG instances; --apply runs them. Instances in use stay."""
    devices = _devices(context, node_settings())
    try:
        _plan(devices, find_gpu(devices, gpu), target, is_applied=is_applied, may_destroy=destroy_others)
    except DeviceError as e:
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
@click.option("--shm-dir", type=click.Path(path_type=Path), help="Where daemons and clients share memory.")
@click.option(
    "--shm-dir-on-node",
    type=click.Path(path_type=Path),
    help="The same directory as the node sees it; both of them, or none: then it is under --state-dir.",
)
def mps_host(socket: Path, state_dir: Path, shm_dir: Path | None, shm_dir_on_node: Path | None) -> None:
    """Start MPS daemons for the agent, in a container that outlives the agent's."""
    node_settings()
    if (shm_dir is None) != (shm_dir_on_node is None):
        raise InputError("expected both --shm-dir and --shm-dir-on-node, or none of them, found one; add the other")
    shared = SharedMemory(shm_dir, shm_dir_on_node) if shm_dir and shm_dir_on_node else None
    if lacking := MpsProgram.missing():
        raise InputError(f"expected what MPS takes, found missing: {lacking}")
    with listening(socket, state_dir, shared) as host:
        host.serve_forever()


def listening(socket: Path, state_dir: Path, shared: SharedMemory | None = None) -> MpsHost:
    """Listen on the socket of the MPS host; raises InputError."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(
            f"--state-dir: expected a directory at {quoted(state_dir)}, found {e.strerror}; name another"
        ) from e
    try:
        return MpsHost(socket, Mps(MpsProgram(), state_dir / "mps", shared))
    except OSError as e:
        raise InputError(
            f"--socket: expected to listen on {quoted(socket)}, found {e.strerror or e}; name another one"
        ) from e


def _wanted(table: MigTable, target: str) -> list[Profile]:
    kind, colon, names = target.strip().casefold().partition(":")
    if (kind, colon) == ("mig", ":"):
        return [table.find(name.strip()) for name in names.split(",") if name.strip()]
    expected = f"expected --to mig:PROFILE[,PROFILE…], found {quoted(target)}"
    if all(name.strip() in table.by_name for name in kind.split(",")):
        raise DeviceError(f"{expected}; did you mean {quoted(f'mig:{kind}')}")
    raise DeviceError(f"{expected}; other modes need no preparation")


def _plan(devices: NvmlDevices, uuid: GpuUuid, target: str, *, is_applied: bool, may_destroy: bool) -> None:
    session, known = devices.session, devices.identity(uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    if table is None:
        raise DeviceError(f"GPU {uuid}: expected a GPU with MIG, found {known.product}")
    try:
        wanted = _wanted(table, target)
    except UnknownProfileError as e:
        raise DeviceError(f"GPU {uuid}: {e}") from e
    mig_instances = devices.actual(uuid).mig_instances
    # An instance of a pod that has not started yet counts as in use.
    in_use = {p.instance.id for p in mig_instances if p.is_used or p.pod_uid}
    found = plan_mig(table, [p.instance for p in mig_instances], in_use, wanted)
    if isinstance(found, MigRefusal):
        raise DeviceError(f"GPU {uuid}: {found.message}")
    if found.steps and not known.mig_enabled:
        note = (
            f"MIG is switched off. Switching it on needs an idle GPU, and on Ampere a reset: nvidia-smi -i "
            f"{known.index} -mig 1"
        )
        if is_applied:
            raise DeviceError(f"GPU {uuid}: expected MIG to be switched on, found: {note}")
        click.echo(f"before: {note}")
    others = {p.instance.id for p in mig_instances if not p.is_managed}
    lost = [s.instance for s in found.steps if isinstance(s, Destroy) and s.instance.id in others]
    if is_applied and lost and not may_destroy:
        raise DeviceError(
            f"GPU {uuid}: expected to destroy only instances of Carpool's agent, found instances of others: "
            f"{', '.join(map(str, lost))}; if they are not needed, add --destroy-others"
        )
    for instance in found.kept:
        click.echo(f"stays: {instance}, {'in use' if instance.id in in_use else 'as wanted'}")
    if any(isinstance(step, Create) for step in found.steps):
        click.echo(_UNASSIGNED_NOTE)
    if not found.steps:
        click.echo("nothing to do" if known.mig_enabled else "nothing to do: MIG is switched off")
    elif is_applied:
        try:
            apply_plan(session, uuid, table, found, time.monotonic, taken=lambda step: click.echo(str(step)))
        except DeviceError as e:
            raise click.ClickException(str(e)) from e  # exit code 1: the GPU refused a step
    else:
        for step in found.steps:
            is_lost = isinstance(step, Destroy) and step.instance in lost
            click.echo(f"would {step}{' (not created by the agent: takes --destroy-others)' if is_lost else ''}")
    if not is_applied:
        return
    if more := _beyond(found.kept, wanted):
        raise click.ClickException(
            f"GPU {uuid}: expected {quoted(target)}, found more, in use: {', '.join(map(str, more))}"
        )
    click.echo("done")


def _beyond(kept: Iterable[Instance], wanted: Iterable[Profile]) -> list[Instance]:
    """Return the kept instances that exceed the wanted ones."""
    left, without_instances = Counter(wanted), list[Instance]()
    for instance in kept:
        left[instance.placement.profile] -= 1
        if left[instance.placement.profile] < 0:
            without_instances.append(instance)
    return without_instances
