"""`carpool profile`: measures a sweep of training jobs on a GPU, alone and in pairs, into a file of rows.

Each point is built and warmed up, which is not measured, then trains for a second under observation.
"""

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import click
import msgspec
from carpool_core.settings import InputError
from carpool_core.values import Optimizer, Precision
from rich.console import Console

from carpool_predictor.profiler.machine import Activity, Failed, Machine, Process, Ready, Sample, Window, Workload


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
    """Time of a step alone."""
    partner_step_time_s: float | None = None
    shared_step_time_s: float | None = None
    """Time of a step together with the partner."""
    partner_shared_step_time_s: float | None = None
    slowdown: float | None = None
    partner_slowdown: float | None = None
    product: str
    driver: str
    cuda: str
    torch: str
    elapsed_s: float


COLUMNS = MeasuredRow.__struct_fields__


def measured_keys(path: Path, product: str) -> set[str]:
    """Return the keys of the rows in a file, and remove an incomplete last line.

    Raises:
        InputError: The file holds something else, or rows of another product.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not content:
        return set()
    reader = csv.DictReader(io.StringIO(whole.decode()))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise InputError(f"expected {path} to hold rows of this version of `carpool profile`; choose another --out")
    rows = list(reader)
    if others := {row["product"] for row in rows} - {product}:
        raise InputError(f"{path} was measured on {', '.join(sorted(others))}, this is {product}; choose another --out")
    if len(whole) < len(content):
        path.write_bytes(whole)
    return {row["key"] for row in rows}


def _cells(row: MeasuredRow) -> dict[str, object]:
    """Return the columns of a row, with six digits; empty for values that were not measured."""
    values = msgspec.to_builtins(row)
    short = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values.items()}
    return {name: "" if value is None else value for name, value in short.items()}


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
_SOLOS_PER_PAIR = 5
_PAIR_BATCHES = (8, 32, 64)
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
    """Return the points of one of `SWEEPS` in their order."""
    solos = [] if sweep == "pairs" else _shuffled([Point(w) for w in _workloads(_BATCHES)])
    pairs = [] if sweep == "solo" else _pairs()
    while solos or pairs:
        yield from solos[:_SOLOS_PER_PAIR]
        yield from pairs[:1]
        solos, pairs = solos[_SOLOS_PER_PAIR:], pairs[1:]


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
    jobs = _shuffled([Point(w) for w in _workloads(_PAIR_BATCHES)])
    modes: tuple[Mode, Mode] = ("time-slicing", "mps")
    return [
        Point(one.workload, other.workload, mode)
        for one, other in zip(jobs[::2], jobs[1::2], strict=False)
        for mode in modes
    ]


def _shuffled(given: list[Point]) -> list[Point]:
    """Return the points in a pseudo-random order that later additions do not change."""
    return sorted(given, key=lambda point: hashlib.sha256(point.key.encode()).digest())


WINDOW_S = 1.0
PAIR_WINDOW_S = 2.0
"""Seconds of a run of two jobs, whose phases drift against each other."""
POLL_S = 0.05
ANSWER_TIMEOUT_S = 60.0
"""Seconds that building, warm-up or a run may take beyond the requested time."""


class _JobError(Exception):
    """A job of the point failed."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed


