"""`carpool profile`: measures a sweep of training jobs on a GPU, alone and in pairs, into a file of rows.

Each point is built and warmed up, which is not measured, then trains for a second under observation.
"""

import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Literal, Self

import click
import msgspec
from carpool_core.values import Optimizer, Precision
from rich.console import Console

from carpool_predictor.profiler.machine import (
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


class RowsError(ValueError):
    """A file of rows cannot be continued; the message says why."""


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; None for values that were not measured. Sizes in MiB, times in seconds."""

    key: str
    kind: Literal["solo", "pair"]
    mode: Literal["exclusive", "time-slicing", "mps"]
    status: Literal["ok", "out_of_memory", "failed"]
    """After an out-of-memory error the peak is censored: more than `capacity_mib`."""
    reason: str = ""
    model: str
    batch_size: int
    optimizer: str
    precision: str
    partner_model: str = ""
    partner_batch_size: int | None = None
    partner_optimizer: str = ""
    partner_precision: str = ""
    capacity_mib: int
    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    peak_process_mib: float | None = None
    gpu_util_percent: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    dram_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    power_w: float | None = None
    steps: int | None = None
    step_time_s: float | None = None
    """Alone."""
    partner_step_time_s: float | None = None
    shared_step_time_s: float | None = None
    """Beside the partner."""
    partner_shared_step_time_s: float | None = None
    slowdown: float | None = None
    partner_slowdown: float | None = None
    product: str
    driver: str
    cuda: str
    torch: str
    elapsed_s: float


COLUMNS = MeasuredRow.__struct_fields__


def done(path: Path, product: str) -> set[str]:
    """Return the keys of the rows in a file, and remove an incomplete last line.

    Raises:
        RowsError: The file holds something else, or rows of another product.
    """
    if not path.exists() or path.stat().st_size == 0:
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    reader = csv.DictReader(io.StringIO(whole.decode()))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise RowsError(f"expected {path} to hold rows of this version of `carpool profile`; choose another --out")
    rows = list(reader)
    others = {row["product"] for row in rows} - {product}
    if others:
        raise RowsError(f"{path} was measured on {', '.join(sorted(others))}, this is {product}; choose another --out")
    return {row["key"] for row in rows}


class RowWriter:
    """Appends rows, each flushed to the disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        if self._file.tell() == 0:
            self._writer.writeheader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: MeasuredRow) -> None:
        """Append one row."""
        values = msgspec.to_builtins(row)
        self._writer.writerow({name: "" if value is None else _short(value) for name, value in values.items()})
        self._file.flush()
        os.fsync(self._file.fileno())


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path) -> Iterable[MeasuredRow]:
    """Return the rows of a file."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield msgspec.convert({k: v for k, v in row.items() if v != ""}, type=MeasuredRow, strict=False)


Mode = Literal["time-slicing", "mps"]

_MODELS = (
    "timm/resnet18", "timm/resnet50", "timm/resnet101", "timm/wide_resnet50_2", "timm/resnext50_32x4d",
    "timm/densenet121", "timm/vgg16", "timm/mobilenetv2_100", "timm/mobilenetv3_large_100", "timm/efficientnet_b0",
    "timm/efficientnet_b3", "timm/regnety_032", "timm/convnext_tiny", "timm/convnext_base", "timm/inception_v3",
    "timm/xception41", "timm/dpn68", "timm/hrnet_w18", "timm/res2net50_26w_4s", "timm/ghostnet_100",
    "timm/mnasnet_100", "timm/dla34", "timm/repvgg_a2", "timm/vit_tiny_patch16_224", "timm/vit_small_patch16_224",
    "timm/vit_base_patch16_224", "timm/deit_small_patch16_224", "timm/swin_tiny_patch4_window7_224",
    "timm/swin_base_patch4_window7_224", "timm/mixer_b16_224", "timm/beit_base_patch16_224", "timm/cait_xxs24_224",
    "timm/coat_lite_tiny", "timm/pit_s_224", "timm/levit_256", "timm/twins_svt_small", "timm/poolformer_s24",
    "timm/maxvit_tiny_rw_224", "torchvision/resnet50", "torchvision/squeezenet1_1", "torchvision/shufflenet_v2_x1_0",
    "torchvision/googlenet",
)  # fmt: skip
_BATCHES = (4, 8, 16, 32, 64, 128, 256)
_OPTIMIZERS = (Optimizer.SGD_MOMENTUM, Optimizer.ADAMW)
_PRECISIONS = (Precision.FP32, Precision.BF16_MIXED)
_SOLOS_A_PAIR = 5
_BATCHES_OF_PAIRS = (8, 32, 64)
SWEEPS = ("default", "solo", "pairs")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: a job alone, or two together."""

    workload: Workload
    partner: Workload | None = None
    mode: Mode | None = None

    @property
    def key(self) -> str:
        """Return the key of the point, equal in every run."""
        return self.workload.key if self.partner is None else f"{self.workload.key}+{self.partner.key}|{self.mode}"


def points(sweep: str) -> Iterator[Point]:
    """Return the points of a sweep in their order.

    Raises:
        ValueError: The sweep is unknown.
    """
    if sweep not in SWEEPS:
        raise ValueError(f"expected a sweep out of {', '.join(SWEEPS)}, found {sweep!r}")
    solos = [] if sweep == "pairs" else _shuffled([Point(w) for w in _workloads(_BATCHES)])
    pairs = [] if sweep == "solo" else _pairs()
    while solos or pairs:
        yield from solos[:_SOLOS_A_PAIR]
        yield from pairs[:1]
        solos, pairs = solos[_SOLOS_A_PAIR:], pairs[1:]


