"""The MPS daemons, over daemons in memory."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pynvml
import pytest
from agent_world import World
from carpool_core.clock import parse_rfc3339
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import JobStatus, WorkerPlacement
from carpool_core.resources.node import Reservation, TenantProfile
from carpool_core.testing.clock import FakeClock
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.gpu import SetMode, StartMps, StopMps
from carpool_deviceplugin.mps import PROGRAM, Daemon, Mps, MpsError, MpsProcesses, MpsProgram, MpsStatus, faults_in
from carpool_deviceplugin.nvlib import NvmlError
from carpool_deviceplugin.probe import ProbeFiles
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import HARDWARE_INTERVALS, Intervals
from carpool_operator.outcomes import attempt_outcome
from hypothesis import given
from hypothesis import strategies as st
from mps_world import GPU, lives, pid_of, server, server_of


def test_starts_once_and_stops_once(mps: Mps, commands: FakeMpsCommands, tmp_path: Path) -> None:
    assert mps.status(GPU) == MpsStatus()
    for _ in range(2):
        mps.start(GPU)
    assert (commands.starts, mps.status(GPU).is_running) == (1, True)
    assert stat.S_IMODE((tmp_path / GPU / "shm").stat().st_mode) == 0o1777
    for _ in range(2):
        mps.stop(GPU)
    assert not mps.status(GPU).is_running


def test_where_selinux_is_on_containers_may_use_pipes_memory_and_the_probe(
    mps: Mps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a client that could not open the daemon's socket ran outside of MPS, without limits."""
    labels = defaultdict[str, bytes](lambda: b"system_u:object_r:var_lib_t:s0\0")

    def refuse(path: Path, name: str, label: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.getxattr", lambda path, _: labels[str(path)])
    monkeypatch.setattr("os.setxattr", refuse)
    with pytest.raises(MpsError, match=r"expected to make the MPS daemon's directories, found .*Permission denied"):
        mps.start(GPU)
    monkeypatch.setattr("os.setxattr", lambda path, _, label: labels.__setitem__(str(path), label))
    mps.start(GPU)
    (probe := ProbeFiles(tmp_path / "probe", lambda: 0.0)).install()
    mounts = [tmp_path / GPU / "pipe", (tmp_path / GPU / "shm").resolve()]
    mounts += [Path(mount.host_path) for mount in probe.access(PodUid("a"))[1]]
    assert len(mounts) == 4
    for mount in mounts:
        found = labels[str(mount if mount.is_dir() else mount.parent)]
        assert found == b"system_u:object_r:container_file_t:s0\0", mount


def test_daemons_of_two_gpus_share_nothing(mps: Mps, commands: FakeMpsCommands) -> None:
    other = GpuUuid(GPU.replace("8f", "9f"))
    for gpu in (GPU, other):
        mps.start(gpu)
    first, second = (set(d.files.environment.items()) for d in commands.daemons.values())
    assert first.isdisjoint(second)


def test_silent_daemon_is_reported_never_doubled_and_killed_by_stop(mps: Mps, commands, tmp_path: Path) -> None:
    """Regression: a slow daemon was taken for dead; a second one removed its pipes and ended its clients."""
    mps.start(GPU)
    commands.daemons[str(tmp_path / GPU / "pipe")].is_wedged = True
    found = mps.status(GPU)
    assert found.is_running
    assert "the MPS daemon does not answer" in found.problem
    with pytest.raises(MpsError, match="found none"):
        mps.start(GPU)
    assert (tmp_path / GPU / "pipe" / "control").exists()
    mps.stop(GPU)
    assert commands.daemons == {}


@pytest.mark.parametrize("name", ["", "../../etc", "GPU-1", "GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f/..", "GPU-$(id)"])
def test_only_uuids_become_paths(mps: Mps, name: str) -> None:
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        mps.start(GpuUuid(name))


def test_directory_that_cannot_be_made_is_named(commands: FakeMpsCommands, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MpsError, match="expected to make the MPS daemon's directories"):
        Mps(commands, tmp_path / "file").start(GPU)


MPS = SharingMode.MPS


class SlowMps(FakeMpsCommands):
    """Daemons with a hook in each question."""

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[], object] = lambda: None

    def ask(self, daemon: Daemon, command: str) -> str:
        during, self.during = self.during, lambda: None
        during()
        return super().ask(daemon, command)


