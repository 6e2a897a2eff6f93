"""The profiler: what is measured, in which order, and what becomes of it, on a GPU that is not there."""

import io
import sys
from pathlib import Path

import msgspec
import pytest
from carpool_core.values import Precision
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_predictor.profiler.hardware import HardwareError, MpsDaemon, NvmlMachine, WorkerProcess
from carpool_predictor.profiler.machine import Failed, Process, Ready, Reply, Window, Workload
from carpool_predictor.profiler.session import (
    COLUMNS,
    InputError,
    Point,
    RowsError,
    Session,
    done,
    measure,
    parse_budget,
    points,
    profile,
    read,
    run_sweep,
)
from carpool_predictor.profiler.testing import CONTEXT_MIB, Behaviour, FakeMachine
from click.testing import CliRunner
from rich.console import Console

QUIET = Console(file=io.StringIO())


def work(model: str = "timm/resnet50", batch: int = 32) -> Workload:
    return Workload(model=model, batch_size=batch)


def test_a_job_alone_is_measured_without_its_warm_up() -> None:
    machine = FakeMachine({"timm/resnet50": Behaviour(memory_mib=3000, step_time_s=0.04, gpu_util=0.9, sm_active=0.6)})
    row = Session(machine).measure(Point(work(batch=64)))
    assert (row.kind, row.mode, row.status) == ("solo", "exclusive", "ok")
    assert (row.step_time_s, row.steps) == (0.04, 25)
    assert row.peak_allocated_mib == 6000
    assert row.peak_process_mib == 6000 + CONTEXT_MIB
    assert row.sm_active_ratio == pytest.approx(0.6, abs=0.03)
    assert row.gpu_util_percent == pytest.approx(90, abs=5)
    assert row.power_w is not None
    assert row.power_w > 300
    assert row.product == "Simulated GPU"
    assert row.elapsed_s == pytest.approx(3.0, abs=0.2)


def test_where_nvml_does_not_tell_processes_apart_the_rise_is_taken() -> None:
    row = Session(FakeMachine(tells_processes=False)).measure(Point(work()))
    assert row.peak_process_mib == 2000 + CONTEXT_MIB


def test_without_gpm_activity_stays_empty() -> None:
    row = Session(FakeMachine(has_gpm=False)).measure(Point(work()))
    assert row.status == "ok"
    assert row.sm_active_ratio is row.tensor_active_ratio is row.dram_active_ratio is None


@pytest.mark.parametrize(
    ("behaviour", "status", "word"),
    [
        pytest.param(Behaviour(memory_mib=50_000), "out_of_memory", "", id="out of memory"),
        pytest.param(Behaviour(failure="RuntimeError: no such model"), "failed", "no such model", id="broken model"),
        pytest.param(Behaviour(is_mute=True), "failed", "no answer within", id="hangs"),
    ],
)
def test_what_goes_wrong_is_a_row_and_leaves_nothing_behind(behaviour: Behaviour, status: str, word: str) -> None:
    machine = FakeMachine({"timm/resnet50": behaviour})
    row = Session(machine).measure(Point(work()))
    assert row.status == status
    assert word in row.reason
    assert row.step_time_s is row.peak_process_mib is None
    assert row.capacity_mib == 40960
    assert not machine.alive


BUSY = {name: Behaviour(gpu_util=0.8, sm_active=0.7) for name in ("timm/resnet50", "timm/vgg16")}


@pytest.mark.parametrize(("mode", "slowdown"), [("time-slicing", 1.64), ("mps", 1.4)])
def test_a_pair_is_measured_alone_and_together(mode: str, slowdown: float) -> None:
    point = Point(work(), work("timm/vgg16"), "mps" if mode == "mps" else "time-slicing")
    machine = FakeMachine(BUSY)
    row = Session(machine).measure(point)
    assert (row.kind, row.mode, row.partner_model) == ("pair", mode, "timm/vgg16")
    assert row.step_time_s == row.partner_step_time_s == 0.05
    assert (row.slowdown, row.partner_slowdown) == pytest.approx((slowdown, slowdown))
    assert {process.mps for process in machine.processes} == {mode == "mps"}


def test_a_pair_that_does_not_fit_together_is_out_of_memory() -> None:
    machine = FakeMachine({name: Behaviour(memory_mib=25_000) for name in ("timm/resnet50", "timm/vgg16")})
    row = Session(machine).measure(Point(work(), work("timm/vgg16"), "time-slicing"))
    assert (row.status, row.slowdown) == ("out_of_memory", None)
    assert not machine.alive


def test_without_mps_the_pair_says_so() -> None:
    row = Session(FakeMachine(has_mps=False)).measure(Point(work(), work("timm/vgg16"), "mps"))
    assert row.status == "failed"
    assert "nvidia-cuda-mps-control" in row.reason


def test_the_sweep_is_the_same_every_time_and_names_nothing_twice() -> None:
    keys = [point.key for point in points("default")]
    assert keys == [point.key for point in points("default")]
    assert len(set(keys)) == len(keys)


