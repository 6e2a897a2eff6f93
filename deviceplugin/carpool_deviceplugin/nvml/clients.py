"""What happens to the clients of a GPU's MPS daemon together: only one of them is to blame, if any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from carpool_core.values import GpuUuid, PodUid

from carpool_deviceplugin.mps.daemons import MpsStatus
from carpool_deviceplugin.nvml.presence import Presence

FAULT = "a client's fatal fault has hit its MPS server"
DEATH = "its MPS daemon ended under its clients"
_WITHIN_S = 20.0
"""Clients that leave so soon after an XID leave because of it: they are told at their next call, and have to end."""
_TOLD_FOR_S = 600.0
"""How long it is told of pods that are gone: whoever starts them again looks sooner."""

Pids = Mapping[int, PodUid]


@dataclass
class _Gpu:
    """What is known of one GPU's clients."""

    were: Pids = field(default_factory=dict)
    """At the last look."""
    suspected: Pids = field(default_factory=dict)
    """Who was there when an XID came."""
    until: float = 0.0
    """How long they are suspected."""
    what: str = ""
    """The fault that goes on; empty where none does."""
    hit: Pids = field(default_factory=dict)
    """Whom it has hit."""
    told: dict[PodUid, tuple[float, str]] = field(default_factory=dict)
    """When and what, of pods that are there and that are gone."""


class Clients:
    """Remembers what happened to the clients of each GPU's daemon, also to those that left before anybody looked.

    Args:
        monotonic: Seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._gpus: dict[GpuUuid, _Gpu] = {}

    def see(
        self, uuid: GpuUuid, mps: MpsStatus, present: Presence, *, is_expected: bool, had_xid: bool
    ) -> dict[PodUid, str]:
        """Take in how a daemon is; return which pods that are there end together, and what happened to them.

        Args:
            uuid: The GPU.
            mps: Its daemon.
            present: Who is on the GPU.
            is_expected: Whether there should be a daemon: then whoever is there is its client.
            had_xid: Whether the driver reported an error of the GPU since the last look.
        """
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        there = {p.running.pid: p.process.pod_uid for p in present.pods if p.process.pod_uid is not None}
        gone = {pid: pod for pid, pod in gpu.were.items() if pid not in there}
        if is_expected and had_xid:
            gpu.suspected, gpu.until = {**gpu.suspected, **gpu.were, **there}, now + _WITHIN_S
        elif now > gpu.until:
            gpu.suspected = {}
        what, hit = _what_happened(mps, there, gone, gpu.suspected, is_expected=is_expected)
        gpu.were = there if is_expected else {}
        if what:
            gpu.hit = {**gpu.hit, **hit} if what == gpu.what else hit
            gpu.what = what
        pods = sorted(set(gpu.hit.values()))
        why = f"GPU {uuid}: {gpu.what}: pods that it ends together: {', '.join(pods)}"
        if what:
            gpu.told.update(dict.fromkeys(pods, (now, why)))
        struck = sorted({there[pid] for pid in gpu.hit.keys() & there.keys()})
        if not struck:
            gpu.what, gpu.hit = "", {}
        return dict.fromkeys(struck, why)

    def ended(self, uuid: GpuUuid) -> dict[PodUid, str]:
        """Return which pods a fault has ended together lately, and what happened to them."""
        gpu, now = self._gpus.setdefault(uuid, _Gpu()), self._monotonic()
        gpu.told = {pod: told for pod, told in gpu.told.items() if now - told[0] <= _TOLD_FOR_S}
        return {pod: why for pod, (_, why) in gpu.told.items()}


def _what_happened(mps: MpsStatus, there: Pids, gone: Pids, suspected: Pids, *, is_expected: bool) -> tuple[str, Pids]:
    """Say what happened since the last look, and to whom; empty where nothing did."""
    left = {pid: pod for pid, pod in suspected.items() if pid not in there}
    if mps.faulty:
        return FAULT, {**left, **{pid: pod for pid, pod in there.items() if pid in mps.faulty}}
    if is_expected and not mps.is_running and (there or gone):
        return DEATH, {**gone, **there}
    if len(set(left.values())) > 1:  # one alone is its own affair
        return FAULT, left
    return "", {}
