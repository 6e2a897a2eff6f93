"""What the world may do to an agent, as far as no other test says it: docs/node-agent.md has the list."""

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from carpool_core.keys import CDI_KIND
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PartitionState, SharingMode
from carpool_deviceplugin.app import build
from carpool_deviceplugin.cdi import slots as cdi
from carpool_deviceplugin.devices.gpu import Access
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.kubelet.plugin import Knowledge, Plugin
from carpool_deviceplugin.kubelet.prestart import HeldByPod
from carpool_deviceplugin.kubelet.protos import podresources_pb2 as pr
from carpool_deviceplugin.kubelet.wire import KubeletError, PodResources, RefusedError, Server
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import Flow, flowing, running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Ground:
    """A plugin whose pod `a` holds slot 0 and is promised a GPU."""

    def __init__(self, directory: Path, reservation) -> None:
        self.directory, self.clock, self.failures, self.asked = directory, FakeClock(), 0, 0
        pod = {"metadata": {"name": "a", "namespace": "default", "uid": reservation.pod_uid}}
        ready = Partition(pod_uid=reservation.pod_uid, generation=1, state=PartitionState.READY)
        self.plugin = Plugin(
            Knowledge(
                pod=lambda _: msgspec.convert(pod, Pod),
                reservations=lambda: [reservation],
                partitions=lambda: [ready],
                access=lambda uuid, pod_uid: Access(env={"A": "b"}, mounts=()),
                held=self._held,
            ),
            directory,
            also_read=(directory.with_name("etc"),),
            gpus=1,
            slots_per_gpu=8,
            clock=self.clock,
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def _held(self) -> list[HeldByPod]:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise KubeletError("kubelet.sock: expected an answer, found DEADLINE_EXCEEDED: Deadline Exceeded")
        devices = [pr.ContainerDevices(resource_name="carpool.dev/gpu", device_ids=["slot-0"])]
        containers = [pr.ContainerResources(name="train", devices=devices)]
        return [pr.PodResources(namespace="default", name="a", containers=containers)]


@pytest.fixture
def ground(tmp_path: Path, reserve) -> Ground:
    return Ground(tmp_path / "cdi", reserve("a", "GPU-1"))


async def test_podresources_that_is_away_for_a_moment_is_waited_for(ground: Ground) -> None:
    ground.failures = 3
    await ground.plugin.pre_start(["slot-0"])
    assert (ground.asked, cdi.path_of(ground.directory, "slot-0").exists()) == (4, True)


async def test_podresources_that_stays_away_is_said_in_time(ground: Ground) -> None:
    """The kubelet gives PreStartContainer 30 s, and tries again."""
    ground.failures = 10**6
    began = ground.clock.monotonic()
    with pytest.raises(RefusedError, match=r"expected the kubelet's PodResources to say who holds slot-0.*DEADLINE"):
        await ground.plugin.pre_start(["slot-0"])
    assert 5 <= ground.clock.monotonic() - began < 6


async def test_podresources_that_never_answers_is_left(tmp_path: Path) -> None:
    """A kubelet that hangs takes its socket's calls, and is silent."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "kubelet.sock"))
        silent.listen()
        resources = PodResources(tmp_path / "kubelet.sock", within_s=0.1)
        for _ in range(2):
            with pytest.raises(KubeletError, match=r"kubelet.sock: expected an answer, found DEADLINE_EXCEEDED"):
                await resources.list()


async def test_a_kubelets_directory_that_is_not_there_is_said(ground: Ground, tmp_path: Path, capfd) -> None:
    """Regression: gRPC wrote a line of its own each second."""
    with pytest.raises(KubeletError, match=r"nowhere: expected the kubelet's device plugin directory, found none"):
        await Server(tmp_path / "nowhere" / "carpool.sock", ground.plugin).start()
    assert capfd.readouterr() == ("", "")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_full_disk_under_the_cdi_directory(ground: Ground) -> None:
    await ground.plugin.pre_start(["slot-0"])
    path = cdi.path_of(ground.directory, "slot-0")
    before = path.read_bytes()
    with full_disk(), pytest.raises(RefusedError, match=r"expected to write the CDI specification of pod default/a: "):
        await ground.plugin.pre_start(["slot-0"])
    assert [p.name for p in ground.directory.iterdir()] == [path.name], "nothing half-written is left"
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["theirs.json", "nvidia.yaml", "../etc/theirs.yaml"])
async def test_specification_of_others_for_our_devices(ground: Ground, name: str) -> None:
    """Two files for one device: the runtime refuses it, and says nothing of why in the pod's events."""
    ground.directory.mkdir()
    ground.directory.with_name("etc").mkdir()
    theirs = (ground.directory / name).resolve()
    theirs.write_text(f'{{"cdiVersion": "0.6.0", "kind": "{CDI_KIND}", "devices": [{{"name": "slot-0"}}]}}')
    with pytest.raises(RefusedError, match=rf"expected Carpool alone to describe.*found {theirs}; remove it"):
        await ground.plugin.pre_start(["slot-0"])
    theirs.write_text('{"kind": "vendor.com/net", "devices": []}')
    await ground.plugin.pre_start(["slot-0"])


async def test_file_of_others_with_our_name_is_replaced(ground: Ground) -> None:
    ground.directory.mkdir()
    path = cdi.path_of(ground.directory, "slot-0")
    path.write_text("not ours")
    await ground.plugin.pre_start(["slot-0"])
    assert b'"CARPOOL_POD_UID=uid-a"' in path.read_bytes()


HOSTILE = ['"} 1\nDCGM_FI_DEV_GPU_UTIL{pod="x', "../../../etc/passwd", "$(reboot)", "a" * 5000, "\u202e\x00"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_stay_names(devices, tmp_path: Path, reserve, enter, name: str) -> None:
    """The API server lets no pod have such a name; nothing rests on that."""
    agent = flowing(AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path), FakeKube(), devices)
    registry, kube, gpu = CollectorRegistry(), agent.reconciler._api, devices.uuids[0]
    registry.register(AgentCollector(agent))
    hostile = msgspec.structs.replace(reserve("a", gpu), pod_name=name, job_name=name, pod_namespace=name)
    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        await kube.patch(GPU_NODES, "n", {"spec": {"reservations": [msgspec.to_builtins(hostile)]}})
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"])
        with enter(gpu, "a"):
            await until(lambda: agent.reconciler.meters[gpu].uses)
            page = generate_latest(registry).decode()
    used = {
        (s.labels["namespace"], s.labels["pod"], s.labels["job"])
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name == "carpool_gpu_tenant_memory_bytes"
    }
    assert used == {(name, name, name)}
    spec = cdi.specifications(hostile, ["slot-0"], {gpu: Access(env={}, mounts=())})
    cdi.write(tmp_path / "cdi", spec)
    assert [p.name for p in (tmp_path / "cdi").iterdir()] == ["carpool.dev-slot-0.json"]


@pytest.mark.parametrize("uuid", ["GPU-1/../../x", "", "GPU-$(id)", "x" * 10_000])
async def test_hostile_gpus_are_nobodys(devices, tmp_path: Path, reserve, uuid: str) -> None:
    agent = flowing(AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path), FakeKube(), devices)
    kube = agent.reconciler._api
    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        wanted = reserve("a", uuid, mode=SharingMode.MPS)
        await kube.patch(GPU_NODES, "n", {"spec": {"reservations": [msgspec.to_builtins(wanted)]}})
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Failed"])
    assert len(agent.reconciler.partitions[0].message) <= 4096