class Shared:
    """A GPU in mode MPS with clients of some pods."""

    def __init__(self, root: Path, *pods: str, first_pid: int = 42) -> None:
        self.mps = SlowMps()
        self.node = Node(FakeNvml(["H100"]), self.mps, root)
        self.devices = self.node.devices()
        (self.gpu,) = self.devices.uuids
        self.pipe = str(root / "mps" / self.gpu / "pipe")
        self.devices.apply(self.gpu, SetMode(MPS))
        self.devices.apply(self.gpu, StartMps())
        self.pids = {pod: first_pid + at for at, pod in enumerate(pods)}
        for pod, pid in self.pids.items():
            self.node.start(0, pid, pod)
            self.node.mps.connect(self.pipe, pid)
        self.daemons, self.log = Mps(self.mps, root / "mps"), root / "mps" / self.gpu / "log" / "server.log"
        self.look()

    def look(self):
        return self.devices.actual(self.gpu)

    def leave(self, *pods: str) -> None:
        for pod in pods:
            self.node.end(0, self.pids[pod])
            if self.pipe in self.node.mps.daemons:
                self.node.mps.daemons[self.pipe].leave(self.pids[pod])

    def ended(self) -> set[str]:
        return {pod for pod in "abc" if uid(pod) in self.look().ended}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path, "a", "b", "c")


def test_clients_that_end_between_two_reads_are_reported(shared: Shared) -> None:
    """Regression: clients end within seconds of the fault, and the agent reads the GPU every ten."""
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a", "b")
    actual = shared.look()
    assert actual.struck == {}
    assert actual.ended.keys() == {uid("a"), uid("b")}
    why = actual.ended[uid("a")]
    assert why == (
        f"GPU {shared.gpu}: a client's fatal fault has hit its MPS server: pods that it ends together: "
        f"{uid('a')}, {uid('b')}"
    )


def test_clients_that_end_later_are_reported_with_the_first(shared: Shared) -> None:
    shared.node.nvml.raise_xid(0, 13)
    assert shared.ended() == set()
    shared.leave("a")
    assert shared.ended() == set(), "a single pod may have failed by itself"
    shared.node.advance(15)
    shared.leave("b")
    assert shared.ended() == {"a", "b"}
    shared.leave("c")
    assert shared.ended() == {"a", "b", "c"}


@pytest.mark.parametrize("passed_s", [21, None], ids=["long-after-an-xid", "without-an-xid"])
def test_clients_that_end_for_another_reason_are_not_reported(shared: Shared, passed_s: int | None) -> None:
    if passed_s is not None:
        shared.node.nvml.raise_xid(0, 31)
        shared.look()
        shared.node.advance(passed_s)
    shared.leave("a", "b")
    assert shared.ended() == set()


def test_two_processes_of_one_pod_count_as_one(shared: Shared) -> None:
    shared.node.start(0, 99, "a")
    shared.look()
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a")
    shared.node.end(0, 99)
    assert shared.ended() == set()


def test_clients_that_end_with_their_daemon_are_reported_for_ten_minutes(shared: Shared) -> None:
    shared.node.mps.die(shared.pipe)
    shared.leave("a", "b", "c")
    assert shared.ended() == {"a", "b", "c"}
    assert "its MPS daemon ended under its clients" in shared.look().ended[uid("c")]
    shared.node.seconds += 599
    assert shared.ended() == {"a", "b", "c"}
    shared.node.seconds += 2
    assert shared.ended() == set()


def test_stopped_daemon_is_no_failure(shared: Shared) -> None:
    shared.leave("a", "b", "c")
    shared.look()
    shared.devices.apply(shared.gpu, StopMps())
    assert shared.ended() == set()


def test_faulty_server_names_present_and_ended_clients(shared: Shared) -> None:
    shared.node.mps.daemons[shared.pipe].fault()
    shared.leave("a")
    actual = shared.look()
    assert actual.struck.keys() == {uid("b"), uid("c")}
    assert actual.ended.keys() == {uid("a"), uid("b"), uid("c")}
    shared.leave("b", "c")
    assert (shared.look().struck, shared.look().problem, shared.ended()) == ({}, "", {"a", "b", "c"})


RECORDED = {file.stem: file.read_text() for file in (Path(__file__).parent / "mps").glob("*.log")}
"""Logs of MPS servers on an H100 with driver 580.159.04, from the second client on."""
FIRST_PIDS = {"illegal-address": 4332, "assert": 2488}


