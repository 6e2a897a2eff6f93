"""The profiler's measurements, sweep and rows on a simulated GPU."""

import csv
import io
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from carpool_core.settings import InputError
from carpool_core.values import Precision
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_predictor.profiler.hardware import HardwareError, MpsDaemon, NvmlMachine, WorkerProcess
from carpool_predictor.profiler.machine import Failed, Process, Ready, Reply, Window, Workload
from carpool_predictor.profiler.session import (
    COLUMNS,
    MAX_RESIDENT,
    SWEEPS,
    Group,
    MeasuredRow,
    Mode,
    Session,
    groups,
    measure,
    measured_runs,
    parse_budget,
    profile,
)
from click.testing import CliRunner
from fake_gpu import CONTEXT_MIB, Behaviour, FakeMachine
from rich.console import Console

QUIET = Console(file=io.StringIO())


def job(model: str = "timm/resnet50", batch: int = 32) -> Workload:
    return Workload(model=model, batch_size=batch)


def measured(
    machine: FakeMachine, *jobs: Workload, mode: Mode = "exclusive", seconds: float = 60.0
) -> list[MeasuredRow]:
    return list(Session(machine).measure(Group(jobs, mode), machine.monotonic() + seconds))


def test_a_job_alone_is_measured_without_its_warm_up() -> None:
    machine = FakeMachine({"timm/resnet50": Behaviour(memory_mib=3000, step_time_s=0.04, gpu_util=0.9, sm_active=0.6)})
    (row,) = measured(machine, job(batch=64))
    assert (row.mode, row.status, row.partners, row.resident) == ("exclusive", "ok", "", 1)
    assert (row.step_time_s, row.steps) == (0.04, 25)
    assert row.peak_allocated_mib == 6000
    assert row.peak_process_mib == 6000 + CONTEXT_MIB
    assert row.sm_active_ratio == pytest.approx(0.6, abs=0.03)
    assert row.gpu_util_percent == pytest.approx(90, abs=5)
    assert row.power_w is not None
    assert row.power_w > 300
    assert row.product == "Simulated GPU"
    assert row.elapsed_s == pytest.approx(1.0, abs=0.2)


def test_without_memory_by_process_the_rise_of_used_memory_counts() -> None:
    (row,) = measured(FakeMachine(reports_processes=False), job())
    assert row.peak_process_mib == 2000 + CONTEXT_MIB
    beside = measured(FakeMachine(reports_processes=False), job(), job("timm/vgg16"), mode="time-slicing")
    assert {row.peak_process_mib for row in beside} == {None}, "the rise is of both"


LARGE = {name: Behaviour(memory_mib=25_000) for name in ("timm/resnet50", "timm/vgg16")}
BROKEN, MUTE = Behaviour(failure="RuntimeError: no such model"), Behaviour(is_mute=True)


@pytest.mark.parametrize(
    ("machine", "mode", "status", "word"),
    [
        pytest.param(FakeMachine(LARGE, memory_mib=20_000), "exclusive", "out_of_memory", "", id="out of memory"),
        pytest.param(FakeMachine({"timm/resnet50": BROKEN}), "exclusive", "failed", "no such model", id="broken model"),
        pytest.param(FakeMachine({"timm/resnet50": MUTE}), "exclusive", "failed", "no answer within", id="hangs"),
        pytest.param(FakeMachine(has_mps=False), "mps", "failed", "nvidia-cuda-mps-control", id="no MPS"),
    ],
)
def test_a_failure_is_a_row_and_ends_all_processes(machine: FakeMachine, mode: Mode, status: str, word: str) -> None:
    (row,) = measured(machine, job(), mode=mode)
    assert row.status == status
    assert word in row.reason
    assert row.step_time_s is row.peak_process_mib is row.slowdown is None
    assert row.capacity_mib == machine.describe().capacity_mib
    assert not machine.alive


def test_a_job_that_fails_beside_others_leaves_them_running() -> None:
    machine = FakeMachine({"timm/vgg16": BROKEN, "timm/densenet121": Behaviour(memory_mib=50_000)})
    jobs = job(), job("timm/vgg16"), job("timm/densenet121"), job("timm/resnet18")
    rows = measured(machine, *jobs, mode="time-slicing")
    failed = {row.model: (row.status, row.reason) for row in rows if row.status != "ok"}
    assert failed["timm/vgg16"] == ("failed", "RuntimeError: no such model")
    assert failed["timm/densenet121"] == ("failed", "out of memory beside 2 other jobs"), "its peak says nothing"
    assert {row.model for row in rows if row.partners} == {"timm/resnet50", "timm/resnet18"}
    assert not machine.alive


