"""Trials of the agent on a GPU: each returns what it measured, and raises FailedError or SkippedError."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from carpool_core.products import UnknownProductError, find_product
from carpool_core.values import SharingMode
from carpool_deviceplugin.check import FailedError, SkippedError, check_contract, check_mps, prepare
from gpu_machine import (
    LOOK_EVERY_S,
    NOTICED_WITHIN_S,
    Kind,
    Trial,
    reservation,
    running,
    sm_active,
    still_step,
    wait_until,
)

MPS = SharingMode.MPS
LIMIT_MIB, BEYOND_MIB = 4096, 8192
"""A small training and PyTorch fit into the one; the other is more than a process may have."""
SHARES = (100, 50, 25)
DIES_WITHIN_S = 30.0


def processes_share(trial: Trial, count: int) -> str:
    """Train so many processes behind one daemon; the one that asks for too much dies alone."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB, percent=100 // count) for i in range(count)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        actual = trial.machine.devices.actual(trial.gpu)
        if actual.problem or actual.tenants != {r.pod_uid for r in wanted}:
            raise FailedError(
                f"expected {count} pods on the GPU and no others, found {len(actual.tenants)}: {actual.problem}"
            )
        rates = still_step(trial, loads)
        greedy, others = loads[-1], loads[:-1]
        greedy.take(BEYOND_MIB)
        took_s = wait_until(
            trial,
            lambda: greedy.ended() is not None or max(memory_mib(trial, greedy), 0) > LIMIT_MIB,
            DIES_WITHIN_S,
            f"the process that asks for {BEYOND_MIB:,} MiB of {LIMIT_MIB:,} MiB to die",
        )
        if greedy.ended() != "out of memory":
            raise FailedError(
                f"expected it to die of memory at {LIMIT_MIB:,} MiB, found {greedy.ended() or 'it alive'} with "
                f"{memory_mib(trial, greedy):,} MiB"
            )
        still_step(trial, others)
    each = ", ".join(f"{rate:.1f}" for rate in rates)
    return (
        f"{count} processes made {each} steps/s; the one that asked for {BEYOND_MIB:,} MiB of {LIMIT_MIB:,} died alone "
        f"after {took_s:.0f} s"
    )


def memory_mib(trial: Trial, load: Any) -> int:
    """Memory that a process's pod has on the GPU."""
    uses = trial.machine.devices.read(trial.gpu).processes
    return sum(p.memory_mib for p in uses if p.pod_uid == load.pod_uid)


def thread_percentage_limits_sm_activity(trial: Trial) -> str:
    """A kernel that fills the GPU fills the share of it that its pod was promised."""
    found: dict[int, float] = {}
    for percent in SHARES:
        wanted = [reservation(trial, "p0", MPS, percent=percent)]
        with running(trial, Kind.PRODUCT, wanted):
            found[percent] = sm_active(trial)
    measured = ", ".join(f"{share}%: {active:.2f}" for share, active in found.items())
    wrong = [share for share, active in found.items() if not 0.7 * share / 100 <= active <= share / 100 + 0.1]
    if wrong:
        raise FailedError(f"expected an SM activity of about each thread percentage, found {measured}")
    return f"SM activity by thread percentage: {measured}"


def fault_names_all_clients(trial: Trial) -> str:
    """A client's fatal fault is noticed, and the pods that it ends together are named."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        trial.machine.devices.actual(trial.gpu)
        loads[0].fault()
        trial.machine.wait(READ_EVERY_S)  # both have ended by then
        took_s = READ_EVERY_S + _struck(trial, loads)
        wait_until(trial, lambda: all(load.ended() is not None for load in loads), DIES_WITHIN_S, "both to end")
        ends = ", ".join(str(load.ended()) for load in loads)
    return f"noticed after {took_s:.0f} s, with both pods; they ended: {ends}"


def assertion_ends_its_own_client(trial: Trial) -> str:
    """A failed assertion in a kernel ends its own client; its neighbour goes on, and the agent names no other pod."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    devices, gpu = trial.machine.devices, trial.gpu
    with running(trial, Kind.TRAIN, wanted) as (failing, neighbour):
        devices.actual(gpu)
        failing.fail_assertion()
        took_s = wait_until(trial, lambda: failing.ended() is not None, DIES_WITHIN_S, "it to end")
        (rate,) = still_step(trial, [neighbour])
        actual = devices.actual(gpu)
        if neighbour.ended() is not None or actual.problem or neighbour.pod_uid in actual.ended:
            found = neighbour.ended() or actual.problem or actual.ended[neighbour.pod_uid]
            raise FailedError(f"expected the neighbour to go on, and no problem of the GPU, found {found}")
        end = failing.ended()
    return f"it ended alone after {took_s:.0f} s: {end}; its neighbour made {rate:.1f} steps/s"