@pytest.mark.parametrize(("name", "ended"), [("illegal-address", {"a", "b"}), ("assert", set())])
def test_recorded_log_names_clients_that_have_ended(tmp_path: Path, name: str, ended: set[str]) -> None:
    """Regression: the status said FAULT for 0.4 s, and clients end before the next read. Not every GPU has XIDs."""
    shared = Shared(tmp_path, "a", "b", first_pid=FIRST_PIDS[name])
    shared.log.write_text(RECORDED[name])
    shared.leave("a", "b")
    assert shared.ended() == ended
    assert shared.look().problem == ""


@pytest.mark.parametrize("neighbour", ["none", "known", "unknown"])
def test_pod_that_was_alone_has_failed_by_itself(tmp_path: Path, neighbour: str) -> None:
    """A pod that came and ended between two reads is not named; the one beside it is."""
    shared = Shared(tmp_path, "a", *(["b"] if neighbour == "known" else []))
    shared.node.start(0, 99, "a")
    shared.node.mps.connect(shared.pipe, 99)
    shared.look()
    if neighbour == "unknown":
        shared.node.mps.connect(shared.pipe, 98)
    shared.node.mps.daemons[shared.pipe].fault()
    shared.leave(*shared.pids)
    shared.node.end(0, 99)
    assert shared.ended() == {"none": set(), "known": {"a", "b"}, "unknown": {"a"}}[neighbour]


def test_reused_process_id_and_old_faults_are_not_reported(shared: Shared) -> None:
    shared.node.mps.daemons[shared.pipe].fault()
    shared.leave("a", "b", "c")
    shared.node.advance(700)
    assert shared.ended() == set("abc")
    shared.node.advance(700)
    for pod, pid in (("a", 43), ("b", 42)):
        shared.node.start(0, pid, pod)
        shared.node.mps.connect(shared.pipe, pid)
    assert (shared.look().struck, shared.ended()) == ({}, set())
    shared.node.end(0, 42)
    shared.node.end(0, 43)
    assert shared.ended() == set()


@given(st.integers(0), st.integers(0))
def test_any_part_of_a_log_names_only_its_clients(start: int, end: int) -> None:
    """The end may be torn in a number, the start may be missing."""
    log = RECORDED["illegal-address"]
    start, end = start % len(log), end % len(log)
    found = faults_in(log[start:end])
    assert frozenset().union(*found) <= {4332, 4333}
    assert faults_in(log[start:]) == ([{4332, 4333}] if start <= log.index(" 0\n") + 3 else [])


OLDER = """[2025-01-01 00:00:00.000 Server 7] The following clients have a sticky error set:
[2025-01-01 00:00:00.000 Server 7] 41
[2025-01-01 00:00:00.000 Server 7] Client {42, 1} exit
[2025-01-01 00:00:00.000 Server 7] 42
[2025-01-01 00:00:00.000 Server 7] The following devices will be reset:
[2025-01-01 00:00:00.000 Server 7] 0
[2025-01-01 00:00:00.000 Server 7] 123456789
"""
"""As libcuda.so of driver 550 writes it, with a line of another thread between."""


def test_log_of_an_older_driver_is_read() -> None:
    assert faults_in(OLDER) == [{41, 42}]
    assert faults_in(OLDER + "[2025-01-01 00:00:00.000 Server 7] Status of client {41, 1} is ACTIVE\n") == [{42}]


