"""A job's measured memory predicts the next job of its model, and counts once despite crashes of any process."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from carpool_e2e.chart import NAMESPACE
from carpool_e2e.cluster import AGENT_PORT, Cluster
from carpool_e2e.demo import manifests
from kubectl import Watcher, eventually

CRASHING = str(Path(__file__).with_name("crashing.py"))

pytestmark = pytest.mark.e2e

CALIBRATION = "carpool-calibration"
A100 = "NVIDIA A100-SXM4-40GB"
TOOK_MIB = 2300
"""Beside the context; under the bound that is shipped, and far from its median."""


def trains(name: str, model: str) -> dict[str, Any]:
    """A job of some seconds; jobs that name the same model are alike."""
    return manifests.job(
        name, "--no-loop", f"--memory-mib={TOOK_MIB}", "--step-seconds=0.2", "--steps=60",
        model={"features": manifests.SMALL_FEATURES | {"name": model}},
        training={"batchSize": 128, "optimizer": "sgd-momentum", "precision": "fp32"},
    )  # fmt: skip


def calibration(watcher: Watcher) -> dict[str, Any]:
    """Return the calibration of simulated A100s in fp32; empty before the first sample."""
    found = watcher.read("configmap", CALIBRATION, "-n", NAMESPACE)
    stacks = json.loads(found["data"]["calibration.json"])["stacks"] if found else []
    wanted = {"product": A100, "precision": "fp32", "driver": "simulated"}
    return next((stack for stack in stacks if stack["stack"].items() >= wanted.items()), {})


def samples(watcher: Watcher, job: str) -> list[list[Any]]:
    """The rows that a job's attempts left."""
    uid = watcher.job(job)["metadata"]["uid"]
    return [row for row in calibration(watcher).get("rows", []) if row[4].startswith(f"{uid}/")]


def attempt(watcher: Watcher, job: str) -> dict[str, Any]:
    """The latest attempt of a job; empty before the first."""
    attempts = watcher.job(job).get("status", {}).get("attempts", [])
    return attempts[-1] if attempts else {}


def memory(watcher: Watcher, job: str) -> dict[str, Any]:
    """Return the predicted memory of a job on an A100."""
    products = watcher.job(job).get("status", {}).get("prediction", {}).get("products", [])
    return next((product["memory"] for product in products if product["product"] == A100), {})


def test_the_second_job_of_a_kind_is_predicted_with_what_the_first_showed(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(trains("first", "learned in this test"))
    eventually("the first to be learned from", lambda: attempt(watcher, "first").get("learned"), timeout_s=120)
    peak = attempt(watcher, "first")["peakMemoryMib"]
    assert peak >= TOOK_MIB
    (row,) = samples(watcher, "first")
    assert row[3:5] == [False, f"{watcher.job('first')['metadata']['uid']}/1"]
    cluster.apply(trains("second", "learned in this test"))
    eventually("a prediction of the second", lambda: memory(watcher, "second"))
    assert memory(watcher, "second")["learnedRuns"] == 1
    assert abs(memory(watcher, "second")["medianMib"] - peak) <= 1
    assert memory(watcher, "first")["medianMib"] != memory(watcher, "second")["medianMib"]
    message = eventually("why", lambda: watcher.condition("second", "Predicted").get("message"))
    assert "1 run of the same training" in message


def test_an_operator_killed_after_writing_it_and_before_the_status_counts_nothing_twice(
    cluster: Cluster, watcher: Watcher, once: Path
) -> None:
    operator = cluster["operator"]
    healthy = operator.command
    operator.kill()
    cluster.apply(trains("killed", "killed in this test"))
    sample = f"{watcher.job('killed')['metadata']['uid']}/1"
    # The document exists by then: it holds the job's steps, which count before its memory.
    operator.command = [
        sys.executable, CRASHING, "--at", "carpool_core.kube.client:KubeClient.patch", "--when", "after",
        "--matching", sample, "--once", str(once), "--", *healthy[1:],
    ]  # fmt: skip
    try:
        operator.start()
        eventually("the operator to end", lambda: once.exists() and not operator.running, timeout_s=120)
        assert len(samples(watcher, "killed")) == 1, "the calibration was written"
        seen = calibration(watcher)["seen"]
        assert not attempt(watcher, "killed").get("learned"), "the status was not"
    finally:
        operator.command = healthy
        operator.kill()
        operator.start()
    eventually("the status to say so", lambda: attempt(watcher, "killed").get("learned"))
    assert len(samples(watcher, "killed")) == 1
    assert calibration(watcher)["seen"] == seen


def test_the_step_probe_measures_a_training_in_its_container(cluster: Cluster, watcher: Watcher) -> None:
    """The container's Python is a virtual environment, where PYTHONPATH starts the probe."""
    job = manifests.job(
        "probed", "--memory-mib=1500", "--step-seconds=0.1", training={"steps": 100_000},
        model={"features": manifests.SMALL_FEATURES},
    )  # fmt: skip
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["env"] += [{"name": "PYTHONPATH", "value": "/run/carpool/probe/pythonpath"}]
    cluster.apply(job)

    def measured() -> dict[str, Any]:
        found: dict[str, Any] = watcher.job("probed").get("status", {}).get("observed", {})
        return found if {"samplesPerSecond", "soloStepTimeSeconds", "latestEnd"} <= found.keys() else {}

    found = eventually("steps in the status", measured, timeout_s=240)
    assert found["steps"] >= 20
    assert found["stepTimeSeconds"] >= 0.1, "the simulated GPU takes that long for a step"
    assert found["stepTimeInterval"]["median"] == found["stepTimeSeconds"]
    assert found["latestEnd"] >= found["expectedEnd"]
    eventually("the spread of twenty readings", lambda: "stepTimeDeviationSeconds" in str(watcher.read("gpunodes")))
    assert found["soloSource"] == "Run"
    assert found["samplesPerSecond"] > 0, "only the probe sees the data loader"
    assert 0 <= found["dataWaitRatio"] < 1
    node = watcher.job("probed")["status"]["placement"][0]["node"]
    ports, agent = cluster.plane.ports, cluster.kubelets[node].link.node_address
    for address, name in (
        (f"127.0.0.1:{ports.operator_metrics}", "carpool_job_steps_done"),
        (f"{agent}:{AGENT_PORT}", "carpool_gpu_tenant_samples_per_second"),
    ):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith(name + "{")]
        assert any("probed" in line and float(line.rsplit(" ", 1)[1]) > 0 for line in lines), (name, lines)
