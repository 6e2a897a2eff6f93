"""Which GPUs take no job just now, though nobody reports them unhealthy: for a while, of which time tells the end."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import nsmallest

from carpool_core.clock import Clock
from carpool_core.resources.node import Device, GpuNode
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode

from carpool_extender.cache.gpu_table import GpuReport, UnavailableReason

SILENCE_S = 60.0
"""After this time without a heartbeat a node's agent counts as gone: it sends one each 25 s, and one may be lost."""
FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0
"""How long a GPU that could not be prepared is left alone, after the first failure in a row and at most."""


SILENT, RESTING, KEPT = 1, 2, 8
"""Kinds of hindrances; the others are in `doubts`."""
KEPT_FOR_OTHERS = UnavailableReason(KEPT, "kept for a job that comes first")
"""In words that stay: each change is a write for every waiting pod."""


@dataclass(frozen=True, slots=True)
class _Rest:
    length_s: float
    until_s: float


class GpuAvailability:
    """Counts the silence of agents and the failures of GPUs, and knows which are kept for somebody.

    Silence counts from when this process saw a heartbeat change, not from the time that the heartbeat says: clocks of
    nodes differ, and after a start, or an outage of the API server, every agent has its time to report.

    Args:
        clock: Tells how long ago something was.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._rests: dict[tuple[str, GpuUuid], _Rest] = {}
        self._kept: set[tuple[str, GpuUuid]] = set()

    def record_heartbeat(self, node: str, heartbeat: str | None, ago_s: float = 0.0) -> None:
        """Take note of a node's heartbeat; an agent that never sent one is silent since the node was first heard of.

        Args:
            node: Name of the node.
            heartbeat: What the agent wrote.
            ago_s: For how long that has stood there, where it is known; nodes are told of in falling order of it.
        """
        last = self._heard.get(node)
        if last is None or (heartbeat and last[0] != heartbeat):
            self._heard[node] = (heartbeat, self._clock.monotonic() - ago_s)
            self._heard.move_to_end(node)  # so that the longest silent stand first

    def forget(self, node: str) -> None:
        """Forget a node that was deleted."""
        self._heard.pop(node, None)
        for key in [key for key in self._rests if key[0] == node]:
            del self._rests[key]

    def record_failure(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Leave GPUs that could not be prepared alone for a while, twice as long as the last time."""
        now = self._clock.monotonic()
        for gpu in gpus:
            last = self._rests.get((node, gpu))
            if last is None or now >= last.until_s:  # several that failed together are one failure
                length = FIRST_REST_S if last is None else min(LONGEST_REST_S, 2 * last.length_s)
                self._rests[node, gpu] = _Rest(length, now + length)

    def record_success(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Forget the failures of GPUs that were prepared."""
        for gpu in gpus:
            self._rests.pop((node, gpu), None)

    def keep(self, gpus: Iterable[tuple[str, GpuUuid]]) -> None:
        """Have GPUs, by node and UUID, take nobody, because they are kept for somebody."""
        self._kept.update(gpus)

    def keep_no_more(self, gpus: Iterable[tuple[str, GpuUuid]]) -> None:
        """Have GPUs take others again."""
        self._kept.difference_update(gpus)

    def silent(self) -> dict[str, UnavailableReason]:
        """Nodes whose agents are silent, in words that stay: each change is a write for every waiting pod."""
        now, found = self._clock.monotonic(), {}
        for node, (_, at) in self._heard.items():
            if now - at <= SILENCE_S:
                break
            found[node] = UnavailableReason(SILENT, f"its agent has not reported for more than {SILENCE_S:.0f} s")
        return found

    def resting(self) -> dict[tuple[str, GpuUuid], UnavailableReason]:
        """GPUs that are left alone because they could not be prepared, by node and UUID."""
        now = self._clock.monotonic()
        return {
            key: UnavailableReason(
                RESTING, f"could not be prepared, is tried again at {self._time(rest.until_s - now)}"
            )
            for key, rest in self._rests.items()
            if now < rest.until_s
        }

    def excluded(self) -> dict[tuple[str, GpuUuid], UnavailableReason]:
        """GPUs that are left alone for whatever reason, by node and UUID."""
        return dict.fromkeys(self._kept, KEPT_FOR_OTHERS) | self.resting()

    def _time(self, in_s: float) -> str:
        moment: datetime = self._clock.now() + timedelta(seconds=in_s)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


UNHEALTHY, STRANGER, CONTRADICTION, INVALID, DISPUTED, NO_MEMORY = 0, 3, 4, 5, 6, 7
"""Kinds of hindrances; the others are those of time, in `standing`."""
LEAST_MIB = 256
"""Memory that any job needs, in MiB: what a process takes of a GPU before it has stored anything there."""
MOST_NAMED = 3
"""Pods or nodes that a hindrance names."""
LONGEST_MESSAGE = 120
"""Characters of what others wrote that a hindrance repeats: it goes into the conditions of all pods that wait."""


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Cut a text where it gets too long, and show that it was cut."""
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def listed(names: Collection[str]) -> str:
    """Name the first few of some, and say how many more there are: `a`, `a and b`, `a, b, c and 37 more`."""
    first, more = nsmallest(MOST_NAMED, names), len(names) - MOST_NAMED
    *others, last = [*first, f"{more:,} more"] if more > 0 else first
    return f"{', '.join(others)} and {last}" if others else last


def validate_gpu(said: GpuReport) -> UnavailableReason | None:
    """Say why a GPU is left out; None where nothing speaks against it."""
    device, held = said.device, said.held
    if device.health is not DeviceHealth.HEALTHY:
        message = shortened(device.health_message)
        return UnavailableReason(UNHEALTHY, f"unhealthy: {message}" if message else "unhealthy")
    if said.is_told_twice:
        return UnavailableReason(CONTRADICTION, f"its node tells of several GPUs by the UUID {device.uuid}")
    if said.shares_index:
        return UnavailableReason(CONTRADICTION, f"its node tells of several GPUs by the index {device.index}")
    if device.memory_mib - device.reserved_mib < LEAST_MIB:
        return UnavailableReason(NO_MEMORY, _without_memory(device))
    modes = sorted({reservation.mode for reservation in held})
    if len(modes) > 1:
        return UnavailableReason(CONTRADICTION, f"its reservations contradict each other: {', '.join(modes)}")
    if len(held) > 1 and modes == [SharingMode.EXCLUSIVE]:
        return UnavailableReason(CONTRADICTION, f"its reservations contradict each other: {len(held)} are exclusive")
    known = {reservation.pod_uid for reservation in held}
    strangers = [tenant for tenant in said.seen if tenant.pod_uid not in known and tenant.memory_mib > 0]
    if strangers:
        memory = sum(tenant.memory_mib for tenant in strangers)
        pods = {tenant.pod_uid for tenant in strangers}
        who = f"{'pod' if len(pods) == 1 else 'pods'} {listed(pods)}"
        return UnavailableReason(STRANGER, f"{memory:,} MiB are used without a reservation, by {who}")
    return None


def _without_memory(device: Device) -> str:
    reserved = f", of which {device.reserved_mib:,} are reserved" if device.reserved_mib else ""
    return f"reports {device.memory_mib:,} MiB of memory{reserved}: expected at least {LEAST_MIB} MiB to give"


def has_unreserved_usage(node: GpuNode) -> bool:
    """Whether pods use memory of a node's GPUs without a reservation there."""
    known = {reservation.pod_uid for reservation in node.spec.reservations}
    return any(tenant.pod_uid not in known and tenant.memory_mib for tenant in node.status.tenants)


def still_valid(node: GpuNode, seen: GpuNode, chosen: Collection[GpuUuid]) -> bool:
    """Whether a decision that was made on one state of a node holds for another.

    It does where it knew all that stands there now, and everybody whom it counted with is there: what was released on
    other GPUs since makes room, and forbids nothing.

    Args:
        node: The node as it is now.
        seen: As it was decided on, with all that was about to be written.
        chosen: The GPUs that were decided on.
    """
    was, now = seen.status, node.status
    # The generation alone does not tell them apart: it is a millisecond, in which a pod may be decided on twice.
    known = {r.pod_uid: (r.generation, r.gpu_uuids, r.mode, r.tenant) for r in seen.spec.reservations}
    here = {r.pod_uid for r in node.spec.reservations}
    gone = [r for r in seen.spec.reservations if r.pod_uid not in here]
    return (
        (seen.metadata.uid, was.devices, was.tenants) == (node.metadata.uid, now.devices, now.tenants)
        and all(known.get(r.pod_uid) == (r.generation, r.gpu_uuids, r.mode, r.tenant) for r in node.spec.reservations)
        and not any(uuid in chosen for r in gone for uuid in r.gpu_uuids)
        and not has_unreserved_usage(node)
    )
