"""What stands at /metrics."""

import asyncio

import msgspec
import pytest
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, SharingMode
from carpool_deviceplugin.app import Agent, build
from carpool_deviceplugin.metrics import DEVICE_GAUGES, ENERGY, AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import QUICK, running, until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

DCGM_LABELS = {
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname", "pod", "namespace",
    "container",
}  # fmt: skip


@pytest.fixture
def agent(devices, tmp_path) -> Agent:
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    return build(settings, FakeKube(), SystemClock(), devices, QUICK)


def registry_of(agent: Agent) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    return registry


async def sampled(agent: Agent) -> CollectorRegistry:
    """Let the agent look at its GPUs, and end."""
    async with running(agent):
        await until(lambda: agent.reconciler.reporter.devices)
        healthy = [d.uuid for d in agent.reconciler.reporter.devices if d.health is DeviceHealth.HEALTHY]
        await until(lambda: all(agent.reconciler.meters[uuid].is_current for uuid in healthy))
    return registry_of(agent)


async def test_idle_gpus_under_dcgms_names(agent, devices) -> None:
    registry = await sampled(agent)
    found = {m.name: m for m in registry.collect()}
    names = {name for name in found if name.startswith("DCGM_")}
    assert {"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_SM_ACTIVE", ENERGY} <= names
    assert names < {*DEVICE_GAUGES, ENERGY}, "what a simulated GPU cannot know is absent"
    for name in names:
        assert [set(s.labels) for s in found[name].samples] == [DCGM_LABELS] * 2
        assert {s.name for s in found[name].samples} == {name}
    (used, *_) = found["DCGM_FI_DEV_FB_USED"].samples
    assert (used.value, used.labels["gpu"], used.labels["hostname"]) == (0, "0", "node-1")
    assert used.labels["modelName"] == "Simulated NVIDIA A100-SXM4-40GB"
    free, reserved = (found[f"DCGM_FI_DEV_FB_{what}"].samples[0].value for what in ("FREE", "RESERVED"))
    assert free + reserved == 40960
    assert generate_latest(registry)
    assert generate_openmetrics(registry)


async def test_tenants_have_series_of_their_own(agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    wanted = [reserve(pod, gpu, mode=SharingMode.MPS, memory_limit_mib=9000) for pod in "ab"]
    registry = registry_of(agent)
    async with running(agent):
        kube = agent.reconciler._api
        await until(lambda: kube.dump_all(GPU_NODES))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted[:1])}})
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"])
        with enter(gpu, "a") as (opened,):
            opened.allocate(1000)
            await asyncio.to_thread(opened.run, 0.2, 0.5)
            await until(lambda: agent.reconciler.meters[gpu].uses["uid-a"].energy_j)
            labels = {"UUID": gpu, "namespace": "default", "pod": "a", "job": "job-a"}
            value = registry.get_sample_value
            assert value("carpool_gpu_tenant_memory_bytes", labels) >= 1000 * 1024 * 1024
            assert value("carpool_gpu_tenant_memory_limit_bytes", labels) == 9000 * 1024 * 1024
            assert value("carpool_gpu_tenant_energy_joules_total", labels) > 0
            assert 0 < value("carpool_gpu_tenant_sm_active_ratio", labels) <= 1
            assert value("carpool_agent_partitions", {"state": "Ready"}) == 1
            assert value("carpool_agent_gpu_healthy", {"UUID": gpu}) == 1
            assert value("carpool_agent_status_writes_total") > 0
            by_gpu = {
                s.labels["UUID"]: s for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED" for s in m.samples
            }
            assert by_gpu[gpu].labels["pod"] == "a"
            assert by_gpu[gpu].value >= 1000
            await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted)}})
            await until(lambda: len(agent.reconciler.partitions) == 2)
            (shared, *_) = next(m for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED").samples
            assert shared.labels["pod"] == "", "a shared GPU belongs to no pod"


async def test_sick_gpu_has_no_values_but_a_health(agent, devices, tmp_path) -> None:
    (tmp_path / "state" / "simulated" / devices.uuids[0] / "device.json").write_text("{")
    registry = await sampled(agent)
    assert registry.get_sample_value("carpool_agent_gpu_healthy", {"UUID": devices.uuids[0]}) == 0
    assert len(next(m for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED").samples) == 1
