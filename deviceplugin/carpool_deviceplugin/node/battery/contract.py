"""What holds for NVML on every GPU, real or not, as far as the agent relies on it. It only reads."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from carpool_deviceplugin.nvml.accounting import AHEAD_US
from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.mig import read_table
from carpool_deviceplugin.nvml.reading import (
    list_gpus,
    list_samples,
    read_identity,
    read_processes,
    read_telemetry,
)
from carpool_deviceplugin.nvml.xids import XidWatch

T = TypeVar("T")
Rule = Callable[[Session], Iterator[str]]
"""Yields what is otherwise than expected."""
_BEYOND_PIDS = 2**22 + 1
"""The kernel has no larger ones."""
_FEW = 3
_FIRST_STAMP_US = 1_500_000_000_000_000
"""In 2017: what is less is counted in other units, or from another moment."""
NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"


def identity_makes_sense(session: Session) -> Iterator[str]:
    """UUIDs, indices and sizes are what they can be."""
    uuids = list_gpus(session)
    if not uuids or len(set(uuids)) != len(uuids):
        yield f"expected GPUs with a UUID each, found {uuids}"
    for index, uuid in enumerate(uuids):
        known = read_identity(session, uuid)
        fine = {
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
        yield from _unmet(fine, known)


def telemetry_makes_sense(session: Session) -> Iterator[str]:
    """Counters are within what they can be, and energy never falls."""
    for uuid in list_gpus(session):
        known, first, second = read_identity(session, uuid), *(read_telemetry(session, uuid) for _ in range(2))
        for seen in (first, second):
            fine = {
                "no more memory than there is": seen.memory_used_mib + seen.memory_free_mib <= known.memory_mib,
                "a temperature from -20 to 130 C": seen.temperature_c is None or -20 < seen.temperature_c < 130,
                "a power from 0 to 5,000 W": seen.power_w is None or 0 < seen.power_w < 5000,
                "a utilization of 0 to 100%": seen.gpu_util_percent is None or 0 <= seen.gpu_util_percent <= 100,
            }
            yield from _unmet(fine, seen)
        if first.energy_mj is not None and (second.energy_mj is None or second.energy_mj < first.energy_mj):
            yield f"expected an energy counter that never falls, found {first.energy_mj}, then {second.energy_mj}"


def processes_make_sense(session: Session) -> Iterator[str]:
    """Processes have IDs and no more memory than there is, and are told once, on an instance only where those are."""
    for uuid in list_gpus(session):
        known, found = read_identity(session, uuid), read_processes(session, uuid)
        for p in found:
            fine = {
                "a process ID": 0 < p.pid < _BEYOND_PIDS,
                "no more memory than there is, or none told": 0 <= (p.memory_mib or 0) <= known.memory_mib,
                "an instance only where MIG is switched on": p.gpu_instance_id is None or known.mig_enabled,
            }
            yield from _unmet(fine, p)
        yield from _repeated(f"GPU {uuid}: expected each process once", found, lambda p: (p.pid, p.gpu_instance_id))


def utilization_makes_sense(session: Session, wall: Callable[[], float] = time.time) -> Iterator[str]:
    """What a process did is a share at a moment of the node's clock; a GPU may be unable to say it."""
    for uuid in list_gpus(session):
        found = list_samples(session, uuid, 0) or ()
        latest = round(1e6 * wall()) + AHEAD_US
        for pid, at_us, sm_percent in found:
            fine = {
                "a process ID": pid < _BEYOND_PIDS,
                "0 to 100% of the SMs": sm_percent <= 100,
                "microseconds since 1970, and none to come": _FIRST_STAMP_US < at_us <= latest,
            }
            yield from _unmet(fine, (pid, at_us, sm_percent))
        yield from _repeated(f"GPU {uuid}: expected each process once at each moment", found, lambda one: one[:2])


def gpm_says_ratios_or_nothing(session: Session) -> Iterator[str]:
    """One sample says nothing, two say ratios."""
    gpm = Gpm(session)
    for uuid in list_gpus(session):
        if gpm.sample(uuid) is not None:
            yield "expected nothing of a single sample, found something"
        found = gpm.sample(uuid)
        if found is not None and found.sm is not None and not 0 <= found.sm <= 1:
            yield f"expected an SM activity of 0 to 1, found {found.sm}"
        gpm.forget(uuid)


def xids_can_be_watched(session: Session) -> Iterator[str]:
    """Events can be registered for, and looked at without waiting."""
    uuids = list_gpus(session)
    watch = XidWatch(session, uuids)
    for uuid in uuids:
        yield from (f"expected XIDs from 1 up, found {xid}" for xid in watch.seen(uuid) if xid <= 0)


def mig_profiles_lie_within_the_gpu(session: Session) -> Iterator[str]:
    """A GPU with MIG has profiles, with names and places that fit on it."""
    for uuid in list_gpus(session):
        known = read_identity(session, uuid)
        table = read_table(session, uuid) if known.mig_capable else None
        if (table is not None) != known.mig_capable:
            yield f"expected MIG profiles where there is MIG, found {table}"
        for profile in table.profiles if table else ():
            fine = {
                "a name such as 3g.20gb": "g." in profile.name and not profile.name.startswith("MIG "),
                "less memory than the GPU has": profile.memory_mib < known.memory_mib,
                "places within the GPU": max(profile.starts) + profile.memory_slices
                <= (table.memory_slices if table else 0),
            }
            yield from _unmet(fine, profile)


def unknown_gpu_is_an_error_that_names_it(session: Session) -> Iterator[str]:
    """Nobody's UUID is refused."""
    try:
        session.handle(NO_GPU)
    except NvmlError as e:
        if NO_GPU not in str(e):
            yield f"expected an error that names the GPU, found {e}"
    else:
        yield f"expected no GPU {NO_GPU}, found one"


CONTRACT: Sequence[Rule] = (
    identity_makes_sense,
    telemetry_makes_sense,
    processes_make_sense,
    utilization_makes_sense,
    gpm_says_ratios_or_nothing,
    xids_can_be_watched,
    mig_profiles_lie_within_the_gpu,
    unknown_gpu_is_an_error_that_names_it,
)


def _repeated(expected: str, found: Sequence[T], key: Callable[[T], Hashable]) -> Iterator[str]:
    """Say which of these were told before, the first few of them: there may be thousands."""
    seen, again = set[Hashable](), list[T]()
    for one in found:
        if (name := key(one)) in seen:
            again.append(one)
        seen.add(name)
    if again:
        few = ", ".join(map(str, again[:_FEW])) + " …" * (len(again) > _FEW)
        yield f"{expected}, found {len(again):,} of {len(found):,} that were told before: {few}"


def _unmet(fine: dict[str, bool], found: object) -> Iterator[str]:
    yield from (f"expected {what}, found {found}" for what, is_so in fine.items() if not is_so)
