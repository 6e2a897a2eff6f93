"""`carpool profile`: measures training jobs on a GPU, alone and beside each other, into a file of rows.

The jobs of a group hold their memory on the GPU together, each built and warmed up once. Then single ones, pairs and
threes of them run for a second or two under observation, while the others idle. So a pair costs two seconds, not ten.
At the end each runs alone again, because a second of steps that the processor limits differs from the next by a tenth.
"""

import csv
import hashlib
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, Literal

import click
import msgspec
from carpool_core.settings import InputError
from carpool_core.values import Optimizer, Precision
from rich.console import Console

from carpool_predictor.profiler.hardware import HardwareError, NvmlMachine
from carpool_predictor.profiler.machine import (
    Activity,
    Failed,
    Machine,
    Process,
    Ready,
    Reply,
    Sample,
    Window,
    Workload,
)

Mode = Literal["exclusive", "time-slicing", "mps"]


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job in one run; None for values that were not measured. Sizes in MiB, times in seconds."""

    run: str
    """Key of the run: its jobs and the mode. The rows of a run have the same values of the GPU.

    A job of a group runs alone twice, under one key."""
    mode: Mode
    status: Literal["ok", "out_of_memory", "failed"]
    """After an out-of-memory error the peak is censored: more than `capacity_mib`, if the job was alone on the GPU."""
    reason: str = ""
    model: str
    batch_size: int
    optimizer: str
    precision: str
    partners: str = ""
    """Jobs that ran beside it: `model|batch size|optimizer|precision`, separated by `+`; empty if it ran alone."""
    resident: int
    """Jobs that held memory on the GPU during the run, the idle ones included."""
    capacity_mib: int
    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    peak_process_mib: float | None = None
    steps: int | None = None
    step_time_s: float | None = None
    """Median time of a step in this run."""
    alone_step_time_s: float | None = None
    """The same in its two runs alone at the beginning and the end of its group, by the mean rate."""
    slowdown: float | None = None
    gpu_util_percent: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    dram_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    power_w: float | None = None
    product: str
    driver: str
    cuda: str
    torch: str
    elapsed_s: float
    """Duration of the run."""


COLUMNS = MeasuredRow.__struct_fields__


def measured_runs(path: Path, product: str) -> dict[str, bool]:
    """Return the keys of the runs in a file, each with whether no job failed; remove an incomplete last line.

    Raises:
        InputError: The file holds something else, or rows of another product.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not content:
        return {}
    reader = csv.DictReader(io.StringIO(whole.decode()))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise InputError(f"expected {path} to hold rows of this version of `carpool profile`; choose another --out")
    rows = list(reader)
    if others := {row["product"] for row in rows} - {product}:
        raise InputError(f"{path} was measured on {', '.join(sorted(others))}, this is {product}; choose another --out")
    if len(whole) < len(content):
        path.write_bytes(whole)
    failed = {row["run"] for row in rows if row["status"] != "ok"}
    return {row["run"]: row["run"] not in failed for row in rows}


