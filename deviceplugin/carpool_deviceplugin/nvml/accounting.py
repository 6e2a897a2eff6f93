"""From the driver's samples to what each process has used: time, SM activity, energy. No calls, only arithmetic.

Energy is the GPU's own counter, shared out by the time in which each process's kernels ran: the processes' parts add up
to the counter, also with those that have ended since the moment before. Where nobody's kernels ran, those who hold the
GPU share it evenly. Under MIG nobody knows that time; then the SMs that each instance kept busy stand in for it, and
where these are not known either, nobody's energy is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from carpool_deviceplugin.devices.gpu import ProcessUse
from carpool_deviceplugin.devices.processes import Process
from carpool_deviceplugin.nvml.values import GpmMetrics, RunningProcess, UtilizationSample

_BY_TIME = itemgetter(1)
"""Of a sample."""
_FIRST_SAMPLE_US = 1e6 / 6
_LONGEST_SAMPLE_US = 1_000_000
"""The driver samples each sixth of a second to each second; a longer gap was no sample."""
_UNSEEN = GpmMetrics()
AHEAD_US = 2_000_000
"""Stamps so far ahead of the node's clock are of a time before it was set back."""


class Present(msgspec.Struct, frozen=True):
    """A process on the GPU, and whose it is."""

    running: RunningProcess
    process: Process


@dataclass(frozen=True, slots=True)
class Moment:
    """What was read of the GPU at one moment."""

    at: float
    """Monotonic time, in seconds."""
    present: Sequence[Present]
    samples: Sequence[UtilizationSample] | None
    """Since the moment before; None where the GPU cannot say."""
    energy_j: float | None
    gpm: GpmMetrics | None
    parts: Mapping[int, "PartMoment"] = field(default_factory=dict)
    """Of MIG instances, by ID."""


@dataclass(frozen=True, slots=True)
class PartMoment:
    """What was read of a MIG instance."""

    sm_count: int
    gpm: GpmMetrics | None