class Session:
    """Measures on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.description = machine.describe()

    def measure(self, point: Point) -> MeasuredRow:
        """Measure one point; a failure is recorded in the row."""
        begin = self._machine.monotonic()
        processes: list[Process] = []
        try:
            found = self._solo(point, processes) if point.partner is None else self._pair(point, processes)
        except _JobError as e:
            found = asdict(e.failed)
        finally:
            for process in processes:
                process.stop()
        return self._row(point, found, self._machine.monotonic() - begin)

    def _solo(self, point: Point, processes: list[Process]) -> dict[str, Any]:
        before_mib = self._machine.sample().memory_used_mib
        job = self._ready(point.workload, processes, mps=False)
        samples, activity, (window,) = self._run([job], WINDOW_S)
        # Without memory by process, the rise of the GPU's used memory counts.
        own = [s.process_mib[job.pid] for s in samples if job.pid in s.process_mib]
        rise_mib = max(s.memory_used_mib for s in samples) - before_mib
        return {
            "status": "ok",
            **asdict(window),
            "peak_process_mib": max(own) if own else rise_mib or None,
            **_means(samples, activity),
        }

    def _pair(self, point: Point, processes: list[Process]) -> dict[str, Any]:
        """Run each job alone while the other one idles with its memory allocated, then both."""
        if point.partner is None:
            raise ValueError("expected a pair, found a single job")
        mps = point.mode == "mps"
        one = self._ready(point.workload, processes, mps=mps)
        other = self._ready(point.partner, processes, mps=mps)
        _, _, (alone,) = self._run([one], WINDOW_S)
        _, _, (partner_alone,) = self._run([other], WINDOW_S)
        samples, activity, (shared, partner_shared) = self._run([one, other], PAIR_WINDOW_S)
        return {
            "status": "ok",
            **asdict(shared),
            "step_time_s": alone.step_time_s,
            "partner_step_time_s": partner_alone.step_time_s,
            "shared_step_time_s": shared.step_time_s,
            "partner_shared_step_time_s": partner_shared.step_time_s,
            "slowdown": shared.step_time_s / alone.step_time_s,
            "partner_slowdown": partner_shared.step_time_s / partner_alone.step_time_s,
            **_means(samples, activity),
        }

    def _ready(self, workload: Workload, processes: list[Process], *, mps: bool) -> Process:
        try:
            process = self._machine.start(workload, mps=mps)
        except OSError as e:
            raise _JobError(Failed(str(e))) from e
        processes.append(process)
        self._wait(process)
        return process

    def _run(self, jobs: list[Process], seconds: float) -> tuple[list[Sample], Activity | None, list[Window]]:
        """Run jobs together; return NVML's samples, GPM's activity, and each job's window."""
        samples = []
        self._machine.begin_activity()
        for job in jobs:
            job.run(seconds)
        end = self._machine.monotonic() + seconds
        while self._machine.monotonic() < end:
            self._machine.sleep(POLL_S)
            samples.append(self._machine.sample())
        activity = self._machine.end_activity()
        return samples, activity, [window for job in jobs if isinstance(window := self._wait(job), Window)]

    def _wait(self, process: Process) -> Ready | Window:
        end = self._machine.monotonic() + ANSWER_TIMEOUT_S
        while (reply := process.reply()) is None:
            if self._machine.monotonic() >= end:
                raise _JobError(Failed(f"no answer within {ANSWER_TIMEOUT_S:g} s"))
            self._machine.sleep(POLL_S)
        if isinstance(reply, Failed):
            raise _JobError(reply)
        return reply

    def _row(self, point: Point, found: dict[str, Any], elapsed_s: float) -> MeasuredRow:
        partner = {} if point.partner is None else msgspec.structs.asdict(point.partner)
        return MeasuredRow(
            key=point.key,
            kind="pair" if partner else "solo",
            mode=point.mode or "exclusive",
            elapsed_s=elapsed_s,
            **msgspec.structs.asdict(point.workload),
            **{f"partner_{name}": value for name, value in partner.items()},
            **asdict(self.description),
            **found,
        )


def _means(samples: Sequence[Sample], activity: Activity | None) -> dict[str, float]:
    """Return the GPU's activity by column name."""
    return {
        "gpu_util_percent": fmean(s.gpu_util_percent for s in samples),
        "power_w": fmean(s.power_w for s in samples),
        **({} if activity is None else asdict(activity)),
    }


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


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
    from carpool_predictor.profiler.hardware import HardwareError, NvmlMachine

    try:
        with NvmlMachine(gpu_index) as machine:
            measure(machine, sweep, budget_s, out, Console(stderr=True))
    except (HardwareError, OSError) as e:
        raise InputError(str(e)) from e


def measure(machine: Machine, sweep: str, budget_s: float, out: Path, console: Console) -> int:
    """Measure a sweep into a file until the budget is used, print each row, and return the number of rows.

    A point starts only if the mean duration of the earlier ones fits into the rest of the budget.

    Raises:
        InputError: The file cannot be continued.
    """
    session, begin, count = Session(machine), machine.monotonic(), 0
    earlier = measured_keys(out, session.description.product)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for point in (p for p in points(sweep) if p.key not in earlier):
            spent_s = machine.monotonic() - begin
            if spent_s + (spent_s / count if count else 0.0) > budget_s:
                break
            row = session.measure(point)
            writer.writerow(_cells(row))
            file.flush()
            console.print(_summary(row), highlight=False)
            count += 1
    console.print(f"{count} rows measured, {len(earlier)} were there before: {out}", highlight=False)
    return count


def _summary(row: MeasuredRow) -> str:
    what = f"{row.model} × {row.batch_size}" + (f" and {row.partner_model}" if row.partner_model else "")
    if row.status != "ok":
        return f"{what}: {row.status.replace('_', ' ')} {row.reason}".rstrip()
    slowed = (
        f", slowed {row.slowdown:.2f} and {row.partner_slowdown:.2f}" if row.slowdown and row.partner_slowdown else ""
    )
    return f"{what}: {1000 * (row.step_time_s or 0):.1f} ms a step{slowed}, {row.elapsed_s:.1f} s"
