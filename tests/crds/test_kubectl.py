"""`carpool status`, `top`, `logs` and `diagnose` against an API server in memory."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from carpool_core import cli
from carpool_core.cli import main
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden, Overloaded, Unreachable
from carpool_core.kubectl import output
from carpool_core.kubectl.output import OTHER_JOBS, table, wrapped
from carpool_core.testing.kube import FakeKube
from click.testing import CliRunner, Result

A100 = "NVIDIA A100-SXM4-40GB"


def interval(median: float) -> dict[str, float]:
    return {"median": median, "lower": median / 2, "upper": median * 2}


PREDICTION = {
    "outcome": "Predicted", "reason": "Predicted", "products": [{
        "product": A100, "stepTimeSeconds": interval(0.1),
        "memory": {"medianMib": 8000, "upperMib": 12000, "coverage": 0.9},
        "activity": {"gpuUtilPercent": interval(40), "smActiveRatio": interval(0.3), "dramActiveRatio": interval(0.2)},
    }],
}  # fmt: skip


def place(node: str = "a", **fields: Any) -> dict[str, Any]:
    neighbours = [{"namespace": "other", "job": "beside", "gpuUuid": "GPU-0"}]
    return {
        "worker": 0, "pod": "train-worker-0-1", "podUid": "p", "node": node, "gpuUuids": ["GPU-0"], "product": A100,
        "mode": "MPS", "memoryLimitMib": 12000, "expectedSlowdown": 1.25, "neighbours": neighbours, **fields,
    }  # fmt: skip


def condition(type_: str, status: str = "True", reason: str = "Because", message: str = "") -> dict[str, str]:
    moment = "2026-01-01T00:00:00Z"
    return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def seed_job(kube: FakeKube, name: str = "train", namespace: str = "default", **status: Any) -> None:
    running = {
        "state": "Running", "prediction": PREDICTION, "placement": [place()],
        "conditions": [condition("Predicted", reason="Predicted"), condition("Placed"), condition("Running")],
        "observed": {"peakMemoryMib": 9000, "gpuUtilPercent": 35.0},
    }  # fmt: skip
    spec = {"training": {"steps": 1000}, "template": {"spec": {"containers": [{"name": "train"}]}}}
    kube.seed(
        GPU_TRAINING_JOBS,
        {"metadata": {"name": name, "namespace": namespace}, "spec": spec, "status": running | status},
    )


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    kube = FakeKube()

    @contextlib.asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[FakeKube]:
        yield kube

    monkeypatch.setattr(output, "connect", connected)
    return kube


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "250"})


def test_status_has_state_prediction_place_cotenants_and_progress(kube: FakeKube) -> None:
    seed_job(kube)
    (row,) = run("status").output.splitlines()[1:]
    cells = [cell.strip() for cell in row.split("   ") if cell.strip()]
    # It began in January, and 1,000 steps of 0.1 s, slowed to 1.25, take 125 s.
    assert cells[:5] == ["train", "Running", "8,000 MiB (at most 12,000), 40%", f"a ({A100})", "other/beside"]
    assert cells[5].startswith("about 100% (")
    assert cells[5].endswith(" of 2.1 min, at most 4.2 min)")


def test_progress_is_in_steps_where_the_probe_counts_them(kube: FakeKube) -> None:
    seed_job(kube, observed={"steps": 250, "expectedEnd": "2026-01-01T01:00:00Z", "latestEnd": "2026-01-01T02:00:00Z"})
    assert "   25% (250 of 1,000 steps, " in run("status").output
    assert "of 60 min, at most 2 h)" in run("status").output


@pytest.mark.parametrize(
    ("state", "expected"), [("Complete", "   20 s"), ("Failed", "   2% (15 of 1,000 steps, 20 s)")]
)
def test_a_job_that_has_succeeded_is_not_at_the_share_of_the_last_reading(
    kube: FakeKube, state: str, expected: str
) -> None:
    """Regression: a job of 20 steps that had succeeded stayed at 15 of them."""
    times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:20Z"}
    seed_job(kube, state=state, observed={"steps": 15}, **times)
    assert run("status").output.rstrip().endswith(expected)
    assert "other/beside" not in run("status").output


def test_status_of_a_waiting_job_has_the_reason(kube: FakeKube) -> None:
    waits = condition("Placed", "False", "NoGpuFits", "needs 12,000 MiB")
    seed_job(kube, state="Queued", placement=[], observed=None, conditions=[condition("Predicted"), waits])
    (item,) = json.loads(run("status", "train", "-o", "json").output)["items"]
    assert (item["state"], item["reason"], item["message"]) == ("Queued", "NoGpuFits", "needs 12,000 MiB")
    assert "progress" not in item


def test_namespaces_select_jobs(kube: FakeKube) -> None:
    seed_job(kube)
    seed_job(kube, "far", namespace="other")
    assert [item["name"] for item in json.loads(run("status", "-o", "json").output)["items"]] == ["train"]
    everything = yaml.safe_load(run("status", "-A", "-o", "yaml").output)["items"]
    assert [(item["namespace"], item["name"]) for item in everything] == [("default", "train"), ("other", "far")]
    assert "far" in run("status", "-n", "other", "-o", "wide").output
    assert run("status", "-n", "empty").exit_code == 0


def seed_node(kube: FakeKube) -> None:
    devices = [{"uuid": f"GPU-{i}", "index": i, "product": A100, "memoryMib": 40960} for i in (1, 0)]
    held = {
        "podUid": "p", "podNamespace": "default", "podName": "train-worker-0-1", "jobUid": "j", "jobName": "train",
        "gpuUuids": ["GPU-0"], "mode": "MPS", "expectedSlowdown": 1.25, "tenant": {"memoryMib": 12000},
    }  # fmt: skip
    status = {
        "devices": devices,
        "partitions": [{"podUid": "p", "generation": 1, "state": "Ready"}],
        "tenants": [
            {"podUid": "p", "gpuUuid": "GPU-0", "memoryMib": 8500, "peakMemoryMib": 9000, "gpuUtilPercent": 35}
        ],
    }
    kube.seed(GPU_NODES, {"metadata": {"name": "a"}, "spec": {"reservations": [held]}, "status": status})


def test_top_has_each_gpu_with_its_tenants(kube: FakeKube) -> None:
    seed_node(kube)
    lines = run("top", "-o", "wide").output.splitlines()
    assert [line.split()[:2] for line in (lines[1], lines[3])] == [["a", "0"], ["a", "1"]]
    assert "8,500 / 40,960 MiB" in lines[1]
    assert lines[2].split() == ["default/train", "8,500", "MiB", "12,000", "MiB", "35%", "-", "1.25", "Ready"]
    assert run("top").output.splitlines()[-1].split() == ["1", *A100.split(), "idle"]
    (tenant,) = json.loads(run("top", "-o", "json").output)["items"][0]["tenants"]
    assert (tenant["countedMib"], tenant["use"]["peakMemoryMib"]) == (12000, 9000)


def test_logs_are_those_of_the_latest_attempt_and_name_the_worker(kube: FakeKube) -> None:
    seed_job(kube)
    job = kube.dump(GPU_TRAINING_JOBS, "train", "default")
    kube.seed(GPU_TRAINING_JOBS, job | {"spec": job["spec"] | {"workers": 2}})
    for name in ("train-worker-0-1", "train-worker-0-2", "train-worker-1-2"):
        metadata = {"name": name, "namespace": "default", "labels": {"carpool.dev/job": "train"}}
        kube.seed(PODS, {"metadata": metadata, "spec": {"nodeName": "a", "containers": [{"name": "train"}]}})
    kube.written_logs = {"train-worker-0-1": ["old"], "train-worker-0-2": ["step 1", "step 2"]}
    result = run("logs", "train", "--tail", "1")
    assert (result.exit_code, result.stdout) == (0, "[worker-0] step 2\n")
    assert 'container "train" in pod "train-worker-1-2" is waiting to start' in result.stderr
    assert run("logs", "train", "-w", "1").exit_code == 1
    assert "has no worker 7" in run("logs", "train", "-w", "7").output


def test_a_pod_without_a_node_has_no_log_and_the_reason_is_printed(kube: FakeKube) -> None:
    """Regression: the API server answers with an empty log, so nothing was printed and the exit code was 0."""
    waits = condition("Placed", "False", "NoGpuFits", "needs 12,000 MiB")
    seed_job(kube, state="Queued", placement=[], conditions=[condition("Predicted"), waits])
    metadata = {"name": "train-worker-0-1", "namespace": "default", "labels": {"carpool.dev/job": "train"}}
    kube.seed(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "train"}]}})
    kube.written_logs = {"train-worker-0-1": []}
    result = run("logs", "train")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "no log: train-worker-0-1 is not on a node yet (NoGpuFits) needs 12,000 MiB\n"


@pytest.mark.parametrize("container", [None, "StartError"])
def test_a_container_that_never_started_has_no_log_and_the_reason_is_printed(kube: FakeKube, container: Any) -> None:
    """Regression: nothing was printed, and the exit code was 0."""
    failed = condition("Failed", reason="PodFailed", message="no GPU is allocated")
    seed_job(kube, state="Failed", conditions=[condition("Predicted"), failed])
    assert "has no pods; it is Failed (PodFailed) no GPU is allocated" in run("logs", "train").output
    metadata = {"name": "train-worker-0-1", "namespace": "default", "labels": {"carpool.dev/job": "train"}}
    ended = {"reason": container, "finishedAt": "2026-01-01T00:00:00Z"}
    statuses = [{"name": "train", "state": {"terminated": ended}}] if container else []
    pod = {"metadata": metadata, "spec": {"nodeName": "a", "containers": [{"name": "train"}]}}
    kube.seed(PODS, pod | {"status": {"phase": "Failed", "containerStatuses": statuses}})
    kube.written_logs = {"train-worker-0-1": []}
    result = run("logs", "train")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "no log: train-worker-0-1 never started (PodFailed) no GPU is allocated\n"
    kube.seed(PODS, pod | {"status": {"containerStatuses": [{"name": "train", "state": {"running": {}}}]}})
    assert run("logs", "train").exit_code == 0, "it ran, and wrote nothing"


@pytest.mark.parametrize(
    ("state", "type_", "status", "reason"),
    [
        ("Unplaceable", "Placed", "False", "ExceedsEveryGpu"),
        ("Failed", "Failed", "True", "InvalidTemplate"),
        ("Queued", "Placed", "False", "PodForbidden"),
    ],
)
def test_diagnosis_repeats_why_a_job_cannot_run(
    kube: FakeKube, state: str, type_: str, status: str, reason: str
) -> None:
    """Regression: it found nothing unusual."""
    refused = condition(type_, status, reason, "a sentence")
    seed_job(kube, state=state, placement=[], observed=None, conditions=[condition("Predicted"), refused])
    assert f"finding: {state} ({reason}): a sentence\n" in run("diagnose", "train").output


def test_steps_of_a_job_without_an_end_have_their_age(kube: FakeKube) -> None:
    """Regression: an old count looked current."""
    seed_job(kube, observed={"steps": 250, "stepsAt": "2026-01-01T00:00:00Z"})
    assert " ago, " not in run("status").output
    job = kube.dump(GPU_TRAINING_JOBS, "train", "default")
    kube.seed(GPU_TRAINING_JOBS, job | {"spec": job["spec"] | {"training": {}}})
    assert re.search(r"   250 steps \d+ [a-z]+ ago, ", run("status").output)


@pytest.mark.parametrize(
    ("observed", "state", "expected"),
    [
        ({"peakMemoryMib": 3900}, "Complete", "took 3,900 MiB, 0.49 times the 8,000 MiB predicted on"),
        ({"peakMemoryMib": 3900, "steps": 20}, "Running", "took 3,900 MiB, 0.49 times the 8,000 MiB predicted on"),
        ({"peakMemoryMib": 3900, "steps": 19}, "Running", None),
        ({"peakMemoryMib": 450}, "Failed", None),
        ({"peakMemoryMib": 4100}, "Complete", None),
    ],
)
def test_measured_memory_far_from_the_prediction_is_a_finding(
    kube: FakeKube, observed: dict[str, int], state: str, expected: str | None
) -> None:
    seed_job(kube, state=state, observed=observed)
    found = json.loads(run("diagnose", "train", "-o", "json").output)["findings"]
    far = [text for text in found if "predicted on" in text]
    assert [text.startswith(expected or "") for text in far] == [True] * (expected is not None)


def test_each_worker_counts_with_its_own_bound_whatever_another_one_took(kube: FakeKube) -> None:
    measured = place(provisional=True, measuredMib=9000)
    smaller = place(worker=1, pod="train-worker-1-1", podUid="q", memoryLimitMib=5000)
    seed_job(kube, placement=[measured, smaller], observed={"peakMemoryMib": 8800})
    found = json.loads(run("diagnose", "train", "-o", "json").output)
    assert found["job"]["memoryBoundMib"] == 9000
    assert found["comparisons"][0]["atMost"] == 9000
    assert found["comparisons"][0]["predicted"]["upper"] == 12000
    assert found["findings"] == []


def test_diagnosis_compares_and_names_what_is_unusual(kube: FakeKube) -> None:
    interval = {"median": 0.3, "lower": 0.2, "upper": 0.4}
    peak = {
        "stepTimeInterval": interval,
        "peakMemoryMib": 13000,
        "gpuUtilPercent": 35.0,
        "stepTimeSeconds": 0.3,
        "stepTimeRatio": 3.0,
    }
    probed = {"dataWaitRatio": 0.4, "checkpointRatio": 0.1, "copyRatio": 0.2, "slowdown": 2.0}
    oom = {"number": 1, "outcome": "GpuOutOfMemory", "message": "CUDA out of memory"}
    seed_job(kube, observed=peak, attempts=[oom, {"number": 2}])
    created = kube.dump(GPU_TRAINING_JOBS, "train", "default")["metadata"]["creationTimestamp"]
    moments = (("train", created), ("other", created), ("train", "2025-12-31T23:59:59Z"))  # the last is a predecessor's
    for number, (name, moment) in enumerate(moments):
        about = {"kind": "GpuTrainingJob", "name": name}
        event = {"involvedObject": about, "reason": "Restarted", "message": "again", "lastTimestamp": moment}
        kube.seed(EVENTS, {"metadata": {"name": f"e-{number}", "namespace": "default"}, **event})
    found = json.loads(run("diagnose", "train", "-o", "json").output)
    assert [c["measured"] for c in found["comparisons"] if "measured" in c] == [13000, 35.0, 0.3]
    assert [c["atMost"] for c in found["comparisons"] if "atMost" in c] == [0.4]
    assert [event["object"] for event in found["events"]] == ["GpuTrainingJob train"]
    begins = ["ran out of GPU memory in 1 of 2", "took 13,000 MiB, more than the bound of 12,000 MiB",
              "its kernels run 35% of the time", "a step takes 3.00 times the one predicted alone"]  # fmt: skip
    assert len(found["findings"]) == len(begins)
    assert all(text.startswith(begin) for text, begin in zip(found["findings"], begins, strict=True))
    stalled = condition("Stalled", "True", "DataWait", "worker 0: no step for 60 s")
    over = condition("Straggler", "False", "Recovered", "over")
    seed_job(kube, observed=peak | probed, conditions=[condition("Predicted"), stalled, over])
    seed_job(kube, "rounded", observed={"peakMemoryMib": 13000, "gpuUtilPercent": 34.5678, "stepTimeSeconds": 0.26712})
    rounded = run("diagnose", "rounded").output
    assert [row.split()[-2] for row in rounded.splitlines()[4:8] if "(" in row] == ["13,000", "34.6", "-", "0.267"]
    (memory,) = [row.split() for row in rounded.splitlines() if row.startswith("memory (MiB)")]
    assert memory[-5:] == ["8,000", "0", "12,000", "13,000", "-"], "a lower end of 0 is a number"
    printed = run("diagnose", "train").output
    assert "finding: Stalled (DataWait) since" in printed
    assert "Z: worker 0: no step for 60 s\n" in printed
    assert "Straggler" not in printed
    assert "finding: waits 40% of its time for input data, 20% of its time for copies to the GPU\n" in printed
    assert "finding: measured slowdown 2.00 by other/beside, more than spec.sharing.maxSlowdown (1.5)\n" in printed


@pytest.mark.parametrize(
    ("ended_at", "state", "expected"),
    [(None, "Queued", "Queued"), (None, "Running", "Running"), ("2026-01-01T01:00:00Z", "BackingOff", "PodFailed")],
)
def test_an_open_attempt_has_the_state_of_its_job(
    kube: FakeKube, ended_at: str | None, state: str, expected: str
) -> None:
    """Regression: the attempt of a queued job was Running, because its pods existed."""
    outcome = "PodFailed" if ended_at else "Running"
    attempt = {"number": 1, "outcome": outcome} | ({"endedAt": ended_at} if ended_at else {})
    seed_job(kube, state=state, placement=[], observed=None, attempts=[attempt])
    lines = run("diagnose", "train").output.splitlines()
    after = lines[next(number for number, line in enumerate(lines) if line.startswith("ATTEMPT")) + 1]
    assert after.split()[:2] == ["1", expected]


def test_sm_activity_is_printed_in_percent_as_predict_prints_it(kube: FakeKube) -> None:
    seed_job(kube, observed={"peakMemoryMib": 4100, "smActiveRatio": 0.375})
    (line,) = [row for row in run("diagnose", "train").output.splitlines() if row.startswith("SM activity (%)")]
    assert line.split()[-2] == "37.5"
    assert all(float(cell) >= 1 for cell in line.split()[-5:-2])


def test_the_last_cell_goes_on_in_further_rows() -> None:
    columns, rows = ["NAME", "MESSAGE"], [["x", "one two three four five six seven eight nine ten eleven"], ["y", ""]]
    assert table(columns, wrapped(columns, rows, 50)).splitlines() == [
        "NAME   MESSAGE",
        "x      one two three four five six seven eight",
        "       nine ten eleven",
        "y      -",
    ]


def test_answer_of_the_server_is_not_called_unreachable(kube: FakeKube) -> None:
    for error, sentence in (
        (Unreachable("GET jobs: reset"), "the cluster could not be reached: GET jobs: reset"),
        (Overloaded("GET jobs: later", status=503), "the API server answered GET jobs: later"),
    ):
        kube.fail_next("list", GPU_TRAINING_JOBS, error)
        assert run("status").output == f"Error: {sentence}\n"


@pytest.mark.parametrize("command", ["status", "logs", "diagnose"])
def test_missing_job_and_missing_right_exit_with_2(kube: FakeKube, command: str) -> None:
    missing = run(command, "nothing")
    assert (missing.exit_code, missing.output) == (
        2,
        f"Error: no GpuTrainingJob nothing in namespace default{OTHER_JOBS}\n",
    )
    for status, remedy in (
        (403, ""),
        (401, "; sign in again: the credentials of the kubeconfig are wrong or have expired"),
    ):
        kube.fail_next("get", GPU_TRAINING_JOBS, Forbidden("you may not get gputrainingjobs", status=status))
        refused = run(command, "nothing")
        assert (refused.exit_code, refused.output) == (2, f"Error: you may not get gputrainingjobs{remedy}\n")


def test_shells_complete_commands_and_jobs(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_job(kube)
    for words, expected in ((["st"], "status\t"), (["status", "tr"], "train\n"), (["status", "-n", "none", ""], ":4")):
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-carpool", *words])
        cli.complete_for_kubectl()
        printed = capsys.readouterr().out
        assert printed.startswith(expected)
        assert printed.endswith(":4\n")
    assert "_CARPOOL_COMPLETE=bash_complete" in run("completion", "bash").output


def test_version_names_the_commit() -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout[:12]
    assert f"(commit {commit}" in run("--version").output
