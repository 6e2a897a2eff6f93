"""A simulated GPU for the profiler: jobs use memory and time and slow each other down; its clock moves on `sleep`."""

from dataclasses import dataclass, field

from carpool_predictor.profiler.machine import Activity, Description, Failed, Ready, Reply, Sample, Window, Workload

CONTEXT_MIB = 400.0
IDLE_W = 60.0
START_S = 100.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Load of a workload."""

    memory_mib: float = 2000.0
    step_time_s: float = 0.05
    gpu_util: float = 0.8
    sm_active: float = 0.5
    failure: str = ""
    """Message of its failure while it is built; empty if it does not fail."""
    is_mute: bool = False
    """Whether it never answers."""
    drift_per_s: float = 0.0
    """Growth of its step time in each second of the machine's time."""


@dataclass
class FakeProcess:
    """A job on the fake GPU."""

    machine: "FakeMachine"
    workload: Workload
    pid: int
    mps: bool
    behaviour: Behaviour
    replies: list[Reply] = field(default_factory=list)
    ready_at: float = 0.0
    until: float | None = None
    seconds: float = 0.0
    is_stopped: bool = False
    has_failed: bool = False
    slowest: float = 1.0

    def run(self, seconds: float) -> None:
        if self.is_stopped:
            raise AssertionError("run was called on a stopped process")
        self.until, self.seconds, self.slowest = self.machine.monotonic() + seconds, seconds, 1.0

    def reply(self) -> Reply | None:
        return self.replies.pop(0) if self.replies else None

    def stop(self) -> None:
        self.is_stopped = True

    @property
    def is_running(self) -> bool:
        """Whether it trains right now."""
        return self.until is not None and not self.is_stopped


class FakeMachine:
    """A GPU with memory that runs out and co-tenants that slow each other down.

    Args:
        behaviours: Load of each model at batch 32; `Behaviour()` for others. Memory grows with the batch.
        memory_mib: Memory of the GPU.
        reports_processes: Whether NVML reports memory by process.
        has_mps: Whether an MPS daemon can be started.
    """

    def __init__(
        self,
        behaviours: dict[str, Behaviour] | None = None,
        *,
        memory_mib: int = 40960,
        reports_processes: bool = True,
        has_mps: bool = True,
    ) -> None:
        self._behaviours = behaviours or {}
        self._memory_mib, self._reports_processes, self._has_mps = memory_mib, reports_processes, has_mps
        self._now = START_S
        self._activity: list[float] | None = None
        self.processes: list[FakeProcess] = []

    def describe(self) -> Description:
        return Description("Simulated GPU", self._memory_mib, "0.0", "0.0", "0.0")

    def start(self, workload: Workload, *, mps: bool) -> FakeProcess:
        """Build and warm up, which takes two seconds."""
        if mps and not self._has_mps:
            raise OSError("expected nvidia-cuda-mps-control to start")
        behaviour = self._behaviours.get(workload.model, Behaviour())
        process = FakeProcess(self, workload, 1000 + len(self.processes), mps, behaviour, ready_at=self._now + 2.0)
        self.processes.append(process)
        return process

    def memory_of(self, process: FakeProcess) -> float:
        """Return the memory of a job with its context, in MiB."""
        return CONTEXT_MIB + process.behaviour.memory_mib * process.workload.batch_size / 32

    @property
    def alive(self) -> list[FakeProcess]:
        """Jobs that hold memory."""
        return [p for p in self.processes if not p.is_stopped and p.ready_at <= self._now]

    def sample(self) -> Sample:
        running = [p for p in self.alive if p.is_running]
        busy = min(1.0, sum(p.behaviour.gpu_util for p in running))
        held = {p.pid: self.memory_of(p) for p in self.alive}
        return Sample(100 * busy, sum(held.values()), IDLE_W + 300 * busy, held if self._reports_processes else {})

    def begin_activity(self) -> None:
        self._activity = []

    def end_activity(self) -> Activity | None:
        values, self._activity = self._activity or [0.0], None
        mean = sum(values) / len(values)
        return Activity(mean, mean / 2, mean / 3, mean / 4)

    def sleep(self, seconds: float) -> None:
        """Advance the clock; jobs become ready, interfere, and finish runs."""
        self._now += seconds
        running = [p for p in self.alive if p.is_running]
        if self._activity is not None:
            self._activity.append(min(1.0, sum(p.behaviour.sm_active for p in running)))
        for process in running:
            others = [p for p in running if p is not process]
            process.slowest = max(process.slowest, 1 + sum(self._slows(process, other) for other in others))
        for process in self.processes:
            self._advance(process)

    def _slows(self, process: FakeProcess, other: FakeProcess) -> float:
        """Return the slowdown: shared time under time-slicing, activity beyond the GPU under MPS."""
        mine, its = process.behaviour, other.behaviour
        if process.mps and other.mps:
            return max(0.0, mine.sm_active + its.sm_active - 1)
        return mine.gpu_util * its.gpu_util

    def _advance(self, process: FakeProcess) -> None:
        if process.is_stopped or process.behaviour.is_mute:
            return
        if process.ready_at and process.ready_at <= self._now:
            process.ready_at = 0.0
            process.replies.append(self._first_reply(process))
        if process.until is not None and process.until <= self._now:
            process.until = None
            drift = 1 + process.behaviour.drift_per_s * (self._now - START_S)
            step_s = process.behaviour.step_time_s * process.slowest * drift
            allocated = self.memory_of(process) - CONTEXT_MIB
            process.replies.append(
                Window(
                    steps=max(1, int(process.seconds / step_s)),
                    step_time_s=step_s,
                    peak_allocated_mib=allocated,
                    peak_reserved_mib=1.1 * allocated,
                )
            )

    def _first_reply(self, process: FakeProcess) -> Reply:
        """Give memory in the order of the starts; a job that fails returns it."""
        before = [p for p in self.alive if p.pid <= process.pid and not p.has_failed]
        process.has_failed = True
        if process.behaviour.failure:
            return Failed(process.behaviour.failure)
        if sum(map(self.memory_of, before)) > self._memory_mib:
            return Failed(status="out_of_memory")
        process.has_failed = False
        return Ready()

    def monotonic(self) -> float:
        return self._now