def test_only_the_end_of_a_log_is_read_and_one_that_cannot_be_is_a_problem(shared: Shared) -> None:
    with shared.log.open("wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"\xff\n" * 1000 + RECORDED["illegal-address"].encode())
    assert shared.daemons.status(shared.gpu).hit == (frozenset({4332, 4333}),)
    shared.log.unlink()
    assert shared.daemons.status(shared.gpu) == MpsStatus(True, frozenset({9000}), frozenset({42, 43, 44}))
    shared.log.mkdir()
    assert "expected to read the log of its MPS server, found [Errno 21]" in shared.daemons.status(shared.gpu).problem


async def test_operator_learns_the_reason_before_it_counts_the_failure(tmp_path: Path, reserve) -> None:
    """The recorded sequence: both pods have ended when the agent reads again, and their jobs do not pay for it."""
    world = World(tmp_path, HARDWARE_INTERVALS)
    node, agent = world.node, world.agent
    async with running(agent):
        await world.hold(*(reserve(pod, world.gpu, mode=MPS, pod_uid=uid(pod)) for pod in "ab"))
        for pid, pod in ((4332, "a"), (4333, "b")):
            node.start(0, pid, pod)
            node.mps.connect(str(world.pipe), pid)
        await until(lambda: len(agent.reconciler.meters[world.gpu].running()) == 2)
        began = agent.clock.monotonic()
        await until(lambda: agent.clock.monotonic() > began + 15)
        before = world.seen
        (world.pipe.parent / "log" / "server.log").write_text(RECORDED["illegal-address"])
        for pid in (4332, 4333):
            node.mps.daemons[str(world.pipe)].leave(pid)
            node.end(0, pid)
        await until(lambda: len(world.status.struck) == 2)
    place = WorkerPlacement(
        worker=0, pod="a", pod_uid=uid("a"), node="n", gpu_uuids=[world.gpu], product="NVIDIA H100", mode=MPS
    )
    ended = {"exitCode": 1, "finishedAt": "2026-11-27T23:14:20Z", "message": "CUDA error: an illegal memory access"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]}
    pod = msgspec.convert({"metadata": {"name": "a", "uid": uid("a")}, "status": status}, Pod)
    latest_s = HARDWARE_INTERVALS.sample_s * HARDWARE_INTERVALS.idle_samples
    now, of = parse_rfc3339("2026-11-27T23:14:20Z") + timedelta(seconds=latest_s), JobStatus(placement=[place])
    assert attempt_outcome([pod], of, [before], now) is None, "it waits for the report"
    outcome = attempt_outcome([pod], of, [world.seen], now)
    assert outcome is not None
    assert (outcome.reason, outcome.charged) == ("MpsClientsEnded", False)


@pytest.mark.parametrize("is_released", [True, False])
async def test_status_names_ended_pods(tmp_path: Path, reserve, is_released: bool) -> None:
    """With and without their reservations: the operator needs the reason to restart their jobs."""
    world = World(tmp_path, Intervals(resync_s=1e9))
    node, agent = world.node, world.agent
    wanted = [reserve(pod, world.gpu, mode=MPS, pod_uid=uid(pod)) for pod in "ab"]
    async with running(agent):
        await world.hold(*wanted)
        for pid, pod in ((42, "a"), (43, "b")):
            node.start(0, pid, pod)
            node.mps.connect(str(world.pipe), pid)
        await until(lambda: len(agent.reconciler.meters[world.gpu].running()) == 2)
        began = agent.clock.monotonic()
        await until(lambda: agent.clock.monotonic() > began + 15)
        node.nvml.raise_xid(0, 31)
        node.end(0, 42)
        node.end(0, 43)
        if is_released:
            await world.hold()
        await until(lambda: {s.pod_uid for s in world.status.struck} == {uid("a"), uid("b")})
        assert "a client's fatal fault has hit its MPS server" in world.status.struck[0].message


def test_client_that_ends_while_the_daemon_is_asked_is_not_foreign(shared: Shared) -> None:
    """Regression: its GPU was unhealthy until the next look."""
    shared.leave("a")
    shared.mps.during = lambda: shared.leave("b")
    assert shared.look().problem == ""
    assert shared.look().tenants == {uid("c")}


def test_process_that_ends_before_its_lookup_is_not_foreign(shared: Shared) -> None:
    """The driver is asked again; a process that is still there is foreign."""
    asked = []

    def end_at_second(name: str) -> None:
        if name == "nvmlDeviceGetComputeRunningProcesses":
            asked.append(name)
            if len(asked) == 2:
                shared.node.nvml.end(0, 42)

    shutil.rmtree(shared.node.root / "proc" / "42")
    shared.node.nvml.before_each(end_at_second)
    actual = shared.look()
    assert (actual.problem, actual.tenants) == ("", {uid("b"), uid("c")})
    shutil.rmtree(shared.node.root / "proc" / "43")
    assert "process 43 on the GPU belong to no pod" in shared.look().problem