BUSY = {name: Behaviour(gpu_util=0.8, sm_active=0.7) for name in ("timm/resnet50", "timm/vgg16", "timm/resnet18")}


@pytest.mark.parametrize(("mode", "slowdown"), [("time-slicing", 1.64), ("mps", 1.4)])
def test_jobs_of_a_group_run_alone_then_together(mode: Mode, slowdown: float) -> None:
    machine = FakeMachine(BUSY)
    rows = measured(machine, job(), job("timm/vgg16"), mode=mode)
    alone, pair = rows[:4], rows[4:]
    assert [row.model for row in alone] == 2 * ["timm/resnet50", "timm/vgg16"]
    assert {row.partners for row in alone} == {""}
    assert [(row.model, row.partners) for row in pair] == [
        ("timm/resnet50", job("timm/vgg16").key),
        ("timm/vgg16", job().key),
    ]
    assert {row.step_time_s for row in alone} == {row.alone_step_time_s for row in pair} == {0.05}
    assert [row.slowdown for row in pair] == pytest.approx([slowdown, slowdown])
    assert {row.run for row in pair} == {f"{job().key}+{job('timm/vgg16').key}|{mode}"}
    assert {row.resident for row in rows} == {2}
    assert {process.mps for process in machine.processes} == {mode == "mps"}
    assert len(machine.processes) == 2, "each is built once"


def test_a_slowdown_is_over_both_runs_alone_by_their_mean_rate() -> None:
    """On an H100 a job that the processor limits took 38 ms a step alone, and 54 ms in another run alone."""
    drifting = Behaviour(gpu_util=0.5, drift_per_s=0.02)
    rows = measured(FakeMachine({"timm/resnet50": drifting}), job(), job("timm/vgg16"), mode="mps")
    first, again = (row.step_time_s for row in rows if row.model == "timm/resnet50" and not row.partners)
    assert first is not None
    assert again is not None
    assert again > 1.05 * first
    together = next(row for row in rows if row.model == "timm/resnet50" and row.partners)
    assert together.alone_step_time_s == pytest.approx(2 / (1 / first + 1 / again))
    assert together.step_time_s is not None
    assert together.slowdown == pytest.approx(together.step_time_s / together.alone_step_time_s)


