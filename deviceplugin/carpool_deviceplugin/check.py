"""Checks of a node and its GPUs: requirements of the node, NVML's answers, MPS and MIG. Needs no Kubernetes."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode

from carpool_deviceplugin import cdi
from carpool_deviceplugin.canary import Client, judge, run_client
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.dcgm import FIELD_NAMES, Exporter
from carpool_deviceplugin.files import write_file
from carpool_deviceplugin.gpu import DeviceError, Devices
from carpool_deviceplugin.health import XidWatch, boot_id
from carpool_deviceplugin.mig import MigRefusal, plan_mig
from carpool_deviceplugin.mig_instances import apply_plan, read_instances, read_mig_devices, read_table
from carpool_deviceplugin.mps import MIN_DRIVER, PROGRAM, MpsProgram, driver_problem, program_version
from carpool_deviceplugin.nvlib import (
    Identity,
    NvmlError,
    Session,
    SuspendedError,
    list_gpus,
    list_samples,
    read_identity,
    read_processes,
    read_telemetry,
)
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.preflight import Directories, Host, Outcome, Verdict, check_host, check_system, row
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.sampling import AHEAD_US, SM_ACTIVE, GpmSampler
from carpool_deviceplugin.settings import AgentSettings


class SkippedError(Exception):
    """The check cannot run here; `str()` names the missing requirement."""


class FailedError(DeviceError):
    """The GPU deviates; `str()` states what was expected and what was found."""


def read_all(devices: NvmlDevices) -> None:
    """Read state and counters of every GPU, for the rows that use what was last read. Not beside a running agent."""
    devices.refresh_counters()
    devices.inventory()
    for uuid in devices.uuids:
        with suppress(DeviceError):  # the GPU's health reports it
            devices.read(uuid)


def check_node(devices: Devices | Outcome, settings: AgentSettings, host: Host) -> Iterator[Outcome]:
    """Return the rows of the preflight: requirements of the node and of its GPUs, as last read.

    `devices` is the first row if the driver or its GPUs cannot be used. Then only rows that need no NVML follow.
    """
    if isinstance(devices, Outcome):
        yield devices
    elif isinstance(devices, NvmlDevices):
        passed = f"driver {devices.driver}; from {MIN_DRIVER} on, MPS with limits and reports of clients' faults"
        yield _row_of("driver", driver_problem(devices.driver), passed=passed)
    yield from check_host(host, Directories(settings.state_dir, settings.cdi_dir, settings.device_plugin_dir))
    if not isinstance(devices, Outcome | NvmlDevices):
        found = f"{len(devices.uuids)} simulated GPUs, which need no driver, MPS program, MIG or DCGM"
        yield Outcome(name="gpus", verdict=Verdict.PASSED, found=found)
        return
    yield check_system(host)
    yield row(
        "host-pids",
        "" if host.shows_processes else "another PID namespace",
        "the host's PIDs, to assign processes to pods",
        "run with hostPID: true",
        passed="processes of the host are visible",
        otherwise=Verdict.FAILED,
    )
    problem = devices.mps_missing if isinstance(devices, NvmlDevices) else MpsProgram.problem()
    if settings.mps_host and not problem and not Path(settings.mps_host).is_socket():
        problem = f"expected a socket at {quoted(Path(settings.mps_host))}, found none; check the pod carpool-mps"
    version = program_version(settings.state_dir / "mps" / "version" if settings.mps_host else None)
    if isinstance(devices, NvmlDevices) and not problem and version and devices.driver not in (version, "unknown"):
        problem = (
            f"expected {PROGRAM} of driver {devices.driver}, found {version}, whose servers do not start with it; "
            "restart the pod that runs it, or install the driver's"
        )
    yield _row_of("mps-program", problem, passed=f"{PROGRAM} {version or 'without a version'}")
    if isinstance(devices, NvmlDevices):
        yield from _check_gpus(devices, settings, host)


def _row_of(name: str, problem: str, passed: str) -> Outcome:
    """Return a row of a sentence, at best of what was expected, what was found and what to do; empty if it passed."""
    parts = re.fullmatch("expected (.+?), found (.+?); (.+)", problem)
    needed, found, advice = parts.groups() if parts else ("", problem, "")
    return row(name, found, needed, advice, passed=passed)


_MAX_UNOWNED_MIB = 1024
"""More than MPS servers without clients hold."""


def _check_gpus(devices: NvmlDevices, settings: AgentSettings, host: Host) -> Iterator[Outcome]:
    known = [devices.identity(uuid) for uuid in devices.uuids]
    unread = [one for one in known if not devices.state(one.uuid).is_read]
    count = f"{len(known)} of {len(known)} can be read"
    advice = "repair them, then restart the agent; until then it uses the others"
    yield row("gpus", "; ".join(devices.unreadable), "GPUs that can be read", advice, passed=count)
    yield row(
        "device-files",
        ", ".join(f"none of GPU {index}" for index in devices.hidden),
        "the device file of each GPU",
        "set nodeAgent.visibleDevices to management.nvidia.com/gpu=all where MIG is on; ignore it for GPUs of others",
        passed="one of each GPU",
    )
    yield _check_cdi(devices, NvidiaCdi((settings.cdi_static_dir, settings.cdi_dir)))
    yield _if_read(_check_mig(devices, known, host), [one for one in unread if one.mig_capable])
    limited = [one for one in known if one.compute_mode.withdrawn_modes]
    yield row(
        "compute-mode",
        ", ".join(f"{one.compute_mode} on GPU {one.index}" for one in limited),
        "compute mode Default, without which modes of sharing are not offered",
        "allow several programs: nvidia-smi -i INDEX -c 0",
        passed="Default",
    )
    yield row(
        "persistence",
        ", ".join(f"off on GPU {one.index}" for one in known if one.is_persistent is False),
        "persistence mode, without which power limits are lost when the last program ends",
        "run nvidia-persistenced, or nvidia-smi -pm 1",
        passed="on" if all(one.is_persistent for one in known) else "not reported by NVML",
    )
    processes = row(
        "processes",
        "; ".join(f"GPU {one.index}: {names}" for one in known if (names := devices.state(one.uuid).foreign_processes)),
        "no process outside of pods on the GPUs",
        "end it; until then the GPU gets no new work",
        passed="none outside of pods",
    )
    yield _if_read(processes, unread)
    yield row(
        "graphics",
        "; ".join(f"GPU {one.index}: {names}" for one in known if (names := devices.graphics_processes(one.uuid))),
        "no graphics programs on the GPUs, because placement does not count their memory",
        "stop the display manager, or keep the GPU's node out of Carpool",
        passed="none",
    )
    memory = row(
        "memory",
        "; ".join(
            f"{mib:,} MiB in use on GPU {one.index}"
            for one in known
            if (mib := devices.state(one.uuid).unowned_mib) > _MAX_UNOWNED_MIB
        ),
        "no memory in use on GPUs without processes, because placement does not count it",
        "free it: nvidia-smi -i INDEX --gpu-reset",
        passed=f"at most {_MAX_UNOWNED_MIB:,} MiB in use on GPUs without processes",
    )
    yield _if_read(memory, unread)
    yield from _check_counters(devices, settings, host)
    yield from read_canary(settings.state_dir, devices)


def _if_read(found: Outcome, unread: Sequence[Identity]) -> Outcome:
    """Return the row, but unknown if nothing is wrong so far and these GPUs were not read yet."""
    if found.verdict is not Verdict.PASSED or not unread:
        return found
    return Outcome(
        name=found.name,
        verdict=Verdict.UNKNOWN,
        found=f"GPU {', '.join(str(one.index) for one in unread)} not read yet",
        needed="an answer of each GPU",
        advice="check again: the agent reads every GPU after its start, and Ready in its GpuNode names unreadable ones",
    )


def _check_cdi(devices: NvmlDevices, cdi: NvidiaCdi) -> Outcome:
    advice = "write it: nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"
    try:
        known = map(devices.identity, devices.uuids)
        without = [str(one.index) for one in known if cdi.find(one.uuid, one.minor) is None]
        found = f"none of GPU {', '.join(without)}" if without else ""
    except DeviceError as e:
        found, advice = str(e), "correct or delete the file"
    needed = "NVIDIA's CDI specification of each GPU, or the runtime class nvidia in pods"
    return row("cdi", found, needed, advice, passed="a specification of each GPU")


def _check_mig(devices: NvmlDevices, known: Sequence[Identity], host: Host) -> Outcome:
    capable = [one for one in known if one.mig_capable]
    lacks = [
        f"GPU {one.index} changes its MIG mode at its reset" for one in capable if one.mig_pending != one.mig_enabled
    ]
    lacks += [
        f"GPU {one.index} has {count} MIG instances that others created"
        for one in capable
        if (count := sum(it.own is None for it in devices.state(one.uuid).instances))
    ]
    if capable and devices.mig_manager:
        lacks.append(devices.mig_manager)
    elif capable and "nvidia-mig-mana" in host.programs:
        lacks.append("nvidia-mig-manager, which runs on the node")
    modes = ", ".join(f"GPU {one.index}: MIG {'on' if one.mig_enabled else 'off'}" for one in capable)
    return row(
        "mig-state",
        "; ".join(lacks),
        "GPUs that the agent alone divides by MIG",
        "remove the instances, and the label nvidia.com/mig.config, which GPU Operator sets unless it has "
        "migManager.enabled=false; or leave MIG to the other manager",
        passed=modes or "no GPU with MIG",
    )


def _check_counters(devices: NvmlDevices, settings: AgentSettings, host: Host) -> Iterator[Outcome]:
    sources = {state.identity.index: state.sources for state in map(devices.state, devices.uuids)}
    unread = [state.identity for state in map(devices.state, devices.uuids) if not state.sources]
    fields = {name for of_gpu in sources.values() for name, source in of_gpu.items() if source == Exporter.name}
    advice = "set CARPOOL_DCGM_EXPORTER (nodeAgent.dcgmExporter) to the URL of its metrics on this node"
    if settings.dcgm_exporter or "dcgm-exporter" in host.programs:
        lacks = "a page without them" if settings.dcgm_exporter else "a running dcgm-exporter whose URL is not set"
        absent = sorted(FIELD_NAMES - fields)
        found = f"{len(fields)} fields" + (f", without {', '.join(absent)}" if absent else "")
        is_missing = not fields and not (settings.dcgm_exporter and unread)
        exporter = row(
            "dcgm-exporter", lacks if is_missing else "", "the fields of dcgm-exporter", advice, passed=found
        )
        yield _if_read(exporter, unread)
    else:
        yield Outcome(name="dcgm-exporter", verdict=Verdict.SKIPPED, found="none runs here")
    activity = row(
        "sm-activity",
        ", ".join(f"none of GPU {index}" for index, of_gpu in sources.items() if of_gpu and SM_ACTIVE not in of_gpu),
        "a source of SM activity for each GPU",
        "before Hopper, run DCGM's host engine at CARPOOL_DCGM_ADDRESS with its library in the container, or "
        "dcgm-exporter with DCGM_FI_PROF_SM_ACTIVE at CARPOOL_DCGM_EXPORTER",
        passed=", ".join(sorted({of_gpu.get(SM_ACTIVE, "") for of_gpu in sources.values() if of_gpu})) or "none",
    )
    yield _if_read(activity, unread)


# The contract of NVML: rules that every library, real or fake, keeps. They only read, and yield each deviation.

Rule = Callable[[Session], Iterator[str]]
UNKNOWN_GPU = "GPU-00000000-0000-0000-0000-000000000000"
_MAX_PID = 2**22
"""PID_MAX_LIMIT of the Linux kernel on 64-bit machines."""
_MIN_STAMP_US = 1_500_000_000_000_000
"""A stamp before 2017 has another unit or another epoch."""
_MAX_DEVIATIONS = 10


def _deviations(rules: Mapping[str, tuple[bool, object]], of: str) -> Iterator[str]:
    """Yield a sentence for each rule that does not hold; a rule has what was found."""
    yield from (f"{of}: expected {rule}, found {found}" for rule, (holds, found) in rules.items() if not holds)


def _duplicates(keys: Iterable[object]) -> list[object]:
    counts = Counter(keys)
    return [*(counts - Counter(counts.keys())).elements()]


def check_identity(session: Session) -> Iterator[str]:
    """UUIDs, indices and sizes are plausible."""
    uuids = list_gpus(session)
    if not uuids or _duplicates(uuids):
        yield f"expected GPUs with a UUID each, found {', '.join(uuids) or 'none'}"
    gpus = [read_identity(session, uuid) for uuid in uuids]
    indices = [known.index for known in gpus]
    if indices != sorted(set(indices)):  # a GPU that cannot be read leaves a gap
        yield f"expected GPUs in the order of their indices, each index once, found {', '.join(map(str, indices))}"
    for uuid, known in zip(uuids, gpus, strict=True):
        mib, reserved, power, bus = known.memory_mib, known.reserved_mib, known.power_limit_w, known.pci_bus_id
        rules = {
            "the UUID of the query": (known.uuid == uuid and uuid.startswith("GPU-"), known.uuid),
            "more than 1 GiB": (mib > 1024, f"{mib:,} MiB"),
            "less than a quarter of the memory reserved": (0 <= reserved < mib / 4, f"{reserved:,} of {mib:,} MiB"),
            "compute capability 5.0 or more": (float(known.compute_capability) >= 5, known.compute_capability),
            "a PCI bus ID with a domain": (bus.count(":") == 2, bus),
            "a power limit from 5 to 5,000 W": (power is None or 5 < power < 5000, f"{power} W"),
            "NVLinks to other devices only": (bus not in known.nvlink_peers, f"one to itself, {bus}"),
            "MIG on only if supported": (known.mig_capable or not known.mig_enabled, "it on"),
        }
        yield from _deviations(rules, f"GPU {known.index}")


def check_telemetry(session: Session) -> Iterator[str]:
    """Counters are within physical bounds, and energy never falls."""
    for uuid in list_gpus(session):
        known, first, second = read_identity(session, uuid), *(read_telemetry(session, uuid) for _ in range(2))
        for found in (first, second):
            free, celsius, power, used = (
                found.memory_free_mib,
                found.temperature_c,
                found.power_w,
                found.gpu_util_percent,
            )
            rules = {
                "free memory beside the reserved": (
                    known.reserved_mib + free <= known.memory_mib,
                    f"{known.reserved_mib:,} reserved and {free:,} free of {known.memory_mib:,} MiB",
                ),
                "a temperature from -20 to 130 C": (celsius is None or -20 < celsius < 130, f"{celsius} C"),
                "a power from 0 to 5,000 W": (power is None or 0 < power < 5000, f"{power} W"),
                "a utilization of 0 to 100%": (used is None or 0 <= used <= 100, f"{used}%"),
            }
            yield from _deviations(rules, f"GPU {known.index}")
        if first.energy_mj is not None and (second.energy_mj is None or second.energy_mj < first.energy_mj):
            yield f"expected an energy counter that never falls, found {first.energy_mj}, then {second.energy_mj}"


def check_processes(session: Session) -> Iterator[str]:
    """Processes have valid IDs, plausible memory and no duplicates; MIG instance IDs appear only with MIG on."""
    for uuid in list_gpus(session):
        known, found = read_identity(session, uuid), read_processes(session, uuid)
        for p in found:
            mib, instance = p.memory_mib or 0, p.gpu_instance_id
            rules = {
                "a process ID": (0 < p.pid <= _MAX_PID, p.pid),
                "at most the GPU's memory, or none": (0 <= mib <= known.memory_mib, f"{mib:,} MiB of process {p.pid}"),
                "a MIG instance only with MIG on": (instance is None or known.mig_enabled, f"instance {instance}"),
            }
            yield from _deviations(rules, f"GPU {known.index}")
        if again := _duplicates([(p.pid, p.gpu_instance_id) for p in found]):
            yield f"GPU {uuid}: expected each process once, found {len(again):,} duplicates, such as {again[0]}"


def check_utilization(session: Session, wall: Callable[[], float] = time.time) -> Iterator[str]:
    """Utilization samples are percentages with stamps of the node's clock; not every GPU supports them."""
    for uuid in list_gpus(session):
        found = list_samples(session, uuid, 0) or ()
        latest = round(1e6 * wall()) + AHEAD_US
        for pid, at_us, sm_percent in found:
            rules = {
                "a process ID": (pid <= _MAX_PID, pid),
                "0 to 100% of the SMs": (sm_percent <= 100, f"{sm_percent}%"),
                "microseconds since 1970, not in the future": (_MIN_STAMP_US < at_us <= latest, at_us),
            }
            yield from _deviations(rules, f"GPU {uuid}")
        if again := _duplicates([pid for pid, _, _ in found]):
            yield f"GPU {uuid}: expected one sample of each process, found {len(again):,} more, as of {again[0]}"