@pytest.mark.parametrize("is_concurrent", [True, False], ids=["concurrent", "failed"])
def test_concurrent_or_failed_read_loses_no_fault(shared: Shared, is_concurrent: bool) -> None:
    """Regression: one read took the XID, the other one the ended clients, and no pod was reported."""
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a", "b")
    if is_concurrent:
        other = threading.Thread(target=shared.look)
        shared.mps.during = lambda: (other.start(), other.join(0.2))
        shared.look()
        other.join()
    else:
        shared.node.nvml.fail_next("nvmlDeviceGetComputeRunningProcesses", pynvml.NVML_ERROR_UNKNOWN)
        with pytest.raises(NvmlError):
            shared.look()
    assert shared.ended() == {"a", "b"}


async def test_failures_survive_a_restart_of_the_agent(tmp_path: Path) -> None:
    """Regression: the first status of a new agent removed them before the operator had read them."""
    world = World(tmp_path, Intervals(resync_s=1e9, sample_s=100, measures_s=100))
    struck = [{"podUid": uid("a"), "message": "hit"}, {"podUid": uid("b"), "message": "hit"}]
    world.kube.seed(GPU_NODES, {"metadata": {"name": "n"}, "spec": {"reservations": []}, "status": {"struck": struck}})
    async with running(world.agent):
        await until(lambda: world.status.devices)
        began = world.agent.clock.monotonic()
        assert {s.pod_uid for s in world.status.struck} == {uid("a"), uid("b")}
        world.agent.clock.advance(450)  # at one go: each step of its time takes some of the machine's
        await until(lambda: not world.status.struck)
        assert world.agent.clock.monotonic() - began > 500


def kill_daemon(mps: Mps, directory: Path, gpu: GpuUuid = GPU) -> None:
    """Kill a daemon, and wait until it has ended."""
    os.kill(pid_of(directory, gpu), signal.SIGKILL)
    while mps.is_running(gpu):
        time.sleep(0.01)


def test_server_that_outlives_its_daemon_is_found_and_ended(program: MpsProgram, tmp_path: Path) -> None:
    script = (tmp_path / "bin" / PROGRAM).read_text()
    with server() as its_server:
        (tmp_path / "bin" / PROGRAM).write_text(script.replace("700", str(its_server.pid)))
        mps = Mps(program, tmp_path / "mps")
        mps.start(GPU)
        assert mps.status(GPU) == MpsStatus(True), "a listed process alone is no proof"
        assert mps.status(GPU, [its_server.pid]) == MpsStatus(True, frozenset({its_server.pid}), frozenset({42}))
        kill_daemon(mps, tmp_path / "mps")
        assert Mps(program, tmp_path / "mps").status(GPU) == MpsStatus(servers=frozenset({its_server.pid}))
        mps.stop(GPU)
        assert its_server.wait(5) == -signal.SIGTERM
        assert mps.status(GPU) == MpsStatus()