def _workloads(batches: Sequence[int]) -> list[Workload]:
    return [
        Workload(model=model, batch_size=batch, optimizer=optimizer, precision=precision)
        for model in _MODELS
        for batch in batches
        for optimizer in _OPTIMIZERS
        for precision in _PRECISIONS
    ]


def _pairs() -> list[Point]:
    """Return pairs of jobs, each in both sharing modes."""
    jobs = _shuffled([Point(w) for w in _workloads(_BATCHES_OF_PAIRS)])
    found = []
    for one, other in zip(jobs[::2], jobs[1::2], strict=False):
        modes: tuple[Mode, Mode] = ("time-slicing", "mps")
        found += [Point(one.workload, other.workload, mode) for mode in modes]
    return found


def _shuffled(given: list[Point]) -> list[Point]:
    """Return the points in a pseudo-random order that later additions do not change."""
    return sorted(given, key=lambda point: hashlib.sha256(point.key.encode()).digest())


WINDOW_S = 1.0
PAIR_WINDOW_S = 2.0
"""Seconds of a run of two jobs, whose phases drift against each other."""
POLL_S = 0.05
PATIENCE_S = 60.0
"""Seconds that building, warm-up or a run may take beyond the requested time."""


class _Ended(Exception):  # noqa: N818 (a reply, not an error)
    """A process answered with an unexpected reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


@dataclass
class Span:
    """Samples taken during a run."""

    samples: list[Sample] = field(default_factory=list)
    activity: Activity | None = None

    def peak_mib(self, pid: int, before_mib: float) -> float | None:
        """Return a process's peak; the rise of the GPU's used memory if NVML does not report processes."""
        own = [sample.process_mib[pid] for sample in self.samples if pid in sample.process_mib]
        if own:
            return max(own)
        return max((sample.memory_used_mib for sample in self.samples), default=before_mib) - before_mib or None

    def figures(self) -> dict[str, float | None]:
        """Return the GPU's activity by column name."""
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
        """Return the machine's description."""
        return self._known

    def measure(self, point: Point) -> MeasuredRow:
        """Measure one point; a failure is recorded in the row."""
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
        """Run each job alone while the other one idles with its memory allocated, then both."""
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
    """Measure points until the budget is used, and return their number.

    A point starts only if the mean duration of the earlier ones fits into the rest of the budget.
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


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class InputError(click.ClickException):
    """The input is invalid, or there is no GPU."""

    exit_code = 2


def parse_budget(text: str) -> float:
    """Return the seconds of a text such as `90s`, `9m` or `1.5h`.

    Raises:
        InputError: The text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) == 0:
        raise InputError(f"--budget expects a time such as 90s, 9m or 1.5h; found {text!r}")
    return float(found[1]) * _UNITS[found[2]]


@click.command(short_help="Measure training steps on this machine's GPU, alone and in pairs.")
@click.option("--sweep", type=click.Choice(SWEEPS), default="default", show_default=True, help="What is measured.")
@click.option("--budget", default="9m", show_default=True, help="Time that it may take, such as 90s, 9m or 1.5h.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File of rows; continued.")
@click.option("--gpu-index", type=click.IntRange(0), default=0, show_default=True, help="Which GPU, by NVML's number.")
def profile(sweep: str, budget: str, out: Path, gpu_index: int) -> None:
    """Measure training steps on this machine's GPU, alone and in pairs; no other process should use the GPU meanwhile.

    Each row is written when it is measured. The same command continues the file.
    """
    budget_s = parse_budget(budget)
    # Loads NVML's bindings.
    from carpool_predictor.profiler.hardware import HardwareError, NvmlMachine

    try:
        with NvmlMachine(gpu_index) as machine:
            measure(machine, sweep, budget_s, out, Console(stderr=True))
    except (HardwareError, RowsError, OSError) as e:
        raise InputError(str(e)) from e


def measure(machine: Machine, sweep: str, budget_s: float, out: Path, console: Console) -> int:
    """Measure a sweep into a file, print each row, and return the number of rows.

    Raises:
        RowsError: The file cannot be continued.
    """
    session = Session(machine)
    known = done(out, session.description.product)
    with RowWriter(out) as writer:

        def write(row: MeasuredRow) -> None:
            writer.write(row)
            console.print(_told(row), highlight=False)

        measured = run_sweep(session, machine, points(sweep), known, budget_s, write)
    console.print(f"{measured} rows measured, {len(known)} were there before: {out}", highlight=False)
    return measured


def _told(row: MeasuredRow) -> str:
    what = f"{row.model} × {row.batch_size}" + (f" beside {row.partner_model}" if row.partner_model else "")
    if row.status != "ok":
        return f"{what}: {row.status.replace('_', ' ')} {row.reason}".rstrip()
    slowed = (
        f", slowed {row.slowdown:.2f} and {row.partner_slowdown:.2f}" if row.slowdown and row.partner_slowdown else ""
    )
    return f"{what}: {1000 * (row.step_time_s or 0):.1f} ms a step{slowed}, {row.elapsed_s:.1f} s"