def check_gpm(session: Session) -> Iterator[str]:
    """One GPM sample gives no metrics, two give ratios."""
    gpm = GpmSampler(session)
    for uuid in list_gpus(session):
        if found := gpm.sample(uuid):
            yield f"expected no metrics after one sample, found {found}"
        found = gpm.sample(uuid)
        if not 0 <= found.get(SM_ACTIVE, 0.0) <= 1:
            yield f"expected an SM activity of 0 to 1, found {found}"
        gpm.forget(uuid)


def check_xids(session: Session) -> Iterator[str]:
    """XID events can be registered and polled without waiting."""
    uuids = list_gpus(session)
    watch = XidWatch(session, uuids)
    for uuid in uuids:
        yield from (f"expected XIDs from 1 up, found {xid.code}" for xid in watch.poll(uuid) if xid.code <= 0)


def check_mig_profiles(session: Session) -> Iterator[str]:
    """MIG profiles have names, and placements within the GPU."""
    without = list[str]()
    for uuid in list_gpus(session):
        known = read_identity(session, uuid)
        table = read_table(session, uuid) if known.mig_capable else None
        if known.mig_capable and table is None:
            without.append(str(known.index))
        for profile in table.profiles if table else ():
            mib, last = profile.memory_mib, max(profile.starts) + profile.memory_slices
            slices = table.memory_slices if table else 0
            rules = {
                "a name such as 3g.20gb": ("g." in profile.name and not profile.name.startswith("MIG "), profile.name),
                "less memory than the GPU has": (mib < known.memory_mib, f"{mib:,} MiB of {profile.name}"),
                "placements within the GPU": (last <= slices, f"{profile.name} up to slice {last} of {slices}"),
            }
            yield from _deviations(rules, f"GPU {known.index}")
    if without:
        yield f"expected MIG profiles of each GPU that has MIG, found none of GPU {', '.join(without)}"


