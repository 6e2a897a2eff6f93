"""The cluster that the demo leaves, on a server in memory: its GPUs, its jobs, and the extender's own decisions."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.clock import Clock
from carpool_core.kube.api import CONFIG_MAPS, GPU_NODES, GPU_TRAINING_JOBS, NODES, Selector
from carpool_core.kube.pods import PodSpec
from carpool_core.products import device_class
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode, GpuNodeStatus
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid
from carpool_deviceplugin.simulated import SimulatedDevices, parse_inventory
from carpool_e2e.chart import NAMESPACE, RELEASE
from carpool_e2e.cluster import FULL
from carpool_e2e.demo import manifests
from carpool_e2e.fleet import TAINT
from carpool_extender.cache import ledger
from carpool_extender.explain.commands import JobPredictor
from carpool_extender.explain.explain import cluster_view
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation, best_place, reservation_of
from carpool_extender.informers import JobRow
from carpool_extender.testing import node_of
from carpool_extender.workloads import AS_SHIPPED, pod_request_of
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.store import CalibrationStore, StoredCalibration

SLOTS = 8
RULES = SchedulerConfig(find_policy("least-slowdown"), SLOTS)
JOBS = (
    manifests.small("small-b"),
    manifests.small("small-a"),
    manifests.busy("busy", max_slowdown=1.1),
    manifests.busy("eager", max_slowdown=3),
    manifests.mystery("mystery"),
    manifests.large("large"),
)
"""Those that run at the end, in the order in which they came."""
CALIBRATION = "carpool-calibration"
LEARNS = {"CARPOOL_CALIBRATION": f"{NAMESPACE}/{CALIBRATION}"}
"""Settings of the operator, from the chart, that `carpool explain` depends on."""
RUNNING = [
    {"type": "Placed", "status": "True", "reason": "Bound", "message": ""},
    {"type": "Running", "status": "True", "reason": "Running", "message": "1 of 1 workers run, attempt 1"},
]


async def after_the_demo(clock: Clock, folder: Path) -> FakeKube:
    """Set it up.

    Args:
        clock: Of the server and the agents.
        folder: Where the simulated GPUs keep their state.
    """
    kube = FakeKube(clock)
    for name, gpus in {**FULL.kubelet_nodes, **FULL.fleet}.items():
        gpus_of_node = SimulatedDevices(parse_inventory(gpus), name, folder / name)
        devices = [gpus_of_node.describe(uuid) for uuid in gpus_of_node.uuids]
        kube.seed(GPU_NODES, GpuNode(metadata=ObjectMeta(name=name, uid=name), status=GpuNodeStatus(devices=devices)))
        spec = {"taints": [TAINT]} if name in FULL.fleet else {}
        kube.seed(NODES, {**node_of(name), "spec": spec})
    await CalibrationStore(kube, NAMESPACE, CALIBRATION).write(StoredCalibration(), Calibration())
    metadata = {"name": f"{RELEASE}-settings", "namespace": NAMESPACE}
    kube.seed(CONFIG_MAPS, {"metadata": metadata, "data": LEARNS})
    for manifest in JOBS:
        await run(kube, manifest, clock)
    return kube


async def run(kube: FakeKube, manifest: dict[str, Any], clock: Clock) -> None:
    """Predict a job and place it, as operator and extender would, on a node that kube-scheduler would offer."""
    page = await kube.list_page(GPU_NODES, Selector())
    nodes = {node.metadata.name: node for node in (msgspec.json.decode(raw, type=GpuNode) for raw in page.items)}
    name = manifest["metadata"]["name"]
    job = msgspec.convert({**manifest, "metadata": {**manifest["metadata"], "uid": name}}, GpuTrainingJob)
    kinds = {device_class(device) for node in nodes.values() for device in node.status.devices}
    body = msgspec.to_builtins(await JobPredictor(is_strict=True).predict(job, kinds))
    pod_request = pod_request_of(msgspec.convert(body, JobRow), PodSpec(), AS_SHIPPED)
    offered = [node for node in nodes.values() if node.metadata.name in FULL.kubelet_nodes]
    found = best_place(CachedEvaluation(pod_request, RULES, cluster_view(offered, RULES, None).snapshot()))
    assert found is not None, name
    node, now = nodes[found[0]], clock.now()
    held = reservation_of(found[1], pod_request, PodUid(f"pod-{name}"), f"{name}-worker-0-1", now=now, deadline=now)
    spec = ledger.reserve(node.spec, held, ledger.capacity_of(node, SLOTS))
    assert not isinstance(spec, ledger.Rejected), spec
    kube.seed(GPU_NODES, msgspec.structs.replace(node, spec=spec))
    body["status"] |= {"state": "Running", "conditions": RUNNING}
    kube.seed(GPU_TRAINING_JOBS, body)


@contextlib.asynccontextmanager
async def connected(kube: FakeKube) -> AsyncIterator[FakeKube]:
    """A connection to the server."""
    yield kube
