"""What is measured, against loads that are known: activity, energy, whose it is, and what the measuring costs."""

from carpool_core.products import UnknownProductError, find_product
from carpool_core.values import SharingMode

from carpool_deviceplugin.mig.planner import MigRefusal, plan_mig
from carpool_deviceplugin.node.battery.contract import CONTRACT
from carpool_deviceplugin.node.battery.mps_trials import memory_mib
from carpool_deviceplugin.node.battery.ports import FailedError, Kind, SkippedError, Trial
from carpool_deviceplugin.node.battery.trials import LOOK_EVERY_S, reservation, running, sm_active
from carpool_deviceplugin.nvml.mig import read_instances, read_mig_devices, read_table
from carpool_deviceplugin.nvml.mig_run import run_plan

ALONE = SharingMode.EXCLUSIVE
IDLE_S, BUSY_S = 10.0, 30.0
READ_EVERY_S, COST_S = 5.0, 60.0
"""As the agent reads its GPUs."""
MOST_TOLD = 10
"""Of what is otherwise than expected: each of thousands of processes may be."""
MOST_OF_A_CORE = 0.005


def contract_holds(trial: Trial) -> str:
    """All that the agent relies on, by the contract that the fakes are held to."""
    broken = [why for rule in CONTRACT for why in rule(trial.machine.devices.session)]
    if broken:
        more = f"; and {len(broken) - MOST_TOLD:,} more" if len(broken) > MOST_TOLD else ""
        raise FailedError("; ".join(broken[:MOST_TOLD]) + more)
    return f"{len(CONTRACT)} rules hold"


def activity_of_known_kernels(trial: Trial) -> str:
    """A product that fills the GPU is about all of it, a single block about one SM."""
    found: dict[Kind, float] = {}
    for kind in (Kind.PRODUCT, Kind.BLOCK):
        with running(trial, kind, [reservation(trial, "p0", ALONE)]):
            found[kind] = sm_active(trial)
    said = f"product {found[Kind.PRODUCT]:.3f}, one block {found[Kind.BLOCK]:.4f}"
    if found[Kind.PRODUCT] < 0.85:
        raise FailedError(f"expected an SM activity of at least 0.85 for an 8192³ product, found {said}")
    try:
        sms = find_product(trial.machine.devices.identity(trial.gpu).product).sm_count
    except UnknownProductError as e:
        return f"SM activity: {said}; how many SMs it has is not known: {e}"
    one = 1 / sms
    if not 0.5 * one <= found[Kind.BLOCK] <= 2 * one:
        raise FailedError(f"expected one block to be about one of {sms} SMs ({one:.4f}), found {said}")
    return f"SM activity: {said}, of {sms} SMs"


def energy_adds_up(trial: Trial) -> str:
    """What the pods and the idle GPU take together is what the GPU's counter says, and its power over the time."""
    machine, gpu = trial.machine, trial.gpu
    machine.devices.read(gpu)
    machine.wait(IDLE_S)
    if machine.devices.read(gpu).energy_j is None:
        raise SkippedError("this GPU has no counter of energy")
    wanted = [reservation(trial, name, SharingMode.TIME_SLICING) for name in ("p0", "p1")]
    with running(trial, Kind.TRAIN, wanted):
        first = machine.devices.read(gpu)
        power_j, last = 0.0, first
        while last.at - first.at < BUSY_S:
            machine.wait(LOOK_EVERY_S)
            now = machine.devices.read(gpu)
            power_j += ((now.power_w or 0.0) + (last.power_w or 0.0)) / 2 * (now.at - last.at)
            last = now
    before = {p.pod_uid: p.energy_j or 0.0 for p in first.processes}
    pods_j = sum((p.energy_j or 0.0) - before.get(p.pod_uid, 0.0) for p in last.processes)
    idle_j = (last.idle_power_w or 0.0) * (last.at - first.at)
    counter_j = (last.energy_j or 0.0) - (first.energy_j or 0.0)
    said = f"pods {pods_j:,.0f} J + idle {idle_j:,.0f} J beside {counter_j:,.0f} J of the counter"
    if abs(pods_j + idle_j - counter_j) > 0.01 * counter_j:
        raise FailedError(f"expected them to be equal within 1%, found {said}")
    if abs(power_j - counter_j) > 0.1 * counter_j:
        raise FailedError(f"expected power over time to be the counter within 10%, found {power_j:,.0f} J; {said}")
    return f"{said}; power over time {power_j:,.0f} J"


