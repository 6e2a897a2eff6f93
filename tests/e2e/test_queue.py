"""Admission by scheduling gate on the real control plane."""

import time
from typing import Any

import pytest
from carpool_core.keys import GATE_ADMISSION
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import H100, sleeper
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e


def exclusive(name: str, gpus: int) -> dict[str, Any]:
    """A job of whole GPUs of the H100 node; its length is unknown."""
    return sleeper(name, "sleep 600", gpu={"product": H100}, gpusPerWorker=gpus, sharing={"mode": "Exclusive"})


def test_a_waiting_job_stays_gated_and_a_long_job_does_not_pass_the_first_in_line(
    cluster: Cluster, watcher: Watcher
) -> None:
    """The first that does not fit has GPUs reserved in time, so that a later, long job waits although it would fit.

    Jobs of equal length are served by arrival, from whichever end of the queue the next one is taken.
    """
    busy = exclusive("busy", 2)
    busy["spec"]["training"]["steps"] = 10
    cluster.apply(busy)
    watcher.running("busy")
    cluster.apply(exclusive("wide", 4))
    eventually("wide to wait", lambda: watcher.condition("wide", "Placed").get("reason") == "NoGpuFits")
    time.sleep(1.1)
    cluster.apply(exclusive("later", 1))
    eventually(
        "later to wait for wide",
        lambda: "reserved for job default/wide" in watcher.condition("later", "Placed").get("message", ""),
    )
    assert watcher.condition("later", "Placed")["reason"] == "WouldDelay", "as the queue has it"
    gates = cluster.kubectl("get", "pod", "wide-worker-0-1", "-o", "jsonpath={.spec.schedulingGates[*].name}")
    assert GATE_ADMISSION in str(gates)
    cluster.kubectl("delete", "gputrainingjob", "busy", "--wait=false")
    watcher.running("wide")
    assert watcher.condition("later", "Placed").get("status") == "False"
