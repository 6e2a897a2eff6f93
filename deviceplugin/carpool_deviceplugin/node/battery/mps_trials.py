"""MPS with real training processes: limits, shares, a fault, and a daemon that dies."""

from carpool_core.values import SharingMode

from carpool_deviceplugin.node.battery.ports import FailedError, Kind, Load, Trial
from carpool_deviceplugin.node.battery.trials import (
    NOTICED_WITHIN_S,
    prepare,
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


def two_share(trial: Trial) -> str:
    """Two training processes behind one daemon; the one that asks for too much dies alone."""
    return _share(trial, 2)


def three_share(trial: Trial) -> str:
    """The same with three."""
    return _share(trial, 3)


def _share(trial: Trial, count: int) -> str:
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB, percent=100 // count) for i in range(count)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        actual = trial.machine.devices.actual(trial.gpu)
        if actual.problem or actual.tenants != {r.pod_uid for r in wanted}:
            raise FailedError(
                f"expected {count} pods on the GPU and nobody else, found {len(actual.tenants)}: {actual.problem}"
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


def memory_mib(trial: Trial, load: Load) -> int:
    """Memory that a process's pod has on the GPU."""
    uses = trial.machine.devices.read(trial.gpu).processes
    return sum(p.memory_mib for p in uses if p.pod_uid == load.pod_uid)


def threads_show_in_sm_activity(trial: Trial) -> str:
    """A kernel that fills the GPU fills the share of it that its pod was promised."""
    found: dict[int, float] = {}
    for percent in SHARES:
        wanted = [reservation(trial, "p0", MPS, percent=percent)]
        with running(trial, Kind.PRODUCT, wanted):
            found[percent] = sm_active(trial)
    said = ", ".join(f"{share}%: {active:.2f}" for share, active in found.items())
    wrong = [share for share, active in found.items() if not 0.7 * share / 100 <= active <= share / 100 + 0.1]
    if wrong:
        raise FailedError(f"expected an SM activity of about each thread percentage, found {said}")
    return f"SM activity by thread percentage: {said}"


def fault_is_told(trial: Trial) -> str:
    """A client's fatal fault is noticed, and the pods that it ends together are named."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        trial.machine.devices.actual(trial.gpu)
        loads[0].fault()
        took_s = _struck(trial, loads)
        wait_until(trial, lambda: all(load.ended() is not None for load in loads), DIES_WITHIN_S, "both to end")
        ends = ", ".join(str(load.ended()) for load in loads)
    return f"told after {took_s:.0f} s, with both pods; they ended: {ends}"


def daemon_that_dies_is_told(trial: Trial) -> str:
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
        prepare(trial, wanted)
        again_s = trial.machine.monotonic() - began
        if not devices.actual(gpu).mps_daemon:
            raise FailedError("expected another daemon in the place of the dead one, found none")
    return f"told after {took_s:.0f} s, with both pods; another daemon answered after {again_s:.2f} s"


def _struck(trial: Trial, loads: list[Load]) -> float:
    """Wait until the agent names all of these pods; return the seconds."""
    pods, devices = {load.pod_uid for load in loads}, trial.machine.devices
    return wait_until(
        trial,
        lambda: devices.actual(trial.gpu).ended.keys() >= pods,
        NOTICED_WITHIN_S,
        "the agent to name all pods that end together",
    )
