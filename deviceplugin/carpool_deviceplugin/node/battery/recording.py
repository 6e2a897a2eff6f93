"""What one GPU's NVML answers, as a file; and in what another library, such as the fake, answers otherwise."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pynvml
from carpool_core.values import GpuUuid

from carpool_deviceplugin.node.battery.contract import NO_GPU
from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.library import Handle, NvmlLibrary
from carpool_deviceplugin.nvml.mig import read_table
from carpool_deviceplugin.nvml.reading import read_identity

NEAR_MIB = 64
"""By so much may what the driver reserves, or an instance's memory, differ from one driver to another."""
_NO_LINK, _NO_PROFILE, _NO_TYPE = 99, 99, 99


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG profile as the driver describes it."""

    name: str
    id: int
    compute_slices: int
    memory_slices: int
    starts: list[int]
    memory_mib: int
    sm_count: int


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU answered."""

    product: str
    driver: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    power_limit_w: float | None
    mig: list[Profile]
    codes: dict[str, int]
    """NVML's return code of each question, by what was asked; 0 is success."""


def record(session: Session, uuid: GpuUuid) -> Recording:
    """Ask a GPU all that a fake must answer alike. It only reads; raises NvmlError where it cannot be read at all."""
    known = read_identity(session, uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    return Recording(
        product=known.product,
        driver=session.ask("", session.library.nvmlSystemGetDriverVersion) or "",
        memory_mib=known.memory_mib,
        reserved_mib=known.reserved_mib,
        compute_capability=known.compute_capability,
        power_limit_w=known.power_limit_w,
        mig=[
            Profile(
                name=p.name,
                id=p.id,
                compute_slices=p.compute_slices,
                memory_slices=p.memory_slices,
                starts=list(p.starts),
                memory_mib=p.memory_mib,
                sm_count=p.sm_count,
            )
            for p in (table.profiles if table else ())
        ],
        codes={name: _code(ask) for name, ask in _questions(session.library, session.handle(uuid))},
    )


def differences(recorded: Recording, other: Recording) -> list[str]:
    """Say in what another library's answers are not those that were recorded; what drivers vary is allowed for."""
    found = [
        f"{name}: recorded {getattr(recorded, name)}, found {getattr(other, name)}"
        for name in ("product", "memory_mib", "compute_capability")
        if getattr(recorded, name) != getattr(other, name)
    ]
    if abs(recorded.reserved_mib - other.reserved_mib) > NEAR_MIB:
        found.append(f"reserved_mib: recorded {recorded.reserved_mib}, found {other.reserved_mib}")
    ours, theirs = ({p.name: p for p in one.mig} for one in (other, recorded))
    found += [
        f"MIG profile {name}: recorded {theirs.get(name)}, found {ours.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if not _is_as(theirs.get(name), ours.get(name))
    ]
    return found + [
        f"{name}: recorded {_named(code)}, found {_named(other.codes.get(name))}"
        for name, code in recorded.codes.items()
        if other.codes.get(name) != code
    ]


def _is_as(recorded: Profile | None, other: Profile | None) -> bool:
    if recorded is None or other is None:
        return False
    near = abs(recorded.memory_mib - other.memory_mib) <= NEAR_MIB
    return near and msgspec.structs.replace(recorded, memory_mib=0) == msgspec.structs.replace(other, memory_mib=0)


def _named(code: int | None) -> str:
    return "nothing" if code is None else "success" if code == 0 else f"{pynvml.NVMLError(code)} ({code})"


def _code(ask: Callable[[], Any]) -> int:
    try:
        ask()
    except pynvml.NVMLError as e:
        return int(e.value)
    return 0


def _questions(library: NvmlLibrary, handle: Handle) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what some GPUs cannot say, and what none can, each with a name that says what was asked."""
    yield "NUMA node", lambda: library.nvmlDeviceGetNumaNodeId(handle)
    yield "MIG mode", lambda: library.nvmlDeviceGetMigMode(handle)
    yield "remapped rows", lambda: library.nvmlDeviceGetRemappedRows(handle)
    yield (
        "uncorrectable ECC errors",
        lambda: library.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
    )
    yield "energy", lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle)
    yield "reasons of clocks", lambda: library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    yield "a sensor of temperature that there is none of", lambda: library.nvmlDeviceGetTemperature(handle, _NO_TYPE)
    yield "what processes did in the future", lambda: library.nvmlDeviceGetProcessUtilization(handle, 2**62)
    yield "the first NVLink", lambda: library.nvmlDeviceGetNvLinkState(handle, 0)
    yield "an NVLink that there is none of", lambda: library.nvmlDeviceGetNvLinkState(handle, _NO_LINK)
    yield "an unknown UUID", lambda: library.nvmlDeviceGetHandleByUUID(NO_GPU)
    yield "an index beyond the last", lambda: library.nvmlDeviceGetHandleByIndex(library.nvmlDeviceGetCount())
    yield "XIDs where there are none", lambda: _wait(library)
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        yield f"MIG profile {index}", partial(library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index)
    yield (
        "places of an unknown MIG profile",
        lambda: library.nvmlDeviceGetGpuInstancePossiblePlacements(
            handle,
            _NO_PROFILE,
            (pynvml.c_nvmlGpuInstancePlacement_t * 16)(),
            ctypes.byref(ctypes.c_uint(16)),
        ),
    )


def _wait(library: NvmlLibrary) -> None:
    events = library.nvmlEventSetCreate()
    try:
        library.nvmlEventSetWait(events, 0)
    finally:
        library.nvmlEventSetFree(events)
