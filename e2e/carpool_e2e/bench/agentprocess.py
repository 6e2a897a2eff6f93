"""One agent of eight H100 and 64 tenants, over fakes, for `make bench` to look at: `python -m … DIRECTORY`.

The GPUs are the stateful fake of NVML; API server and MPS daemons are in memory, too; kubelet and Prometheus are the
parent's. What the fakes themselves spend, to let time pass and to answer, is a metric, to be taken off.
"""

import asyncio
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from carpool_core import metrics
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, NODES, PODS, ResourceKind
from carpool_core.resources.node import Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.app import Agent, build
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.mps import Mps
from carpool_deviceplugin.nvlib import NvmlLibrary
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.processes import ProcTree
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

GPUS, TENANTS = 8, 8
NODE = "node-1"
READY = "ready"
"""What is printed, with the port of the metrics, when every tenant runs."""


SPENT = "bench_fakes_seconds_total"
"""The metric of what the fakes spent."""


class Spent(Collector):
    """Processor time of the fakes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def collect(self) -> Iterable[Metric]:
        """Show it."""
        return [CounterMetricFamily(SPENT.removesuffix("_total"), "Processor time of the fakes.", self.seconds)]


class CountedNvml:
    """The fake of NVML, whose own work is counted: a driver's is no part of the agent's either."""

    def __init__(self, library: FakeNvml, spent: Spent) -> None:
        self._library, self._spent = library, spent

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self._spent.seconds += time.thread_time() - began

        setattr(self, name, counted)
        return counted


class CountedKube(FakeKube):
    """The API server in memory, whose own work on writes is counted."""

    def __init__(self, spent: Spent) -> None:
        super().__init__()
        self._spent = spent

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        patch: Mapping[str, Any] | list[Mapping[str, Any]],
        *,
        namespace: str = "",
        subresource: str = "",
        wants_object: bool = True,
    ) -> dict[str, Any]:
        """Patch, and count what it took."""
        began = time.thread_time()
        patched = await super().patch(
            kind, name, patch, namespace=namespace, subresource=subresource, wants_object=wants_object
        )
        self._spent.seconds += time.thread_time() - began
        return patched


def pod_name(gpu: int, number: int) -> str:
    """Name of a tenant's pod, short enough for a made-up UID."""
    return f"p{gpu}{number}"


def settings_in(root: Path) -> AgentSettings:
    """Return the settings, with all sockets and directories under `root`."""
    return AgentSettings(
        node_name=NODE,
        device_plugin_dir=root / "plugins",
        pod_resources_socket=root / "resources.sock",
        cdi_dir=root / "cdi",
        state_dir=root / "state",
        slots_per_gpu=TENANTS,
    )


async def main(root: Path) -> None:
    """Run until the parent ends it."""
    node, spent = Node(FakeNvml(["H100"] * GPUS), FakeMpsCommands(), root), Spent()
    describe_to_containers(root / "cdi", [gpu.uuid for gpu in node.nvml.gpus])
    devices = NvmlDevices(
        cast("NvmlLibrary", CountedNvml(node.nvml, spent)),
        mps=Mps(node.mps, root / "mps"),
        cdi=NvidiaCdi([root / "cdi"]),
        state_dir=root / "state",
        processes=ProcTree(root / "proc"),
        wall=lambda: node.nvml.now_us / 1e6,
    )
    registry = CollectorRegistry()
    registry.register(spent)
    kube = CountedKube(spent)
    kube.seed(NODES, {"metadata": {"name": NODE}})
    kube.seed(GPU_NODES, {"metadata": {"name": NODE}, "spec": {"reservations": _reservations(kube, devices)}})
    agent = build(settings_in(root), kube, SystemClock(), devices)
    registry.register(AgentCollector(agent))
    server = await metrics.serve(registry, 0, host="127.0.0.1")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(agent.run())
        await until(lambda: _is_prepared(agent))
        _begin(node, devices)
        gc.freeze()  # as the agent does when it has begun
        print(READY, server.port, flush=True)  # the parent reads it
        await _let_time_pass(node, spent)


def _reservations(kube: FakeKube, devices: NvmlDevices) -> list[object]:
    found: list[object] = []
    for at, gpu in enumerate(devices.uuids):
        for number in range(TENANTS):
            name = pod_name(at, number)
            kube.seed(PODS, {"metadata": {"name": name, "uid": uid(name)}, "spec": {"nodeName": NODE}})
            wanted = Reservation(
                pod_uid=PodUid(uid(name)),
                pod_namespace="default",
                pod_name=name,
                job_uid=JobUid(name),
                job_name=name,
                gpu_uuids=[gpu],
                mode=SharingMode.MPS,
                memory_limit_mib=9000,
                thread_percentage=50,
            )
            found.append(msgspec.to_builtins(wanted))
    return found


def _is_prepared(agent: Agent) -> bool:
    return [p.state for p in agent.reconciler.partitions] == [PartitionState.READY] * (GPUS * TENANTS)


def _begin(node: Node, devices: NvmlDevices) -> None:
    for at, gpu in enumerate(devices.uuids):
        pipe = str(node.root / "mps" / gpu / "pipe")
        for number in range(TENANTS):
            pid = 1000 + 100 * at + number
            node.start(at, pid, pod_name(at, number), 8000, sm=0.1, dram=0.05)
            server = node.mps.connect(pipe, pid)
            if server not in node.nvml.gpus[at].processes:
                node.start(at, server, "agent", 100)


def describe_to_containers(directory: Path, uuids: list[str]) -> None:
    """Write NVIDIA's CDI specification, as long as that of a node with so many GPUs."""
    libraries = [f"/usr/lib/x86_64-linux-gnu/libnvidia-{number}.so.580.95.05" for number in range(40)]
    mounts = [
        {"hostPath": path, "containerPath": path, "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}
        for path in libraries
    ]
    nodes = [{"path": f"/dev/nvidia{name}"} for name in ("ctl", "-uvm", "-uvm-tools", "-modeset")]
    devices = [
        {
            "name": name,
            "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{at}"}, {"path": f"/dev/dri/card{at}"}]},
        }
        for at, uuid in enumerate(uuids)
        for name in (str(at), uuid)
    ]
    edits = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": nodes, "mounts": mounts}
    directory.mkdir()
    (directory / "nvidia.yaml").write_bytes(
        msgspec.yaml.encode(
            {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": edits}
        )
    )


async def _let_time_pass(node: Node, spent: Spent) -> None:
    """Kernels run and the driver samples."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(1)
        began, now = time.thread_time(), time.monotonic()
        node.nvml.advance(now - last)
        last = now
        spent.seconds += time.thread_time() - began


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
