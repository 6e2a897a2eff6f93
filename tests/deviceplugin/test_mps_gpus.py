"""MPS daemons of real GPUs: taken over, watched, told; over the fake of NVML and daemons in memory."""

from pathlib import Path

import msgspec
import pytest
from carpool_core.values import GpuUuid, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import DeviceError, Limits, SetLimits, SetMode, StartMps, StopMps
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Inline, Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals

MPS, READY = SharingMode.MPS, PartitionState.READY


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


def pipe(node: Node, gpu: str) -> str:
    return str(node.root / "mps" / gpu / "pipe")


def end_daemon(node: Node, gpu: str, how: str) -> None:
    if how == "wedged":
        node.mps.daemons[pipe(node, gpu)].is_wedged = True
    else:
        node.mps.die(pipe(node, gpu))


def behind_a_daemon(node: Node) -> tuple[NvmlDevices, GpuUuid]:
    """A GPU that has a daemon."""
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    return devices, gpu


def test_mps_daemon_dies_and_is_started_again(node: Node, reserve) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    wanted = [reserve("a", gpu, mode=MPS, memory_limit_mib=5000)]
    for step in plan(devices.actual(gpu), wanted).steps:
        devices.apply(gpu, step)
    assert node.mps.daemons[pipe(node, gpu)].environment["CUDA_VISIBLE_DEVICES"] == gpu
    assert plan(devices.actual(gpu), wanted).steps == ()
    node.mps.die(pipe(node, gpu))
    assert plan(devices.actual(gpu), wanted).steps == (StartMps(),)


def test_another_agent_takes_the_daemon_over(node: Node) -> None:
    gpu = node.devices().uuids[0]
    for _ in range(2):
        devices = node.devices()
        devices.apply(gpu, SetMode(MPS))
        devices.apply(gpu, StartMps())
        devices.apply(gpu, SetLimits(PodUid("p"), Limits(10, 20)))
    assert node.mps.starts == 1
    assert node.devices().actual(gpu).limits == {PodUid("p"): Limits(10, 20)}


def test_mps_server_is_nobodys_process(node: Node) -> None:
    devices, gpu = behind_a_daemon(node)
    node.start(0, 42, "a")
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, None)
    actual = devices.actual(gpu)
    assert (actual.problem, actual.tenants) == ("", {uid("a")})
    with pytest.raises(DeviceError, match="expected no process"):
        devices.apply(gpu, StopMps())


@pytest.mark.parametrize("how", ["wedged", "killed"])
@pytest.mark.parametrize("is_known", [True, False], ids=["same agent", "next agent"])
def test_server_of_a_daemon_that_is_no_more_keeps_nobody_away(node: Node, how: str, is_known: bool) -> None:
    """Regression: it counted as a pod for ever, so that its daemon was never ended nor another one started."""
    devices, gpu = behind_a_daemon(node)
    node.start(0, 42, "a")
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "carpool-mps")
    assert devices.actual(gpu).tenants == {uid("a")}
    end_daemon(node, gpu, how)
    if not is_known:
        devices = node.devices()
    assert devices.actual(gpu).tenants == {uid("a")}
    node.end(0, 42)
    assert devices.actual(gpu).tenants == set()
    devices.apply(gpu, StopMps())
    assert (node.mps.daemons, node.mps.started(server)) == ({}, None)


@pytest.mark.parametrize("how", ["wedged", "killed"])
def test_server_that_was_never_seen_is_known_by_where_it_lives(node: Node, how: str) -> None:
    """Regression: it counted as a process of carpool-mps, and somebody had to end it."""
    devices, gpu = behind_a_daemon(node)
    assert devices.actual(gpu).tenants == set()
    node.start(0, 42, "a")
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "carpool-mps")
    end_daemon(node, gpu, how)
    assert node.devices().actual(gpu).tenants == {uid("a")}
    node.end(0, 42)
    assert devices.actual(gpu).tenants == set()
    devices.apply(gpu, StopMps())
    assert (node.mps.daemons, node.mps.started(server)) == ({}, None)


class Shared:
    """A GPU of which pod a has a share in mode MPS, and its worker."""

    def __init__(self, node: Node, reserve) -> None:
        self.node, self.devices = node, node.devices()
        self.gpu = self.devices.uuids[0]
        self.worker = GpuWorker(self.gpu, self.devices, lambda: None, Intervals(), caller=Inline())
        reservation = reserve("a", self.gpu, mode=MPS, memory_limit_mib=5000)
        self.wanted = [msgspec.structs.replace(reservation, pod_uid=uid("a"))]

    async def look(self) -> PartitionState:
        self.worker.want(self.wanted)
        await self.worker.once()
        (outcome,) = self.worker.outcomes.values()
        return outcome.state

    def serve(self, pid: int, pod: str) -> int:
        """Return the server's process ID."""
        self.node.start(0, pid, pod)
        server = self.node.mps.connect(pipe(self.node, self.gpu), pid)
        if server not in self.node.nvml.gpus[0].processes:
            self.node.start(0, server, "carpool-mps")
        return server


async def test_daemon_that_hangs_makes_room_for_one_that_answers(node: Node, reserve) -> None:
    """Regression: it stayed while a share of the GPU was promised, and its pod could not connect."""
    shared = Shared(node, reserve)
    assert await shared.look() is READY
    node.mps.daemons[pipe(node, shared.gpu)].is_wedged = True
    node.advance(61)
    assert (await shared.look(), node.mps.starts) == (READY, 1), "it may be slow only"
    node.advance(11)
    assert (await shared.look(), node.mps.starts) == (READY, 2)
    actual = shared.devices.actual(shared.gpu)
    assert (actual.problem, actual.limits) == ("", {uid("a"): Limits(5000, None)})