@pytest.mark.parametrize("how", ["hangs", "has died"])
def test_unlisted_server_is_found_by_name_and_control_group(program: MpsProgram, tmp_path: Path, how: str) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    mps.status(GPU)  # the daemon was seen once
    with server() as its_server, subprocess.Popen(["sleep", "20"]) as client:
        if how == "hangs":
            (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
        else:
            kill_daemon(mps, tmp_path / "mps")
        quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
        assert quick.status(GPU, [its_server.pid, client.pid]).servers == {its_server.pid}
        quick.stop(GPU)
        assert its_server.wait(5) == -signal.SIGTERM
        assert client.poll() is None
        client.kill()
    assert not mps.is_running(GPU)


def test_process_with_a_reused_id_is_never_killed(program: MpsProgram, tmp_path: Path) -> None:
    daemon, processes = Daemon(GPU, tmp_path), MpsProcesses()
    with server() as another:
        began = processes.started(another.pid) or 0
        for name in ("daemon", "servers"):
            (tmp_path / name).write_text(f"{another.pid} {began - 1}")
        program.kill(daemon)
        assert another.poll() is None
        daemon.record.unlink()
        (tmp_path / "servers").write_text(f"{another.pid} {began}")
        program.kill(daemon)
        assert another.wait(5) == -signal.SIGTERM


def test_inspection_writes_nothing(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: `carpool node inspect` wrote beside a living agent."""
    Mps(program, tmp_path / "mps").start(GPU)
    before = sorted((tmp_path / "mps" / GPU).iterdir())
    with server() as its_server:
        reader = Mps(MpsProgram(private_shm=False, within_s=5.0, may_write=False), tmp_path / "mps")
        assert its_server.pid in reader.status(GPU, [its_server.pid]).servers
        its_server.kill()
    assert sorted((tmp_path / "mps" / GPU).iterdir()) == before
    reader.stop(GPU)


def test_process_of_another_control_group_is_no_server(program: MpsProgram, tmp_path: Path) -> None:
    """A pod chooses the names of its processes; they must not vanish from the GPU's tenants."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    mps.status(GPU)
    home = tmp_path / "mps" / GPU / "home"
    assert home.read_text()
    kill_daemon(mps, tmp_path / "mps")
    home.write_text("00000000-0000-4000-8000-000000000001 cri-containerd-1.scope")
    with server() as named:
        assert mps.status(GPU, [named.pid]).servers == set()
        named.kill()


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])
def test_daemon_and_servers_of_another_gpu_are_not_ours(program: MpsProgram, tmp_path: Path, is_alive: bool) -> None:
    """Regression: a client that answered in its daemon's place had another namespace's daemon and servers ended."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    own, theirs = server_of(mps.daemon(GPU).pipe), server_of(mps.daemon(other).pipe)
    daemon = pid_of(tmp_path / "mps", other)
    (mps.daemon(GPU).pipe / "listed").write_text(f"{daemon}\n{theirs}\n{own}\n")
    if not is_alive:
        kill_daemon(mps, tmp_path / "mps", other)
    assert mps.status(GPU).servers == {own}
    assert mps.status(GPU, [own]).servers == {own}
    if is_alive:
        assert mps.status(GPU, [daemon, theirs]).servers == {own}
    mps.end(GPU)
    assert (mps.is_running(other), lives(own)) == (is_alive, False)
    assert lives(theirs)
    os.kill(theirs, signal.SIGKILL)


@contextmanager
def mounted(directory: Path) -> Iterator[int]:
    """A container's view of a directory, which survives a rename."""
    view = os.open(directory, os.O_RDONLY)
    yield view
    os.close(view)


@pytest.mark.parametrize("is_wedged", [True, False])
def test_ending_container_never_reaches_the_next_daemon(commands: FakeMpsCommands, mps: Mps, is_wedged: bool) -> None:
    """The pod may have been deleted by force: its reservation is gone before its container."""
    mps.start(GPU)
    with mounted(mps.daemon(GPU).pipe) as theirs:
        assert os.listdir(theirs) == ["control"]
        commands.daemons[str(mps.daemon(GPU).pipe)].is_wedged = is_wedged
        mps.stop(GPU)
        mps.start(GPU)
        assert os.listdir(theirs) == []
    assert os.listdir(mps.daemon(GPU).pipe) == ["control"]


async def test_daemon_serves_one_namespace(tmp_path: Path, reserve) -> None:
    """Regression: one update replaced the last pod by another namespace's, and the daemon stayed."""
    world = World(tmp_path)

    def of(pod: str, namespace: str) -> Reservation:
        return reserve(pod, world.gpu, mode=SharingMode.MPS, pod_namespace=namespace)

    async with running(world.agent):
        await world.hold(of("a", "one"))
        shm = world.devices.access(world.gpu).mps_shm.host_path
        with mounted(world.pipe) as pipe, mounted(Path(shm)) as memory:
            os.close(os.open("segment", os.O_CREAT, dir_fd=memory))
            await world.hold(of("b", "another"))
            assert (world.node.mps.starts, os.listdir(pipe), os.listdir(memory)) == (2, [], [])
        theirs = world.devices.access(world.gpu).mps_shm.host_path
        assert (theirs != shm, os.listdir(theirs)) == (True, [])
        await world.hold(of("b", "another"), of("c", "another"))
        await world.hold(of("c", "another"), of("d", "another"))
        assert world.node.mps.starts == 2, "it stays while one of its pods stays"


@pytest.mark.parametrize(("takes_mib", "state"), [(9_000, "Ready"), (11_000, "Failed")])
async def test_measured_peak_admits_another_pod(tmp_path: Path, reserve, takes_mib: int, state: str) -> None:
    """Pod a has a limit of 60,000 MiB and a measured peak of 10,000; b's 60,000 fit only beside the latter."""
    world = World(tmp_path)
    tenant = TenantProfile(memory_mib=60_000, measured_mib=10_000)
    limited = {"mode": MPS, "memory_limit_mib": 60_000}
    first = reserve("a", world.gpu, tenant=tenant, pod_uid=uid("a"), **limited)
    second = reserve("b", world.gpu, pod_uid=uid("b"), **limited)
    async with running(world.agent):
        await world.hold(first)
        world.node.start(0, 42, "a", takes_mib)
        world.node.mps.connect(str(world.pipe), 42)
        await until(lambda: [t.peak_memory_mib for t in world.status.tenants] == [takes_mib])
        await world.hold(first, second, b=state)
        if state == "Failed":
            assert "MiB that are not promised, found a limit of 60,000 MiB" in world.status.partitions[1].message


