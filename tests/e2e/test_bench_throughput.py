"""The benchmark of the control plane: what it counts, and what it says; without measuring."""

import asyncio
import os
import subprocess
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.kube.errors import Unreachable
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_e2e.bench.measure import RAISED, counted, preferred
from carpool_e2e.bench.throughput import (
    AT_ONCE,
    ROUNDS,
    WHOLE,
    Background,
    Finish,
    Players,
    Throughput,
    Turn,
    bind_all,
    play,
    pod,
    throughput_section,
    until_bound,
)
from carpool_e2e.cluster import Cluster
from carpool_e2e.errors import StalledError
from carpool_e2e.fleetprocess import LEASES
from carpool_e2e.processes import Process, ProcessTable
from carpool_extender.testing import gpu_node, tenant

METRICS = """# HELP apiserver_request_total [STABLE] Counter of apiserver requests
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="carpool.dev",resource="gpunodes",\
scope="resource",subresource="status",verb="PATCH",version="v1alpha1"} 7
apiserver_request_total{code="409",component="apiserver",dry_run="",group="carpool.dev",resource="gpunodes",\
scope="resource",subresource="status",verb="PATCH",version="v1alpha1"} 1
apiserver_request_total{code="201",component="apiserver",dry_run="All",group="",resource="pods",\
scope="resource",subresource="",verb="POST",version="v1"} 2
apiserver_request_total{code="200",component="",dry_run="",group="",resource="",scope="",subresource="/readyz",\
verb="GET",version=""} 3
apiserver_request_duration_seconds_bucket{verb="PATCH",le="0.1"} 900
""".replace("\\\n", "")


def test_requests_are_counted_by_verb_and_resource_whatever_became_of_them() -> None:
    assert counted(METRICS) == {"PATCH gpunodes/status": 8, "POST pods (dry run)": 2, "GET /readyz": 3}


def test_costs_are_split_by_process_and_by_request_beside_those_of_the_stock_scheduler() -> None:
    ours = Throughput(
        100,
        2.0,
        {"etcd": 0.5, "operator": 1.5},
        Counter({"POST pods": 100, "PATCH nodes": 250, "x": 0}),
        told_s=3.0,
        load=1.5,
        preferred=["etcd", "operator"],
        stolen=0.0,
    )
    stock = Throughput(
        100, 1.0, {"etcd": 0.2}, Counter({"POST pods": 100}), told_s=0.0, load=0.0, preferred=[], stolen=0.01
    )
    slower, quicker = (replace(ours, elapsed_s=s, stolen=by) for s, by in ((2.5, 0.05), (1.0, 0.0)))
    told = "\n".join(throughput_section([Turn(one, stock) for one in (slower, ours, quicker)]))
    assert "| jobs a second | 50.0 (40.0 to 100.0) | 100.0 (100.0 to 100.0) | ≥ 40, aimed at 80 | kept |" in told
    assert "| stolen | 0.0% (0.0% to 5.0%) | 1.0% (1.0% to 1.0%) | | |" in told
    assert "stolen; left out: 0." in told
    assert "| jobs a second | 40.0 (40.0 to 50.0) |" in "\n".join(
        throughput_section([Turn(ours, stock), Turn(slower, stock)])
    )
    assert "| operator | 15.0 |  |" in told
    assert "| all of them | 20.0 | 2.00 |" in told
    assert told.index("| PATCH nodes | 2.50 |  |") < told.index("| POST pods | 1.00 | 1.00 |")
    assert "| all of them | 3.50 | 1.00 |" in told
    assert "| x |" not in told
    assert "| jobs a second until every job's status told its place, too | 20.0 | | | |" in told
    assert f"In Carpool's run these ran with raised priority ({RAISED}): etcd, operator." in told
    assert "In kube-scheduler's run" not in told
    assert "load averages before the first was created: 1.5 and 0.0." in told


def test_a_round_counts_by_what_was_stolen_from_either_of_the_two() -> None:
    calm = Throughput(100, 2.0, {}, Counter(), told_s=0.0, load=0.0, preferred=[], stolen=0.0)
    disturbed = replace(calm, stolen=0.2, elapsed_s=9.0)
    assert Turn(calm, disturbed).stolen == Turn(disturbed, calm).stolen == 0.2
    told = "\n".join(throughput_section([Turn(disturbed, calm), *[Turn(calm, calm)] * ROUNDS, Turn(calm, disturbed)]))
    assert "left out: 2." in told
    assert "| jobs a second | 50.0 (50.0 to 50.0) | 50.0 (50.0 to 50.0) |" in told


def test_processes_that_go_before_others_are_told() -> None:
    with subprocess.Popen(["sleep", "60"]) as plain, subprocess.Popen(["nice", "-n", "-40", "sleep", "60"]) as first:
        try:
            for _ in range(1000):
                if found := preferred({"first": first.pid}):
                    break
                threading.Event().wait(0.01)  # it begins as a copy of this process
            assert found == ["first"] or os.geteuid() != 0
            assert "plain" not in preferred({"plain": plain.pid}) or preferred({"": 0})
        finally:
            plain.kill()
            first.kill()


def test_a_pod_of_the_baseline_asks_for_one_whole_gpu() -> None:
    container = pod(3)["spec"]["containers"][0]
    assert container["resources"] == {"limits": {WHOLE: "1"}, "requests": {WHOLE: "1"}}


