"""A job on trial leaves a GPU on which it slows another beyond its limit, by what agents measure on simulated GPUs."""

import json
from typing import Any

import pytest
from carpool_e2e.chart import NAMESPACE
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo import manifests
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e


def trains(name: str, **sharing: Any) -> dict[str, Any]:
    """A job that is busier than its model makes expect."""
    return manifests.job(
        name, "--no-loop", "--memory-mib=2500", "--step-seconds=0.1", "--gpu-util=0.95", "--sm-active=0.9",
        model={"features": manifests.SMALL_FEATURES | {"name": "slows others"}},
        training={"batchSize": 128, "optimizer": "sgd-momentum", "precision": "fp32"},
        sharing={"maxSlowdown": 1.3} | sharing,
    )  # fmt: skip


def test_the_last_job_to_come_leaves_and_the_first_is_fast_again(cluster: Cluster, watcher: Watcher) -> None:
    rest = manifests.job("rest", "--no-loop", gpusPerWorker=3, sharing={"mode": "Exclusive"})
    cluster.apply(rest)  # one A100 is left
    eventually("the rest to run", lambda: watcher.job("rest").get("status", {}).get("state") == "Running")

    def observed(name: str) -> dict[str, Any]:
        found: dict[str, Any] = watcher.job(name).get("status", {}).get("observed", {})
        return found

    def solo_records() -> list[Any]:
        found = watcher.read("configmap", "carpool-calibration", "-n", NAMESPACE)
        records: list[Any] = json.loads(found["data"]["calibration.json"]).get("solo", []) if found else []
        return records

    # A job on trial tries a new pair only if the step times of both alone are known: by an equal job before them.
    before = solo_records()
    cluster.apply(trains("earlier"))
    eventually("its step time alone", lambda: "soloStepTimeSeconds" in observed("earlier"), timeout_s=120)
    eventually("the operator to know it", lambda: solo_records() != before)
    cluster.kubectl("delete", "gputrainingjob", "earlier")
    eventually("its end", lambda: not watcher.reserved("earlier"))
    cluster.apply(trains("first"))
    eventually("the first to run", lambda: "soloStepTimeSeconds" in observed("first"), timeout_s=120)
    cluster.apply(trains("second", whenSlowed="Move"))

    def attempts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = watcher.job("second").get("status", {}).get("attempts", [])
        return found

    eventually("the second to move", lambda: [a["outcome"] for a in attempts()][:1] == ["Moved"], timeout_s=240)
    assert "times as long as alone, accepts 1.30" in attempts()[0]["message"]
    assert watcher.job("second")["status"].get("restarts", 0) == 0
    eventually("the first to be as fast as its owner accepts", lambda: observed("first").get("slowdown", 9) < 1.3)
    assert watcher.job("first")["status"]["state"] == "Running"
