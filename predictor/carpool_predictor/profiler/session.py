"""Measures point after point: build and warm up, which does not count; then a second of training under observation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from carpool_predictor.profiler.ports import (
    Activity,
    Description,
    Failed,
    Machine,
    OutOfMemory,
    Process,
    Ready,
    Reply,
    Sample,
    Window,
    Workload,
)
from carpool_predictor.profiler.rows import MeasuredRow
from carpool_predictor.profiler.sweep import Point

WINDOW_S = 1.0
PAIR_WINDOW_S = 2.0
"""Longer, because two jobs meet in ever new ways."""
POLL_S = 0.05
PATIENCE_S = 60.0
"""What building, warming up or a run may take beyond what was asked."""


class _Ended(Exception):  # noqa: N818 (a reply, not an error)
    """A process answered with something else than what was waited for."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


@dataclass
class Span:
    """What was seen while something ran."""

    samples: list[Sample] = field(default_factory=list)
    activity: Activity | None = None

    def peak_mib(self, pid: int, before_mib: float) -> float | None:
        """Return a process's peak; where processes are not told apart, what the GPU's use rose by."""
        own = [sample.process_mib[pid] for sample in self.samples if pid in sample.process_mib]
        if own:
            return max(own)
        return max((sample.memory_used_mib for sample in self.samples), default=before_mib) - before_mib or None

    def figures(self) -> dict[str, float | None]:
        """Return what the GPU did, by the names of the columns."""
        seen = self.activity
        return {
            "gpu_util_percent": fmean(s.gpu_util_percent for s in self.samples) if self.samples else None,
            "power_w": fmean(s.power_w for s in self.samples) if self.samples else None,
            "sm_active_ratio": seen.sm_active if seen else None,
            "sm_occupancy_ratio": seen.sm_occupancy if seen else None,
            "dram_active_ratio": seen.dram_active if seen else None,
            "tensor_active_ratio": seen.tensor_active if seen else None,
        }


class Session:
    """Measures on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: Description = machine.describe()

    @property
    def description(self) -> Description:
        """Say what is measured on."""
        return self._known

    def measure(self, point: Point) -> MeasuredRow:
        """Measure one point; whatever goes wrong with it is in the row."""
        begin = self._machine.monotonic()
        processes: list[Process] = []
        try:
            found = self._solo(point, processes) if point.partner is None else self._pair(point, processes)
        except _Ended as ended:
            found = _status(ended.reply)
        finally:
            for process in processes:
                process.stop()
        return self._row(point, found, self._machine.monotonic() - begin)

    def _solo(self, point: Point, processes: list[Process]) -> dict[str, Any]:
        before_mib = self._machine.sample().memory_used_mib
        job = self._ready(point.workload, processes, mps=False)
        span, (window,) = self._run([job], WINDOW_S)
        return {
            "status": "ok",
            "steps": window.steps,
            "step_time_s": window.step_time_s,
            "peak_allocated_mib": window.peak_allocated_mib,
            "peak_reserved_mib": window.peak_reserved_mib,
            "peak_process_mib": span.peak_mib(job.pid, before_mib),
            **span.figures(),
        }

    def _pair(self, point: Point, processes: list[Process]) -> dict[str, Any]:
        """Run each alone while the other waits with its memory in place, then both."""
        if point.partner is None:
            raise ValueError("expected a pair, found a single job")
        mps = point.mode == "mps"
        one = self._ready(point.workload, processes, mps=mps)
        other = self._ready(point.partner, processes, mps=mps)
        _, (alone,) = self._run([one], WINDOW_S)
        _, (partner_alone,) = self._run([other], WINDOW_S)
        span, (shared, partner_shared) = self._run([one, other], PAIR_WINDOW_S)
        return {
            "status": "ok",
            "steps": shared.steps,
            "step_time_s": alone.step_time_s,
            "partner_step_time_s": partner_alone.step_time_s,
            "shared_step_time_s": shared.step_time_s,
            "partner_shared_step_time_s": partner_shared.step_time_s,
            "slowdown": shared.step_time_s / alone.step_time_s,
            "partner_slowdown": partner_shared.step_time_s / partner_alone.step_time_s,
            "peak_allocated_mib": shared.peak_allocated_mib,
            "peak_reserved_mib": shared.peak_reserved_mib,
            **span.figures(),
        }

    def _ready(self, workload: Workload, processes: list[Process], *, mps: bool) -> Process:
        process = self._machine.start(workload, mps=mps)
        processes.append(process)
        reply = self._wait(process, PATIENCE_S)
        if not isinstance(reply, Ready):
            raise _Ended(reply)
        return process

    def _run(self, jobs: list[Process], seconds: float) -> tuple[Span, list[Window]]:
        span = Span()
        self._machine.begin_activity()
        for job in jobs:
            job.run(seconds)
        end = self._machine.monotonic() + seconds
        while self._machine.monotonic() < end:
            self._machine.sleep(POLL_S)
            span.samples.append(self._machine.sample())
        span.activity = self._machine.end_activity()
        windows = []
        for job in jobs:
            reply = self._wait(job, PATIENCE_S)
            if not isinstance(reply, Window):
                raise _Ended(reply)
            windows.append(reply)
        return span, windows

    def _wait(self, process: Process, seconds: float) -> Reply:
        end = self._machine.monotonic() + seconds
        while (reply := process.reply()) is None:
            if self._machine.monotonic() >= end:
                return Failed(f"no answer within {seconds:g} s")
            self._machine.sleep(POLL_S)
        return reply

    def _row(self, point: Point, found: dict[str, Any], elapsed_s: float) -> MeasuredRow:
        one, other = point.workload, point.partner
        partner: dict[str, Any] = {}
        if other is not None:
            partner = {
                "partner_model": other.model,
                "partner_batch_size": other.batch_size,
                "partner_optimizer": other.optimizer.value,
                "partner_precision": other.precision.value,
            }
        return MeasuredRow(
            key=point.key,
            kind="solo" if other is None else "pair",
            mode=point.mode or "exclusive",
            model=one.model,
            batch_size=one.batch_size,
            optimizer=one.optimizer.value,
            precision=one.precision.value,
            capacity_mib=self._known.memory_mib,
            product=self._known.product,
            driver=self._known.driver,
            cuda=self._known.cuda,
            torch=self._known.torch,
            elapsed_s=elapsed_s,
            **partner,
            **found,
        )


def _status(reply: Reply) -> dict[str, Any]:
    if isinstance(reply, OutOfMemory):
        return {"status": "out_of_memory"}
    reason = reply.reason if isinstance(reply, Failed) else f"unexpected answer {type(reply).__name__}"
    return {"status": "failed", "reason": reason}


def run_sweep(
    session: Session,
    machine: Machine,
    asked: Iterable[Point],
    known: set[str],
    budget_s: float,
    write: Callable[[MeasuredRow], None],
) -> int:
    """Measure points that are not known yet, until the budget would not hold another one; return how many.

    A point is begun only when the mean of those before it still fits.
    """
    begin = machine.monotonic()
    measured = 0
    for point in asked:
        spent = machine.monotonic() - begin
        if spent + (spent / measured if measured else 0.0) > budget_s:
            break
        if point.key not in known:
            write(session.measure(point))
            measured += 1
    return measured