OWN, FOREIGN = "0::/carpool-mps\n", "0::/kubepods/besteffort/pod00000000-0000-4000-8000-000000000001/cri-1\n"


@pytest.fixture
def show(tmp_path: Path) -> Callable[[int, str], Path]:
    """Add a process to a tree of /proc with a chosen control group."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(OWN)

    def of(pid: int, cgroup: str) -> Path:
        (its := tmp_path / "proc" / str(pid)).mkdir()
        (its / "cgroup").write_text(cgroup)
        for name in ("stat", "environ"):
            (its / name).symlink_to(f"/proc/{pid}/{name}")
        return tmp_path / "proc"

    return of


def test_process_of_another_control_group_is_never_ended(show: Callable[[int, str], Path], tmp_path: Path) -> None:
    """A pod chooses the names and the environment of its processes, but not their control group."""
    pipe = tmp_path / "pipe"
    with server(pipe) as own, server(pipe) as named, server(tmp_path / "other") as of_another_gpu:
        for process, group in ((own, OWN), (named, FOREIGN), (of_another_gpu, OWN)):
            proc = show(process.pid, group)
        processes = MpsProcesses(proc)
        assert processes.of_pipe(pipe)().keys() == {own.pid}
        processes.end(processes.of_pipe(pipe))
        assert own.wait(10) == -signal.SIGTERM
        assert (named.poll(), of_another_gpu.poll()) == (None, None)


def test_found_process_counts_until_it_has_ended(show: Callable[[int, str], Path], tmp_path: Path) -> None:
    """Regression: the environment of an ending process disappears before its GPU memory."""
    pipe = tmp_path / "pipe"
    with server(pipe) as process:
        proc = show(process.pid, OWN)
        look = MpsProcesses(proc).of_pipe(pipe)
        assert look().keys() == {process.pid}
        environment = proc / str(process.pid) / "environ"
        environment.unlink()
        environment.touch()
        assert look().keys() == {process.pid}
        process.kill()
        process.wait()
        assert not look()


@pytest.fixture
def gone() -> int:
    """ID of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_process_that_the_driver_holds_is_named(gone: int) -> None:
    clock = FakeClock()
    began = clock.monotonic()
    with pytest.raises(MpsError, match=f"expected MPS processes to end when they are killed, found {gone} still there"):
        MpsProcesses(monotonic=clock.monotonic, sleep=clock.advance).end(lambda: {gone: 1})
    assert 4 <= clock.monotonic() - began < 4.3, "one second for the first signal, three for the second"


def test_failed_start_names_the_daemon_that_it_leaves(
    program: MpsProgram, tmp_path: Path, gone: int, show: Callable[[int, str], Path]
) -> None:
    """The driver holds that daemon."""
    (proc := show(gone, OWN)).rename(tmp_path / "later")
    (its := tmp_path / "later" / str(gone)).joinpath("stat").unlink()
    (its / "environ").unlink()
    pipe, shm = tmp_path / GPU / "pipe", tmp_path / GPU / "shm"
    (its / "stat").write_text(f"{gone} (nvidia-cuda-mps) D " + " ".join(["0"] * 30))
    (its / "environ").write_text(f"A=b\0CUDA_MPS_PIPE_DIRECTORY={pipe}\0")
    proc.mkdir()
    (tmp_path / "bin" / PROGRAM).write_text(f"#!/bin/sh\nmv {tmp_path}/later/* {proc}\necho no such device\nexit 1\n")
    clock = FakeClock()
    processes = MpsProcesses(proc, clock.monotonic, clock.advance)
    for directory in (pipe, shm):
        directory.mkdir(parents=True)
    daemon = Daemon(GPU, tmp_path / GPU)
    daemon.log.mkdir()
    with pytest.raises(MpsError, match=f"ended with 1: no such device; moreover .* found {gone} still there"):
        MpsProgram(private_shm=False, processes=processes).start(daemon, shm)