async def test_server_that_hangs_makes_room_for_one_that_answers(node: Node, reserve) -> None:
    """Regression: its daemon answered, so that it stayed for ever, and whoever came to it waited."""
    shared = Shared(node, reserve)
    await shared.look()
    server = shared.serve(42, "a")
    await shared.look()
    node.mps.daemons[pipe(node, shared.gpu)].is_server_wedged = True
    node.advance(61)
    assert (await shared.look(), node.mps.starts) == (READY, 1)
    node.advance(11)
    assert (await shared.look(), node.mps.starts) == (READY, 1), "its clients are there"
    node.end(0, 42)
    assert (await shared.look(), node.mps.starts, node.mps.started(server)) == (READY, 2, None)


async def test_daemon_that_is_slow_now_and_then_stays(node: Node, reserve) -> None:
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
async def test_daemon_is_left_alone_while_its_server_has_clients(node: Node, reserve, how: str) -> None:
    """Regression: where it had been killed, its server was ended under clients that went on."""
    shared = Shared(node, reserve)
    await shared.look()
    server = shared.serve(42, "a")
    await shared.look()
    end_daemon(node, shared.gpu, how)
    for _ in range(3):
        node.advance(61)
        assert (await shared.look(), node.mps.starts, node.mps.started(server)) == (READY, 1, server)
    node.end(0, 42)
    assert (await shared.look(), node.mps.starts, node.mps.started(server)) == (READY, 2, None)


@pytest.mark.parametrize("has_context", [True, False])
async def test_server_of_a_dead_daemon_goes_before_another_mode_is_ready(node: Node, reserve, has_context) -> None:
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
    assert (await shared.look(), node.mps.started(server)) == (READY, None)


def test_after_a_stop_nobody_sees_a_server_any_more(node: Node) -> None:
    """It had no context on the GPU, so its end is no news there."""
    devices, gpu = behind_a_daemon(node)
    node.mps.connect(pipe(node, gpu), 42)
    devices.actual(gpu)
    node.mps.die(pipe(node, gpu))
    devices.apply(gpu, SetMode(None))
    assert devices.actual(gpu).mps_servers_left
    devices.apply(gpu, StopMps())
    assert not devices.actual(gpu).mps_servers_left


def test_another_daemon_takes_the_place_of_a_dead_ones_server(node: Node) -> None:
    devices, gpu = behind_a_daemon(node)
    server = node.mps.connect(pipe(node, gpu), 42)
    devices.actual(gpu)
    node.mps.die(pipe(node, gpu))
    devices.apply(gpu, StartMps())
    assert (node.mps.starts, node.mps.started(server)) == (2, None)


def test_no_daemon_starts_under_who_is_there(node: Node) -> None:
    """Whoever came between the look and the step: its dead daemon's server would be ended."""
    devices, gpu = behind_a_daemon(node)
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "carpool-mps")
    devices.actual(gpu)
    node.mps.die(pipe(node, gpu))
    node.start(0, 42, "a")
    with pytest.raises(DeviceError, match=f"expected no pod's process where an MPS daemon starts, found {uid('a')}"):
        devices.apply(gpu, StartMps())
    assert (node.mps.starts, node.mps.started(server)) == (1, server)
    node.end(0, 42)
    devices.apply(gpu, StartMps())
    assert (node.mps.starts, node.mps.started(server)) == (2, None)


def test_daemon_is_asked_rarely_while_the_same_processes_are_there(node: Node) -> None:
    """Each question starts a program; measuring once a second must not."""
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
    assert [p.pod_uid for p in devices.read(gpu).processes] == [uid("a")], "a new server is known at once"


def test_access_says_whom_the_mps_server_serves(node: Node) -> None:
    devices, gpu = behind_a_daemon(node)
    other = devices.uuids[1]
    assert devices.access(gpu).mps_user is None, "nobody yet"
    node.start(0, 42, "a", user=1000)
    node.start(0, node.mps.connect(pipe(node, gpu), 42), None, user=1000)
    devices.read(gpu)
    assert (devices.access(gpu).mps_user, devices.access(other).mps_user) == (1000, None)
    node.end(0, 42)
    node.mps.daemons[pipe(node, gpu)].clients.clear()
    devices.read(gpu)
    assert devices.access(gpu).mps_user is None, "a server without clients makes room for another user's"


def test_fatal_fault_of_a_client_names_all_clients(node: Node) -> None:
    devices, gpu = behind_a_daemon(node)
    for pid, pod in ((42, "a"), (43, "b")):
        node.start(0, pid, pod)
        node.mps.connect(pipe(node, gpu), pid)
    node.mps.daemons[pipe(node, gpu)].is_faulty = True
    problem = devices.actual(gpu).problem
    assert "fatal fault (clients: 42, 43)" in problem
    assert f"pods that it ends together: {uid('a')}, {uid('b')}" in problem


def test_daemon_that_does_not_start_is_said(node: Node) -> None:
    devices = node.devices()
    node.mps.refuse = "nvidia-cuda-mps-control ended with 1: no"
    devices.apply(devices.uuids[0], SetMode(MPS))
    with pytest.raises(DeviceError, match="ended with 1: no"):
        devices.apply(devices.uuids[0], StartMps())