def _cells(row: MeasuredRow) -> dict[str, object]:
    """Return the columns of a row, with six digits; empty for values that were not measured."""
    values = msgspec.to_builtins(row)
    short = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values.items()}
    return {name: "" if value is None else value for name, value in short.items()}


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
_SHARING: Mapping[str, Sequence[int]] = {
    "timm/resnet50": (8, 32, 64),
    "timm/mobilenetv3_large_100": (8, 32, 128),
    "timm/efficientnet_b0": (8, 32, 64),
    "timm/vgg16": (4, 16, 32),
    "timm/densenet121": (4, 16, 32),
    "timm/regnety_032": (8, 16, 32),
    "timm/vit_base_patch16_224": (4, 16, 32),
    "timm/swin_tiny_patch4_window7_224": (4, 16, 32),
    "timm/convnext_tiny": (4, 16, 32),
    "transformers/google-bert/bert-base-uncased": (1, 4, 8),
    "transformers/openai-community/gpt2": (1, 2, 4),
    "transformers/EleutherAI/pythia-160m": (1, 2, 4),
}
"""Models of the sweep `sharing` with their batch sizes: from a few percent of a large GPU's time to all of it."""
_SHARING_JOB_MIB = 6144
"""Memory that a job of that sweep takes at most in the mean, with its context."""
MAX_RESIDENT = 12
SWEEPS = ("sharing", "alone")


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that are on the GPU together; exclusive if it is only one."""

    jobs: tuple[Workload, ...]
    mode: Mode

    def key(self, *jobs: Workload) -> str:
        """Return the key of a run of some of the jobs, equal in every sweep."""
        return f"{'+'.join(job.key for job in jobs)}|{self.mode}"


def groups(sweep: str, capacity_mib: int) -> list[Group]:
    """Return the groups of one of `SWEEPS` in their order, for a GPU with this memory."""
    if sweep == "alone":
        return [Group((job,), "exclusive") for job in _shuffled(_alone())]
    size = min(max(capacity_mib // _SHARING_JOB_MIB, 2), MAX_RESIDENT)
    jobs = _shuffled(_sharing())
    modes: tuple[Mode, Mode] = ("time-slicing", "mps")
    return [Group(tuple(jobs[i : i + size]), mode) for i in range(0, len(jobs), size) for mode in modes]


def _alone() -> list[Workload]:
    return [
        Workload(model=model, batch_size=batch, optimizer=optimizer, precision=precision)
        for model in _MODELS
        for batch in _BATCHES
        for optimizer in _OPTIMIZERS
        for precision in _PRECISIONS
    ]


def _sharing() -> list[Workload]:
    """Return three jobs of each model; optimizers and precisions take turns."""
    return [
        Workload(model=model, batch_size=batch, optimizer=_OPTIMIZERS[(m + n) % 2], precision=_PRECISIONS[n % 2])
        for m, (model, batches) in enumerate(_SHARING.items())
        for n, batch in enumerate(batches)
    ]


def _shuffled(jobs: Sequence[Workload]) -> list[Workload]:
    """Return the jobs in a pseudo-random order that later additions do not change."""
    return sorted(jobs, key=lambda job: hashlib.sha256(job.key.encode()).digest())


_PAIRS_PER_THREE = 5


def _together(group: Group, jobs: Sequence[Workload]) -> Iterator[tuple[Workload, ...]]:
    """Yield the runs of a group's jobs: pairs in a pseudo-random order, and three jobs after each five pairs."""
    pairs, threes = (
        sorted(combinations(jobs, n), key=lambda run: hashlib.sha256(group.key(*run).encode()).digest()) for n in (2, 3)
    )
    for number, pair in enumerate(pairs, 1):
        yield pair
        if number % _PAIRS_PER_THREE == 0 and threes:
            yield threes.pop(0)


ALONE_S = 1.0
TOGETHER_S = 1.5
"""Seconds of a run of several jobs, whose phases drift against each other."""
LEAST_TOGETHER_S = 15.0
"""Seconds of runs of several jobs for which a group is started; fewer would not pay for its start."""
POLL_S = 0.05
ANSWER_TIMEOUT_S = 90.0
"""Seconds that building, warm-up or a run may take beyond the requested time."""