def check_unknown_gpu(session: Session) -> Iterator[str]:
    """An unknown UUID is an error that names the UUID."""
    try:
        session.handle(UNKNOWN_GPU)
    except NvmlError as e:
        if UNKNOWN_GPU not in str(e):
            yield f"expected an error that names the GPU, found {e}"
    else:
        yield f"expected no GPU {UNKNOWN_GPU}, found one"


def check_reopening(session: Session) -> Iterator[str]:
    """A released driver is not called, and answers as before when it is opened again."""
    before = [read_identity(session, uuid) for uuid in list_gpus(session)]
    session.suspend("the contract is checked")
    try:
        read_identity(session, before[0].uuid)
        yield "expected a released GPU not to be read, found an answer"
    except SuspendedError:
        pass
    finally:
        session.suspend("")
    for known in before:
        again = read_identity(session, known.uuid)
        if (again.index, again.pci_bus_id, again.memory_mib) != (known.index, known.pci_bus_id, known.memory_mib):
            found, then = (f"index {it.index}, {it.pci_bus_id}, {it.memory_mib:,} MiB" for it in (known, again))
            yield f"GPU {known.uuid}: expected the same after opening the driver again, found {found}, then {then}"


CONTRACT: Sequence[Rule] = (
    check_identity,
    check_telemetry,
    check_processes,
    check_utilization,
    check_gpm,
    check_xids,
    check_mig_profiles,
    check_unknown_gpu,
    check_reopening,
)