class Ledger:
    """What each process of one GPU has used since it was first seen."""

    def __init__(self) -> None:
        self._uses: dict[str, ProcessUse] = {}
        self._there: Mapping[str, Present] = {}
        self._last_us: dict[int, int] = {}
        self._at: float | None = None
        self._energy_j: float | None = None
        self.since_us = 0
        """Stamp of the last sample: ask for what came after it."""
        self.idle_power_w: float | None = None
        """The least that was measured with nobody on the GPU; None until that was."""

    def keep_up(self, now_us: int) -> None:
        """Begin anew with the driver's stamps where the node's clock was set back: all of them would be in the past."""
        if self.since_us > now_us + AHEAD_US:
            self.since_us = 0
            self._last_us.clear()

    def take(self, now: Moment) -> tuple[list[ProcessUse], list[ProcessUse]]:
        """Take in a moment.

        Returns:
            What the processes that are there have used, and what those that have ended since the moment before had.
        """
        elapsed = 0.0 if self._at is None else now.at - self._at
        energy = self._energy(now.energy_j)
        there = {p.process.key: p for p in now.present}
        gone = [p for key, p in self._there.items() if key not in there]
        if not now.present and not gone and elapsed > 0 and energy is not None:
            power = energy / elapsed
            self.idle_power_w = power if self.idle_power_w is None else min(power, self.idle_power_w)
        busy = None if now.samples is None else self._busy(now.samples, elapsed)
        known = [p for p in gone if p.running.gpu_instance_id in (None, *now.parts)]
        energies = self._shared(_weights([*now.present, *known], now, busy), energy, elapsed)
        ended = [self._ended(p.process.key, energies.get(p.process.key)) for p in gone]
        shares = _shares(now, busy)
        self._uses = {
            key: self._used(key, p, now, elapsed, busy, shares, energies.get(key)) for key, p in there.items()
        }
        self._last_us = {p.running.pid: self._last_us.get(p.running.pid, self.since_us) for p in now.present}
        self._at, self._there = now.at, there
        return list(self._uses.values()), ended

    def _ended(self, key: str, energy: float | None) -> ProcessUse:
        was = self._uses[key]
        return replace(was, energy_j=_plus(was.energy_j, energy))

    def _energy(self, counter_j: float | None) -> float | None:
        before, self._energy_j = self._energy_j, counter_j
        if before is None or counter_j is None or counter_j < before:
            return None  # the driver began anew
        return counter_j - before

    def _busy(self, samples: Sequence[UtilizationSample], elapsed: float) -> dict[int, float]:
        """Seconds of kernels of each process ID."""
        busy: dict[int, float] = {}
        last_us, ordered = self._last_us, sorted(samples, key=_BY_TIME)
        for pid, at_us, sm_percent in ordered:
            last = last_us.get(pid, 0)
            us = at_us - last if last else _FIRST_SAMPLE_US
            if us > _LONGEST_SAMPLE_US:  # there are thousands: each call counts
                us = _LONGEST_SAMPLE_US
            if us > 0:
                busy[pid] = busy.get(pid, 0.0) + sm_percent * us
            last_us[pid] = at_us
        if ordered:
            self.since_us = max(self.since_us, _BY_TIME(ordered[-1]))
        return {pid: min(percent_us / 1e8, elapsed) if elapsed > 0 else 0.0 for pid, percent_us in busy.items()}

    def _shared(self, weights: Mapping[str, float], energy: float | None, elapsed: float) -> dict[str, float]:
        if energy is None:
            return {}
        above = max(0.0, energy - (self.idle_power_w or 0.0) * elapsed)
        return {key: above * weight for key, weight in weights.items()}

    def _used(
        self,
        key: str,
        p: Present,
        now: Moment,
        elapsed: float,
        busy: Mapping[int, float] | None,
        shares: Mapping[int, float],
        energy: float | None,
    ) -> ProcessUse:
        memory, was = p.running.memory_mib or 0, self._uses.get(key)
        gpm, share = _seen(p, now), shares[p.running.pid]
        if was is None:
            return ProcessUse(
                id=key,
                pod_uid=p.process.pod_uid,  # type: ignore[arg-type]  # the caller leaves out who has no pod
                started=now.at,
                memory_mib=memory,
                peak_memory_mib=memory,
                busy_s=None if busy is None else 0.0,
                sm_s=None if gpm.sm is None else 0.0,
                dram_s=None if gpm.dram is None else 0.0,
                energy_j=energy,
                steps=0,
                steps_s=0.0,
            )
        return ProcessUse(
            id=key,
            pod_uid=was.pod_uid,
            started=was.started,
            memory_mib=memory,
            peak_memory_mib=max(was.peak_memory_mib, memory),
            busy_s=_plus(was.busy_s, None if busy is None else busy.get(p.running.pid, 0.0)),
            sm_s=_plus(was.sm_s, None if gpm.sm is None else gpm.sm * elapsed * share),
            dram_s=_plus(was.dram_s, None if gpm.dram is None else gpm.dram * elapsed * share),
            energy_j=_plus(was.energy_j, energy),
            steps=was.steps,
            steps_s=was.steps_s,
        )


def _seen(p: Present, now: Moment) -> GpmMetrics:
    """What was seen of the SMs where a process is."""
    instance = p.running.gpu_instance_id
    if instance is None:
        return now.gpm or _UNSEEN
    part = now.parts.get(instance)
    return (part.gpm if part else None) or _UNSEEN


def _shares(now: Moment, busy: Mapping[int, float] | None) -> dict[int, float]:
    """Share of what was seen where it is, of each process ID."""
    beside = Counter(p.running.gpu_instance_id for p in now.present)
    times = {p.running.pid: (busy or {}).get(p.running.pid, 0.0) for p in now.present}
    total = sum(times.values())

    def share(running: RunningProcess) -> float:
        if running.gpu_instance_id is not None:
            return 1 / beside[running.gpu_instance_id]
        return times[running.pid] / total if total else 0.0

    return {p.running.pid: share(p.running) for p in now.present}


def _weights(there: Sequence[Present], now: Moment, busy: Mapping[int, float] | None) -> dict[str, float]:
    """Share of the GPU's energy of each process that was there, 1 together; empty where nobody knows."""
    instances = Counter(p.running.gpu_instance_id for p in there)
    times: dict[str, float] = {}
    for p in there:
        instance = p.running.gpu_instance_id
        if instance is None:
            times[p.process.key] = (busy or {}).get(p.running.pid, 0.0)
            continue
        part = now.parts.get(instance)
        if part is None or part.gpm is None or part.gpm.sm is None:
            return {}
        times[p.process.key] = part.gpm.sm * part.sm_count / instances[instance]
    total = sum(times.values())
    return {key: time / total if total else 1 / len(times) for key, time in times.items()}


def _plus(was: float | None, more: float | None) -> float | None:
    """A sum of what is known; nothing is known where it never was."""
    if more is None:
        return was
    return (was or 0.0) + more
