"""What stands at /metrics."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.metrics import DEVICE_GAUGES, ENERGY, AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

DCGM_LABELS = {
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "hostname", "pod",
    "namespace", "container",
}  # fmt: skip


@pytest.fixture
def agent(devices, tmp_path) -> Agent:
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    return flowing(settings, FakeKube(), devices)


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
    assert (used.value, used.labels["gpu"], used.labels["Hostname"]) == (0, "0", "node-1")
    assert used.labels["hostname"] == "node-1"
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
            labels = {"UUID": gpu, "namespace": "default", "pod": "a", "job": "job-a"}
            value = registry.get_sample_value
            working = asyncio.ensure_future(asyncio.to_thread(opened.run, 0.4, 0.5))
            active = await until(lambda: value("carpool_gpu_tenant_sm_active_ratio", labels))
            assert 0 < active <= 1
            await working
            assert value("carpool_gpu_tenant_memory_bytes", labels) >= 1000 * 1024 * 1024
            assert value("carpool_gpu_tenant_memory_limit_bytes", labels) == 9000 * 1024 * 1024
            assert value("carpool_gpu_tenant_energy_joules_total", labels) > 0
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


class Exporter:
    """dcgm-exporter, which shows some of the GPUs and instances."""

    name, is_public = "dcgm-exporter", True

    def __init__(self) -> None:
        self.shows: set[tuple[str, int | None]] = set()

    def values(self) -> dict:
        return {place: {"DCGM_FI_DEV_GPU_UTIL": 5.0} for place in self.shows}


def series(registry: CollectorRegistry, prefix: str = "DCGM_") -> set[tuple[str, str]]:
    return {(s.name, s.labels["UUID"]) for m in registry.collect() for s in m.samples if s.name.startswith(prefix)}


async def test_what_dcgm_exporter_shows_is_shown_by_nobody_else(tmp_path) -> None:
    exporter = Exporter()
    devices = Node(FakeNvml(["H100", "A100-40"]), FakeMpsCommands(), tmp_path, sources=(exporter,)).devices()
    shown, other = devices.uuids
    exporter.shows = {(shown, None)}
    agent = flowing(AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path), FakeKube(), devices)
    registry = registry_of(agent)
    value = registry.get_sample_value
    async with running(agent):
        await until(lambda: value("carpool_agent_gpu_metrics_source", {"UUID": shown, "source": "dcgm-exporter"}))
        assert value("carpool_agent_gpu_metrics_source", {"UUID": other, "source": "nvml"}) == 1
        assert {uuid for _, uuid in series(registry)} == {other}
        exporter.shows = set()
        await until(lambda: value("carpool_agent_gpu_metrics_source", {"UUID": shown, "source": "nvml-gpm"}))
        assert {uuid for _, uuid in series(registry)} == {shown, other}


async def test_each_place_is_shown_once_where_dcgm_exporter_shows_instances_only(tmp_path) -> None:
    """Regression: of a divided GPU it shows the instances; both showed them."""
    exporter = Exporter()
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path, sources=(exporter,))
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    shown, other = (mig.create(mig.table.profiles[-2].id, at, 1).id for at in (0, 1))
    devices = node.devices()
    exporter.shows = {(devices.uuids[0], shown)}
    agent = flowing(AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path), FakeKube(), devices)
    registry = registry_of(agent)
    source = {"UUID": devices.uuids[0], "source": "dcgm-exporter"}

    def places() -> set[str]:
        return {s.labels["GPU_I_ID"] for m in registry.collect() for s in m.samples if s.name.startswith("DCGM_")}

    async with running(agent):
        await until(lambda: registry.get_sample_value("carpool_agent_gpu_metrics_source", source))
        await until(lambda: node.advance(0.1) or places() == {"", str(other)})
        exporter.shows = {(devices.uuids[0], None)}
        await until(lambda: node.advance(0.1) or places() == {str(shown), str(other)})


async def test_mig_instances_have_series_and_gone_ones_have_none(tmp_path, reserve) -> None:
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = True
    devices, kube = node.devices(), FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    agent = flowing(AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path), kube, devices)
    registry = registry_of(agent)
    wanted = [
        msgspec.structs.replace(
            reserve(pod, devices.uuids[0], mode=SharingMode.MIG), mig_profile=profile, pod_uid=uid(pod)
        )
        for pod, profile in (("a", "3g.40gb"), ("b", "1g.10gb"))
    ]

    def parts() -> dict[tuple[str, str], float]:
        return {
            (s.labels["GPU_I_PROFILE"], s.labels["pod"]): s.value
            for m in registry.collect()
            if m.name == "DCGM_FI_PROF_SM_ACTIVE"
            for s in m.samples
        }

    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted)}})
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"] * 2)
        instances = {i.profile.name: i.id for i in node.nvml.gpus[0].mig.instances.values()}
        node.start(0, 42, "a", 5000, sm=0.5, instance=instances["3g.40gb"])
        await until(lambda: node.advance(0.1) or parts().get(("3g.40gb", "a"), 0) > 0.4)
        await until(lambda: node.advance(0.1) or len(parts()) == 3)  # another thread reads one after the other
        assert parts().keys() == {("", ""), ("3g.40gb", "a"), ("1g.10gb", "b")}
        assert parts()["1g.10gb", "b"] == 0
        names = {s.name for m in registry.collect() for s in m.samples if s.labels.get("GPU_I_PROFILE") == "3g.40gb"}
        assert {"DCGM_FI_DEV_FB_USED", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"} <= names
        energy = next(m for m in registry.collect() if m.name == ENERGY)
        assert [s.labels["GPU_I_ID"] for s in energy.samples] == [""], "the counter is the whole GPU's"
        assert "DCGM_FI_DEV_POWER_USAGE" not in names, "nobody knows an instance's power"
        labels = {"UUID": devices.uuids[0], "namespace": "default", "pod": "a", "job": "job-a"}
        await until(
            lambda: node.advance(0.1) or registry.get_sample_value("carpool_gpu_tenant_sm_active_ratio", labels)
        )
        node.end(0, 42)
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted[1:])}})
        await until(lambda: node.advance(0.1) or parts().keys() == {("", ""), ("1g.10gb", "b")})
        await until(lambda: registry.get_sample_value("carpool_gpu_tenant_memory_bytes", labels) is None)


async def test_series_are_bounded_by_reservations(agent, devices, reserve, enter) -> None:
    """Whoever is on a GPU without a reservation has no series, however many come and go."""
    registry = registry_of(agent)
    async with running(agent):
        await until(lambda: agent.reconciler.reporter.devices)
        kube = agent.reconciler._api
        gpu = devices.uuids[0]
        await until(lambda: kube.dump_all(GPU_NODES))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins([reserve("a", gpu)])}})
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"])
        for number in range(5):
            with enter(gpu, f"uninvited-{number}"):
                await until(lambda: len(agent.reconciler.meters[gpu].uses) > 0)
        with enter(gpu, "a"):
            await until(lambda: series(registry, "carpool_gpu_tenant_memory_bytes"))
            shown = [s for m in registry.collect() if m.name == "carpool_gpu_tenant_memory_bytes" for s in m.samples]
            assert [s.labels["pod"] for s in shown] == ["a"]
        await until(lambda: set(agent.reconciler.meters[gpu].uses) <= {"uid-a"})
