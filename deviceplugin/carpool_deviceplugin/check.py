"""`carpool node check`: tests what the agent relies on, NVML, MPS and MIG. Needs no workload and no Kubernetes."""

import ctypes
import errno
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import pynvml
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode

from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.gpu import DeviceError, NoDevicesError
from carpool_deviceplugin.health import XidWatch
from carpool_deviceplugin.mig import MigRefusal, plan_mig
from carpool_deviceplugin.mig_instances import apply_plan, read_instances, read_mig_devices, read_table
from carpool_deviceplugin.mps import Mps, MpsProgram
from carpool_deviceplugin.nvlib import (
    Handle,
    NvmlError,
    NvmlLibrary,
    Session,
    list_gpus,
    list_samples,
    load_nvml,
    read_identity,
    read_processes,
    read_telemetry,
)
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.preflight import InputError, find_gpu, no_gpus, node_settings
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.sampling import AHEAD_US, GpmSampler

T = TypeVar("T")
Rule = Callable[[Session], Iterator[str]]
"""Yields one sentence for each deviation."""
NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"
_MAX_PID = 2**22
"""PID_MAX_LIMIT of the Linux kernel on 64-bit machines."""
_FIRST_STAMP_US = 1_500_000_000_000_000
"""A stamp before 2017 has another unit or another epoch."""
_MAX_EXAMPLES = 3
_MAX_DEVIATIONS = 10
_NO_LINK, _NO_PROFILE, _NO_SENSOR = 99, 99, 99


class SkippedError(Exception):
    """The check cannot run here; `str()` names the missing requirement."""


class FailedError(DeviceError):
    """The GPU deviates; `str()` says what was expected and what was found."""


def check_identity(session: Session) -> Iterator[str]:
    """UUIDs, indices and sizes are plausible."""
    uuids = list_gpus(session)
    if not uuids or len(set(uuids)) != len(uuids):
        yield f"expected GPUs with a UUID each, found {uuids}"
    for index, uuid in enumerate(uuids):
        known = read_identity(session, uuid)
        rules = {
            "the UUID that it was asked by": known.uuid == uuid and uuid.startswith("GPU-"),
            f"index {index}": known.index == index,
            "more than 1 GiB": known.memory_mib > 1024,
            "less than a quarter of it reserved": 0 <= known.reserved_mib < known.memory_mib / 4,
            "compute capability 5.0 or more": float(known.compute_capability) >= 5,
            "a PCI bus ID with a domain": known.pci_bus_id.count(":") == 2,
            "a power limit from 5 to 5,000 W": known.power_limit_w is None or 5 < known.power_limit_w < 5000,
            "NVLinks to others only": known.pci_bus_id not in known.nvlink_peers,
            "MIG switched on only where there is MIG": known.mig_capable or not known.mig_enabled,
        }
        yield from _unmet(rules, known)


def check_telemetry(session: Session) -> Iterator[str]:
    """Counters are within physical bounds, and energy never falls."""
    for uuid in list_gpus(session):
        known, first, second = read_identity(session, uuid), *(read_telemetry(session, uuid) for _ in range(2))
        for seen in (first, second):
            rules = {
                "no more memory than there is": seen.memory_used_mib + seen.memory_free_mib <= known.memory_mib,
                "a temperature from -20 to 130 C": seen.temperature_c is None or -20 < seen.temperature_c < 130,
                "a power from 0 to 5,000 W": seen.power_w is None or 0 < seen.power_w < 5000,
                "a utilization of 0 to 100%": seen.gpu_util_percent is None or 0 <= seen.gpu_util_percent <= 100,
            }
            yield from _unmet(rules, seen)
        if first.energy_mj is not None and (second.energy_mj is None or second.energy_mj < first.energy_mj):
            yield f"expected an energy counter that never falls, found {first.energy_mj}, then {second.energy_mj}"