def processes_belong_to_pods(trial: Trial) -> str:
    """A process in a pod's cgroup is that pod's, with its memory and its share of the time."""
    wanted = [reservation(trial, name, SharingMode.TIME_SLICING) for name in ("p0", "p1")]
    with running(trial, Kind.TRAIN, wanted) as loads:
        for load in loads:
            if why := trial.machine.in_cgroup(load):
                raise SkippedError(f"it takes a cgroup of the pod: {why}")
        trial.machine.devices.read(trial.gpu)
        trial.machine.wait(READ_EVERY_S)
        found = {p.pod_uid: p for p in trial.machine.devices.read(trial.gpu).processes}
        memory = [memory_mib(trial, load) for load in loads]
    if found.keys() != {load.pod_uid for load in loads} or not all(memory):
        raise FailedError(f"expected {len(loads)} pods with memory, found {len(found)} with {memory} MiB")
    busy = [found[load.pod_uid].busy_s for load in loads]
    if None in busy or not any(busy):
        raise FailedError(f"expected the time of each pod's kernels, found {busy}")
    return f"2 pods with {memory[0]:,} and {memory[1]:,} MiB, and {busy[0]:.1f} and {busy[1]:.1f} s of kernels"


def cost_beside_dmon(trial: Trial) -> str:
    """What the agent's own readings take of a core, beside `nvidia-smi dmon`."""
    machine = trial.machine
    began, spent = machine.monotonic(), machine.cpu_s()
    while machine.monotonic() - began < COST_S:
        for uuid in machine.devices.uuids:
            machine.devices.read(uuid)
            machine.devices.actual(uuid)
        machine.wait(READ_EVERY_S)
    share = (machine.cpu_s() - spent) / (machine.monotonic() - began)
    said = f"{100 * share:.2f}% of a core with {len(machine.devices.uuids)} GPUs, read each {READ_EVERY_S:g} s"
    if share > MOST_OF_A_CORE:
        raise FailedError(f"expected at most {100 * MOST_OF_A_CORE:g}% of a core, found {said}")
    try:
        return f"{said}; nvidia-smi dmon, each second: {100 * machine.dmon_cpu_s(READ_EVERY_S) / READ_EVERY_S:.2f}%"
    except SkippedError as e:
        return f"{said}; not beside dmon: {e}"


def instances_come_and_go(trial: Trial) -> str:
    """MIG instances of two profiles are made, read back, and destroyed."""
    session, gpu = trial.machine.devices.session, trial.gpu
    if not trial.may_divide:
        raise SkippedError("only with --mig, on a machine whose settings may be changed")
    known = trial.machine.devices.identity(gpu)
    table = read_table(session, gpu) if known.mig_enabled else None
    if table is None:
        raise SkippedError(f"MIG is switched off (nvidia-smi -i {known.index} -mig 1), or this GPU has none")
    if read_instances(session, gpu, table):
        raise SkippedError("somebody else's instances stand there")
    plain = {p.compute_slices: p for p in table.profiles if "+me" not in p.name}
    wanted = [plain[size] for size in sorted(plain)[:2]]
    for profiles in (wanted, []):
        found = plan_mig(table, read_instances(session, gpu, table), set(), profiles)
        if isinstance(found, MigRefusal):
            raise FailedError(found.message)
        run_plan(session, gpu, table, found, trial.machine.monotonic)
        devices, there = read_mig_devices(session, gpu), read_instances(session, gpu, table)
        if sorted(i.placement.profile.name for i in there) != sorted(p.name for p in profiles) or len(devices) != len(
            profiles
        ):
            raise FailedError(f"expected {[p.name for p in profiles]}, found {[str(i) for i in there]}")
    return f"{' and '.join(p.name for p in wanted)} made, read back and destroyed"