async def test_a_sign_of_life_that_failed_is_written_again_soon() -> None:
    """Regression: it counted as written, so that its node was left out after a minute of silence."""
    clock = FakeClock()
    kube = FakeKube(clock)
    node = GpuNode(metadata=ObjectMeta(name="a"))
    kube.seed(GPU_NODES, {"apiVersion": node.api_version, "kind": "GpuNode", "metadata": {"name": "a"}})
    kube.fail_next("patch", GPU_NODES, Unreachable("busy"))
    async with Background() as background:
        players = Players(kube, kube, background, clock, clock.sleep)
        players.see(None, node)
        players.beat()
        written = []
        for _ in range(60):
            for _ in range(10):
                await asyncio.sleep(0)
            written.append(kube.dump(GPU_NODES, "a").get("status", {}).get("heartbeatTime", ""))
            clock.advance(0.5)
    assert [at for at, (was, now) in enumerate(pairwise(written)) if was != now] == [1, 51]


async def test_a_server_that_is_too_busy_for_a_report_is_not_asked_again_at_once() -> None:
    """Regression: 500 agents asked as fast as they were refused, and kept it from everything else."""
    clock = FakeClock()
    kube = FakeKube(clock)
    kube.seed(GPU_NODES, {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "a"}})
    kube.fail_next("patch", GPU_NODES, Unreachable("busy"))
    async with Background() as background:
        players = Players(kube, kube, background, clock, clock.sleep)
        players.see(None, gpu_node("a", reservations=[tenant("t", ["GPU-a-0"])]))
        reported = []
        for _ in range(4):
            for _ in range(10):
                await asyncio.sleep(0)
            reported.append(len(kube.dump(GPU_NODES, "a").get("status", {}).get("partitions", [])))
            clock.advance(0.5)
    assert reported == [0, 0, 1, 1]


async def test_a_process_that_ended_is_told_at_once(tmp_path: Path) -> None:
    """Regression: nobody starts kube-scheduler again here, and the rest of ten minutes was waited for."""
    finish, clock = Finish(3, {"a"}), FakeClock()
    process = ProcessTable(tmp_path, "/usr/bin:/bin").start(
        "kube-scheduler", ["sh", "-c", "echo lost the lease; exit 1"]
    )
    assert process.popen is not None
    process.popen.wait()
    waiting = asyncio.create_task(until_bound(finish, [process], clock.sleep))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    with pytest.raises(StalledError, match=r"(?s)kube-scheduler ended with 1 .* 1 of 3 until then.*lost the lease"):
        await waiting


async def test_pods_that_are_not_bound_in_time_are_told(tmp_path: Path) -> None:
    clock = FakeClock()
    process = ProcessTable(tmp_path, "/usr/bin:/bin").start("kube-scheduler", ["sleep", "60"])
    try:
        waiting = asyncio.create_task(until_bound(Finish(3, {"a"}), [process], clock.sleep))
        while not waiting.done():
            await asyncio.sleep(0)
            clock.advance(1)
        with pytest.raises(StalledError, match="expected 3 pods to be bound within 600 s, found 1;"):
            await waiting
    finally:
        process.kill()


class Control:
    """A control plane of one process, as far as the benchmark looks at it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.plane = self.api = self

    def __getitem__(self, name: str) -> Process:
        return self._process

    def call(self, method: str, path: str) -> str:
        return ""


async def test_nothing_goes_on_once_pods_cannot_be_bound_any_more(tmp_path: Path) -> None:
    """Regression: progress was told for ever of a run that had been given up, and pods were still created."""
    clock, told, created, before = FakeClock(), list[str](), list[int](), asyncio.all_tasks()
    process = ProcessTable(tmp_path, "/usr/bin:/bin").start("kube-scheduler", ["sleep", "60"])

    async def create() -> None:
        created.append(len(created))
        await asyncio.Event().wait()

    try:
        control = cast("Cluster", Control(process))
        running = asyncio.create_task(
            bind_all(control, FakeKube(clock), told.append, [create] * 99, ["it"], sleep=clock.sleep)
        )
        for _ in range(8):
            for _ in range(10):
                await asyncio.sleep(0)
            clock.advance(1)
        assert len(told) == 1
        process.kill()
        while not running.done():
            await asyncio.sleep(0)
            clock.advance(1)
    finally:
        process.kill()
    with pytest.raises(StalledError, match="kube-scheduler ended with -9"):
        await running
    assert len(created) == AT_ONCE
    assert asyncio.all_tasks() == before


async def test_a_node_whose_lease_was_late_says_again_that_it_is_ready() -> None:
    """Regression: nodes were called unknown while the server was busy, and nothing was bound there any more."""
    clock = FakeClock()
    kube = FakeKube(clock)
    kube.seed(NODES, {"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
    kube.seed(LEASES, {"metadata": {"name": "a", "namespace": "kube-node-lease"}, "spec": {}})
    told = []
    async with Background() as background:
        background.start(play(kube, "a", 0.0, clock, clock.sleep))
        for second in range(80):
            if second == 10:
                for _ in range(20):
                    kube.fail_next("patch", LEASES, Unreachable("busy"))
            for _ in range(10):
                await asyncio.sleep(0)
            renewed = kube.dump(LEASES, "a", "kube-node-lease")["spec"].get("renewTime", "")[11:19]
            told.append((renewed, kube.dump(NODES, "a")["status"]["conditions"][0]["status"]))
            clock.advance(1)
    assert [told[at] for at in (0, 24, 44, 45, 70)] == [
        ("12:00:00", "Unknown"),
        ("12:00:00", "Unknown"),
        ("12:00:00", "Unknown"),
        ("12:00:45", "True"),
        ("12:01:10", "True"),
    ]


async def test_background_work_that_missed_its_end_is_ended_all_the_same() -> None:
    """Regression: a call answered its cancellation with an error, its loop went on, and the benchmark never ended."""
    ended = []

    async def work() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(len(ended))

    async with Background() as background:
        background.start(work())
        await asyncio.sleep(0)
    assert ended == [0, 1]
