"""The files of a simulated device, and how they are read and written.

    <root>/<uuid>/device.json    what it is; written once, by the agent
                  mode.json      how it is shared; written by the agent
                  totals.json    what processes used that are gone
                  lock           flock: whoever holds it may do sums over claims, and write claims, mode and totals
                  claims/*.claim one for each process, which holds an exclusive flock on it for as long as it lives

The kernel releases a flock when its process dies, however it dies, and flocks work between containers through a bind
mount: so a claim without a lock is dead, and the agent removes it. Readers need no lock: JSON files are replaced whole,
and a claim carries a checksum, so that a half-written one is read again.

Containers may write in `claims` only, and may write anything there. What they leave is taken for a claim where it is a
regular file of a sensible size with sensible values; whatever else it is concerns nobody but its own pod.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from carpool_simulated.errors import DeviceStateError
from carpool_simulated.jsonfiles import checked, read_json, write_json

IDLE = "Idle"
MODES = (IDLE, "Exclusive", "TimeSlicing", "MPS")


@dataclass(frozen=True, slots=True)
class Facts:
    """`device.json`: what the device is. Memory in MiB, power in W."""

    uuid: str
    index: int
    product: str
    """Begins with `Simulated `."""
    memory_mib: int
    reserved_mib: int
    """What the driver keeps."""
    context_mib: int
    """What a CUDA context of a process takes."""
    sm_count: int
    compute_capability: str
    power_limit_w: float
    idle_power_w: float


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one pod behind an MPS daemon. They hold for each process, as CUDA's do."""

    memory_mib: int | None = None
    thread_percentage: int | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """`mode.json`: how the device is shared."""

    mode: str = IDLE
    """`Idle` (nobody may use it), `Exclusive`, `TimeSlicing` or `MPS`."""
    mps_daemon: bool = False
    limits: dict[str, Limit] = field(default_factory=dict)
    """By pod UID."""


@dataclass(frozen=True, slots=True)
class Totals:
    """`totals.json`: what is needed for counters that never fall."""

    since: float
    """Monotonic time at which the device appeared, in seconds."""
    energy_j: float = 0.0
    """Energy above idle of processes that are gone, in J."""


def read_facts(directory: Path) -> Facts:
    """Read `device.json`; raises DeviceStateError."""
    path = directory / "device.json"
    do = "remove it, and the node agent will write it anew when it starts"
    facts = checked(Facts, read_json(path, do), path, do)
    if facts.uuid != directory.name:
        raise DeviceStateError(path, expected=f"uuid {directory.name!r}, the directory's name", found=facts.uuid, do=do)
    if not 0 <= facts.reserved_mib < facts.memory_mib:
        found = f"reserved_mib {facts.reserved_mib} of memory_mib {facts.memory_mib}"
        raise DeviceStateError(path, expected="0 <= reserved_mib < memory_mib", found=found, do=do)
    return facts


def read_mode(directory: Path) -> Mode:
    """Read `mode.json`; raises DeviceStateError."""
    path = directory / "mode.json"
    do = "end the processes on this GPU and remove the file; the node agent will prepare the GPU again"
    mode = checked(Mode, read_json(path, do), path, do)
    if mode.mode not in MODES:
        raise DeviceStateError(path, expected=f"mode to be one of {', '.join(MODES)}", found=repr(mode.mode), do=do)
    limits = {pod: checked(Limit, raw, path, do) for pod, raw in mode.limits.items()}
    return Mode(mode.mode, mode.mps_daemon, limits)


def write_mode(directory: Path, mode: Mode) -> None:
    """Write `mode.json`."""
    write_json(directory / "mode.json", asdict(mode))


def read_totals(directory: Path) -> Totals:
    """Read `totals.json`; raises DeviceStateError."""
    path, do = directory / "totals.json", "remove it: only the energy counter starts again"
    return checked(Totals, read_json(path, do), path, do)


def write_totals(directory: Path, totals: Totals) -> None:
    """Write `totals.json`."""
    write_json(directory / "totals.json", asdict(totals))