def test_any_beginning_of_the_sweep_is_a_fair_sample() -> None:
    begun = list(points("default"))[:360]
    solos, pairs = [p for p in begun if p.partner is None], [p for p in begun if p.partner is not None]
    assert len(solos) >= 300
    assert len(pairs) >= 60
    assert len({p.workload.model for p in solos[:150]}) >= 35
    assert {p.workload.precision for p in solos[:20]} == {Precision.FP32, Precision.BF16_MIXED}
    assert {p.mode for p in pairs[:2]} == {"time-slicing", "mps"}
    assert pairs[0].workload == pairs[1].workload


def test_parts_of_the_sweep_can_be_asked_for() -> None:
    assert all(point.partner is None for point in points("solo"))
    assert all(point.partner is not None for point in points("pairs"))
    with pytest.raises(ValueError, match="expected a sweep out of"):
        next(points("other"))


def test_the_budget_is_kept() -> None:
    machine = FakeMachine()
    begin = machine.monotonic()
    rows: list[str] = []
    count = run_sweep(Session(machine), machine, points("solo"), set(), 60.0, lambda row: rows.append(row.key))
    assert count == len(rows) > 15
    assert machine.monotonic() - begin <= 60.0


def test_rows_are_on_the_disk_as_they_come_and_continued_where_they_were_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = measure(FakeMachine(), "default", 60.0, path, QUIET)
    with path.open("a") as file:
        file.write("timm/half-a-row,solo,excl")
    second = measure(FakeMachine(), "default", 60.0, path, QUIET)
    rows = list(read(path))
    assert len(rows) == first + second
    assert [row.key for row in rows] == [point.key for point in points("default")][: len(rows)]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_row_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    measure(FakeMachine(BUSY), "default", 60.0, path, QUIET)
    pair = next(row for row in read(path) if row.kind == "pair")
    assert pair.slowdown == pytest.approx((pair.shared_step_time_s or 0) / (pair.step_time_s or 1))
    assert pair.peak_process_mib is None


def test_a_file_of_something_else_or_of_another_gpu_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RowsError, match="choose another --out"):
        done(path, "Simulated GPU")
    path.unlink()
    measure(FakeMachine(), "solo", 10.0, path, QUIET)
    with pytest.raises(RowsError, match="was measured on Simulated GPU, this is NVIDIA H200"):
        done(path, "NVIDIA H200")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("9m", 540), ("1.5h", 5400)])
def test_budgets_are_read(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["9", "0m", "nine minutes", "-3s"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expects a time such as"):
        parse_budget(text)


def test_without_a_driver_the_command_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(profile, ["--out", str(tmp_path / "rows.csv"), "--gpu-index", "63"])
    assert result.exit_code == 2
    assert "expected GPU 63 behind NVML" in result.stderr
    assert "Traceback" not in result.stderr


STUB = """
import json, os, sys
task = json.loads(sys.stdin.readline())
if task["workload"]["model"] == "dies":
    sys.exit("segmentation fault, say")
print(json.dumps({"type": "Ready"}), flush=True)
for line in sys.stdin:
    run = json.loads(line)
    print(json.dumps({"type": "Window", "steps": 7, "step_time_s": run["seconds"], "peak_allocated_mib": len(
        os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")), "peak_reserved_mib": 2.0}), flush=True)
"""


def stub() -> WorkerProcess:
    return WorkerProcess((sys.executable, "-c", STUB))


def wait(process: Process) -> Reply:
    while (reply := process.reply()) is None:
        pass
    return reply


def test_a_worker_is_told_what_to_train_and_answers() -> None:
    process = stub()
    process.give(work(), {})
    assert wait(process) == Ready()
    process.run(0.5)
    window = wait(process)
    assert isinstance(window, Window)
    assert (window.steps, window.step_time_s) == (7, 0.5)
    process.stop()


def test_a_worker_that_dies_says_how() -> None:
    process = stub()
    process.give(work("dies"), {})
    reply = wait(process)
    assert isinstance(reply, Failed)
    assert "ended with code 1: segmentation fault" in reply.reason
    process.run(1.0)
    process.stop()


def test_a_worker_without_a_gpu_fails_with_a_sentence() -> None:
    from carpool_predictor.profiler.worker import Task, replies

    line = msgspec.json.encode(Task(workload=work("timm/resnet18", 2)))
    (reply,) = replies(iter([line]))
    assert isinstance(reply, Failed)
    assert reply.reason


def test_real_nvml_calls_are_read_into_the_port() -> None:
    nvml = FakeNvml(["H100"])
    with NvmlMachine(0, nvml, stub) as machine:
        known = machine.describe()
        assert "H100" in known.product
        assert known.memory_mib > 80_000
        before = machine.sample()
        job = machine.start(work(), mps=False)
        assert wait(job) == Ready()
        process = nvml.start(0, job.pid, 5000)
        process.sm, process.dram = 0.5, 0.25
        machine.begin_activity()
        nvml.advance(1.0)
        seen = machine.end_activity()
        assert seen is not None
        assert (seen.sm_active, seen.dram_active) == pytest.approx((0.5, 0.25), abs=0.01)
        after = machine.sample()
        assert after.process_mib[job.pid] == 5000
        assert after.memory_used_mib >= before.memory_used_mib + 5000
        assert after.power_w > 0
        job.stop()


def test_a_gpu_that_is_not_there_is_an_error() -> None:
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
