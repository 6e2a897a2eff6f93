"""The commands `carpool agent` and `carpool node`."""

import asyncio
import errno
import gc
import itertools
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import structlog
from carpool_core import logs, metrics
from carpool_core.clock import SystemClock, rfc3339
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import KubeError
from carpool_core.products import device_class, product_of
from carpool_core.resources.node import Device
from carpool_core.settings import InputError, LogLevel, MisconfiguredError, SettingsError, click_options, load
from carpool_core.values import DeviceHealth, GpuUuid, NodeName
from prometheus_client import CollectorRegistry

from carpool_deviceplugin.app import build, find_devices, real_devices
from carpool_deviceplugin.canary import device_files, judge, run_client
from carpool_deviceplugin.check import (
    CHECKS,
    Report,
    check_node,
    read_all,
    run_canary,
    run_check,
    store_canary,
    without_driver,
)
from carpool_deviceplugin.files import write_file
from carpool_deviceplugin.gpu import Counters, DeviceError, Devices, NoDevicesError
from carpool_deviceplugin.health import boot_id
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.mig import Instance, MigRefusal, Profile, UnknownProfileError, plan_mig
from carpool_deviceplugin.mig_instances import apply_plan, read_mig_devices, read_table
from carpool_deviceplugin.mps import Mps, MpsHost, MpsProgram, SharedMemory, program_version
from carpool_deviceplugin.nvlib import Identity, UnusableDriverError, load_nvml
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.preflight import HEADER, Host, Outcome, Verdict
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.reconciler import create_gpu_node
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.status import report_unusable


async def serve(settings: AgentSettings) -> None:
    """Run one agent until SIGTERM or SIGINT."""
    clock, registry = SystemClock(), CollectorRegistry()
    try:
        devices = find_devices(settings)
    except NoDevicesError as error:
        if isinstance(error.__cause__, UnusableDriverError):
            await _report(settings, error.__cause__.row)
        raise
    async with connect(settings.kube) as api:
        agent = build(settings, api, clock, devices)
        registry.register(AgentCollector(agent))
        metrics.build_info(registry, "agent", version("carpool"))
        api.metrics = metrics.ApiMetrics(registry)
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


async def _report(settings: AgentSettings, driver: Outcome) -> None:
    """Show in the GpuNode why the agent cannot start, as far as the API server can be reached."""
    node = NodeName(settings.node_name)
    try:
        async with connect(settings.kube) as api:
            rows = list(check_node(driver, settings, Host.find(await create_gpu_node(node, api))))
            await report_unusable(node, api, SystemClock().now(), str(driver), rows)
    except (KubeConfigError, KubeError) as error:
        structlog.get_logger().warning("gpunode not written", error=str(error))


@click.command(short_help="Run the node agent, which manages a node's GPUs.")
@click_options(AgentSettings)
def agent(settings: AgentSettings) -> None:
    """Run the node agent: GPUs, their partitions, the kubelet's device plugin, metrics."""
    logs.configure(settings.log, "agent")
    try:
        asyncio.run(serve(settings))
    except (NoDevicesError, KubeConfigError, SettingsError) as e:
        raise MisconfiguredError(str(e)) from e


def node_settings(lowest: LogLevel | None = None) -> AgentSettings:
    """Read the agent's settings from the environment, and send logs to standard error.

    `lowest` is the level of logs if CARPOOL_LOG_LEVEL is not set: a command that prints a table prints their content.

    Raises:
        InputError: A variable has an invalid value.
    """
    try:
        settings = load(AgentSettings, os.environ)
    except SettingsError as e:
        raise InputError(str(e)) from e
    if lowest is not None and "CARPOOL_LOG_LEVEL" not in os.environ:
        settings = replace(settings, log=replace(settings.log, level=lowest))
    logs.configure(settings.log, "node")
    return settings


def _find_real(context: click.Context, settings: AgentSettings, *, may_write: bool = True) -> NvmlDevices:
    """Return the node's GPUs; tests put fake GPUs or a fake library into the context. Raises NoDevicesError."""
    if isinstance(context.obj, NvmlDevices):
        return context.obj
    return real_devices(settings, load_nvml() if context.obj is None else context.obj, may_write=may_write)