# The checks of one idle GPU.


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


@contextmanager
def _mps(devices: NvmlDevices, gpu: GpuUuid, memory_limit_mib: int | None = None) -> Iterator[Reservation]:
    """Start an MPS daemon on an idle GPU for a pod, and stop it. Raises DeviceError or SkippedError."""
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
        memory_limit_mib=memory_limit_mib,
        reserved_at="check",
    )
    try:
        prepare(devices, gpu, [wanted])
        actual = devices.actual(gpu)
        if actual.problem or not actual.mps_daemon:
            raise FailedError(f"expected a healthy MPS daemon, found {actual.problem or 'none'}")
        yield wanted
    finally:
        prepare(devices, gpu, [])


def check_mps(devices: NvmlDevices, gpu: GpuUuid) -> str:
    """Start an MPS daemon on an idle GPU, query it and stop it. Raises DeviceError or SkippedError."""
    with _mps(devices, gpu):
        return "a daemon started, answered and stopped"


_CANARY_MIB = 2048
"""More than a CUDA context takes, and less than an idle GPU has free: only the limit refuses more."""


def run_canary(devices: NvmlDevices, gpu: GpuUuid, client: Client = run_client) -> list[Outcome]:
    """Run a CUDA program on an idle GPU as a container with a memory limit would; return its rows."""
    try:
        with _mps(devices, gpu, _CANARY_MIB) as wanted:
            access = devices.access(gpu)
            environment = cdi.environment(wanted, {gpu: access})
            if access.mps_pipe is not None:  # the paths are those of the node, not of a container
                environment["CUDA_MPS_PIPE_DIRECTORY"] = access.mps_pipe.host_path
            return judge(client(environment, access.mps_shm.host_path if access.mps_shm else ""), environment)
    except SkippedError as e:
        return [Outcome(name="canary", verdict=Verdict.SKIPPED, found=str(e))]
    except DeviceError as e:
        return [row("canary", str(e), "an MPS daemon", "see the row mps", passed="", otherwise=Verdict.FAILED)]


