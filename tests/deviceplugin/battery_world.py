"""A machine for the battery, and what NVML answers there."""

from pathlib import Path

from carpool_deviceplugin.check import TRIALS, Outcome, Recording, Trial, record, tried
from carpool_deviceplugin.nvlib import NvmlLibrary, Session, list_gpus
from carpool_deviceplugin.testing.check import Faithless, FakeMachine
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml


def machine(directory: Path, kind: str = "H100", **faithless) -> FakeMachine:
    return FakeMachine(Node(FakeNvml([kind]), FakeMpsCommands(), directory), Faithless(**faithless))


def try_out(there: FakeMachine, *names: str, may_divide: bool = False) -> dict[str, Outcome]:
    trial = Trial(there, there.devices.uuids[0], may_divide)
    return {outcome.name: outcome for outcome in tried(trial, names or TRIALS)}


def of_first(library: NvmlLibrary) -> Recording:
    session = Session(library)
    session.open()
    return record(session, list_gpus(session)[0])


def recording(kind: str) -> Recording:
    return of_first(FakeNvml([kind]))