def _open_devices(context: click.Context, settings: AgentSettings) -> NvmlDevices:
    """Return the node's GPUs to read them beside an agent; raises InputError."""
    try:
        return _find_real(context, settings, may_write=False)
    except NoDevicesError as e:
        hint = "; CARPOOL_SIMULATED_GPUS is for the agent, and this command needs NVIDIA's driver"
        raise InputError(f"{e}{hint if settings.simulated_gpus else ''}") from e


def find_gpu(devices: Devices, name: str) -> GpuUuid:
    """Return the GPU with this index, UUID, or UUID of a MIG device on it; raises DeviceError."""
    uuids = devices.uuids
    if name in uuids:
        return GpuUuid(name)
    read: Callable[[GpuUuid], Identity | Device]
    read = devices.identity if isinstance(devices, NvmlDevices) else devices.describe
    by_index = {str(read(uuid).index): uuid for uuid in uuids}  # a GPU that cannot be read leaves a gap
    if name in by_index:
        return by_index[name]
    expected = (
        f"--gpu: expected the index of a GPU that can be read ({', '.join(by_index)}), its UUID, or that of a MIG "
        "device on it, found "
    )
    if not isinstance(devices, NvmlDevices):
        raise DeviceError(f"{expected}{quoted(name)}; the UUIDs are {', '.join(uuids)}")
    for uuid in uuids:
        if devices.identity(uuid).mig_enabled and name in {d.uuid for d in read_mig_devices(devices.session, uuid)}:
            return uuid
    unreadable = f"; {'; '.join(devices.unreadable)}" if devices.unreadable else ""
    raise DeviceError(f"{expected}{quoted(name)}{unreadable}; `carpool node inspect` names them")


@click.group()
def node() -> None:
    """Inspect, check and partition a node's GPUs, without Kubernetes."""


@node.command(short_help="Check the node, an idle GPU and its driver.")
@click.option(
    "--gpu", default="0", show_default=True, help="Index or UUID of an idle GPU, or UUID of a MIG device on it."
)
@click.option("--only", multiple=True, type=click.Choice([*CHECKS]), help="Run this check only; may be repeated.")
@click.option("--mig", is_flag=True, help="Allow creating and destroying MIG instances on this GPU.")
@click.option("--canary", is_flag=True, help="Also run a CUDA program with a memory limit in an MPS daemon.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the report, as JSON.")
@click.pass_context
def check(context: click.Context, gpu: str, only: tuple[str, ...], mig: bool, canary: bool, out: Path | None) -> None:
    """Check what the agent relies on: the node, NVML's answers, MPS daemons and MIG instances. Takes seconds.

    Exit code 1: a row FAILED, so Carpool does not work here. 2: no row failed, but no check of the GPU passed, or an
    option is invalid. 0 otherwise: missing or unknown rows cost features only. With simulated GPUs, or without a
    usable driver, it checks the node alone.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="carpool-check-")
    except OSError as e:
        raise InputError(f"expected a directory for temporary files, found {e}; set TMPDIR to a writable one") from e
    with temporary as directory:
        settings = node_settings(LogLevel.ERROR)
        # A state directory of its own, so that the agent's state stays as it is.
        devices = _find_checked(context, replace(settings, state_dir=Path(directory), mps_host=""))
        if isinstance(devices, Outcome) and not re.fullmatch(r"\d+|(GPU|MIG)-\S+", gpu):
            raise InputError(f"--gpu: expected the index or UUID of a GPU, found {quoted(gpu)}; leave it out for GPU 0")
        is_simulated = not isinstance(devices, Outcome) and devices.simulated
        if is_simulated and (given := [f"--{name}" for name in ("only", "mig", "canary") if context.params[name]]):
            raise InputError(f"{', '.join(given)}: expected a real GPU, found simulated ones; leave it out")
        report = Report(carpool=version("carpool"), checked_at=rfc3339(SystemClock().now()), boot=boot_id())
        uuid, busy = GpuUuid(""), ""
        rows: Iterable[Outcome] = check_node(devices, settings, Host.find())
        try:
            if not isinstance(devices, Outcome):
                uuid = find_gpu(devices, gpu)
                driver = devices.driver if isinstance(devices, NvmlDevices) else ""
                report.product, report.driver, report.gpu = devices.describe(uuid).product, driver, uuid
                click.echo(f"{report.product}{f', driver {driver}' if driver else ''}  {uuid}")
            _write(report, out)  # fails before the first check if the file cannot be written
            if isinstance(devices, NvmlDevices):
                actual = devices.actual(uuid)
                busy = actual.problem or (f"pods {sorted(actual.tenants)}" if actual.tenants else "")
                read_all(devices)
                checks = (run_check(name, devices, uuid, may_divide=mig) for name in CHECKS if name in (only or CHECKS))
                client = run_canary(devices, uuid) if canary and not busy else []
                _store(settings, report, client)
                rows = (row for row in rows if not (canary and row.name.startswith("canary")))
                rows = itertools.chain(() if only else rows, *(() if busy else (checks, client)))
            elif isinstance(devices, Outcome):
                wanted = [*CHECKS, "canary"] if canary else CHECKS
                asked = (name for name in wanted if name in only or name == "canary" or (name == "mig" and mig))
                rows = itertools.chain([devices] if only else rows, map(without_driver, asked))
            click.echo(HEADER)
            for outcome in rows:
                _print(outcome)
                report.outcomes.append(outcome)
            _write(report, out)
        except DeviceError as e:
            raise InputError(str(e)) from e
    if out is not None:
        click.echo(f"written to {quoted(out)}")
    count = Counter(outcome.verdict for outcome in report.outcomes)
    click.echo(", ".join(f"{count[verdict]} {verdict.lower()}" for verdict in Verdict if count[verdict]))
    if busy:
        click.echo(f"Error: GPU {uuid}: expected a healthy and idle GPU, found {busy}; drain it first", err=True)
    passed = {outcome.name for outcome in report.outcomes if outcome.verdict is Verdict.PASSED}
    context.exit(1 if count[Verdict.FAILED] else 0 if is_simulated or passed & CHECKS.keys() else 2)


def _store(settings: AgentSettings, report: Report, client: Sequence[Outcome]) -> None:
    """Store the rows of the canary for the agent's condition Preflight."""
    try:
        store_canary(settings.state_dir, report, client)
    except OSError as e:
        found = f"CARPOOL_STATE_DIR: expected to write to {quoted(settings.state_dir)}, found {e.strerror}"
        click.echo(f"{found}; the agent's GpuNode does not get the rows of the canary", err=True)