def check_mig(devices: NvmlDevices, gpu: GpuUuid) -> str:
    """Create, read back and destroy MIG instances of two profiles. Raises DeviceError or SkippedError."""
    session, known = devices.session, devices.identity(gpu)
    table = read_table(session, gpu) if known.mig_enabled else None
    if table is None:
        raise SkippedError(f"MIG is off (nvidia-smi -i {known.index} -mig 1), or this GPU has none")
    if read_instances(session, gpu, table):
        raise SkippedError("the GPU already has MIG instances")
    plain = {p.compute_slices: p for p in table.profiles if {"+", "-"}.isdisjoint(p.name)}
    wanted = [plain[size] for size in sorted(plain)[:2]]
    for profiles in (wanted, []):
        found = plan_mig(table, read_instances(session, gpu, table), set(), profiles)
        if isinstance(found, MigRefusal):
            raise FailedError(found.message)
        apply_plan(session, gpu, found, time.monotonic)
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


_MENDING = {
    "contract": ("answers of NVML as its documentation has them", "update the driver; if the row stays, report it"),
    "mps": (
        "an MPS daemon that starts, answers and stops",
        "end programs named nvidia-cuda-mps, then run `nvidia-cuda-mps-control -f`, which prints why it does not start",
    ),
    "mig": (
        "MIG instances that can be created, read and destroyed",
        "destroy what is left (`carpool node plan --to mig: --apply --destroy-others`); then reset the GPU",
    ),
}
"""The need of each check, and the advice if it fails."""


