"""Where MPS daemons share memory with their clients: the kubelet's own volume, found from the node."""

import json
from typing import Any

import pytest
from carpool_e2e import chart
from carpool_e2e.cluster import Cluster
from carpool_e2e.nodes import BUSYBOX_IMAGE
from kubectl import eventually

pytestmark = pytest.mark.e2e


def pod(name: str, script: str, path: str, volume: dict[str, Any]) -> chart.Manifest:
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", f"{script}; sleep 600"],
        "volumeMounts": [{"name": "shm", "mountPath": path}],
    }
    spec = {"nodeName": "a100", "terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def test_what_clients_of_mps_share_is_the_hosts_and_has_a_limit(cluster: Cluster) -> None:
    """The agent names the volume of the pod `carpool-mps` by its place on the node, which is the kubelet's to say."""
    values = {"nodeAgent.simulatedGpus": "", "nodeAgent.mps.sharedMemory": "16Mi"}
    spec = chart.render(cluster.binaries, values).one("DaemonSet", "carpool-mps")["spec"]["template"]["spec"]
    arguments = dict(a.removeprefix("--").split("=", 1) for a in spec["containers"][0]["args"] if "=" in a)
    volume = next(v for v in spec["volumes"] if v["name"] == "shm")
    try:
        directory = f"{arguments['shm-dir']}/GPU-1"
        cluster.apply(pod("mps-host", f"mkdir -m 1777 {directory}", arguments["shm-dir"], volume))
        eventually("a directory", lambda: run(cluster, "mps-host", "ls", arguments["shm-dir"]) == "GPU-1")
        uid = cluster.kubectl("get", "pod", "mps-host", "-o", "jsonpath={.metadata.uid}")
        on_node = arguments["shm-dir-on-node"].replace("$(POD_UID)", uid)
        fill = "echo hello > /dev/shm/word; head -c 20000000 /dev/zero > /dev/shm/big; touch /done"
        shared = {"name": "shm", "hostPath": {"path": f"{on_node}/GPU-1"}}
        cluster.apply(pod("mps-client", fill, "/dev/shm", shared))  # noqa: S108  # in a container
        eventually("a word", lambda: run(cluster, "mps-client", "ls", "/done"))
        assert run(cluster, "mps-host", "cat", f"{directory}/word") == "hello"
        size_kib = int(run(cluster, "mps-host", "du", "-k", directory).split()[0])
        assert 15_000 < size_kib <= 16 * 1024, "more than the limit was written, and refused"
    finally:
        cluster.kubectl("delete", "pod", "mps-host", "mps-client", "--ignore-not-found")


def run(cluster: Cluster, name: str, *command: str) -> str:
    """Return what a command says in a container; nothing where that does not run (yet)."""
    found = json.loads(cluster.kubectl("get", "pod", name, "-o", "json"))
    if found["status"].get("phase") != "Running":
        return ""
    return cluster.kubectl("exec", name, "--", "sh", "-c", f"{' '.join(command)} 2> /dev/null || true").strip()