def _find_checked(context: click.Context, settings: AgentSettings) -> Devices | Outcome:
    """Return the GPUs to check, or the row that says why the driver or its GPUs cannot be used. Raises InputError."""
    try:
        if settings.simulated_gpus and context.obj is None:
            return find_devices(replace(settings, node_name=settings.node_name or "check"))
        return _find_real(context, settings)
    except UnusableDriverError as e:
        return e.row
    except NoDevicesError as e:
        raise InputError(str(e)) from e


@node.command(short_help="Check, in a container with GPUs, what it got.")
@click.pass_context
def canary(context: click.Context) -> None:
    """Check, in a container that Carpool gave GPUs, that it sees these only, is inside MPS and has its limit."""
    if "CARPOOL_VISIBLE_GPUS" not in os.environ:
        raise InputError("expected a container with GPUs of Carpool, found none; run it in a pod of a GpuTrainingJob")
    rows = judge(run_client(os.environ), os.environ, device_files())
    click.echo(HEADER)
    for row in rows:
        _print(row)
    verdicts = {row.verdict for row in rows}
    context.exit(1 if Verdict.FAILED in verdicts else 0 if Verdict.PASSED in verdicts else 2)


def _print(row: Outcome) -> None:
    for line in row.lines():
        click.echo(line)


_WRITE_ADVICE = {
    errno.ENOENT: "name a file in an existing directory",
    errno.ENOSPC: "free some space, or name a file elsewhere",
}


def _write(report: Report, out: Path | None) -> None:
    if out is None:
        return
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as e:
        raise DeviceError(
            f"--out: expected to write to {quoted(out)}, found {e.strerror}; "
            f"{_WRITE_ADVICE.get(e.errno or 0, 'name a writable file')}"
        ) from e


@node.command()
@click.pass_context
def inspect(context: click.Context) -> None:
    """Print the node's GPUs, their state, and missing requirements."""
    settings = node_settings(LogLevel.ERROR)
    devices = _open_devices(context, settings)
    try:
        for line in inspect_node(devices, settings, Host.find()):
            click.echo(line)
    except DeviceError as e:
        raise InputError(str(e)) from e


