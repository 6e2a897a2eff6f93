"""A job ends with its training, whatever else its pods run; and says who keeps it from that."""

from typing import Any

import pytest
from carpool_e2e.cluster import Cluster, KubectlError
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.nodes import BUSYBOX_IMAGE
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e

FOLLOWER: dict[str, Any] = {
    "name": "logs",
    "image": BUSYBOX_IMAGE,
    "imagePullPolicy": "Never",
    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"],
}


def followed(name: str, *, is_sidecar: bool) -> dict[str, Any]:
    """A job that trains for a second, beside a container that never ends by itself."""
    job = sleeper(name, "sleep 1")
    spec = job["spec"]["template"]["spec"]
    if is_sidecar:
        spec["initContainers"] = [{**FOLLOWER, "restartPolicy": "Always"}]
    else:
        spec["containers"].append(FOLLOWER)
    return job


def test_sidecar_ends_with_the_training_and_the_ended_job_is_fixed(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(followed("escorted", is_sidecar=True))
    eventually("Complete", lambda: watcher.state("escorted") == "Complete", timeout_s=90)
    assert "1 of 1 workers succeeded" in watcher.condition("escorted", "Running")["message"]
    eventually("no reservation left", lambda: not watcher.reserved("escorted"))
    with pytest.raises(KubectlError, match="this job has ended"):
        cluster.kubectl("patch", "gtj", "escorted", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":true}}}')


def test_an_ordinary_container_that_outlives_the_training_is_named(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(followed("outlived", is_sidecar=False))
    message = "container train of pod outlived-worker-0-1 has ended with exit code 0, but logs still runs"
    eventually("named", lambda: message in watcher.condition("outlived", "Running").get("message", ""), timeout_s=90)
    assert watcher.state("outlived") == "Running"
