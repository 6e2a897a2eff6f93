"""Jobs that wait are served in the order of the queue, whichever pod kube-scheduler tries first."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import H100, sleeper
from kubectl import Watcher, carpool, eventually

pytestmark = pytest.mark.e2e

APART_S = 1.1
"""Between two jobs: the API server tells seconds."""


def whole_node(name: str, command: str = "sleep 600", **training: int) -> dict[str, Any]:
    """A job that wants all GPUs of a node to itself."""
    job = sleeper(name, command, gpu={"product": H100}, gpusPerWorker=4, sharing={"mode": "Exclusive"})
    job["spec"]["training"] |= training
    return job


def served(cluster: Cluster, watcher: Watcher, jobs: Sequence[str]) -> list[str]:
    """Let the running job end, and return the others by their start; each occupies the node for longer than a second.

    The start is read from the status, because a short job may come and go between two queries.
    """
    cluster.kubectl("delete", "gputrainingjob", "busy", "--wait=false")
    for name in jobs:
        eventually(f"{name} to end", lambda name=name: watcher.state(name) == "Complete", timeout_s=120)
    return sorted(jobs, key=lambda name: watcher.job(name)["status"]["startTime"])


def waiting(cluster: Cluster, watcher: Watcher, jobs: Sequence[dict[str, Any]]) -> list[str]:
    """Apply jobs one after the other, and have each refused, in another order, before anything becomes free."""
    cluster.apply(whole_node("busy"))
    watcher.running("busy")
    for job in jobs:
        cluster.apply(job)
        time.sleep(APART_S)
    names = [str(job["metadata"]["name"]) for job in jobs]
    for name in names:
        eventually(f"{name} to wait", lambda name=name: watcher.condition(name, "Placed").get("reason") == "NoGpuFits")
    # kube-scheduler has those that it tried last behind all others.
    for name in random.Random(1).sample(names, len(names)):  # noqa: S311
        cluster.kubectl("annotate", "pod", watcher.pods(name)[0]["metadata"]["name"], "example.com/tried=again")
    return names


def turn(cluster: Cluster, job: str, order: str) -> str:
    """Return a job's place in the queue by `carpool explain`, such as `1st of 8`."""
    explained, head = carpool(cluster.kubeconfig, "explain", job, "--queue-order", order), "place in the queue: "
    assert explained.returncode == 0, explained.stderr
    (line,) = [line for line in explained.stdout.splitlines() if line.startswith(head)]
    return line.removeprefix(head).partition(" pending jobs")[0]


def test_jobs_are_served_by_arrival(cluster: Cluster, watcher: Watcher) -> None:
    """Regression: the order in which jobs started correlated with that in which they came by 0.47."""
    names = waiting(cluster, watcher, [whole_node(f"job-{number}", "sleep 1") for number in range(3)])
    assert [turn(cluster, name, "Arrival") for name in (names[0], names[2])] == ["1st of 3", "3rd of 3"]
    assert served(cluster, watcher, names) == names
