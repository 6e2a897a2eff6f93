"""MPS daemons of NVML GPUs: adopted, watched, replaced; over the fake of NVML and daemons in memory."""

import pytest
from agent_world import first_gpu
from carpool_core.values import GpuUuid, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import DeviceError, Limits, SetLimits, SetMode, StartMps, StopMps
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.testing.node import Inline, Node, uid
from carpool_deviceplugin.timeouts import Intervals

MPS, READY = SharingMode.MPS, PartitionState.READY


def pipe(node: Node, gpu: str) -> str:
    return str(node.root / "mps" / gpu / "pipe")


def end_daemon(node: Node, gpu: str, how: str) -> None:
    if how == "wedged":
        node.mps.daemons[pipe(node, gpu)].is_wedged = True
    else:
        node.mps.die(pipe(node, gpu))


def behind_a_daemon(node: Node) -> tuple[NvmlDevices, GpuUuid]:
    """A GPU that has a daemon."""
    devices, gpu = first_gpu(node)
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    return devices, gpu


def test_next_agent_adopts_the_daemon(node: Node) -> None:
    gpu = node.devices().uuids[0]
    for _ in range(2):
        devices = node.devices()
        devices.apply(gpu, SetMode(MPS))
        devices.apply(gpu, StartMps())
        devices.apply(gpu, SetLimits(PodUid("p"), Limits(10, 20)))
    assert node.mps.starts == 1
    assert node.devices().actual(gpu).limits == {PodUid("p"): Limits(10, 20)}


@pytest.mark.parametrize("how", ["wedged", "killed"])
@pytest.mark.parametrize("seen_by", ["same-agent", "earlier-agent", "no-agent"])
def test_server_without_a_daemon_is_no_tenant_and_is_ended(node: Node, how: str, seen_by: str) -> None:
    """Regression: it counted as a process of carpool-mps, and its GPU stayed unusable."""
    devices, gpu = behind_a_daemon(node)
    assert devices.actual(gpu).tenants == set()
    node.start(0, 42, "a")
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "carpool-mps")
    if seen_by != "no-agent":
        assert devices.actual(gpu).tenants == {uid("a")}
    end_daemon(node, gpu, how)
    if seen_by == "earlier-agent":
        devices = node.devices()
    assert devices.actual(gpu).tenants == {uid("a")}
    node.end(0, 42)
    assert devices.actual(gpu).tenants == set()
    devices.apply(gpu, StopMps())
    assert (node.mps.daemons, node.mps.has_server(server)) == ({}, False)
    assert not devices.actual(gpu).mps_servers_left


class Shared:
    """A GPU of which pod a has a share in mode MPS, and its worker."""

    def __init__(self, node: Node, reserve) -> None:
        self.node, self.devices = node, node.devices()
        self.gpu = self.devices.uuids[0]
        self.worker = GpuWorker(self.gpu, self.devices, lambda: None, Intervals(), caller=Inline())
        self.wanted = [reserve("a", self.gpu, mode=MPS, memory_limit_mib=5000, pod_uid=uid("a"))]

    async def look(self) -> PartitionState:
        self.worker.want(self.wanted)
        await self.worker.once()
        (partition,) = self.worker.partitions.values()
        return partition.state

    def serve(self, pid: int, pod: str) -> int:
        """Return the server's process ID."""
        self.node.start(0, pid, pod)
        server = self.node.mps.connect(pipe(self.node, self.gpu), pid)
        if server not in self.node.nvml.gpus[0].processes:
            self.node.start(0, server, "carpool-mps")
        return server


@pytest.mark.parametrize("what", ["daemon", "server"])
async def test_daemon_or_server_that_hangs_is_replaced(node: Node, reserve, what: str) -> None:
    """Regression: it stayed while the GPU was promised, and the pod could not connect."""
    shared = Shared(node, reserve)
    assert await shared.look() is READY
    server = shared.serve(42, "a")
    await shared.look()
    daemon = node.mps.daemons[pipe(node, shared.gpu)]
    daemon.is_wedged, daemon.is_server_wedged = what == "daemon", what == "server"
    node.advance(61)
    assert (await shared.look(), node.mps.starts) == (READY, 1), "it may be slow only"
    node.advance(11)
    assert (await shared.look(), node.mps.starts) == (READY, 1), "its clients are there"
    node.end(0, 42)
    assert (await shared.look(), node.mps.starts, node.mps.has_server(server)) == (READY, 2, False)
    actual = shared.devices.actual(shared.gpu)
    assert (actual.problem, actual.limits) == ("", {uid("a"): Limits(5000, None)})


