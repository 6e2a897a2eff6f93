"""The process that the MPS daemons live with, and the agent beside it."""

import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
from carpool_core.values import GpuUuid, PartitionState, SharingMode
from carpool_deviceplugin.devices.gpu import SetMode, StartMps
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.mps.daemons import Mps, SharedMemory
from carpool_deviceplugin.mps.host import HostedMps, UntidiedError
from carpool_deviceplugin.mps.port import MpsError
from carpool_deviceplugin.mps.program import MpsProgram
from carpool_deviceplugin.partitions.worker import GpuWorker
from carpool_deviceplugin.testing.agents import Inline
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node
from mps_world import GPU, LONG_S, hosting


@pytest.fixture
def hosted(program: MpsProgram, tmp_path: Path) -> Iterator[HostedMps]:
    """The agent's side; the other one runs in a thread."""
    with hosting(tmp_path / "host.sock", Mps(program, tmp_path / "mps")):
        yield HostedMps(program, tmp_path / "mps", tmp_path / "host.sock")


def test_daemons_are_started_by_their_host_and_stopped_by_the_agent(hosted: HostedMps, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "host.sock").stat().st_mode) == 0o600
    for _ in range(2):
        hosted.start(GPU)
    assert hosted.status(GPU).is_running
    hosted.stop(GPU)
    assert not hosted.status(GPU).is_running


def test_what_the_host_refuses_is_said(hosted: HostedMps, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="ended with 1: no such device"):
        hosted.start(GpuUuid(GPU.replace("8f", "9f")))
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        hosted.start(GpuUuid("../../etc"))
    with socket.socket(socket.AF_UNIX) as anybody:
        anybody.connect(str(tmp_path / "host.sock"))
        anybody.sendall(b"../../etc; reboot\n")
        assert b"expected a GPU's UUID" in anybody.recv(4096)


def test_host_that_is_away_is_said(program: MpsProgram, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match=r"expected the MPS daemons' host at .*; look at the pod carpool-mps"):
        HostedMps(program, tmp_path / "mps", tmp_path / "nowhere.sock").start(GPU)


def test_a_daemon_that_hangs_is_ended_by_its_host(hosted: HostedMps, tmp_path: Path) -> None:
    """The agent may have no right to, under AppArmor."""
    hosted.start(GPU)
    hosted.end(GPU)
    assert not hosted.is_running(GPU)
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        hosted.end(GpuUuid("../../etc"))


def test_all_gpus_of_a_node_get_their_daemons_at_once(hosted: HostedMps, tmp_path: Path) -> None:
    """Regression: of eight one found no room in the host's queue."""
    gpus = [GpuUuid(f"GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e{number:02x}") for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hosted.start, gpus))
    assert all(map(hosted.is_running, gpus))
    for gpu in gpus:
        hosted.end(gpu)
    assert not any(map(hosted.is_running, gpus))


DONE = b'{"error":"","is_understood":true}\n'


