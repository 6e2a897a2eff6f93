"""Starts a cluster with one kubelet and a running pod, says which slot it has, and holds it until it is ended."""

import signal
import sys

from carpool_e2e import processes
from carpool_e2e.cluster import Shape, running
from carpool_e2e.nodes import BUSYBOX_IMAGE

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sleeper", "namespace": "default"},
    "spec": {
        "nodeName": "held",
        "containers": [
            {
                "name": "c",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", "echo up; sleep 600"],
            }
        ],
    },
}

if __name__ == "__main__":
    processes.as_by_ctrl_c()
    nodes = {"held": "Tesla T4:1"} if sys.argv[1] == "kubelet" else {}
    with running(Shape(kubelet_nodes=nodes, carpool=False)) as cluster:
        if nodes:
            cluster.apply(POD)
            cluster.kubectl("wait", "pod/sleeper", "--for=condition=Ready", "--timeout=60s", timeout_s=70)
            assert cluster.kubectl("logs", "sleeper") == "up\n"
        print(cluster.slot.number, flush=True)
        signal.pause()
