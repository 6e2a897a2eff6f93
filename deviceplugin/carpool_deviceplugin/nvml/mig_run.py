"""Carries out a plan of MIG steps: each one read back, all of them within a deadline, undone where one fails."""

from collections.abc import Callable, Sequence

from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.mig.planner import Create, Destroy, MigPlan, MigStep
from carpool_deviceplugin.mig.profiles import MigTable
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.mig import apply_step, read_instances, read_processes_of_instances

DEADLINE_S = 30.0
"""An instance takes well under a second; a driver that needs longer for all of them is stuck."""


def run_plan(
    session: Session,
    uuid: GpuUuid,
    table: MigTable,
    plan: MigPlan,
    monotonic: Callable[[], float],
    taken: Callable[[MigStep], None] = lambda _: None,
) -> None:
    """Take the steps of a plan.

    Args:
        session: The open library.
        uuid: The GPU.
        table: What it can be divided into.
        plan: What to do; made from what the GPU was a moment ago.
        monotonic: Seconds.
        taken: Hears of each step when it was read back.

    Raises:
        DeviceError: A step failed, and whether it was undone.
    """
    until = monotonic() + DEADLINE_S
    done: list[MigStep] = []
    failing = ""
    try:
        for step in plan.steps:
            failing = str(step)
            if monotonic() >= until:
                raise DeviceError(f"expected all steps within {DEADLINE_S:g} s, found {step} still to do")
            _still_idle(session, uuid, step)
            done.append(step)
            apply_step(session, uuid, step)
            _read_back(session, uuid, table, step)
            taken(step)
    except DeviceError as e:
        why = str(e).removeprefix(f"GPU {uuid}: ")
        raise DeviceError(f"GPU {uuid}: {failing} failed: {why}; {_undo(session, uuid, table, done)}") from e


def _still_idle(session: Session, uuid: GpuUuid, step: MigStep) -> None:
    """Somebody may have come since the plan was made; the driver would refuse as well, but only half-way."""
    if isinstance(step, Destroy) and step.instance.id in read_processes_of_instances(session, uuid):
        raise DeviceError(f"expected {step.instance} to be idle, found a process on it; make a new plan")


def _there(session: Session, uuid: GpuUuid, table: MigTable) -> set[Placement]:
    return {i.placement for i in read_instances(session, uuid, table)}


def _read_back(session: Session, uuid: GpuUuid, table: MigTable, step: MigStep) -> None:
    there = _there(session, uuid, table)
    if isinstance(step, Create) and step.placement not in there:
        raise DeviceError(f"read back, {step.placement} is not there")
    if isinstance(step, Destroy) and step.instance.placement in there:
        raise DeviceError(f"read back, {step.instance} is still there")


def _undo(session: Session, uuid: GpuUuid, table: MigTable, done: Sequence[MigStep]) -> str:
    try:
        for step in reversed(done):
            if isinstance(step, Destroy):
                apply_step(session, uuid, Create(step.instance.placement))
                continue
            made = [i for i in read_instances(session, uuid, table) if i.placement == step.placement]
            for instance in made:
                apply_step(session, uuid, Destroy(instance))
    except DeviceError as e:
        return f"undoing it failed as well: {e}"
    return "it was undone"
