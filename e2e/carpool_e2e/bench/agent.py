"""Cost of a node agent with eight GPUs and 64 tenants, and its start beside a lost GPU, over the fake of NVML."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, JobUid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.app import build
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import HARDWARE_INTERVALS

from carpool_e2e.bench.measure import Figure, Section, resident_mib

GPUS, TENANTS = 8, 64
WARM_UP_S, FOR_S, STEP_S = 30, 300, 5
"""Seconds before the measurement, of it, and between two steps of the fake's time."""


def measure(report: Callable[[str], None]) -> Section:
    """Run an agent in a process of its own, twice: beside a lost GPU, and with all tenants."""
    began = time.time()
    start_s = _in_a_process(0)["ready_at"] - began
    found = _in_a_process(TENANTS)
    figures = [
        Figure("start of the process until seven of eight GPUs are reported, one is lost", start_s, "s", 2),
        Figure(f"processor time with {TENANTS} tenants", found["core"], "% of a core", 0.5),
        Figure(f"memory with {TENANTS} tenants", found["mib"], "MiB", 80),
    ]
    for figure in figures:
        report(f"{figure.what}: {figure}")
    text = (
        f"The agent reads eight H100s of NVML's fake at the intervals for hardware for {FOR_S} s; 8 pods work on each. "
        "The fake and an API server in memory run in the agent's process and count. There is no kubelet."
    )
    return Section("A node agent with eight GPUs", text, figures)


def _in_a_process(tenants: int) -> dict[str, float]:
    command = [sys.executable, "-m", "carpool_e2e.bench.agent", str(tenants)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


async def _run(node: Node, tenants: int) -> dict[str, float]:
    kube, name = FakeKube(), NodeName("n")
    kube.seed(NODES, {"metadata": {"name": name}})
    if not tenants:
        node.nvml.gpus[3].is_lost = True
    devices = node.devices()
    settings = AgentSettings(node_name=name, kubelet=False, state_dir=node.root)
    agent = build(settings, kube, SystemClock(), devices, HARDWARE_INTERVALS)

    def healthy() -> int:
        status = next((msgspec.convert(one, GpuNode).status for one in kube.dump_all(GPU_NODES)), None)
        return sum(one.health is DeviceHealth.HEALTHY for one in (status.devices if status else ()))

    running = asyncio.ensure_future(agent.run())
    await until(lambda: healthy() >= GPUS - (not tenants))
    ready_at = time.time()
    if not tenants:
        running.cancel()
        return {"ready_at": ready_at}
    reservations = []
    for number in range(tenants):
        gpu, pod = number % GPUS, f"p{number}"
        reservations.append(
            Reservation(
                pod_uid=PodUid(uid(pod)),
                pod_namespace="default",
                pod_name=pod,
                job_uid=JobUid(f"job-{pod}"),
                job_name=pod,
                gpu_uuids=[devices.uuids[gpu]],
                mode=SharingMode.TIME_SLICING,
                reserved_at="2026-01-31T12:00:00Z",
            )
        )
    await kube.patch(GPU_NODES, name, {"spec": {"reservations": msgspec.to_builtins(reservations)}})
    await until(lambda: [p.state for p in agent.reconciler.partitions] == [PartitionState.READY] * tenants)
    for number in range(tenants):
        node.start(number % GPUS, 1000 + number, f"p{number}", sm=0.1, dram=0.05)
    begin, before_s, faked_s = time.monotonic(), time.process_time(), 0.0
    for step in range((WARM_UP_S + FOR_S) // STEP_S):
        if step == WARM_UP_S // STEP_S:
            begin, before_s, faked_s = time.monotonic(), time.process_time(), 0.0
        faked_from_s = time.thread_time()
        node.advance(STEP_S)
        faked_s += time.thread_time() - faked_from_s
        await asyncio.sleep(STEP_S)
    core = 100 * (time.process_time() - before_s - faked_s) / (time.monotonic() - begin)
    running.cancel()
    return {"core": core, "mib": resident_mib(os.getpid())}


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder:
        node = Node(FakeNvml(["H100"] * GPUS), FakeMpsCommands(), Path(folder))
        print(json.dumps(asyncio.run(_run(node, int(sys.argv[1])))))
