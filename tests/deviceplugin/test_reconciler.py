"""One node's GpuNode, against an API server in memory."""

import asyncio
from typing import Any

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.kube.errors import Forbidden, NotFound, Overloaded
from carpool_core.resources.node import GpuNode, NodeSummary
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    return kube


@pytest.fixture
def agent(kube, devices, tmp_path) -> Agent:
    return flowing(AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path), kube, devices)


def status_of(kube: FakeKube, name: str = "node-1") -> Any:
    return msgspec.convert(kube.dump(GPU_NODES, name), GpuNode).status


def exists(kube: FakeKube) -> bool:
    try:
        return bool(status_of(kube).devices)
    except NotFound:
        return False


def writes(kube: FakeKube) -> int:
    return sum(call.subresource == "status" for call in kube.calls)


async def reserve_on(kube: FakeKube, *reservations: Any) -> None:
    await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(list(reservations))}})


def states(kube: FakeKube) -> dict[str, str]:
    return {p.pod_uid: p.state.value for p in status_of(kube).partitions}


async def test_creates_its_gpunode_with_the_node_as_owner(kube, agent, devices) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        found = kube.dump(GPU_NODES, "node-1")
        assert found["metadata"]["ownerReferences"][0]["uid"] == kube.dump(NODES, "node-1")["metadata"]["uid"]
        status = status_of(kube)
        assert [d.uuid for d in status.devices] == list(devices.uuids)
        assert status.simulated
        assert status.heartbeat_time
        assert [(c.type, c.status, c.reason) for c in status.conditions] == [("Ready", "True", "GpusHealthy")]
        assert status.summary == NodeSummary(
            gpus="2x Simulated NVIDIA A100-SXM4-40GB", healthy=2, tenants=0, memory="40 GiB"
        )
        assert agent.unready() is None


async def test_no_owner_where_the_node_may_not_be_read(kube, agent) -> None:
    kube.fail_next("get", NODES, Forbidden("nodes is forbidden", status=403))
    async with running(agent):
        await until(lambda: exists(kube))
        assert not kube.dump(GPU_NODES, "node-1")["metadata"].get("ownerReferences")


async def test_gpunode_deleted_is_created_again(kube, agent) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await kube.delete(GPU_NODES, "node-1")
        await until(lambda: exists(kube))


async def test_reservation_becomes_ready_and_is_returned(kube, agent, devices, reserve) -> None:
    first, second = devices.uuids
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(
            kube, reserve("a", first, mode=SharingMode.MPS, memory_limit_mib=1000), reserve("b", first, second)
        )
        await until(lambda: states(kube) == {"uid-a": "Ready", "uid-b": "Failed"})
        assert "is MPS for default/a" in status_of(kube).partitions[1].message
        await until(lambda: status_of(kube).devices[0].mode is SharingMode.MPS)
        await reserve_on(kube, reserve("c", first, second, mode=SharingMode.EXCLUSIVE))
        await until(lambda: states(kube) == {"uid-c": "Ready"})
        await reserve_on(kube)
        await until(lambda: [d.mode for d in status_of(kube).devices] == [None, None])


async def test_gpu_of_another_node_is_refused(kube, agent, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", "GPU-elsewhere"))
        await until(lambda: states(kube) == {"uid-a": "Failed"})
        assert "expected a GPU out of GPU-" in status_of(kube).partitions[0].message


async def test_status_is_written_on_change_only(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        await until(lambda: status_of(kube).devices[0].mode is SharingMode.TIME_SLICING)
        count = writes(kube)
        later = agent.clock.monotonic() + 0.8 * Rhythm().heartbeat_s
        await until(lambda: agent.clock.monotonic() > later)
        assert writes(kube) == count, "many samples and resyncs later"


async def test_measures_of_a_tenant_reach_the_status(kube, agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", gpu))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        with enter(gpu, "a") as (opened,):
            opened.allocate(2000)
            for _ in range(10):
                await asyncio.to_thread(opened.run, 0.02)
            tenant = await until(lambda: next((t for t in status_of(kube).tenants if t.gpu_util_percent), None))
            assert (tenant.pod_uid, tenant.gpu_uuid) == (PodUid("uid-a"), gpu)
            assert tenant.memory_mib >= 2000
            assert tenant.step_time_seconds >= 0.02
        await until(lambda: status_of(kube).tenants[0].memory_mib == 0)
        assert status_of(kube).tenants[0].peak_memory_mib >= 2000
        await reserve_on(kube)
        await until(lambda: not status_of(kube).tenants)


async def test_pod_that_runs_on_without_its_reservation_is_told_again(kube, agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", gpu))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        with enter(gpu, "a") as (opened,):
            opened.allocate(2000)
            await until(lambda: any(t.memory_mib >= 2000 for t in status_of(kube).tenants))
            await reserve_on(kube)
            await until(lambda: not states(kube))
            await until(lambda: any(t.memory_mib >= 2000 for t in status_of(kube).tenants))


async def test_sick_gpu_is_told_and_mends(kube, agent, devices, tmp_path) -> None:
    path = tmp_path / "state" / "simulated" / devices.uuids[0] / "device.json"
    good = path.read_bytes()
    async with running(agent):
        await until(lambda: exists(kube))
        path.write_text("{")
        await until(lambda: status_of(kube).conditions[0].reason == "SomeGpusUnhealthy")
        assert "expected JSON" in status_of(kube).devices[0].health_message
        path.write_bytes(good)
        await until(lambda: status_of(kube).conditions[0].reason == "GpusHealthy")


async def test_failed_write_is_tried_again(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        kube.fail_next("patch", GPU_NODES, Overloaded("busy", status=429), subresource="status")
        kube.fail_next("patch", GPU_NODES, Overloaded("lost", status=500), subresource="status", after=True)
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})


async def test_new_agent_keeps_what_the_old_one_promised(kube, agent, devices, reserve, tmp_path) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
        await until(lambda: states(kube) == {"uid-b": "Ready"})
    await reserve_on(kube, reserve("a", gpu, mode=SharingMode.MPS), reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    async with running(flowing(settings, kube, devices)):
        await until(lambda: states(kube) == {"uid-a": "Failed", "uid-b": "Ready"})


async def test_several_agents_live_in_one_loop(kube, tmp_path) -> None:
    agents = []
    for name in ("node-1", "node-2", "node-3"):
        settings = AgentSettings(node_name=name, kubelet=False, state_dir=tmp_path, simulated_gpus="Tesla T4:2")
        agents.append(flowing(settings, kube))
    async with running(*agents):
        await until(lambda: len(kube.dump_all(GPU_NODES)) == 3)
        await until(lambda: all(status_of(kube, n).devices for n in ("node-1", "node-2", "node-3")))
    uuids = {d.uuid for n in ("node-1", "node-2", "node-3") for d in status_of(kube, n).devices}
    assert len(uuids) == 6
