"""Clients that end together: told while they are there, and after they have left before anybody looked."""

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pynvml
import pytest
from agent_world import World
from carpool_core.kube.api import GPU_NODES
from carpool_core.values import SharingMode
from carpool_deviceplugin.devices.gpu import SetMode, StartMps, StopMps
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.nvml.calls import NvmlError
from carpool_deviceplugin.testing.agents import running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid

MPS = SharingMode.MPS


class SlowMps(FakeMpsCommands):
    """Something happens while a daemon is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        during, self.during = self.during, lambda: None
        during()
        answer = super().ask(environment, command)
        after, self.after = self.after, lambda: None
        after()
        return answer


class Shared:
    """A GPU in mode MPS with clients of some pods."""

    def __init__(self, root: Path, *pods: str) -> None:
        self.mps = SlowMps()
        self.node = Node(FakeNvml(["H100"]), self.mps, root)
        self.devices = self.node.devices()
        (self.gpu,) = self.devices.uuids
        self.pipe = str(root / "mps" / self.gpu / "pipe")
        self.devices.apply(self.gpu, SetMode(MPS))
        self.devices.apply(self.gpu, StartMps())
        self.pids = {pod: 42 + at for at, pod in enumerate(pods)}
        for pod, pid in self.pids.items():
            self.node.start(0, pid, pod)
            self.node.mps.connect(self.pipe, pid)
        self.look()

    def look(self):
        return self.devices.actual(self.gpu)

    def leave(self, *pods: str) -> None:
        for pod in pods:
            self.node.end(0, self.pids[pod])
            if self.pipe in self.node.mps.daemons:
                self.node.mps.daemons[self.pipe].clients.discard(self.pids[pod])

    def told(self) -> set[str]:
        return {pod for pod in "abc" if uid(pod) in self.look().ended}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path, "a", "b", "c")


def test_clients_that_left_before_anybody_looked_are_told(shared: Shared) -> None:
    """Regression: they end within seconds of the fault, and the agent looks each ten."""
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a", "b")
    actual = shared.look()
    assert actual.struck == {}, "nobody of them is there"
    assert actual.ended.keys() == {uid("a"), uid("b")}
    why = actual.ended[uid("a")]
    assert why == (
        f"GPU {shared.gpu}: a client's fatal fault has hit its MPS server: pods that it ends together: "
        f"{uid('a')}, {uid('b')}"
    )


def test_those_that_take_longer_are_told_with_them(shared: Shared) -> None:
    shared.node.nvml.raise_xid(0, 13)
    assert shared.told() == set(), "nobody has ended yet"
    shared.leave("a")
    assert shared.told() == set(), "one alone is its own affair"
    shared.node.advance(15)
    shared.leave("b")
    assert shared.told() == {"a", "b"}
    shared.leave("c")
    assert shared.told() == {"a", "b", "c"}


def test_who_leaves_long_after_an_xid_leaves_for_another_reason(shared: Shared) -> None:
    shared.node.nvml.raise_xid(0, 31)
    shared.look()
    shared.node.advance(21)
    shared.leave("a", "b")
    assert shared.told() == set()


def test_who_leaves_without_an_xid_has_done_its_work(shared: Shared) -> None:
    shared.leave("a", "b")
    assert shared.told() == set()


def test_two_processes_of_one_pod_are_one_pod(tmp_path: Path) -> None:
    shared = Shared(tmp_path, "a")
    shared.node.start(0, 99, "a")
    shared.look()
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a")
    shared.node.end(0, 99)
    assert shared.told() == set()


def test_daemon_and_clients_that_are_gone_at_once_are_told(shared: Shared) -> None:
    shared.node.mps.die(shared.pipe)
    shared.leave("a", "b", "c")
    assert shared.told() == {"a", "b", "c"}
    assert "its MPS daemon ended under its clients" in shared.look().ended[uid("c")]


def test_a_daemon_that_was_stopped_after_its_clients_is_no_news(shared: Shared) -> None:
    shared.leave("a", "b", "c")
    shared.look()
    shared.devices.apply(shared.gpu, StopMps())
    assert shared.told() == set()


def test_a_server_that_says_fault_names_who_is_there_and_who_has_left(shared: Shared) -> None:
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a")
    shared.node.mps.daemons[shared.pipe].is_faulty = True
    actual = shared.look()
    assert actual.struck.keys() == {uid("b"), uid("c")}
    assert actual.ended.keys() == {uid("a"), uid("b"), uid("c")}
    shared.leave("b", "c")
    shared.node.mps.daemons[shared.pipe].is_faulty = False
    assert (shared.look().struck, shared.look().problem, shared.told()) == ({}, "", {"a", "b", "c"})


def test_it_is_told_for_ten_minutes(shared: Shared) -> None:
    shared.node.mps.die(shared.pipe)
    shared.leave("a", "b", "c")
    shared.look()
    shared.node.seconds += 599
    assert shared.told() == {"a", "b", "c"}
    shared.node.seconds += 2
    assert shared.told() == set()


@pytest.mark.parametrize("is_released", [True, False])
async def test_the_status_names_pods_that_are_gone(tmp_path: Path, reserve, is_released: bool) -> None:
    """Whether the scheduler has released what they had or not: the operator waits to hear who was not to blame."""
    world = World(tmp_path, Rhythm(resync_s=1e9))  # nobody looks just because time has passed
    node, agent = world.node, world.agent
    wanted = [msgspec.structs.replace(reserve(pod, world.gpu, mode=MPS), pod_uid=uid(pod)) for pod in "ab"]
    async with running(agent):
        await world.hold(*wanted)
        for pid, pod in ((42, "a"), (43, "b")):
            node.start(0, pid, pod)
            node.mps.connect(str(world.pipe), pid)
        await until(lambda: len(agent.reconciler.meters[world.gpu].running()) == 2)
        began = agent.clock.monotonic()
        await until(lambda: agent.clock.monotonic() > began + 15)  # they run for a while, and are looked at
        node.nvml.raise_xid(0, 31)
        node.end(0, 42)
        node.end(0, 43)
        if is_released:
            await world.hold()
        await until(lambda: {s.pod_uid for s in world.status.struck} == {uid("a"), uid("b")})
        assert "a client's fatal fault has hit its MPS server" in world.status.struck[0].message


def test_a_client_that_ends_while_the_daemon_is_asked_is_no_stranger(shared: Shared) -> None:
    """Regression: its GPU was unhealthy until the next look."""
    shared.leave("a")
    shared.mps.during = lambda: shared.leave("b")
    assert shared.look().problem == ""
    assert shared.look().tenants == {uid("c")}


def test_a_process_that_ends_before_it_is_looked_up_is_no_stranger(shared: Shared) -> None:
    """The driver had it a moment ago, and it is asked again; who is still there then, is one."""
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


def test_two_that_look_at_once_lose_no_fault(shared: Shared) -> None:
    """Regression: one took the XID, the other one saw who had left, and nobody was told."""
    others: list[threading.Thread] = []

    def look_too() -> None:
        others.append(threading.Thread(target=shared.look))
        others[0].start()
        others[0].join(0.2)  # where it must wait, it cannot end before this look does

    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a", "b")
    shared.mps.during = look_too
    shared.look()
    others[0].join()
    assert shared.told() == {"a", "b"}


def test_a_look_that_fails_loses_no_fault(shared: Shared) -> None:
    shared.node.nvml.raise_xid(0, 31)
    shared.leave("a", "b")
    shared.node.nvml.fail_next("nvmlDeviceGetComputeRunningProcesses", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NvmlError):
        shared.look()
    assert shared.told() == {"a", "b"}


def test_a_daemon_that_was_being_asked_when_it_happened_is_asked_again(shared: Shared) -> None:
    """What it said before is not what it says now."""
    shared.leave("a")
    shared.mps.after = lambda: shared.devices._watcher.forget(shared.gpu)
    shared.devices.read(shared.gpu)
    asked = shared.mps.asked
    shared.look()
    assert shared.mps.asked > asked


async def test_what_an_earlier_agent_told_of_stands_for_ten_minutes(tmp_path: Path) -> None:
    """Regression: a new agent's first word took it back, and the operator may not have read it."""
    world = World(tmp_path, Rhythm(resync_s=1e9, sample_s=100, measures_s=100, heartbeat_s=100))
    told = [{"podUid": uid("a"), "message": "hit"}, {"podUid": uid("b"), "message": "hit"}]
    world.kube.seed(GPU_NODES, {"metadata": {"name": "n"}, "spec": {"reservations": []}, "status": {"struck": told}})
    async with running(world.agent):
        await until(lambda: world.status.devices)
        began = world.agent.clock.monotonic()
        assert {s.pod_uid for s in world.status.struck} == {uid("a"), uid("b")}
        world.agent.clock.advance(450)  # at one go: each step of its time takes some of the machine's
        await until(lambda: not world.status.struck)
        assert world.agent.clock.monotonic() - began > 500
