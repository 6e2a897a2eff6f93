"""The profiler's measurements, sweep and rows on a simulated GPU."""

import csv
import io
import sys
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
    Mode,
    Point,
    Session,
    measure,
    measured_keys,
    parse_budget,
    points,
    profile,
)
from click.testing import CliRunner
from fake_gpu import CONTEXT_MIB, Behaviour, FakeMachine
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


def test_without_memory_by_process_the_rise_of_used_memory_counts() -> None:
    row = Session(FakeMachine(reports_processes=False)).measure(Point(work()))
    assert row.peak_process_mib == 2000 + CONTEXT_MIB


LARGE = {name: Behaviour(memory_mib=25_000) for name in ("timm/resnet50", "timm/vgg16")}
BROKEN, MUTE = Behaviour(failure="RuntimeError: no such model"), Behaviour(is_mute=True)


@pytest.mark.parametrize(
    ("machine", "mode", "status", "word"),
    [
        pytest.param(FakeMachine(LARGE, memory_mib=20_000), None, "out_of_memory", "", id="out of memory"),
        pytest.param(FakeMachine({"timm/resnet50": BROKEN}), None, "failed", "no such model", id="broken model"),
        pytest.param(FakeMachine({"timm/resnet50": MUTE}), None, "failed", "no answer within", id="hangs"),
        pytest.param(FakeMachine(LARGE), "time-slicing", "out_of_memory", "", id="a pair that does not fit together"),
        pytest.param(FakeMachine(has_mps=False), "mps", "failed", "nvidia-cuda-mps-control", id="a pair without MPS"),
    ],
)
def test_a_failure_is_a_row_and_ends_all_processes(
    machine: FakeMachine, mode: Mode | None, status: str, word: str
) -> None:
    row = Session(machine).measure(Point(work(), work("timm/vgg16") if mode else None, mode))
    assert row.status == status
    assert word in row.reason
    assert row.step_time_s is row.peak_process_mib is row.slowdown is None
    assert row.capacity_mib == machine.describe().capacity_mib
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


def test_the_sweep_is_deterministic_without_duplicates() -> None:
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


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_budget_is_kept(tmp_path: Path) -> None:
    machine = FakeMachine()
    begin = machine.monotonic()
    assert measure(machine, "solo", 60.0, tmp_path / "rows.csv", QUIET) > 15
    assert machine.monotonic() - begin <= 60.0


def test_the_same_command_continues_a_file_after_an_incomplete_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = measure(FakeMachine(), "default", 60.0, path, QUIET)
    with path.open("a") as file:
        file.write("timm/half-a-row,solo,excl")
    second = measure(FakeMachine(), "default", 60.0, path, QUIET)
    rows = read(path)
    assert len(rows) == first + second
    assert [row["key"] for row in rows] == [point.key for point in points("default")][: len(rows)]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_row_has_units_and_empty_cells_for_values_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    measure(FakeMachine(BUSY), "default", 60.0, path, QUIET)
    pair = next(row for row in read(path) if row["kind"] == "pair")
    shared, alone = float(pair["shared_step_time_s"]), float(pair["step_time_s"])
    assert float(pair["slowdown"]) == pytest.approx(shared / alone)
    assert pair["peak_process_mib"] == ""
    assert pair["partner_precision"] in list(Precision)


def test_a_file_with_other_content_or_another_gpu_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="choose another --out"):
        measured_keys(path, "Simulated GPU")
    path.unlink()
    measure(FakeMachine(), "solo", 10.0, path, QUIET)
    with pytest.raises(InputError, match="was measured on Simulated GPU, this is NVIDIA H200"):
        measured_keys(path, "NVIDIA H200")


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
    process.give(work(), {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert wait(process) == Ready()
    process.run(0.5)
    window = wait(process)
    assert isinstance(window, Window)
    assert (window.steps, window.step_time_s, window.peak_allocated_mib) == (7, 0.5, 1)
    process.stop()


def test_a_worker_that_dies_is_a_failure_with_its_exit_code() -> None:
    process = stub()
    process.give(work("dies"), {})
    assert wait(process) == Failed("the process ended with code 3")
    process.run(1.0)
    process.stop()


def test_a_worker_without_a_gpu_fails_with_a_sentence() -> None:
    from carpool_predictor.profiler.worker import replies

    (reply,) = replies(work("timm/resnet18", 2), iter([]))
    assert isinstance(reply, Failed)
    assert reply.reason


def test_nvml_values_are_read() -> None:
    nvml = FakeNvml(["H100"])
    with NvmlMachine(0, nvml, stub) as machine:
        known = machine.describe()
        assert "H100" in known.product
        assert known.capacity_mib > 80_000
        before = machine.sample()
        job = machine.start(work(), mps=False)
        assert wait(job) == Ready()
        process = nvml.start(0, job.pid, 5000)
        process.sm, process.dram = 0.5, 0.25
        machine.begin_activity()
        nvml.advance(1.0)
        activity = machine.end_activity()
        assert activity is not None
        assert (activity.sm_active_ratio, activity.dram_active_ratio) == pytest.approx((0.5, 0.25), abs=0.01)
        after = machine.sample()
        assert after.process_mib[job.pid] == 5000
        assert after.memory_used_mib >= before.memory_used_mib + 5000
        assert after.power_w > 0
        job.stop()


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
