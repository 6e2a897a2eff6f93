"""Whether new work may go to a GPU: what happened to it, by kind, and when it is well again. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

_QUIET_S = 60.0
"""How long nothing may happen before a GPU counts as well again."""
_LONGEST_QUIET_S = 3600.0
_MEMORY_S = 3600.0
"""Relapses within this time double the quiet that is asked for."""
_HOT_S = 30.0
"""A hardware slowdown for heat that lasts so long is not just a peak."""
_STUCK_S = 600.0
"""A GPU that says it computes and draws no more than with nobody on it, for so long, is stuck."""


class XidClass(StrEnum):
    """What an XID says of the GPU. Source: NVIDIA, "XID Errors", column of recommended actions."""

    APPLICATION = "Application"
    """The program's own fault: the GPU is fine."""
    RECOVERABLE = "Recoverable"
    """The GPU goes on, after a while in which nothing else happens."""
    FATAL = "Fatal"
    """The GPU must be reset or replaced before it may be used again."""


_APPLICATION = (13, 31, 43, 45, 68, 69, 109)
_FATAL = (48, 61, 62, 64, 74, 79, 95, 110, 119, 120, 121, 136, 140, 143)
XIDS: Mapping[int, XidClass] = {
    **dict.fromkeys(_APPLICATION, XidClass.APPLICATION),
    **dict.fromkeys(_FATAL, XidClass.FATAL),
}
"""Those with a class of their own; all others are recoverable: unknown is not harmless."""

_MEANING = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    62: "micro-controller halted",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    154: "recovery action changed",
}


def xid_class(xid: int) -> XidClass:
    """Return what an XID says of the GPU."""
    return XIDS.get(xid, XidClass.RECOVERABLE)


def describe_xid(xid: int) -> str:
    """Such as `XID 79 (fallen off the bus)`."""
    return f"XID {xid}" + (f" ({_MEANING[xid]})" if xid in _MEANING else "")


@dataclass(frozen=True, slots=True)
class Signals:
    """What was seen of a GPU since the last look. None where it cannot be said."""

    xids: Sequence[int] = ()
    lost: str = ""
    """Why it cannot be read; empty where it can."""
    was_reset: bool = False
    """It, or the driver, began anew."""
    ecc_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    is_hot: bool | None = None
    """The hardware slows down for heat."""
    is_motionless: bool | None = None
    """It says that it computes, and draws no more power than with nobody on it."""


@dataclass(frozen=True, slots=True)
class Health:
    """A GPU's health, and what it takes to be well again."""

    problem: str = ""
    """Why no new work may go there; empty where it may."""
    until: float | None = None
    """Well again at this time if nothing else happens; None: only after a reset."""
    falls: tuple[float, ...] = ()
    """When it fell sick, within the last hour."""
    is_lost: bool = False
    """It could not be read when it was last looked at: that it can be again is a new beginning."""
    hot_since: float | None = None
    motionless_since: float | None = None
    ecc_uncorrectable: int | None = None


def advance(health: Health, seen: Signals, now: float) -> Health:
    """Take in what was seen.

    Args:
        health: As it was.
        seen: Since then.
        now: Monotonic time, in seconds.
    """
    hot_since = _since(health.hot_since, now) if seen.is_hot else None
    motionless_since = _since(health.motionless_since, now) if seen.is_motionless else None
    before, ecc = health.ecc_uncorrectable, seen.ecc_uncorrectable
    health = replace(
        health,
        hot_since=hot_since,
        motionless_since=motionless_since,
        ecc_uncorrectable=before if ecc is None else ecc,
        falls=tuple(t for t in health.falls if now - t < _MEMORY_S),
    )
    began_anew = seen.was_reset or health.is_lost
    health = replace(health, is_lost=bool(seen.lost))
    if began_anew and health.problem and health.until is None and not seen.lost:
        health = replace(health, until=now + _quiet_s(health))
    fatal = _fatal(seen)
    if fatal:
        return _sick(health, fatal, None, now)
    passing = _passing(seen, before, health, now)
    if passing:
        if health.problem and health.until is None:
            return health  # what takes a reset is not outdone by what passes
        return _sick(health, passing, now + _quiet_s(health), now)
    if health.problem and health.until is not None and now >= health.until:
        return replace(health, problem="", until=None)
    return health


def _since(known: float | None, now: float) -> float:
    return now if known is None else known


def _sick(health: Health, problem: str, until: float | None, now: float) -> Health:
    falls = health.falls if health.problem else (*health.falls, now)
    return replace(health, problem=problem, until=until, falls=falls)


def _quiet_s(health: Health) -> float:
    """The quiet that is asked for: a minute, doubled with each relapse."""
    return min(_LONGEST_QUIET_S, _QUIET_S * 2.0 ** max(0, len(health.falls) - (1 if health.problem else 0)))


def _fatal(seen: Signals) -> str:
    if seen.lost:
        return seen.lost
    for xid in seen.xids:
        if xid_class(xid) is XidClass.FATAL:
            return f"{describe_xid(xid)}: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    if seen.remap_failed:
        return "a row of its memory could not be remapped: replace the GPU"
    return ""


def _passing(seen: Signals, ecc_before: int | None, health: Health, now: float) -> str:
    for xid in seen.xids:
        if xid_class(xid) is XidClass.RECOVERABLE:
            return f"{describe_xid(xid)}: no new work until it has been quiet for a while"
    if ecc_before is not None and seen.ecc_uncorrectable is not None and seen.ecc_uncorrectable > ecc_before:
        return f"{seen.ecc_uncorrectable - ecc_before} uncorrectable ECC errors: no new work until it has been quiet"
    if seen.remap_pending:
        return "a row of its memory waits to be remapped: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    if health.hot_since is not None and now - health.hot_since >= _HOT_S:
        return f"it has slowed down for heat for more than {_HOT_S:.0f} s: look at its cooling"
    if health.motionless_since is not None and now - health.motionless_since >= _STUCK_S:
        return (
            f"it is stuck: it says that it computes, and has drawn idle power for more than {_STUCK_S:.0f} s: end its "
            "processes, and reset it (nvidia-smi --gpu-reset) where that does not help"
        )
    return ""