def inspect_node(devices: NvmlDevices, settings: AgentSettings, host: Host) -> Iterator[str]:
    """Describe a node, line by line; the arguments are those of `check_node`."""
    session = devices.session
    cuda = session.ask("", session.library.nvmlSystemGetCudaDriverVersion)
    yield f"driver {devices.driver}, CUDA {f'{cuda // 1000}.{cuda % 1000 // 10}' if cuda else 'unknown'}"
    devices.refresh_counters()
    for device in devices.inventory():
        yield ""
        yield from _describe_gpu(devices, device)
    yield ""
    fine = (Verdict.PASSED, Verdict.SKIPPED)
    missing = [row for row in check_node(devices, settings, host) if row.verdict not in fine]
    yield from (f"{row.verdict}: {row}" for row in missing)
    if not missing:
        yield "nothing is missing"


def _describe_gpu(devices: NvmlDevices, device: Device) -> Iterator[str]:
    known = devices.identity(device.uuid)
    yield f"GPU {device.index}: {device.product}  {device.uuid}"
    numa = "" if known.numa_node is None else f", NUMA node {known.numa_node}"
    yield (
        f"  {device.memory_mib:,} MiB ({known.reserved_mib:,} the driver's, "
        f"{device.reserved_mib - known.reserved_mib:,} more kept free), compute capability "
        f"{known.compute_capability}, PCI {known.pci_bus_id}{numa}"
    )
    yield from _describe_product(device)
    if known.nvlink_peers:
        yield f"  NVLink to {', '.join(known.nvlink_peers)}"
    yield f"  modes: {', '.join(device.modes) or 'none'}; now {device.mode or 'no mode set'}"
    yield "  healthy" if device.health is DeviceHealth.HEALTHY else f"  UNHEALTHY: {device.health_message}"
    try:
        if (counters := devices.read(device.uuid).counters) is not None:
            yield from _describe_counters(counters)
        yield from _describe_mig(devices, known)
    except DeviceError as e:
        yield f"  cannot be read: {e}"


def _describe_product(device: Device) -> Iterator[str]:
    product = product_of(device_class(device))
    values = [f"{value:,}" if value else "?" for value in msgspec.structs.astuple(device.figures)]
    yield "  NVML: {} cores, {} MHz, memory {} MHz x {} bits, {} W".format(*values)
    if product is None:
        yield "  prediction: none, because NVML does not report all of these; jobs run alone, or with spec.memory.limit"
        return
    source = "derived from these" if product.is_derived else "published figures"
    yield (
        f"  prediction: {source}: {product.sm_count} SMs, {product.fp32_tflops:.3g} TFLOP/s FP32, "
        f"{product.tensor_tflops:,.4g} in 16 bits, {product.memory_bandwidth_gb_s:,.0f} GB/s"
    )


def _describe_counters(counters: Counters) -> Iterator[str]:
    by_source: dict[str, list[str]] = {}
    for name, source in counters.sources.items():
        by_source.setdefault(source, []).append(name.removeprefix("DCGM_FI_"))
    for source, names in by_source.items():
        yield f"  metrics from {source}: {', '.join(sorted(names))}"


def _describe_mig(devices: NvmlDevices, known: Identity) -> Iterator[str]:
    if not known.mig_capable:
        yield "  MIG: not supported"
        return
    session, uuid = devices.session, known.uuid
    pending = (
        "" if known.mig_enabled == known.mig_pending else f" ({'on' if known.mig_pending else 'off'} after a reset)"
    )
    table = read_table(session, uuid)
    slices = f", {table.memory_slices} memory slices" if table else ", no profiles"
    yield f"  MIG: {'on' if known.mig_enabled else 'off'}{pending}{slices}"
    for profile in table.profiles if table else ():
        places = f"{{{','.join(map(str, profile.starts))}}}:{profile.memory_slices}"
        yield f"    {profile.name:<12} {profile.memory_mib:>7,} MiB, {profile.sm_count} SMs, at {places}"
    if table is None or not known.mig_enabled:
        return
    names = {d.gpu_instance_id: d.uuid for d in read_mig_devices(session, uuid)}
    mig_instances = devices.actual(uuid).mig_instances
    for one in mig_instances:
        creator = "made by the agent" if one.is_managed else "not created by the agent"
        owner = f"made for pod {one.pod_uid}" if one.pod_uid else creator
        device = names.get(one.instance.id, "no compute instance")
        yield f"    {one.instance}  {device}  {owner}, {'in use' if one.is_used else 'idle'}"


