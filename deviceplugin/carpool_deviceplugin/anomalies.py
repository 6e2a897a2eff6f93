"""Anomalies of a pod's training, found in the readings of its steps and of its memory. Pure; times are monotonic.

An anomaly keeps the numbers and the cause of the reading in which it was found until it ends, so that the status
changes only when one begins or ends. Its end needs other limits than its begin.
"""

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from carpool_core.keys import CONDITION_MEMORY_NEAR_LIMIT, CONDITION_STALLED, CONDITION_STEP_TIME_DRIFT
from carpool_core.resources.node import LOADING_S, Anomaly

from carpool_deviceplugin.gpu import MIN_BUSY, StepCounts

_BIN_S = 10.0
"""Readings of so long make one value; longer if a step takes longer."""
_MIN_BASELINE, _MAX_BASELINE = 60, 360
"""Values of the baseline: ten minutes at least, one hour at most. In five minutes they vary too little."""
_DRIFTS = ((120.0, 1 / 5), (240.0, 1 / 30))
"""Times for which every value must be beyond the limit, and the least robust deviation then, of the median: a drift
makes steps 60% longer for two minutes, or a tenth longer for four. Neighbours on the CPU cause shorter ones."""
_MIN_DEVIATION_S = 1e-6
"""Least robust deviation in s, because a container may report steps that take no time."""
_MIN_DRIFT = 3
"""Values that must be beyond the limit."""
_DEVIATIONS, _CALM_DEVIATIONS = 3.0, 2.0
"""Robust deviations (1.4826 times the median absolute deviation) at which a drift begins and ends."""
_NEW_BASELINE_S = 3600.0
"""A drift of that age ends, because its step time becomes the baseline."""
_EXPLAINED = 0.1
"""Growth of the co-tenants' share of the GPU's time, 0..1, that explains longer steps."""
_STALL_STEPS, _STALL_S, _CHECKPOINT_S = 10, 60.0, 600.0
"""A stall has no step for so many median steps and so many seconds; the last number while a checkpoint is written."""
_MIN_STEPS = 20
"""Timed steps after which the median step is known."""
_CALM_S = 60.0
"""Seconds without a sign of a stall, or of growing memory, after which that anomaly ends."""
_NEAR, _BELOW = 0.95, 0.93
"""Shares of the memory limit at which the anomaly begins and may end."""
_GROWTH_BINS, _MIN_RISES, _MIN_GROWTH = 60, 3, 0.01
"""Memory grows if, in the last ten minutes, it rose in three values and by that share of the limit, which is then at
most 50 minutes away."""


class Sample(NamedTuple):
    """One reading of a pod with processes on a GPU."""

    at: float
    """Time of the reading, in s."""
    steps: int | None = None
    """Steps since the start of its processes; None if it reports none."""
    counts: StepCounts = StepCounts()
    """Growth of its step counters since the last reading."""
    waits_for: str = ""
    """Present wait of the process: `data` or `checkpoint`; empty if it waits for neither."""
    busy: float | None = None
    """Share of time in which its kernels ran; None if unknown."""
    others_busy: float = 0.0
    """The same for all co-tenants together; supposed to be 1 where it is unknown."""
    memory_mib: int = 0
    limit_mib: int | None = None
    """Memory that it can use; None if unknown."""
    clock_mhz: float | None = None
    """Clock of the SMs."""
    temperature_c: float | None = None


class _Value(NamedTuple):
    """Means of some seconds."""

    began: float
    step_s: float
    data_s: float
    """Wait for data per step."""
    copy_s: float
    others_busy: float
    clock_mhz: float