class Session:
    """Measures on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.description = machine.describe()

    def measure(
        self, group: Group, end: float, earlier: Collection[str] = (), share_end: float | None = None
    ) -> Iterator[MeasuredRow]:
        """Yield the rows of a group: each job alone, several together, and each alone again.

        Runs of several that were measured `earlier` are left out. They are yielded last, because their slowdowns need
        both runs alone; if the profiler is interrupted, with what was measured.

        A failure is a row, and its job takes part in no later run.

        Args:
            group: The jobs and their mode.
            end: When the last run ends, in the machine's time.
            earlier: Keys of runs that were measured.
            share_end: When the group ends if it had `LEAST_TOGETHER_S` for several jobs; `end` by default.
        """
        before_mib = self._machine.sample().memory_used_mib
        processes: dict[Workload, Process] = {}
        alone: dict[Workload, list[MeasuredRow]] = {}
        together: list[MeasuredRow] = []
        try:
            yield from self._start(group, processes)
            yield from self._alone(group, processes, alone, before_mib, end)
            again_s, least_end = len(alone) * ALONE_S, self._machine.monotonic() + LEAST_TOGETHER_S
            if least_end + again_s > end:
                again_s = 0.0  # too short for both
            runs_end = min(end, max(share_end or end, least_end + again_s)) - again_s
            for jobs in _together(group, tuple(alone)):
                if self._machine.monotonic() + TOGETHER_S > runs_end:
                    break
                if group.key(*jobs) not in earlier and all(job in processes for job in jobs):
                    together += self._run(group, jobs, processes, before_mib)
            if together:
                yield from self._alone(group, processes, alone, before_mib, end)
        except GeneratorExit:
            raise
        except BaseException:
            yield from _with_slowdowns(together, alone)
            raise
        else:
            yield from _with_slowdowns(together, alone)
        finally:
            for process in processes.values():
                process.stop()

    def _alone(
        self,
        group: Group,
        processes: dict[Workload, Process],
        alone: dict[Workload, list[MeasuredRow]],
        before_mib: float,
        end: float,
    ) -> Iterator[MeasuredRow]:
        """Run each job alone until `end`; yield its row, and add it to those of the job."""
        for job in tuple(processes):
            if alone and self._machine.monotonic() + ALONE_S > end:
                return
            for row in self._run(group, (job,), processes, before_mib):
                if row.status == "ok":
                    alone.setdefault(job, []).append(row)
                yield row

    def _start(self, group: Group, processes: dict[Workload, Process]) -> Iterator[MeasuredRow]:
        """Start all jobs at once; yield the rows of those that fail."""
        begin = self._machine.monotonic()
        for job in group.jobs:
            try:
                processes[job] = self._machine.start(job, mps=group.mode == "mps")
            except OSError as e:
                yield self._row(group, (job,), job, asdict(Failed(str(e))), begin, len(group.jobs))
        for job in tuple(processes):
            if isinstance(reply := self._wait(processes[job]), Failed):
                yield self._failure(group, (job,), job, reply, processes, begin)

    def _run(
        self,
        group: Group,
        jobs: tuple[Workload, ...],
        processes: dict[Workload, Process],
        before_mib: float,
    ) -> Iterator[MeasuredRow]:
        """Run some of the jobs together, and yield a row for each."""
        begin, seconds = self._machine.monotonic(), ALONE_S if len(jobs) == 1 else TOGETHER_S
        samples: list[Sample] = []
        self._machine.begin_activity()
        for job in jobs:
            processes[job].run(seconds)
        while self._machine.monotonic() < begin + seconds:
            self._machine.sleep(POLL_S)
            samples.append(self._machine.sample())
        activity = self._machine.end_activity()
        replies = {job: self._wait(processes[job]) for job in jobs}
        resident = len(processes)
        for job, reply in replies.items():
            if not isinstance(reply, Window):
                yield self._failure(group, jobs, job, reply, processes, begin)
                continue
            own = [s.process_mib[processes[job].pid] for s in samples if processes[job].pid in s.process_mib]
            # Without memory by process, the rise of the GPU's used memory counts, if the job is the only one.
            rise_mib = max(s.memory_used_mib for s in samples) - before_mib if resident == 1 else 0.0
            found = {
                "status": "ok",
                **asdict(reply),
                "peak_process_mib": max(own) if own else rise_mib or None,
                **_means(samples, activity),
            }
            yield self._row(group, jobs, job, found, begin, resident)

    def _failure(
        self,
        group: Group,
        jobs: tuple[Workload, ...],
        job: Workload,
        reply: Ready | Failed,
        processes: dict[Workload, Process],
        begin: float,
    ) -> MeasuredRow:
        """Return the row of a job that failed, and end it."""
        found = asdict(reply) if isinstance(reply, Failed) else {"status": "failed", "reason": "an unexpected answer"}
        if found["status"] == "out_of_memory" and len(processes) > 1:
            found = asdict(Failed(f"out of memory beside {len(processes) - 1} other jobs"))
        row = self._row(group, jobs, job, found, begin, len(processes))
        processes.pop(job).stop()
        return row

    def _wait(self, process: Process) -> Reply:
        end = self._machine.monotonic() + ANSWER_TIMEOUT_S
        while (reply := process.reply()) is None:
            if self._machine.monotonic() >= end:
                return Failed(f"no answer within {ANSWER_TIMEOUT_S:g} s")
            self._machine.sleep(POLL_S)
        return reply

    def _row(
        self,
        group: Group,
        jobs: tuple[Workload, ...],
        job: Workload,
        found: dict[str, Any],
        begin: float,
        resident: int,
    ) -> MeasuredRow:
        return MeasuredRow(
            run=group.key(*jobs),
            mode=group.mode,
            partners="+".join(other.key for other in jobs if other is not job),
            resident=resident,
            elapsed_s=self._machine.monotonic() - begin,
            **msgspec.structs.asdict(job),
            **asdict(self.description),
            **found,
        )


def _with_slowdowns(
    rows: Sequence[MeasuredRow], alone: Mapping[Workload, Sequence[MeasuredRow]]
) -> Iterator[MeasuredRow]:
    """Yield rows of several jobs with the time alone of each, by the mean rate of its runs alone, and its slowdown."""
    times = {job.key: harmonic_mean([row.step_time_s or 0.0 for row in of]) for job, of in alone.items()}
    for row in rows:
        reference = times[_job(row).key]
        if row.step_time_s and reference:
            slowdown = row.step_time_s / reference
            yield msgspec.structs.replace(row, alone_step_time_s=reference, slowdown=slowdown)
        else:
            yield row


def _job(row: MeasuredRow) -> Workload:
    return msgspec.convert({name: getattr(row, name) for name in Workload.__struct_fields__}, Workload)


def _means(samples: Sequence[Sample], activity: Activity | None) -> dict[str, float]:
    """Return the GPU's activity by column name.

    NVML's utilization and power are means of up to a second before each sample, so that the first half is left out; the
    last sample may lie after the run.
    """
    late = samples[len(samples) // 2 : -1] or samples
    return {
        "gpu_util_percent": fmean(s.gpu_util_percent for s in late),
        "power_w": fmean(s.power_w for s in late),
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


@click.command(short_help="Measure training steps on this GPU, alone and together.")
@click.option("--sweep", type=click.Choice(SWEEPS), default=SWEEPS[0], show_default=True, help="What is measured.")
@click.option("--budget", default="9m", show_default=True, help="Time that it may take, such as 90s, 9m or 1.5h.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File of rows; continued.")
@click.option("--gpu-index", type=click.IntRange(0), default=0, show_default=True, help="Which GPU, by NVML's number.")
def profile(sweep: str, budget: str, out: Path, gpu_index: int) -> None:
    """Measure training steps on this machine's GPU, alone and together; no other process should use the GPU meanwhile.

    Rows of jobs alone are written when they are measured, those of several at the end of their group. The same command
    continues the file.
    """
    budget_s = parse_budget(budget)
    try:
        with NvmlMachine(gpu_index) as machine:
            measure(machine, sweep, budget_s, out, Console(stderr=True))
    except (HardwareError, OSError) as e:
        raise InputError(str(e)) from e


def measure(machine: Machine, sweep: str, budget_s: float, out: Path, console: Console) -> int:
    """Measure a sweep into a file until the budget is used, print each row, and return the number of rows.

    Each group gets an equal share of the time that is left, or what it needs to run several jobs. It starts only if the
    mean time that earlier groups took to start and run alone fits into the budget. Groups with fewer runs in the file
    come first. Runs that the file has are not written again, and jobs that failed alone there are left out.

    Raises:
        InputError: The file cannot be continued.
    """
    session, begin, count = Session(machine), machine.monotonic(), 0
    end = begin + budget_s
    earlier = measured_runs(out, session.description.product)
    able = [
        Group(tuple(job for job in group.jobs if earlier.get(group.key(job), True)), group.mode)
        for group in groups(sweep, session.description.capacity_mib)
    ]
    wanted = sorted(
        (group for group in able if not earlier.keys() >= set(_runs(group))),
        key=lambda group: len(earlier.keys() & set(_runs(group))),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    fixed_s: list[float] = []
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for group in wanted:
            now, least_s = machine.monotonic(), TOGETHER_S if len(group.jobs) > 1 else 0.0
            if fixed_s and now + fmean(fixed_s) + least_s > end:
                break
            last_alone, alone = now, set[str]()
            for row in session.measure(group, end, earlier, now + (end - now) / (len(wanted) - len(fixed_s))):
                if not row.partners and row.run not in alone:
                    last_alone = machine.monotonic()
                    alone.add(row.run)
                if row.run not in earlier:
                    writer.writerow(_cells(row))
                    file.flush()
                    count += 1
                elif row.status == "ok":
                    continue
                console.print(_summary(row), highlight=False)
            fixed_s.append(last_alone - now)
    console.print(
        f"{count} rows measured, of {len(earlier)} runs there were rows before: {out}", highlight=False, soft_wrap=True
    )
    left = len(wanted) - len(fixed_s)
    if not wanted:
        console.print(f"{out} has every run of this sweep", highlight=False, soft_wrap=True)
    elif not count and (left or machine.monotonic() + TOGETHER_S > end):
        console.print(
            f"a budget of {budget_s:g} s holds no new run: the jobs of a group take {fixed_s[0]:.0f} s to start and "
            "run alone; choose a longer --budget",
            highlight=False,
            soft_wrap=True,
        )
    elif left:
        console.print(
            f"{left} of {len(wanted)} groups did not fit into the budget; the same command continues",
            highlight=False,
            soft_wrap=True,
        )
    return count


def _runs(group: Group) -> Iterator[str]:
    """Yield the keys of all runs of a group."""
    yield from (group.key(job) for job in group.jobs)
    yield from (group.key(*jobs) for jobs in _together(group, group.jobs))


def _summary(row: MeasuredRow) -> str:
    what = f"{row.model} × {row.batch_size}, {row.mode}" + (f", beside {row.partners}" if row.partners else "")
    if row.status != "ok":
        return f"{what}: {row.status.replace('_', ' ')} {row.reason}".rstrip()
    slowed = f", slowed {row.slowdown:.2f}" if row.slowdown else ""
    return f"{what}: {1000 * (row.step_time_s or 0):.1f} ms a step{slowed}"
