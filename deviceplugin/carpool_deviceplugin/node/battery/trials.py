"""What every trial needs: processes behind the agent's own preparation of a GPU, and waiting for what they do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from carpool_core.resources.node import Reservation
from carpool_core.values import JobUid, SharingMode

from carpool_deviceplugin.cdi import slots as cdi
from carpool_deviceplugin.node.battery.ports import FailedError, Kind, Load, SkippedError, Trial
from carpool_deviceplugin.partitions.plan import plan

BEGINS_WITHIN_S = 180.0
"""From the start of a process to its first step: PyTorch is imported, CUDA and its libraries begin."""
NOTICED_WITHIN_S = 10.0
"""The agent looks at its GPUs each 10 s; what it is told by events it looks at sooner."""
LOOK_EVERY_S = 1.0
SM_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE"


def wait_until(trial: Trial, holds: Callable[[], bool], within_s: float, expected: str) -> float:
    """Wait for something; return the seconds that it took. Raises FailedError."""
    machine, began = trial.machine, trial.machine.monotonic()
    while not holds():
        if (waited := machine.monotonic() - began) >= within_s:
            raise FailedError(f"expected {expected} within {within_s:g} s, found it not so after {waited:.0f} s")
        machine.wait(LOOK_EVERY_S)
    return machine.monotonic() - began


def reservation(
    trial: Trial, name: str, mode: SharingMode, *, mib: int | None = None, percent: int | None = None
) -> Reservation:
    """Write down what a made-up pod is promised."""
    return Reservation(
        pod_uid=trial.machine.pod(name),
        pod_namespace="battery",
        pod_name=name,
        job_uid=JobUid(name),
        job_name=name,
        gpu_uuids=[trial.gpu],
        mode=mode,
        memory_limit_mib=mib,
        thread_percentage=percent,
        reserved_at=name,
    )


def prepare(trial: Trial, wanted: Sequence[Reservation]) -> None:
    """Bring the GPU to what is wanted, as the agent would. Raises DeviceError."""
    devices, gpu = trial.machine.devices, trial.gpu
    for step in plan(devices.actual(gpu), wanted).steps:
        devices.apply(gpu, step)
    found = plan(devices.actual(gpu), wanted)
    if found.steps or found.waiting or found.refused or len(found.ready) != len(wanted):
        raise FailedError(f"expected the GPU to be prepared for {len(wanted)} pods, found {found} still to do")


def environment(trial: Trial, reserved: Reservation) -> Mapping[str, str]:
    """Return what the pod's container would be given, with the paths of the node in the place of the container's."""
    access = trial.machine.devices.access(trial.gpu, reserved.pod_uid)
    given = {**cdi.environment(reserved, {trial.gpu: access}), "CUDA_VISIBLE_DEVICES": trial.gpu}
    pipe = access.mps_pipe
    if "CUDA_MPS_PIPE_DIRECTORY" in given and pipe is not None:
        given["CUDA_MPS_PIPE_DIRECTORY"] = pipe.host_path
    return given


@contextmanager
def running(trial: Trial, kind: Kind, wanted: Sequence[Reservation]) -> Iterator[list[Load]]:
    """Prepare the GPU, start a process of each pod, and wait until all have begun; afterwards all is as before.

    Raises:
        SkippedError: The GPU cannot be had in this mode, or there is nothing to run.
        DeviceError: Something was otherwise than expected.
    """
    modes = trial.machine.devices.actual(trial.gpu).modes
    if lacking := {r.mode for r in wanted} - modes:
        raise SkippedError(f"it takes mode {', '.join(lacking)}, the GPU has {', '.join(sorted(modes)) or 'none'}")
    loads: list[Load] = []
    try:
        prepare(trial, wanted)
        loads += [trial.machine.start(trial.gpu, kind, r.pod_name, environment(trial, r)) for r in wanted]
        for load in loads:
            wait_until(trial, partial(_has_begun, load), BEGINS_WITHIN_S, "a first step")
        dead = [f"{load.pod_uid}: {load.ended()}" for load in loads if load.ended() is not None]
        if dead:
            raise FailedError(f"expected every process to begin, found that they ended: {'; '.join(dead)}")
        yield loads
    finally:
        for load in loads:
            load.stop()
        _return(trial)


def _has_begun(load: Load) -> bool:
    return load.steps() > 0 or load.ended() is not None


def _return(trial: Trial) -> None:
    """Leave the GPU idle, with no daemon. Raises DeviceError."""
    devices, gpu = trial.machine.devices, trial.gpu
    wait_until(trial, lambda: not devices.actual(gpu).tenants, NOTICED_WITHIN_S, "the processes to leave the GPU")
    prepare(trial, [])


def still_step(trial: Trial, loads: Sequence[Load], seconds: float = 5.0) -> list[float]:
    """Return the steps per second of each process over a while. Raises FailedError where one stands still."""
    before, began = [load.steps() for load in loads], trial.machine.monotonic()
    trial.machine.wait(seconds)
    elapsed = trial.machine.monotonic() - began
    rates = [(load.steps() - was) / elapsed for load, was in zip(loads, before, strict=True)]
    if not all(rates):
        raise FailedError(f"expected every process to make steps, found {[round(r, 1) for r in rates]} a second")
    return rates


def sm_active(trial: Trial, seconds: float = 10.0) -> float:
    """Return the GPU's mean SM activity over a while, 0..1. Raises SkippedError where nobody measures it."""
    machine, found = trial.machine, list[float]()
    machine.devices.ask_others()
    machine.devices.read(trial.gpu)
    for _ in range(round(seconds / LOOK_EVERY_S)):
        machine.wait(LOOK_EVERY_S)
        machine.devices.ask_others()
        counters = machine.devices.read(trial.gpu).counters or {}
        if SM_ACTIVE in counters:
            found.append(counters[SM_ACTIVE])
    if not found:
        raise SkippedError("SM activity is measured on Hopper and newer, or where DCGM's host engine runs")
    return sum(found) / len(found)