@pytest.mark.parametrize("hours", [-1, 1])
def test_nodes_clock_that_jumps_loses_no_work(tmp_path: Path, hours: int) -> None:
    """The driver stamps its samples with the node's clock: set back, everything that came was older than the last."""
    node = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    gpu = devices.uuids[0]
    node.start(0, 42, "a", sm=0.5)
    for second in range(21):
        reading = devices.read(gpu)
        if second == 10:
            node.nvml.now_us += hours * 3_600_000_000
        node.advance(1)
    assert reading.processes[0].busy_s == pytest.approx(10, rel=0.15)


async def test_time_of_day_that_jumps_writes_no_storm(devices, tmp_path: Path) -> None:
    """Times in the status are the clock's; when to write goes by seconds that only pass."""

    class Jumping(Flow):
        offset = timedelta()

        def now(self) -> datetime:
            return super().now() + self.offset

    clock, kube = Jumping(), FakeKube()
    settings = AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path)
    agent = build(settings, kube, clock, devices, Rhythm(sleep=clock.sleep))
    reporter = agent.reconciler.reporter

    def beat() -> str | None:
        found = kube.dump_all(GPU_NODES)
        return msgspec.convert(found[0], GpuNode).status.heartbeat_time if found else None

    async with running(agent):
        await until(beat)
        writes = reporter.writes
        for hours in (-5, 5, 0):
            clock.offset = timedelta(hours=hours)
            await reporter.once()
        assert reporter.writes == writes