def dead_daemon_names_all_clients(trial: Trial) -> str:
    """A daemon that is gone is noticed, its clients are named, and it is started again when they have left."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    devices, gpu = trial.machine.devices, trial.gpu
    with running(trial, Kind.TRAIN, wanted) as loads:
        trial.machine.kill_daemon(gpu)
        took_s = _struck(trial, loads)
        for load in loads:
            load.stop()
        wait_until(trial, lambda: not devices.actual(gpu).tenants, DIES_WITHIN_S, "the clients to leave the GPU")
        began = trial.machine.monotonic()
        prepare(devices, gpu, wanted)
        again_s = trial.machine.monotonic() - began
        if not devices.actual(gpu).mps_daemon:
            raise FailedError("expected another daemon in the place of the dead one, found none")
    return f"noticed after {took_s:.0f} s, with both pods; another daemon answered after {again_s:.2f} s"


def _struck(trial: Trial, loads: list[Any]) -> float:
    """Wait until the agent names all of these pods; return the seconds."""
    pods, devices = {load.pod_uid for load in loads}, trial.machine.devices
    return wait_until(
        trial,
        lambda: devices.actual(trial.gpu).ended.keys() >= pods,
        NOTICED_WITHIN_S,
        "the agent to name all pods that end together",
    )


ALONE = SharingMode.EXCLUSIVE
IDLE_S, BUSY_S = 10.0, 30.0
READ_EVERY_S, COST_S = 5.0, 60.0
"""As the agent reads its GPUs."""
MOST_OF_A_CORE = 0.005


def activity_of_known_kernels(trial: Trial) -> str:
    """A product that fills the GPU is about all of it, a single block about one SM."""
    found: dict[Kind, float] = {}
    for kind in (Kind.PRODUCT, Kind.BLOCK):
        with running(trial, kind, [reservation(trial, "p0", ALONE)]):
            found[kind] = sm_active(trial)
    measured = f"product {found[Kind.PRODUCT]:.3f}, one block {found[Kind.BLOCK]:.4f}"
    if found[Kind.PRODUCT] < 0.85:
        raise FailedError(f"expected an SM activity of at least 0.85 for an 8192³ product, found {measured}")
    try:
        sms = find_product(trial.machine.devices.identity(trial.gpu).product).sm_count
    except UnknownProductError as e:
        return f"SM activity: {measured}; how many SMs it has is not known: {e}"
    one = 1 / sms
    if not 0.5 * one <= found[Kind.BLOCK] <= 2 * one:
        raise FailedError(f"expected one block to be about one of {sms} SMs ({one:.4f}), found {measured}")
    return f"SM activity: {measured}, of {sms} SMs"


def energy_adds_up(trial: Trial) -> str:
    """The energy of pods and the idle GPU adds up to the GPU's counter, and so does its power over time."""
    machine, gpu = trial.machine, trial.gpu
    machine.devices.read(gpu)
    machine.wait(IDLE_S)
    if machine.devices.read(gpu).energy_j is None:
        raise SkippedError("this GPU has no counter of energy")
    wanted = [reservation(trial, name, SharingMode.TIME_SLICING) for name in ("p0", "p1")]
    with running(trial, Kind.TRAIN, wanted):
        first = machine.devices.read(gpu)
        power_j, pods_j, last = 0.0, 0.0, first
        while last.at - first.at < BUSY_S:
            machine.wait(LOOK_EVERY_S)
            now = machine.devices.read(gpu)
            power_j += ((now.power_w or 0.0) + (last.power_w or 0.0)) / 2 * (now.at - last.at)
            pods_j += sum(p.energy_j or 0.0 for p in now.processes) + sum(now.energy_of_ended_j.values())
            last = now
    idle_j = (last.idle_power_w or 0.0) * (last.at - first.at)
    counter_j = (last.energy_j or 0.0) - (first.energy_j or 0.0)
    measured = f"pods {pods_j:,.0f} J + idle {idle_j:,.0f} J beside {counter_j:,.0f} J of the counter"
    if abs(pods_j + idle_j - counter_j) > 0.01 * counter_j:
        raise FailedError(f"expected them to be equal within 1%, found {measured}")
    if abs(power_j - counter_j) > 0.1 * counter_j:
        raise FailedError(f"expected power over time to be the counter within 10%, found {power_j:,.0f} J; {measured}")
    return f"{measured}; power over time {power_j:,.0f} J"


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
    if None in busy or sum(busy) < READ_EVERY_S / 2:
        raise FailedError(f"expected kernels in half of {READ_EVERY_S:g} s at least, found {busy} s")
    return f"2 pods with {memory[0]:,} and {memory[1]:,} MiB, and {busy[0]:.1f} and {busy[1]:.1f} s of kernels"


def cost_beside_dmon(trial: Trial) -> str:
    """Share of a core that the agent's readings take, compared with `nvidia-smi dmon`."""
    machine = trial.machine
    began, spent = machine.monotonic(), machine.cpu_s()
    while machine.monotonic() - began < COST_S:
        for uuid in machine.devices.uuids:
            machine.devices.read(uuid)
            machine.devices.actual(uuid)
        machine.wait(READ_EVERY_S)
    share = (machine.cpu_s() - spent) / (machine.monotonic() - began)
    measured = f"{100 * share:.2f}% of a core with {len(machine.devices.uuids)} GPUs, read each {READ_EVERY_S:g} s"
    if share > MOST_OF_A_CORE:
        raise FailedError(f"expected at most {100 * MOST_OF_A_CORE:g}% of a core, found {measured}")
    try:
        return f"{measured}; nvidia-smi dmon, each second: {100 * machine.dmon_cpu_s(READ_EVERY_S) / READ_EVERY_S:.2f}%"
    except SkippedError as e:
        return f"{measured}; not beside dmon: {e}"


TRIALS: Mapping[str, Callable[[Trial], str]] = {
    "contract": lambda trial: check_contract(trial.machine.devices, trial.gpu),
    "mps-daemon": lambda trial: check_mps(trial.machine.devices, trial.gpu),
    "activity": activity_of_known_kernels,
    "energy": energy_adds_up,
    "attribution": processes_belong_to_pods,
    "mps-two": partial(processes_share, count=2),
    "mps-three": partial(processes_share, count=3),
    "mps-threads": thread_percentage_limits_sm_activity,
    "mps-fault": fault_names_all_clients,
    "mps-assert": assertion_ends_its_own_client,
    "mps-killed": dead_daemon_names_all_clients,
    "cost": cost_beside_dmon,
}