class Interrupted(FakeMachine):
    """A machine whose user presses Ctrl-C after some seconds."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic() > 112:
            raise KeyboardInterrupt


def test_an_interrupted_profiler_keeps_the_pairs_that_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    machine = Interrupted(memory_mib=20_000)
    with pytest.raises(KeyboardInterrupt):
        measure(machine, "sharing", 600.0, path, QUIET)
    assert [row for row in read(path) if row["partners"] and float(row["slowdown"]) >= 1]
    assert not machine.alive


def printed(machine: FakeMachine, budget_s: float, path: Path) -> str:
    console = Console(file=io.StringIO(), width=400)
    measure(machine, "sharing", budget_s, path, console)
    found = console.file
    assert isinstance(found, io.StringIO)
    return found.getvalue()


def test_a_short_budget_measures_pairs_of_the_groups_that_have_fewest(tmp_path: Path) -> None:
    """On an H100 a file of 222 rows was continued with 95 s, and no row was added."""
    path = tmp_path / "rows.csv"
    before: set[str] = set()
    for _ in range(6):
        text = printed(FakeMachine(memory_mib=80_000), 45.0, path)
        assert "of 6 groups did not fit into the budget; the same command continues" in text
        runs = [row["run"] for row in read(path) if row["partners"]]
        assert len(set(runs)) - len(before) >= 5, "each call measures new pairs"
        before = set(runs)
    assert len({(row["mode"], row["model"], row["batch_size"]) for row in read(path)}) == 72, "one group in each call"


def test_a_budget_that_holds_no_new_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for _ in range(8):
        text = printed(FakeMachine(memory_mib=80_000), 14.5, path)
    assert "0 rows measured" in text
    assert "a budget of 14.5 s holds no new run: the jobs of a group take 14 s to start and run alone" in text


def test_a_complete_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    printed(FakeMachine(memory_mib=12_000), 4000.0, path)
    assert "has every run of this sweep" in printed(FakeMachine(memory_mib=12_000), 60.0, path)


def test_a_job_that_failed_alone_is_left_out_of_what_a_file_still_needs(tmp_path: Path) -> None:
    path, broken = tmp_path / "rows.csv", {"timm/vgg16": BROKEN}
    printed(FakeMachine(broken, memory_mib=80_000), 4000.0, path)
    again = FakeMachine(broken, memory_mib=80_000)
    assert "has every run of this sweep" in printed(again, 4000.0, path)
    assert not again.processes
    assert {row["status"] for row in read(path) if row["model"] == "timm/vgg16"} == {"failed"}


def test_a_failure_is_not_named_a_short_budget(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    broken = {job.model: BROKEN for group in groups("sharing", 80_000) for job in group.jobs}
    printed(FakeMachine(memory_mib=80_000), 45.0, path)
    printed(FakeMachine(broken, memory_mib=80_000), 4000.0, path)
    text = printed(FakeMachine(broken, memory_mib=80_000), 4000.0, path)
    assert "0 rows measured" in text
    assert "failed RuntimeError: no such model" in text
    assert "--budget" not in text


def test_three_jobs_run_together_after_five_pairs() -> None:
    jobs = [job(batch=batch) for batch in (1, 2, 4, 8)]
    rows = measured(FakeMachine(), *jobs, mode="time-slicing")
    together = [row.partners.count("+") + 2 for row in rows if row.partners]
    assert together == 5 * [2, 2] + 3 * [3] + [2, 2]


def test_the_sweeps_are_deterministic_without_duplicates() -> None:
    for sweep in SWEEPS:
        keys = [group.key(*group.jobs) for group in groups(sweep, 80_000)]
        assert keys == [group.key(*group.jobs) for group in groups(sweep, 80_000)]
        assert len(set(keys)) == len(keys)


def test_any_beginning_of_a_sweep_is_a_fair_sample() -> None:
    alone = [group.jobs[0] for group in groups("alone", 80_000)][:150]
    assert len({one.model for one in alone}) >= 35
    assert {one.precision for one in alone[:20]} == {Precision.FP32, Precision.BF16_MIXED}
    first, second, *_ = groups("sharing", 80_000)
    assert (first.jobs, first.mode, second.mode) == (second.jobs, "time-slicing", "mps")
    assert len(first.jobs) == MAX_RESIDENT
    assert len({one.model for one in first.jobs}) >= 6
    assert len(groups("sharing", 16_000)[0].jobs) == 2, "as many as fit"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_budget_is_kept(tmp_path: Path) -> None:
    machine = FakeMachine()
    begin = machine.monotonic()
    assert measure(machine, "alone", 60.0, tmp_path / "alone.csv", QUIET) > 15
    assert machine.monotonic() - begin <= 60.0


def test_each_group_gets_its_share_of_the_budget(tmp_path: Path) -> None:
    machine = FakeMachine(memory_mib=200_000)
    begin, path = machine.monotonic(), tmp_path / "rows.csv"
    measure(machine, "sharing", 300.0, path, QUIET)
    assert machine.monotonic() - begin <= 300.0
    pairs = Counter((row["mode"], row["resident"]) for row in read(path) if row["partners"])
    assert len({row["model"] for row in read(path)}) == 12
    assert pairs["time-slicing", "12"] == pytest.approx(pairs["mps", "12"], rel=0.2)


def test_the_same_command_continues_a_file_after_an_incomplete_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = measure(FakeMachine(), "alone", 60.0, path, QUIET)
    with path.open("a") as file:
        file.write("timm/half-a-row,alone,excl")
    second = measure(FakeMachine(), "alone", 60.0, path, QUIET)
    rows = read(path)
    assert len(rows) == first + second
    assert [row["run"] for row in rows] == [g.key(*g.jobs) for g in groups("alone", 40_960)][: len(rows)]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_continued_group_measures_only_other_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for _ in range(2):
        measure(FakeMachine(), "sharing", 150.0, path, QUIET)
    rows = [(row["run"], row["model"], row["batch_size"]) for row in read(path) if row["partners"]]
    assert len(set(rows)) == len(rows)


def test_values_that_were_not_measured_are_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    measure(FakeMachine(BUSY), "sharing", 300.0, path, QUIET)
    rows = read(path)
    alone, shared = next(row for row in rows if not row["partners"]), next(row for row in rows if row["partners"])
    assert alone["slowdown"] == alone["alone_step_time_s"] == ""
    assert float(shared["slowdown"]) == pytest.approx(float(shared["step_time_s"]) / float(shared["alone_step_time_s"]))
    assert shared["precision"] in list(Precision)


def test_a_file_with_other_content_or_another_gpu_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="choose another --out"):
        measured_runs(path, "Simulated GPU")
    path.unlink()
    measure(FakeMachine(), "alone", 10.0, path, QUIET)
    with pytest.raises(InputError, match="was measured on Simulated GPU, this is NVIDIA H200"):
        measured_runs(path, "NVIDIA H200")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("9m", 540), ("1.5h", 5400)])
def test_budgets_have_units(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["9", "0m", "nine minutes", "-3s"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expects a time such as"):
        parse_budget(text)


def test_without_a_driver_the_command_fails_with_a_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(profile, ["--out", str(tmp_path / "rows.csv"), "--gpu-index", "63"])
    assert result.exit_code == 2
    assert "expected GPU 63 behind NVML" in result.stderr
    assert "Traceback" not in result.stderr


def serve(connection: Connection) -> None:
    """Serve like a worker, without a GPU."""
    workload, environment = connection.recv()
    if workload.model == "dies":
        sys.exit(3)
    connection.send(Ready())
    while True:
        window = Window(
            steps=7, step_time_s=connection.recv(), peak_allocated_mib=len(environment), peak_reserved_mib=2.0
        )
        connection.send(window)


def stub() -> WorkerProcess:
    return WorkerProcess(serve)


def wait(process: Process) -> Reply:
    while (reply := process.reply()) is None:
        pass
    return reply


def test_a_worker_receives_its_task_and_answers() -> None:
    process = stub()
    process.give(job(), {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert wait(process) == Ready()
    process.run(0.5)
    window = wait(process)
    assert isinstance(window, Window)
    assert (window.steps, window.step_time_s, window.peak_allocated_mib) == (7, 0.5, 1)
    process.stop()


def test_a_worker_that_dies_is_a_failure_with_its_exit_code() -> None:
    process = stub()
    process.give(job("dies"), {})
    assert wait(process) == Failed("the process ended with code 3")
    process.run(1.0)
    process.stop()


def test_a_worker_without_a_gpu_fails_with_a_sentence() -> None:
    from carpool_predictor.profiler.worker import replies

    (reply,) = replies(job("timm/resnet18", 2), iter([]))
    assert isinstance(reply, Failed)
    assert reply.reason


def test_nvml_values_are_read() -> None:
    nvml = FakeNvml(["H100"])
    with NvmlMachine(0, nvml, stub) as machine:
        known = machine.describe()
        assert "H100" in known.product
        assert known.capacity_mib > 80_000
        before = machine.sample()
        started = machine.start(job(), mps=False)
        assert wait(started) == Ready()
        process = nvml.start(0, started.pid, 5000)
        process.sm, process.dram = 0.5, 0.25
        machine.begin_activity()
        nvml.advance(1.0)
        activity = machine.end_activity()
        assert activity is not None
        assert (activity.sm_active_ratio, activity.dram_active_ratio) == pytest.approx((0.5, 0.25), abs=0.01)
        after = machine.sample()
        assert after.process_mib[started.pid] == 5000
        assert after.memory_used_mib >= before.memory_used_mib + 5000
        assert after.power_w > 0
        started.stop()


def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(HardwareError, match="expected GPU 9"):
        NvmlMachine(9, FakeNvml(["H100"]), stub)


def test_behind_mps_a_worker_gets_the_daemon_that_was_started(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    log = tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@ $CUDA_VISIBLE_DEVICES $(cat)" >> {log}\n')
    program.chmod(0o755)
    daemon = MpsDaemon(tmp_path / "mps", "GPU-1", str(program))
    assert daemon.environment() == daemon.environment() == {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps" / "pipe")}
    daemon.stop()
    daemon.stop()
    assert log.read_text().split() == ["-d", "GPU-1", "GPU-1", "quit"]


def test_without_the_program_mps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="expected absent-program to start"):
        MpsDaemon(tmp_path, "GPU-1", "absent-program").environment()
