"""What the control plane can do at all: as many pods, whole GPUs, and kube-scheduler alone."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.error import HTTPError

import yaml
from carpool_core.kube.api import NODES, PODS, KubeApi

from carpool_e2e.bench.load import (
    AT_ONCE,
    GPUS,
    JOBS,
    NODE_COUNT,
    Background,
    Throughput,
    beat,
    bind_all,
    node_name,
    offer,
    settled,
)
from carpool_e2e.carpool import scheduler_config
from carpool_e2e.cluster import Cluster
from carpool_e2e.images import BUSYBOX_IMAGE

WHOLE = "example.com/gpu"
"""Extended resource that stands for whole GPUs."""
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONFIG = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    # At its default of 50 a second the client would be what is measured.
    "clientConnection": {"qps": 1000, "burst": 1000},
}


def pod(number: int) -> dict[str, Any]:
    """Return a pod that asks for one whole GPU."""
    limits = {WHOLE: "1"}
    container = {
        "name": "train",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "sleep 600"],
        "resources": {"limits": limits, "requests": limits},
    }
    return {"metadata": {"name": f"whole-{number:04}"}, "spec": {"containers": [container]}}


async def measure(cluster: Cluster, api: KubeApi, tell: Callable[[str], None], pods: int = JOBS) -> Throughput:
    """Measure on a cluster whose control plane runs, without Carpool."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def register(number: int) -> None:
        async with gate:
            await api.create(NODES, {"metadata": {"name": node_name(number)}})

    await asyncio.gather(*(register(number) for number in range(NODE_COUNT)))
    await offer(api, WHOLE, GPUS)
    submit = [partial(api.create, PODS, pod(number), namespace="default") for number in range(pods)]
    async with Background() as background:
        beat(api, background)
        await settled(api)
        await asyncio.to_thread(_start_scheduler, cluster)
        tell(f"{NODE_COUNT} nodes of {GPUS} whole GPUs are there")
        return await bind_all(cluster, api, tell, submit, PROCESSES)


def _start_scheduler(cluster: Cluster) -> None:
    file, port = cluster.plane.state / "stock-scheduler.yaml", cluster.plane.ports.scheduler
    file.write_text(scheduler_config(yaml.safe_dump(CONFIG), cluster.kubeconfig))
    command = [cluster.binaries["kube-scheduler"], f"--config={file}", f"--secure-port={port}"]
    outside = [f"--{what}-kubeconfig={cluster.kubeconfig}" for what in ("authentication", "authorization")]
    started = cluster.table.start("kube-scheduler", [*command, *outside, "--bind-address=127.0.0.1"])
    started.wait_until(lambda: _leads(cluster))


def _leads(cluster: Cluster) -> bool:
    try:
        lease = cluster.plane.api.call(
            "GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler"
        )
    except HTTPError:
        return False  # it has not made one yet
    return bool(lease["spec"].get("holderIdentity"))