class Slow(FakeMpsCommands):
    """Daemons that take as long to end as they are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ending, self.may_end = threading.Event(), threading.Event()
        self.ends = 0

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        self.ends += 1
        self.is_ending.set()
        assert self.may_end.wait(10)
        super().kill(environment, servers)


def ask(path: Path, what: str) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(10)
    asking.connect(str(path))
    asking.sendall(f"{what}\n".encode())
    return asking


def test_who_has_hung_up_is_not_obeyed(tmp_path: Path) -> None:
    """Regression: requests of an agent that had given up queued at a host, and ended a daemon under a new client."""
    commands = Slow()
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps")):
        with ask(tmp_path / "host.sock", GPU) as starting:
            assert starting.recv(4096) == DONE
        with ask(tmp_path / "host.sock", f"end {GPU}") as first:
            assert commands.is_ending.wait(10)
            for what in (GPU, f"end {GPU}", GPU):
                ask(tmp_path / "host.sock", what).close()
            commands.may_end.set()
            assert first.recv(4096) == DONE
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as last:
            assert last.recv(4096) == DONE
    assert (commands.starts, commands.ends, commands.daemons) == (1, 1, {})


def test_a_request_that_never_ends_holds_no_others(tmp_path: Path) -> None:
    """Regression: each of them kept a thread for ever."""
    commands, path = Slow(), tmp_path / "host.sock"
    with hosting(path, Mps(commands, tmp_path / "mps"), within_s=0.05), ask(path, f"end {GPU}") as first:
        assert commands.is_ending.wait(10)
        with ask(path, GPU) as second:
            assert b"an earlier request goes on" in second.recv(4096)
        commands.may_end.set()
        assert first.recv(4096) == DONE
        with ask(path, GPU) as third:
            assert third.recv(4096) == DONE


def test_a_clean_stop_ends_nobody(tmp_path: Path) -> None:
    """Regression: it had the host kill whatever was there by then."""
    commands = Slow()
    agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock")
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps")):
        agent.start(GPU)
        agent.stop(GPU)
        agent.start(GPU)
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as stale:
            assert stale.recv(4096) == DONE
        assert agent.is_running(GPU)
        assert agent.shm(GPU).is_dir(), "nothing is removed under a daemon"
    assert (commands.starts, commands.ends) == (2, 0)


def test_a_host_that_does_not_answer_is_said_after_a_stop(commands: FakeMpsCommands, tmp_path: Path) -> None:
    """Regression: it was taken for done."""
    Mps(commands, tmp_path / "mps").start(GPU)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "host.sock"))
        silent.listen()
        agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock", within_s=0.05)
        with pytest.raises(UntidiedError, match=r"found the daemon stopped, and of its host: .*timed out"):
            agent.stop(GPU)
    assert not agent.is_running(GPU)


async def test_a_stop_that_its_host_refuses_is_reported_and_tried_again(tmp_path: Path, reserve) -> None:
    """Regression: it was taken for done, though an earlier request might still start a daemon."""
    commands, path = Slow(), tmp_path / "host.sock"
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=path)
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Rhythm(), caller=Inline())
    with hosting(path, Mps(commands, tmp_path / "mps", tidy_within_s=LONG_S), within_s=0.05):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        with ask(path, f"end {gpu}") as earlier:
            assert commands.is_ending.wait(10)
            assert not await worker.once()
            (outcome,) = worker.outcomes.values()
            assert outcome.state is PartitionState.FAILED
            assert "expected what the clients of its MPS daemon left to be removed" in outcome.message
            assert "an earlier request goes on" in outcome.message
            commands.may_end.set()
            assert earlier.recv(4096) == DONE
        assert await worker.once()
        (outcome,) = worker.outcomes.values()
        assert (outcome.state, commands.daemons) == (PartitionState.READY, {})
        assert list((tmp_path / "mps" / gpu / "memory").iterdir()) == []


async def test_what_its_host_may_not_end_is_reported_and_tried_again(
    commands: FakeMpsCommands, tmp_path: Path, reserve
) -> None:
    """Nobody is let onto the GPU beside a server of a daemon that has died."""
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=tmp_path / "host.sock")
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Rhythm(), caller=Inline())
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps", tidy_within_s=LONG_S)):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        server = commands.connect(pipe := str(tmp_path / "mps" / gpu / "pipe"), 42)
        node.start(0, server, "carpool-mps")
        devices.actual(gpu)
        commands.die(pipe)
        commands.refuse_kill = f"expected to end process {server} of MPS, found Operation not permitted"
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        assert not await worker.once()
        (outcome,) = worker.outcomes.values()
        assert outcome.state is PartitionState.FAILED
        assert f"stop MPS failed: expected to end process {server}" in outcome.message
        assert commands.started(server) == server
        commands.refuse_kill = ""
        assert await worker.once()
        (outcome,) = worker.outcomes.values()
        assert (outcome.state, commands.started(server)) == (PartitionState.READY, None)


async def test_what_clients_left_is_removed_where_nothing_tells_of_them_any_more(tmp_path: Path) -> None:
    """Regression: without limits in the GPU's file no later look went on with a stop whose host had refused."""
    commands, path = Slow(), tmp_path / "host.sock"
    commands.refuse_kill = "it may not be ended"  # so the earlier request does not come to removing anything
    shared = SharedMemory(tmp_path / "here", Path("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/shm"))
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=path)
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Rhythm(), caller=Inline())
    host = Mps(commands, tmp_path / "mps", shared, tidy_within_s=LONG_S)
    with hosting(path, host, within_s=0.05):
        for step in (SetMode(SharingMode.MPS), StartMps()):  # and the agent dies before it sets limits
            devices.apply(gpu, step)
        (shared.here / gpu / host.shm(gpu).name / "left").touch()
        with ask(path, f"end {gpu}") as earlier:
            assert commands.is_ending.wait(10)
            assert not await worker.once()
            assert not devices.actual(gpu).mps_daemon
            commands.may_end.set()
            assert b"it may not be ended" in earlier.recv(4096)
        assert len(list((shared.here / gpu).iterdir())) == 1
        assert await worker.once()
    assert list((shared.here / gpu).iterdir()) == []
    assert devices.actual(gpu).mode is None


def test_a_host_that_is_away_after_a_stop_is_said(commands: FakeMpsCommands, tmp_path: Path) -> None:
    """Its daemons have ended with it, and the next one begins with memory of its own: only the log needs to tell."""
    Mps(commands, tmp_path / "mps").start(GPU)
    with structlog.testing.capture_logs() as said:
        HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock").stop(GPU)
    assert commands.daemons == {}
    assert [(line["event"], line["gpu"]) for line in said] == [
        ("what mps clients left stays until the gpu's next daemon", GPU)
    ]


def test_a_host_of_an_earlier_version_does_not_tidy_up(commands: FakeMpsCommands, tmp_path: Path) -> None:
    Mps(commands, tmp_path / "mps").start(GPU)
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "host.sock"))
        earlier.listen()

        def refuse() -> None:
            with earlier.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b'{"error":"expected a GPU\'s UUID"}\n')

        thread = threading.Thread(target=refuse)
        thread.start()
        with structlog.testing.capture_logs() as said:
            HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock").stop(GPU)
        thread.join()
    assert commands.daemons == {}
    assert [line["reason"] for line in said] == ["expected a GPU's UUID"]