_UNASSIGNED_NOTE = (
    "note: Carpool's agent creates its own instances and assigns none of these to a pod; "
    "--to mig: --destroy-others removes them"
)


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
    try:
        names = _profile_names(target)
        devices = _open_devices(context, node_settings())
        _plan(devices, find_gpu(devices, gpu), names, target, is_applied=is_applied, may_destroy=destroy_others)
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
    if problem := MpsProgram.problem():
        raise InputError(problem)
    with listening(socket, state_dir, shared) as host:
        host.serve_forever()


def listening(socket: Path, state_dir: Path, shared: SharedMemory | None = None) -> MpsHost:
    """Listen on the socket of the MPS host; raises InputError."""
    try:
        write_file(state_dir / "mps" / "version", program_version().encode())
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


def _profile_names(target: str) -> list[str]:
    kind, colon, names = target.strip().casefold().partition(":")
    if (kind, colon) == ("mig", ":"):
        return [name.strip() for name in names.split(",") if name.strip()]
    expected = f"expected --to mig:PROFILE[,PROFILE…], found {quoted(target)}"
    if all(re.fullmatch(r"\d+g\.\d+gb\S*", name.strip()) for name in kind.split(",")):
        raise DeviceError(f"{expected}; did you mean {quoted(f'mig:{kind}')}")
    raise DeviceError(f"{expected}; other modes need no preparation")


def _plan(
    devices: NvmlDevices, uuid: GpuUuid, names: Iterable[str], target: str, *, is_applied: bool, may_destroy: bool
) -> None:
    session, known = devices.session, devices.identity(uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    if table is None:
        raise DeviceError(f"GPU {uuid}: expected a GPU with MIG, found {known.product}")
    try:
        wanted = [table.find(name) for name in names]
    except UnknownProfileError as e:
        raise DeviceError(f"GPU {uuid}: {e}") from e
    mig_instances = devices.actual(uuid).mig_instances
    # An instance of a pod that has not started yet counts as in use.
    in_use = {p.instance.id for p in mig_instances if p.is_used or p.pod_uid}
    found = plan_mig(table, [p.instance for p in mig_instances], in_use, wanted)
    if isinstance(found, MigRefusal):
        raise DeviceError(f"GPU {uuid}: {found.message}")
    if not found.is_empty and not known.mig_enabled:
        note = (
            f"MIG is switched off. Switching it on needs an idle GPU, and on Ampere a reset: nvidia-smi -i "
            f"{known.index} -mig 1"
        )
        if is_applied:
            raise DeviceError(f"GPU {uuid}: expected MIG to be switched on, found: {note}")
        click.echo(f"before: {note}")
    others = {p.instance.id for p in mig_instances if not p.is_managed}
    lost = [instance for instance in found.destroyed if instance.id in others]
    if is_applied and lost and not may_destroy:
        raise DeviceError(
            f"GPU {uuid}: expected to destroy only instances of Carpool's agent, found instances of others: "
            f"{', '.join(map(str, lost))}; if they are not needed, add --destroy-others"
        )
    for instance in found.kept:
        click.echo(f"stays: {instance}, {'in use' if instance.id in in_use else 'as wanted'}")
    if found.created:
        click.echo(_UNASSIGNED_NOTE)
    if found.is_empty:
        click.echo("nothing to do" if known.mig_enabled else "nothing to do: MIG is switched off")
    elif is_applied:
        try:
            apply_plan(session, uuid, found, time.monotonic, taken=click.echo)
        except DeviceError as e:
            raise click.ClickException(str(e)) from e  # exit code 1: the GPU refused a step
    else:
        for instance in found.destroyed:
            note = " (not created by the agent: takes --destroy-others)" if instance in lost else ""
            click.echo(f"would destroy {instance}{note}")
        for placement in found.created:
            click.echo(f"would create {placement}")
    if not is_applied:
        return
    if more := _surplus(found.kept, wanted):
        raise click.ClickException(
            f"GPU {uuid}: expected {quoted(target)}, found more, in use: {', '.join(map(str, more))}"
        )
    click.echo("done")


def _surplus(kept: Iterable[Instance], wanted: Iterable[Profile]) -> list[Instance]:
    """Return the kept instances that exceed the wanted ones."""
    left, surplus = Counter(wanted), list[Instance]()
    for instance in kept:
        left[instance.placement.profile] -= 1
        if left[instance.placement.profile] < 0:
            surplus.append(instance)
    return surplus