class AnomalyWatch:
    """Follows one pod on one GPU. Its memory is bounded.

    Args:
        kept: The pod's anomalies in the status that an earlier agent wrote. A stall stays until there are steps, a
            drift until steps are as short as before; the rest is found again.
    """

    def __init__(self, kept: Iterable[Anomaly] = ()) -> None:
        self._raised = {one.type: one for one in kept if one.type == CONDITION_STALLED or one.ends_below_seconds}
        self._raised_at: dict[str, float] = {}
        self._calm_since: dict[str, float] = {}
        self._steps = self._timed_steps = 0
        self._began: float | None = None
        self._active_at = self._value_began = 0.0
        self._step_s: float | None = None
        """Median step time; None before the first value."""
        self._sums, self._others_s = StepCounts(), 0.0
        """Sums since the last value."""
        self._recent: deque[_Value] = deque()
        """The values that are judged; older ones are in the baseline."""
        self._baseline: deque[_Value] = deque(maxlen=_MAX_BASELINE)
        self._memory: deque[int] = deque(maxlen=_GROWTH_BINS)
        self._memory_began = 0.0

    @property
    def anomalies(self) -> list[Anomaly]:
        """The present anomalies, by type."""
        return [self._raised[type_] for type_ in sorted(self._raised)]

    def add(self, sample: Sample) -> None:
        """Add a reading. If the number of steps fell, its processes began again, and so does the baseline."""
        if sample.steps is not None and sample.steps < self._steps:
            AnomalyWatch.__init__(self)
        if self._began is None:
            self._began = self._active_at = self._value_began = self._memory_began = sample.at
            self._raised_at = dict.fromkeys(self._raised, sample.at)
        if sample.steps is not None and sample.counts.elapsed_s > 0:
            self._steps = sample.steps
            self._judge_pause(sample)
            self._add_steps(sample)
        self._add_memory(sample)

    # Steps

    def _add_steps(self, sample: Sample) -> None:
        self._timed_steps += sample.counts.timed_steps
        self._sums = sums = self._sums.plus(sample.counts)
        self._others_s += sample.counts.elapsed_s * sample.others_busy
        steps = sums.timed_steps
        if not steps or sample.at - self._value_began < _BIN_S:
            return
        step_s, others_busy = max(0.0, sums.steps_s - sums.checkpoint_s) / steps, self._others_s / sums.elapsed_s
        waits = sums.data_s / steps, sums.copy_s / steps
        recent = self._recent
        recent.append(_Value(self._value_began, step_s, *waits, others_busy, sample.clock_mhz or 0.0))
        self._sums, self._others_s, self._value_began = StepCounts(), 0.0, sample.at
        while len(recent) > _MIN_DRIFT and sample.at - recent[1].began >= _DRIFTS[-1][0]:
            old = recent.popleft()
            if CONDITION_STEP_TIME_DRIFT not in self._raised:
                self._baseline.append(old)
        self._step_s = median(one.step_s for one in self._baseline or recent)
        self._judge_drift(sample)

    def _judge_drift(self, sample: Sample) -> None:
        type_, baseline = CONDITION_STEP_TIME_DRIFT, self._baseline
        if (known := self._raised.get(type_)) is None:
            if len(baseline) >= _MIN_BASELINE:
                self._find_drift(sample)
        elif sample.at - self._raised_at[type_] >= _NEW_BASELINE_S:
            baseline.clear()
            self._end(type_)
        else:
            values, others = self._latest(_DRIFTS[0][0], sample.at), self._explaining_others()
            if values and all(one.step_s < known.ends_below_seconds or one.others_busy > others for one in values):
                self._end(type_)

    def _find_drift(self, sample: Sample) -> None:
        usual_s, others = median(one.step_s for one in self._baseline), self._explaining_others()
        deviation_s = max(_MIN_DEVIATION_S, 1.4826 * median(abs(one.step_s - usual_s) for one in self._baseline))
        for seconds, least in _DRIFTS:
            values, unit_s = self._latest(seconds, sample.at), max(deviation_s, least * usual_s)
            beyond = (0.0 if one.others_busy > others else one.step_s - usual_s for one in values)
            if (far_s := min(beyond, default=0.0)) <= _DEVIATIONS * unit_s:
                continue
            reason, cause = self._cause_of_drift(values, sample.temperature_c)
            message = (
                f"a step takes {_time(median(one.step_s for one in values))}, {far_s / unit_s:.1f} robust deviations "
                f"or more above its usual {_time(usual_s)} for {sample.at - values[0].began:.0f} s: {cause}"
            )
            calm_s = usual_s + _CALM_DEVIATIONS * max(deviation_s, _DRIFTS[-1][1] * usual_s)
            found = Anomaly(
                type=CONDITION_STEP_TIME_DRIFT, reason=reason, message=message, ends_below_seconds=round(calm_s, 6)
            )
            self._begin(found, sample.at)
            return

    def _latest(self, seconds: float, at: float) -> list[_Value]:
        """Return the last values that cover so many seconds; empty if there are too few."""
        values = list(self._recent)
        while len(values) > _MIN_DRIFT and at - values[1].began >= seconds:
            values.pop(0)
        return values if len(values) >= _MIN_DRIFT and at - values[0].began >= seconds else []

    def _explaining_others(self) -> float:
        """Return the co-tenants' share of the GPU's time above which they explain longer steps."""
        return median(one.others_busy for one in self._baseline) + _EXPLAINED if self._baseline else math.inf

    def _cause_of_drift(self, recent: Iterable[_Value], temperature_c: float | None) -> tuple[str, str]:
        before, now = (_Value(*map(median, zip(*some, strict=True))) for some in (self._baseline, recent))
        extra_s = now.step_s - before.step_s
        if now.data_s - before.data_s >= extra_s / 2:
            return "DataWait", f"it waits {_time(now.data_s - before.data_s)} longer for input data in each step"
        if now.copy_s - before.copy_s >= extra_s / 2:
            return "Copies", f"it waits {_time(now.copy_s - before.copy_s)} longer for copies to the GPU in each step"
        if now.clock_mhz < 0.9 * before.clock_mhz:
            at = "" if temperature_c is None else f" at {temperature_c:.0f} °C"
            return "LowerClock", f"the clock of the GPU fell from {before.clock_mhz:.0f} to {now.clock_mhz:.0f} MHz{at}"
        return "Unknown", (
            "its waits for data and copies and its co-tenants are as before: look for longer samples, other load on "
            "the CPU, or another worker"
        )

    def _judge_pause(self, sample: Sample) -> None:
        type_, counts = CONDITION_STALLED, sample.counts
        if counts.steps or counts.batches:  # an evaluation takes batches and makes no steps
            self._active_at = sample.at
        step_s = self._step_s or 0.0
        limit_s = max(_CHECKPOINT_S if sample.waits_for == "checkpoint" else _STALL_S, _STALL_STEPS * step_s)
        pause_s = sample.at - self._active_at
        if (
            pause_s >= limit_s
            and self._step_s is not None
            and self._timed_steps >= _MIN_STEPS
            and type_ not in self._raised
        ):
            reason, cause = _cause_of_stall(sample)
            message = f"no step for {pause_s:.0f} s, where a step takes {_time(step_s)}: {cause}"
            self._begin(Anomaly(type=type_, reason=reason, message=message), sample.at)
        else:
            stepped = self._active_at > self._raised_at.get(type_, self._began or 0.0)
            self._end_if_calm(type_, sample.at, is_calm=stepped and pause_s < limit_s / 2)

    # Memory

    def _add_memory(self, sample: Sample) -> None:
        if sample.at - self._memory_began < _BIN_S or sample.at - (self._began or 0.0) < LOADING_S:
            return
        self._memory.append(sample.memory_mib)
        self._memory_began = sample.at
        type_, limit_mib, values = CONDITION_MEMORY_NEAR_LIMIT, sample.limit_mib, list(self._memory)
        if not limit_mib:
            return
        rises = sum(later > earlier for earlier, later in pairwise(values))
        now_mib, grown_mib = values[-1], values[-1] - values[0]
        is_growing = rises >= _MIN_RISES and grown_mib >= _MIN_GROWTH * limit_mib
        if now_mib >= _NEAR * limit_mib and is_growing and type_ not in self._raised:
            since_s = _BIN_S * (len(values) - 1)
            left_s = max(0, limit_mib - now_mib) / grown_mib * since_s
            message = (
                f"takes {now_mib:,} MiB of {limit_mib:,} MiB ({now_mib / limit_mib:.0%}), {grown_mib:,} MiB more than "
                f"{since_s:.0f} s ago, so that the limit is {left_s / 60:.0f} min away: mostly tensors that are kept "
                "from step to step, or longer samples"
            )
            self._begin(Anomaly(type=type_, reason="Growing", message=message), sample.at)
        else:
            self._end_if_calm(type_, sample.at, is_calm=now_mib < _BELOW * limit_mib or not rises)

    # Begin and end

    def _begin(self, anomaly: Anomaly, at: float) -> None:
        self._raised[anomaly.type] = anomaly
        self._raised_at[anomaly.type] = at
        self._calm_since.pop(anomaly.type, None)

    def _end(self, type_: str) -> None:
        for memory in (self._raised, self._raised_at, self._calm_since):
            memory.pop(type_, None)

    def _end_if_calm(self, type_: str, at: float, *, is_calm: bool) -> None:
        if not is_calm:
            self._calm_since.pop(type_, None)
        elif at - self._calm_since.setdefault(type_, at) >= _CALM_S:
            self._end(type_)


def _cause_of_stall(sample: Sample) -> tuple[str, str]:
    if sample.waits_for == "data":
        return "DataWait", "it waits for its data loader"
    if sample.waits_for == "checkpoint":
        return "Checkpoint", "it writes a checkpoint"
    if sample.busy is None:
        return "Unknown", "it waits for no data and writes no checkpoint"
    if sample.busy < MIN_BUSY:
        return "IdleGpu", "its GPU is idle and it waits for no data: its process is paused, or works on the CPU"
    return "BusyGpu", (
        f"its kernels run {sample.busy:.0%} of the time: a collective waits for another worker, a kernel hangs, or it "
        "computes without steps"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