def check_processes(session: Session) -> Iterator[str]:
    """Processes have valid IDs, plausible memory and no duplicates; MIG instance IDs appear only with MIG on."""
    for uuid in list_gpus(session):
        known, found = read_identity(session, uuid), read_processes(session, uuid)
        for p in found:
            rules = {
                "a process ID": 0 < p.pid <= _MAX_PID,
                "no more memory than there is, or none told": 0 <= (p.memory_mib or 0) <= known.memory_mib,
                "an instance only where MIG is switched on": p.gpu_instance_id is None or known.mig_enabled,
            }
            yield from _unmet(rules, p)
        yield from _duplicates(f"GPU {uuid}: expected each process once", found, lambda p: (p.pid, p.gpu_instance_id))


def check_utilization(session: Session, wall: Callable[[], float] = time.time) -> Iterator[str]:
    """Utilization samples are percentages with stamps of the node's clock; not every GPU supports them."""
    for uuid in list_gpus(session):
        found = list_samples(session, uuid, 0) or ()
        latest = round(1e6 * wall()) + AHEAD_US
        for pid, at_us, sm_percent in found:
            rules = {
                "a process ID": pid <= _MAX_PID,
                "0 to 100% of the SMs": sm_percent <= 100,
                "microseconds since 1970, and none to come": _FIRST_STAMP_US < at_us <= latest,
            }
            yield from _unmet(rules, (pid, at_us, sm_percent))
        yield from _duplicates(f"GPU {uuid}: expected each process once at each moment", found, lambda one: one[:2])


def check_gpm(session: Session) -> Iterator[str]:
    """One GPM sample gives no metrics, two give ratios."""
    gpm = GpmSampler(session)
    for uuid in list_gpus(session):
        if gpm.sample(uuid) is not None:
            yield "expected nothing of a single sample, found something"
        found = gpm.sample(uuid)
        if found is not None and found.sm is not None and not 0 <= found.sm <= 1:
            yield f"expected an SM activity of 0 to 1, found {found.sm}"
        gpm.forget(uuid)


def check_xids(session: Session) -> Iterator[str]:
    """XID events can be registered and polled without waiting."""
    uuids = list_gpus(session)
    watch = XidWatch(session, uuids)
    for uuid in uuids:
        yield from (f"expected XIDs from 1 up, found {xid}" for xid in watch.seen(uuid) if xid <= 0)


def check_mig_profiles(session: Session) -> Iterator[str]:
    """MIG profiles have names, and placements within the GPU."""
    for uuid in list_gpus(session):
        known = read_identity(session, uuid)
        table = read_table(session, uuid) if known.mig_capable else None
        if (table is not None) != known.mig_capable:
            yield f"expected MIG profiles where there is MIG, found {table}"
        for profile in table.profiles if table else ():
            rules = {
                "a name such as 3g.20gb": "g." in profile.name and not profile.name.startswith("MIG "),
                "less memory than the GPU has": profile.memory_mib < known.memory_mib,
                "places within the GPU": max(profile.starts) + profile.memory_slices
                <= (table.memory_slices if table else 0),
            }
            yield from _unmet(rules, profile)


def check_unknown_gpu(session: Session) -> Iterator[str]:
    """An unknown UUID is an error that names the UUID."""
    try:
        session.handle(NO_GPU)
    except NvmlError as e:
        if NO_GPU not in str(e):
            yield f"expected an error that names the GPU, found {e}"
    else:
        yield f"expected no GPU {NO_GPU}, found one"


CONTRACT: Sequence[Rule] = (
    check_identity,
    check_telemetry,
    check_processes,
    check_utilization,
    check_gpm,
    check_xids,
    check_mig_profiles,
    check_unknown_gpu,
)
"""Rules that every NVML, real or fake, keeps. They only read."""


def _duplicates(expected: str, found: Sequence[T], key: Callable[[T], Hashable]) -> Iterator[str]:
    seen, again = set[Hashable](), list[T]()
    for one in found:
        if (name := key(one)) in seen:
            again.append(one)
        seen.add(name)
    if again:
        few = ", ".join(map(str, again[:_MAX_EXAMPLES])) + " …" * (len(again) > _MAX_EXAMPLES)
        yield f"{expected}, found {len(again):,} duplicates among {len(found):,}: {few}"


