"""What becomes an event: sick GPUs, shares that fail, pods that end together."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from carpool_core.kube.api import EVENTS, GPU_NODES, NODES
from carpool_core.kube.errors import Overloaded
from carpool_core.resources.node import Device, Partition
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.controller import news
from carpool_deviceplugin.controller.news import News
from carpool_deviceplugin.controller.teller import Teller
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid
from structlog.testing import capture_logs

GPU = GpuUuid("GPU-1")
WELL = Device(uuid=GPU, index=0, product="x", memory_mib=1)
SICK = msgspec.structs.replace(WELL, health=DeviceHealth.UNHEALTHY, health_message="XID 79")
HOT = msgspec.structs.replace(SICK, health_message="it is hot")
A, B = PodUid("uid-a"), PodUid("uid-b")


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        ({}, WELL, []),
        ({}, SICK, ["GpuUnhealthy"]),
        ({GPU: WELL}, SICK, ["GpuUnhealthy"]),
        ({GPU: SICK}, SICK, []),
        ({GPU: SICK}, HOT, []),
        ({GPU: SICK}, WELL, ["GpuHealthy"]),
    ],
)
def test_health_is_news_when_it_changes(before: dict, after: Device, reasons: list[str]) -> None:
    assert [n.reason for n in news.of_devices(before, [after])] == reasons


def partition(state: PartitionState, generation: int = 1) -> Partition:
    return Partition(pod_uid=A, generation=generation, state=state, message="why")


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (None, partition(PartitionState.READY), []),
        (None, partition(PartitionState.FAILED), ["GpuShareFailed"]),
        (partition(PartitionState.FAILED), partition(PartitionState.FAILED), []),
        (partition(PartitionState.FAILED), partition(PartitionState.FAILED, 2), ["GpuShareFailed"]),
        (partition(PartitionState.FAILED), partition(PartitionState.READY), ["GpuShareReady"]),
        (partition(PartitionState.PREPARING), partition(PartitionState.READY), []),
    ],
)
def test_shares_are_news_when_they_fail(reserve, before, after, reasons) -> None:
    known = {} if before is None else {A: before}
    assert [n.reason for n in news.of_partitions(known, [after], {A: reserve("a")})] == reasons
    assert news.of_partitions({}, [after], {}) == [], "nobody to tell"


def test_each_pod_that_ends_is_told_once(reserve) -> None:
    both = {A: reserve("a"), B: reserve("b")}
    (told,) = news.of_struck({A: "why"}, {A: "why", B: "why"}, both)
    assert (told.pod, told.reason, told.message) == (both[B], "MpsClientsEnd", "why")


async def test_too_much_news_keeps_nobody_waiting() -> None:
    teller = Teller(NodeName("n"), FakeKube(), FakeClock())
    with capture_logs() as logs:
        teller.tell([News(None, "Warning", "GpuUnhealthy", str(i)) for i in range(300)], "uid")
    assert [entry["event"] for entry in logs] == ["event dropped"] * 44


def told(kube: FakeKube) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in kube.dump_all(EVENTS):
        found.setdefault(event["reason"], []).append(event)
    return found


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    return kube


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)


def agent_of(node: Node, kube: FakeKube) -> Agent:
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=node.root)
    return flowing(settings, kube, node.devices())


async def test_sick_gpu_is_told_and_a_new_agent_does_not_repeat_it(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        node.nvml.raise_xid(0, 95)
        (event,) = (await until(lambda: told(kube).get("GpuUnhealthy"))) or []
        assert event["involvedObject"]["kind"] == "GpuNode"
        assert event["involvedObject"]["uid"] == kube.dump(GPU_NODES, "node-1")["metadata"]["uid"]
        assert "gets no new work: XID 95 (uncontained ECC error)" in event["message"]
        await until(lambda: kube.dump_all(GPU_NODES)[0]["status"]["devices"][0].get("health", "Healthy") == "Unhealthy")
    async with running(agent_of(node, kube)) as agent:
        await until(lambda: agent.reconciler.reporter.devices)
        assert agent.reconciler.reporter.devices[0].health is DeviceHealth.UNHEALTHY, (
            "it takes a reset, not a new agent"
        )
        assert [e["count"] for e in told(kube)["GpuUnhealthy"]] == [1]
        node.nvml.restart_driver()
        await until(lambda: agent.reconciler.reporter.devices[0].health_message.startswith("XID 95"))
        await until(lambda: node.advance(10) or told(kube).get("GpuHealthy"))


@pytest.mark.parametrize("what", ["dies", "is hit by a fault"])
async def test_pods_behind_one_daemon_are_told_when_it(node: Node, kube: FakeKube, reserve, what: str) -> None:
    agent = agent_of(node, kube)
    gpu = agent.devices.uuids[0]
    wanted = [
        msgspec.structs.replace(
            reserve(pod, gpu, mode=SharingMode.MPS, memory_limit_mib=1000), pod_uid=PodUid(uid(pod))
        )
        for pod in "ab"
    ]
    pipe = str(node.root / "mps" / gpu / "pipe")

    def status() -> dict[str, Any]:
        return kube.dump(GPU_NODES, "node-1")["status"]

    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted)}})
        await until(lambda: [p["state"] for p in status()["partitions"]] == ["Ready", "Ready"])
        for pid, pod in ((42, "a"), (43, "b")):
            node.start(0, pid, pod)
            node.mps.connect(pipe, pid)
        await until(lambda: agent.reconciler.meters[gpu].uses.keys() >= {uid("a"), uid("b")})
        if what == "dies":
            node.mps.die(pipe)
        else:
            node.mps.daemons[pipe].is_faulty = True
            node.nvml.raise_xid(0, 31)
        events = await until(lambda: len(told(kube).get("MpsClientsEnd", [])) == 2 and told(kube)["MpsClientsEnd"])
        assert {e["involvedObject"]["name"] for e in events} == {"a", "b"}
        for event in events:
            assert f"pods that it ends together: {uid('a')}, {uid('b')}" in event["message"]
        await until(lambda: all("ends together" in p.get("message", "") for p in status()["partitions"]))
        assert [p["state"] for p in status()["partitions"]] == ["Ready", "Ready"], "nothing is taken from them"
        assert "ends together" in status()["devices"][0].get("healthMessage", "")
        assert node.mps.starts == 1, "under who is there no other daemon begins"
        if what != "dies":
            node.mps.daemons[pipe].is_faulty = False
            node.mps.daemons[pipe].clients.clear()
        for pid in (42, 43):
            node.end(0, pid)
        await until(lambda: status()["devices"][0].get("health", "Healthy") == "Healthy")
        await until(lambda: all("message" not in p for p in status()["partitions"]))
        await until(lambda: node.mps.starts == (2 if what == "dies" else 1))


async def test_event_that_cannot_be_written_ends_nothing(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        kube.fail_next("create", EVENTS, Overloaded("busy", status=429))
        node.nvml.raise_xid(0, 95)
        await until(lambda: kube.dump_all(GPU_NODES)[0]["status"]["devices"][0].get("health", "Healthy") == "Unhealthy")
        assert told(kube) == {}


async def test_share_that_fails_is_told_to_its_pod(node: Node, kube: FakeKube, reserve) -> None:
    agent = agent_of(node, kube)
    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        impossible = reserve("a", agent.devices.uuids[0], mode=SharingMode.MIG)
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": [msgspec.to_builtins(impossible)]}})
        (event,) = await until(lambda: told(kube).get("GpuShareFailed"))
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Pod", "a")
        assert "expected a mode out of" in event["message"]