def run_check(name: str, devices: NvmlDevices, gpu: GpuUuid, *, may_divide: bool) -> Outcome:
    """Run one check. Only `may_divide` lets it create MIG instances."""
    try:
        if name == "mig" and not may_divide:
            raise SkippedError("it changes the GPU: allow it with --mig")
        return Outcome(name=name, verdict=Verdict.PASSED, found=CHECKS[name](devices, gpu))
    except SkippedError as e:
        return Outcome(name=name, verdict=Verdict.SKIPPED, found=str(e))
    except DeviceError as e:
        needed, advice = _MENDING[name]
        return Outcome(name=name, verdict=Verdict.FAILED, found=str(e), needed=needed, advice=advice)


def without_driver(name: str) -> Outcome:
    """Return the row of a check that cannot run, because the driver or its GPUs cannot be used."""
    return Outcome(name=name, verdict=Verdict.SKIPPED, found="no usable driver and GPU, see the first row")


class Report(msgspec.Struct, kw_only=True):
    """File that `carpool node check --out` writes; what is not known is empty."""

    carpool: str
    checked_at: str = ""
    product: str = ""
    driver: str = ""
    boot: str = ""
    """ID of the node's boot."""
    gpu: str = ""
    outcomes: list[Outcome] = []


_CANARY_FILE = "canary.json"


def store_canary(directory: Path, report: Report, rows: Sequence[Outcome]) -> None:
    """Store the rows of a canary in the agent's state directory, unless it did not run; raises OSError."""
    if any(row.verdict is not Verdict.SKIPPED for row in rows):
        write_file(directory / _CANARY_FILE, msgspec.json.encode(msgspec.structs.replace(report, outcomes=[*rows])))


def read_canary(directory: Path, devices: NvmlDevices) -> list[Outcome]:
    """Return the rows of the last canary; they count until a boot, or with another driver or GPU."""
    try:
        last = msgspec.json.decode((directory / _CANARY_FILE).read_bytes(), type=Report)
    except (OSError, ValueError, msgspec.MsgspecError):
        last = Report(carpool="")
    if (last.driver, last.boot) == (devices.driver, boot_id()) and last.gpu in devices.uuids:
        return [msgspec.structs.replace(row, found=f"{row.found}, at {last.checked_at}") for row in last.outcomes]
    found = "not run with this driver since the node's boot; carpool node check --canary runs it on an idle GPU"
    return [Outcome(name="canary", verdict=Verdict.SKIPPED, found=found)]
