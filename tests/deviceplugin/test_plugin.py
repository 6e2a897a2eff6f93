"""The device plugin and a kubelet, over real gRPC on real sockets."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, NODES, PODS
from carpool_core.resources.node import GpuNode
from carpool_core.testing.kube import FakeKube
from carpool_core.values import SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until
from carpool_deviceplugin.testing.kubelet import Kubelet
from prometheus_client import CollectorRegistry

EXCLUSIVE, TIME_SLICING, MPS, _ = SharingMode


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    return kube


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    (tmp_path / "plugins").mkdir()
    return AgentSettings(
        node_name="node-1",
        device_plugin_dir=tmp_path / "plugins",
        pod_resources_socket=tmp_path / "resources.sock",
        cdi_dir=tmp_path / "cdi",
        state_dir=tmp_path / "state",
        simulated_gpus="NVIDIA A100-SXM4-40GB:2",
        slots_per_gpu=4,
    )


def new_agent(settings: AgentSettings, kube: FakeKube) -> Agent:
    return flowing(settings, kube)


@pytest.fixture
async def kubelet(settings):
    kubelet = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


@pytest.fixture
async def agent(settings, kube, kubelet):
    async with running(new_agent(settings, kube)) as agent:
        await kubelet.registered.get()
        await until(lambda: agent.unready() is None)
        await until(lambda: kube.dump_all(GPU_NODES) and status(kube).devices)
        yield agent


def status(kube: FakeKube) -> Any:
    return msgspec.convert(kube.dump(GPU_NODES, "node-1"), GpuNode).status


async def place(kube: FakeKube, *reservations: Any) -> None:
    """What the scheduler does: reserve, wait until ready, bind."""
    await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(list(reservations))}})
    await until(lambda: [p.state.value for p in status(kube).partitions] == ["Ready"] * len(reservations))
    for reservation in reservations:
        pod(kube, reservation.pod_name)


def pod(kube: FakeKube, name: str, **status: Any) -> None:
    kube.seed(
        PODS,
        {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": {"nodeName": "node-1"}, "status": status},
    )


def edits(settings: AgentSettings, slot: str) -> dict[str, Any]:
    spec = json.loads((settings.cdi_dir / f"carpool.dev-{slot}.json").read_text())
    (device,) = spec["devices"]
    assert device["name"] == slot
    edits = device["containerEdits"]
    return {
        "env": dict(e.split("=", 1) for e in edits.get("env", [])),
        "mounts": [m["hostPath"] for m in edits["mounts"]],
    }


async def test_registers_with_what_it_needs(agent, kubelet) -> None:
    options = await kubelet.options()
    assert options.pre_start_required
    assert not options.get_preferred_allocation_available


async def test_allocate_names_slots_and_nothing_else(agent, kubelet, settings) -> None:
    assert await kubelet.admit("a", "slot-3", "slot-5") == ["carpool.dev/slot=slot-3", "carpool.dev/slot=slot-5"]
    assert not settings.cdi_dir.exists() or not list(settings.cdi_dir.iterdir())


async def test_container_gets_its_reservation(agent, kubelet, settings, kube, reserve) -> None:
    first = agent.devices.uuids[0]
    await place(kube, reserve("a", first, mode=MPS, memory_limit_mib=9216, thread_percentage=30))
    await kubelet.admit("a", "slot-7")
    await kubelet.start_container("a")
    found = edits(settings, "slot-7")
    assert found["env"]["CARPOOL_VISIBLE_GPUS"] == first
    assert found["env"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9216M"
    device = settings.state_dir / "simulated" / first
    assert found["mounts"] == [str(device), str(device / "claims"), str(settings.state_dir / "mps" / first)]
    assert all_exist(found["mounts"])


async def test_metrics_name_the_container_that_holds_the_gpu(agent, kubelet, kube, reserve) -> None:
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu, mode=EXCLUSIVE))
    await kubelet.admit("a", "slot-0", container="learn")
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))

    def owners() -> set[tuple[str, str]]:
        samples = [s for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED" for s in m.samples]
        return {(s.labels["pod"], s.labels["container"]) for s in samples if s.labels["UUID"] == gpu}

    await until(lambda: owners() == {("a", "learn")})
    kubelet.held.clear()
    await until(lambda: owners() == {("a", "")})


async def test_two_pods_of_one_size_each_get_their_own(agent, kubelet, settings, kube, reserve) -> None:
    """Matching pods in Allocate by their amount swaps their GPUs."""
    first, second = agent.devices.uuids
    await place(kube, reserve("a", second, mode=EXCLUSIVE), reserve("b", first, mode=EXCLUSIVE))
    await asyncio.gather(kubelet.admit("a", "slot-0"), kubelet.admit("b", "slot-1"))
    await asyncio.gather(kubelet.start_container("b"), kubelet.start_container("a"))
    assert edits(settings, "slot-0")["env"]["CARPOOL_VISIBLE_GPUS"] == second
    assert edits(settings, "slot-1")["env"]["CARPOOL_VISIBLE_GPUS"] == first


async def test_slot_k_brings_gpu_k(agent, kubelet, settings, kube, reserve) -> None:
    first, second = agent.devices.uuids
    await place(kube, reserve("a", second, first, mode=EXCLUSIVE))
    await kubelet.admit("a", "slot-5", "slot-2")
    await kubelet.start_container("a")
    assert edits(settings, "slot-2")["mounts"][0] == str(settings.state_dir / "simulated" / second)
    assert edits(settings, "slot-5")["mounts"][0] == str(settings.state_dir / "simulated" / first)
    assert edits(settings, "slot-2")["env"]["CARPOOL_VISIBLE_GPUS"] == f"{second},{first}"


def all_exist(paths: list[str]) -> bool:
    return all(os.path.exists(path) for path in paths)


async def refused(kubelet: Kubelet, pod: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await kubelet.start_container(pod)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return error.value.details()


async def test_pod_without_reservation_never_starts(agent, kubelet, settings, kube, reserve) -> None:
    """A pod with spec.nodeName set skips the scheduler and still reaches the kubelet."""
    await place(kube, reserve("a", agent.devices.uuids[0]))
    pod(kube, "sneaky")
    await kubelet.admit("sneaky", "slot-0")
    assert "expected a reservation for pod default/sneaky" in await refused(kubelet, "sneaky")
    assert not list(settings.cdi_dir.glob("*.json"))


async def test_annotations_are_not_believed(agent, kubelet, kube, reserve) -> None:
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu))
    kube.seed(
        PODS,
        {
            "metadata": {"name": "forger", "uid": "uid-forger", "annotations": {"carpool.dev/gpus": gpu}},
            "spec": {"nodeName": "node-1"},
        },
    )
    await kubelet.admit("forger", "slot-0")
    assert "found none" in await refused(kubelet, "forger")


async def test_pod_of_another_node_or_none_is_refused(agent, kubelet) -> None:
    await kubelet.admit("ghost", "slot-0")
    assert "expected pod default/ghost on this node" in await refused(kubelet, "ghost")


async def test_namesake_of_a_finished_pod_does_not_inherit(agent, kubelet, kube, reserve) -> None:
    await place(kube, reserve("a", agent.devices.uuids[0]))
    pod(kube, "a", phase="Succeeded")
    await kubelet.admit("a", "slot-0")
    assert "found it finished" in await refused(kubelet, "a")


async def test_failed_partition_is_refused_with_its_reason(agent, kubelet, kube, reserve) -> None:
    wanted = reserve("a", agent.devices.uuids[0], mode=SharingMode.MIG)
    await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins([wanted])}})
    pod(kube, "a")
    await kubelet.admit("a", "slot-0")
    assert "to be ready, found: GPU" in await refused(kubelet, "a")


async def test_other_users_do_not_stand_behind_one_mps_daemon(agent, kubelet, settings, kube, reserve) -> None:
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu, mode=MPS), reserve("b", gpu, mode=MPS), reserve("c", gpu, mode=MPS))
    for number, (name, user) in enumerate((("a", 1000), ("b", 1001), ("c", 1000))):
        spec = {"nodeName": "node-1", "securityContext": {"runAsUser": user}}
        kube.seed(PODS, {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec})
        await kubelet.admit(name, f"slot-{number}")
    await until(lambda: agent.kubelet._pods.store.get("default/c"))
    await kubelet.start_container("a")
    assert "run as user 1000, as pod default/a does, found 1001" in await refused(kubelet, "b")
    assert "run as user 1001, as pod default/b does, found 1000" in await refused(kubelet, "c"), "each in its turn"
    pod(kube, "a", phase="Succeeded")
    await until(lambda: agent.kubelet._pods.store.get("default/a").is_finished)
    await kubelet.start_container("b")


async def test_word_that_comes_late_is_waited_for(agent, kubelet, settings, kube, reserve) -> None:
    await kubelet.admit("a", "slot-0")
    starting = asyncio.ensure_future(kubelet.start_container("a"))
    await place(kube, reserve("a", agent.devices.uuids[0]))
    await starting
    assert edits(settings, "slot-0")["env"]["CARPOOL_POD_UID"] == "uid-a"


async def test_kubelet_restart(agent, kubelet, settings, kube, reserve) -> None:
    await kubelet.stop()
    again = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
    await again.start()
    assert not (settings.device_plugin_dir / "carpool.sock").exists(), "a kubelet that starts deletes it"
    request = await asyncio.wait_for(again.registered.get(), 5)
    assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "carpool.sock", "carpool.dev/gpu")
    await place(kube, reserve("a", agent.devices.uuids[0]))
    await again.admit("a", "slot-0")
    await again.start_container("a")
    await again.stop()


async def test_kubelet_that_comes_later(settings, kube) -> None:
    async with running(new_agent(settings, kube)) as agent:
        await until(lambda: agent.reconciler.reflector.store.synced)
        assert "is not registered with the kubelet" in agent.unready()
        kubelet = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
        await kubelet.start()
        await until(lambda: agent.unready() is None)
        await kubelet.stop()


async def test_agent_killed_between_allocate_and_start(settings, kube, kubelet, reserve) -> None:
    async with running(new_agent(settings, kube)) as agent:
        await until(lambda: kube.dump_all(GPU_NODES) and status(kube).devices)
        gpu = agent.devices.uuids[1]
        await place(kube, reserve("a", gpu, mode=MPS))
        await kubelet.admit("a", "slot-6")
    kubelet.registered = asyncio.Queue()
    async with running(new_agent(settings, kube)):
        await kubelet.registered.get()
        await kubelet.start_container("a")
    assert edits(settings, "slot-6")["env"]["CARPOOL_VISIBLE_GPUS"] == gpu


async def test_slots_of_ended_pods_are_removed_also_by_the_next_agent(settings, kube, kubelet, reserve) -> None:
    async with running(new_agent(settings, kube)) as agent:
        await until(lambda: kube.dump_all(GPU_NODES) and status(kube).devices)
        first, second = agent.devices.uuids
        await place(kube, reserve("a", first), reserve("b", second))
        for number, name in enumerate("ab"):
            await kubelet.admit(name, f"slot-{number}")
            await kubelet.start_container(name)
    await kube.delete(PODS, "a", namespace="default")
    async with running(new_agent(settings, kube)):
        await until(lambda: os.listdir(settings.cdi_dir) == ["carpool.dev-slot-1.json"])
        pod(kube, "b", phase="Failed")
        await until(lambda: os.listdir(settings.cdi_dir) == [])


async def test_health_changes_reach_the_kubelet(agent, kubelet, settings) -> None:
    stream = kubelet.lists()
    assert set((await anext(stream)).values()) == {"Healthy"}
    path = settings.state_dir / "simulated" / agent.devices.uuids[0] / "device.json"
    good = path.read_bytes()
    path.write_text("{")
    health = list((await asyncio.wait_for(anext(stream), 5)).values())
    assert (health.count("Healthy"), health.count("Unhealthy")) == (4, 4)
    path.write_bytes(good)
    assert set((await asyncio.wait_for(anext(stream), 5)).values()) == {"Healthy"}
    await stream.aclose()
