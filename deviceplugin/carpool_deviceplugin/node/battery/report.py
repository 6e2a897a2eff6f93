"""All trials one after the other, and what came of them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.node.battery import measure_trials, mps_trials
from carpool_deviceplugin.node.battery.ports import SkippedError, Trial
from carpool_deviceplugin.node.battery.recording import Recording

TRIALS: Mapping[str, Callable[[Trial], str]] = {
    "contract": measure_trials.contract_holds,
    "activity": measure_trials.activity_of_known_kernels,
    "energy": measure_trials.energy_adds_up,
    "attribution": measure_trials.processes_belong_to_pods,
    "mps-two": mps_trials.two_share,
    "mps-three": mps_trials.three_share,
    "mps-threads": mps_trials.threads_show_in_sm_activity,
    "mps-fault": mps_trials.fault_is_told,
    "mps-killed": mps_trials.daemon_that_dies_is_told,
    "mig": measure_trials.instances_come_and_go,
    "cost": measure_trials.cost_beside_dmon,
}
"""By the name by which one is asked for, in the order in which they are tried."""


class Verdict(StrEnum):
    """What came of a trial."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    name: str
    verdict: Verdict
    said: str
    """What was measured, what was otherwise than expected, or what it takes."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ran where; its `nvml` is what the fakes are checked against."""

    carpool: str
    gpu: GpuUuid
    nvml: Recording
    outcomes: list[Outcome]


def tried(trial: Trial, names: Collection[str]) -> Iterator[Outcome]:
    """Try what was asked for; one that fails keeps no other from being tried."""
    for name, attempt in TRIALS.items():
        if name not in names:
            continue
        try:
            yield Outcome(name=name, verdict=Verdict.PASSED, said=attempt(trial))
        except SkippedError as e:
            yield Outcome(name=name, verdict=Verdict.SKIPPED, said=str(e))
        except DeviceError as e:
            yield Outcome(name=name, verdict=Verdict.FAILED, said=str(e))


def write(report: Report, path: Path) -> None:
    """Write it down; raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def read(path: Path) -> Report:
    """Read it again; raises OSError and msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