def _unmet(rules: Mapping[str, bool], found: object) -> Iterator[str]:
    yield from (f"expected {rule}, found {found}" for rule, holds in rules.items() if not holds)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG profile as the driver describes it."""

    name: str
    id: int
    compute_slices: int
    memory_slices: int
    starts: list[int]
    memory_mib: int
    sm_count: int


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one GPU, which the fake of its product must give as well."""

    product: str
    driver: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    power_limit_w: float | None
    mig: list[Profile]
    codes: dict[str, int]
    """NVML's return code of each query; 0 is success."""


def record(session: Session, uuid: GpuUuid) -> Recording:
    """Query everything that a fake must answer alike. Only reads; raises NvmlError if the GPU cannot be read."""
    known = read_identity(session, uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    return Recording(
        product=known.product,
        driver=session.ask("", session.library.nvmlSystemGetDriverVersion) or "",
        memory_mib=known.memory_mib,
        reserved_mib=known.reserved_mib,
        compute_capability=known.compute_capability,
        power_limit_w=known.power_limit_w,
        mig=[
            Profile(
                name=p.name,
                id=p.id,
                compute_slices=p.compute_slices,
                memory_slices=p.memory_slices,
                starts=list(p.starts),
                memory_mib=p.memory_mib,
                sm_count=p.sm_count,
            )
            for p in (table.profiles if table else ())
        ],
        codes={name: _return_code(ask) for name, ask in _questions(session.library, session.handle(uuid))},
    )


def _return_code(ask: Callable[[], Any]) -> int:
    try:
        ask()
    except pynvml.NVMLError as e:
        return int(e.value)
    return 0


def _questions(library: NvmlLibrary, handle: Handle) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield queries that some or all GPUs refuse, each with its name."""
    yield "NUMA node", lambda: library.nvmlDeviceGetNumaNodeId(handle)
    yield "MIG mode", lambda: library.nvmlDeviceGetMigMode(handle)
    yield "remapped rows", lambda: library.nvmlDeviceGetRemappedRows(handle)
    yield (
        "uncorrectable ECC errors",
        lambda: library.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
    )
    yield "energy", lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle)
    yield "reasons of clocks", lambda: library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    yield "a sensor of temperature that there is none of", lambda: library.nvmlDeviceGetTemperature(handle, _NO_SENSOR)
    yield "what processes did in the future", lambda: library.nvmlDeviceGetProcessUtilization(handle, 2**62)
    yield "the first NVLink", lambda: library.nvmlDeviceGetNvLinkState(handle, 0)
    yield "an NVLink that there is none of", lambda: library.nvmlDeviceGetNvLinkState(handle, _NO_LINK)
    yield "an unknown UUID", lambda: library.nvmlDeviceGetHandleByUUID(NO_GPU)
    yield "an index beyond the last", lambda: library.nvmlDeviceGetHandleByIndex(library.nvmlDeviceGetCount())
    yield "XIDs where there are none", lambda: _wait(library)
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        yield f"MIG profile {index}", partial(library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index)
    yield (
        "places of an unknown MIG profile",
        lambda: library.nvmlDeviceGetGpuInstancePossiblePlacements(
            handle,
            _NO_PROFILE,
            (pynvml.c_nvmlGpuInstancePlacement_t * 16)(),
            ctypes.byref(ctypes.c_uint(16)),
        ),
    )


def _wait(library: NvmlLibrary) -> None:
    events = library.nvmlEventSetCreate()
    try:
        library.nvmlEventSetWait(events, 0)
    finally:
        library.nvmlEventSetFree(events)


class Verdict(StrEnum):
    """Result of one check."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One check and its result."""

    name: str
    verdict: Verdict
    message: str
    """Measured values, the deviation, or the missing requirement."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """File that `--out` writes. Tests compare the fakes with its `nvml`."""

    carpool: str
    gpu: GpuUuid
    nvml: Recording
    outcomes: list[Outcome]


def read_report(path: Path) -> Report:
    """Read a report; raises OSError and msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def check_contract(devices: NvmlDevices, gpu: GpuUuid) -> str:
    """Check every rule of the NVML contract; raises FailedError."""
    broken = [why for rule in CONTRACT for why in rule(devices.session)]
    if broken:
        more = f"; and {len(broken) - _MAX_DEVIATIONS:,} more" if len(broken) > _MAX_DEVIATIONS else ""
        raise FailedError("; ".join(broken[:_MAX_DEVIATIONS]) + more)
    return f"{len(CONTRACT)} rules hold"


def prepare(devices: NvmlDevices, gpu: GpuUuid, wanted: Sequence[Reservation]) -> None:
    """Bring a GPU to the state that these reservations need, as the agent does. Raises DeviceError."""
    for step in plan(devices.actual(gpu), wanted).steps:
        devices.apply(gpu, step)
    found = plan(devices.actual(gpu), wanted)
    if found.steps or found.waiting or found.refused or len(found.ready) != len(wanted):
        raise FailedError(f"expected the GPU to be prepared for {len(wanted)} pods, found {found} still to do")


def check_mps(devices: NvmlDevices, gpu: GpuUuid) -> str:
    """Start an MPS daemon on an idle GPU, query it and stop it. Raises DeviceError or SkippedError."""
    if SharingMode.MPS not in devices.actual(gpu).modes:
        raise SkippedError("the GPU has no mode MPS: it needs nvidia-cuda-mps-control, and MIG switched off")
    wanted = Reservation(
        pod_uid=PodUid("check"),
        pod_namespace="check",
        pod_name="check",
        job_uid=JobUid("check"),
        job_name="check",
        gpu_uuids=[gpu],
        mode=SharingMode.MPS,
        reserved_at="check",
    )
    try:
        prepare(devices, gpu, [wanted])
        actual = devices.actual(gpu)
        if actual.problem or not actual.mps_daemon:
            raise FailedError(f"expected a healthy MPS daemon, found {actual.problem or 'none'}")
    finally:
        prepare(devices, gpu, [])
    return "a daemon started, answered and stopped"


def check_mig(devices: NvmlDevices, gpu: GpuUuid) -> str:
    """Create, read back and destroy MIG instances of two profiles. Raises DeviceError or SkippedError."""
    session, known = devices.session, devices.identity(gpu)
    table = read_table(session, gpu) if known.mig_enabled else None
    if table is None:
        raise SkippedError(f"MIG is off (nvidia-smi -i {known.index} -mig 1), or this GPU has none")
    if read_instances(session, gpu, table):
        raise SkippedError("the GPU already has MIG instances")
    plain = {p.compute_slices: p for p in table.profiles if "+me" not in p.name}
    wanted = [plain[size] for size in sorted(plain)[:2]]
    for profiles in (wanted, []):
        found = plan_mig(table, read_instances(session, gpu, table), set(), profiles)
        if isinstance(found, MigRefusal):
            raise FailedError(found.message)
        apply_plan(session, gpu, table, found, time.monotonic)
        instances = [i.placement.profile.name for i in read_instances(session, gpu, table)]
        expected = sorted(p.name for p in profiles)
        if sorted(instances) != expected or len(read_mig_devices(session, gpu)) != len(profiles):
            raise FailedError(f"expected MIG instances {expected}, found {instances}")
    return f"{' and '.join(p.name for p in wanted)} created, read back and destroyed"


CHECKS: Mapping[str, Callable[[NvmlDevices, GpuUuid], str]] = {
    "contract": check_contract,
    "mps": check_mps,
    "mig": check_mig,
}
"""Checks by name, in order. Each returns a sentence and raises SkippedError or DeviceError."""


def run_check(name: str, devices: NvmlDevices, gpu: GpuUuid) -> Outcome:
    """Run one check; a failure or a missing requirement becomes its verdict."""
    try:
        return Outcome(name=name, verdict=Verdict.PASSED, message=CHECKS[name](devices, gpu))
    except SkippedError as e:
        return Outcome(name=name, verdict=Verdict.SKIPPED, message=str(e))
    except DeviceError as e:
        return Outcome(name=name, verdict=Verdict.FAILED, message=str(e))


@click.command(short_help="Check an idle GPU and its driver.")
@click.option(
    "--gpu", default="0", show_default=True, help="Index or UUID of an idle GPU, or UUID of a MIG device on it."
)
@click.option("--only", multiple=True, type=click.Choice([*CHECKS]), help="Run this check only; may be repeated.")
@click.option("--mig", is_flag=True, help="Allow creating and destroying MIG instances on this GPU.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the report, as JSON.")
@click.pass_context
def check(context: click.Context, gpu: str, only: tuple[str, ...], mig: bool, out: Path | None) -> None:
    """Check what the agent relies on: NVML's answers, MPS daemons and MIG instances. Takes seconds."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="carpool-check-")
    except OSError as e:
        raise InputError(f"expected a directory for temporary files, found {e}; set TMPDIR to a writable one") from e
    with temporary as directory:
        devices = context.obj if isinstance(context.obj, NvmlDevices) else _devices(Path(directory))
        try:
            outcomes = _run(devices, _idle(devices, find_gpu(devices, gpu)), only or tuple(CHECKS), out, may_divide=mig)
        except DeviceError as e:
            raise InputError(str(e)) from e
    count = Counter(outcome.verdict for outcome in outcomes)
    passed, failed = count[Verdict.PASSED], count[Verdict.FAILED]
    click.echo(f"{passed} passed, {failed} failed, {count[Verdict.SKIPPED]} skipped")
    context.exit(1 if failed else 0 if passed else 2)


def _devices(directory: Path) -> NvmlDevices:
    """Open the node's GPUs with a state directory of their own: the agent's state stays as it is."""
    settings = node_settings()
    mps = (
        Mps(MpsProgram(private_shm=not MpsProgram.missing()), directory / "mps") if MpsProgram.is_installed() else None
    )
    try:
        return NvmlDevices(
            load_nvml(),
            mps=mps,
            cdi=NvidiaCdi((Path("/etc/cdi"), settings.cdi_dir)),
            state_dir=directory / "state",
            processes=ProcTree(),
            sources=metrics_sources(settings),
        )
    except NoDevicesError as e:
        raise no_gpus(e, settings) from e


def _idle(devices: NvmlDevices, gpu: GpuUuid) -> GpuUuid:
    """Return the GPU if it is healthy and idle; raises DeviceError."""
    actual = devices.actual(gpu)
    if actual.tenants or actual.problem:
        raise DeviceError(
            f"GPU {gpu}: expected a healthy and idle GPU, found {actual.problem or f'pods {sorted(actual.tenants)}'}; "
            "drain it first"
        )
    return gpu


def _run(
    devices: NvmlDevices, gpu: GpuUuid, names: Sequence[str], out: Path | None, *, may_divide: bool
) -> list[Outcome]:
    recording = record(devices.session, gpu)
    click.echo(f"{recording.product}, driver {recording.driver}  {gpu}")
    report = Report(carpool=version("carpool"), gpu=gpu, nvml=recording, outcomes=[])
    _write(report, out)  # fails before the first check where the file cannot be written
    for name in CHECKS:
        if name not in names:
            continue
        if name == "mig" and not may_divide:
            outcome = Outcome(name=name, verdict=Verdict.SKIPPED, message="it changes the GPU: allow it with --mig")
        else:
            outcome = run_check(name, devices, gpu)
        click.echo(f"{outcome.verdict:<8} {outcome.name:<9} {outcome.message}")
        report.outcomes.append(outcome)
    _write(report, out)
    if out is not None:
        click.echo(f"written to {quoted(out)}")
    return report.outcomes


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