async def test_daemon_that_is_sometimes_slow_stays(node: Node, reserve) -> None:
    shared = Shared(node, reserve)
    await shared.look()
    for _ in range(3):
        node.mps.daemons[pipe(node, shared.gpu)].is_wedged = True
        node.advance(61)
        await shared.look()
        node.mps.daemons[pipe(node, shared.gpu)].is_wedged = False
        node.advance(9)
        await shared.look()
    assert node.mps.starts == 1


@pytest.mark.parametrize("how", ["wedged", "killed"])
async def test_daemon_is_kept_while_its_server_has_clients(node: Node, reserve, how: str) -> None:
    """Regression: where it had been killed, its server was ended under clients that went on."""
    shared = Shared(node, reserve)
    await shared.look()
    server = shared.serve(42, "a")
    await shared.look()
    end_daemon(node, shared.gpu, how)
    for _ in range(3):
        node.advance(61)
        assert (await shared.look(), node.mps.starts, node.mps.has_server(server)) == (READY, 1, True)
    node.end(0, 42)
    assert (await shared.look(), node.mps.starts, node.mps.has_server(server)) == (READY, 2, False)


@pytest.mark.parametrize("has_context", [True, False])
async def test_server_of_a_dead_daemon_ends_before_another_mode_is_ready(node: Node, reserve, has_context) -> None:
    """Regression: it stayed on the GPU of an exclusive pod, with its memory."""
    shared = Shared(node, reserve)
    await shared.look()
    server = shared.serve(42, "a")
    await shared.look()
    node.mps.die(pipe(node, shared.gpu))
    node.end(0, 42)
    if not has_context:
        node.end(0, server)
    shared.wanted = [reserve("b", shared.gpu, mode=SharingMode.EXCLUSIVE)]
    assert (await shared.look(), node.mps.has_server(server)) == (READY, False)


def test_no_daemon_starts_beside_a_pod(node: Node) -> None:
    """A pod may come between plan and step: the server of its dead daemon would be ended."""
    devices, gpu = behind_a_daemon(node)
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "carpool-mps")
    devices.actual(gpu)
    node.mps.die(pipe(node, gpu))
    node.start(0, 42, "a")
    with pytest.raises(DeviceError, match=f"expected no pod's process where an MPS daemon starts, found {uid('a')}"):
        devices.apply(gpu, StartMps())
    assert (node.mps.starts, node.mps.has_server(server)) == (1, True)
    node.end(0, 42)
    devices.apply(gpu, StartMps())
    assert (node.mps.starts, node.mps.has_server(server)) == (2, False)


def test_daemon_is_asked_rarely_while_processes_stay_the_same(node: Node) -> None:
    """Each question starts a program."""
    devices, gpu = behind_a_daemon(node)
    node.start(0, 42, "a")
    devices.read(gpu)
    before = node.mps.asked
    for _ in range(4):
        node.advance(1)
        devices.read(gpu)
    assert node.mps.asked == before
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "agent")
    assert [p.pod_uid for p in devices.read(gpu).processes] == [uid("a")], "a new server is recognised at once"


def test_access_names_the_user_of_the_mps_server(node: Node) -> None:
    devices, gpu = behind_a_daemon(node)
    other = devices.uuids[1]
    assert devices.access(gpu).mps_user is None
    node.start(0, 42, "a", user=1000)
    node.start(0, node.mps.connect(pipe(node, gpu), 42), None, user=1000)
    devices.read(gpu)
    assert (devices.access(gpu).mps_user, devices.access(other).mps_user) == (1000, None)
    node.end(0, 42)
    node.mps.daemons[pipe(node, gpu)].clients.clear()
    devices.read(gpu)
    assert devices.access(gpu).mps_user is None, "a server without clients makes room for another user's"
