"""Calls with deadlines, and processes of the node."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.gpu import DeviceError
from carpool_deviceplugin.processes import ProcTree, pod_of
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Poll
from hypothesis import given
from hypothesis import strategies as st

GPUS = [GpuUuid(f"GPU-{at}") for at in range(8)]


class Gpus:
    """GPUs that answer; some hang until `release` is set."""

    def __init__(self) -> None:
        self.hanging: set[GpuUuid] = set()
        self.release = threading.Event()
        self.asked: list[GpuUuid] = []

    def ask(self, uuid: GpuUuid) -> str:
        self.asked.append(uuid)
        if uuid in self.hanging:
            self.release.wait(60)
        return uuid


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    made = Gpus()
    yield made
    made.release.set()


async def test_hanging_gpus_delay_no_others_and_are_not_asked_again(gpus: Gpus) -> None:
    gpus.hanging = {GPUS[0], GPUS[3], GPUS[7]}
    rounds = Poll(1)
    found = await rounds.ask(gpus.ask, GPUS)
    assert {uuid for uuid, answer in found.items() if isinstance(answer, DeviceError)} == gpus.hanging
    assert "GPU GPU-3: expected an answer within 1 s, found none" in str(found[GPUS[3]])
    gpus.asked.clear()
    again = await rounds.ask(gpus.ask, GPUS)
    assert set(gpus.asked) == set(GPUS) - gpus.hanging
    assert "an earlier call has not come back yet" in str(again[GPUS[0]])
    hung, gpus.hanging = gpus.hanging, set()
    gpus.release.set()
    for _ in range(1000):
        well = await rounds.ask(gpus.ask, sorted(hung))
        if not any(isinstance(answer, DeviceError) for answer in well.values()):
            break
        await asyncio.sleep(0.001)
    assert not any(isinstance(answer, DeviceError) for answer in well.values())


async def test_errors_of_one_gpu_are_its_answer_and_bugs_are_raised(gpus: Gpus) -> None:
    def ask(uuid: GpuUuid) -> int:
        if uuid == GPUS[1]:
            raise DeviceError("GPU-1 is lost")
        if uuid == GPUS[5]:
            raise ZeroDivisionError
        return 1

    rounds = Poll(30)
    found = await rounds.ask(ask, GPUS[:3])
    assert (found[GPUS[0]], str(found[GPUS[1]]), found[GPUS[2]]) == (1, "GPU-1 is lost", 1)
    with pytest.raises(ZeroDivisionError):
        await rounds.ask(ask, GPUS)


UID = "8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f"


@pytest.mark.parametrize(
    ("line", "uid"),
    [
        (f"0::/kubepods.slice/a.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-1.scope", UID),
        (f"0::/kubepods/besteffort/pod{UID}/4f5e", UID),
        (f"0::/kubepods/pod{UID}", UID),
        (f"0::/../../kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-4f5e.scope", UID),
        (f"11:memory:/kubepods/burstable/pod{UID}/4f5e\n1:name=systemd:/kubepods/burstable/pod{UID}/4f5e", UID),
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice/x", UID),
        ("0::/kubepods/burstable/pod0123456789abcdef0123456789abcdef/x", "0123456789abcdef0123456789abcdef"),
        ("0::/system.slice/docker-4f5e.scope", None),
        ("0::/user.slice/podman-4f5e.scope", None),
        ("0::/", None),
        ("", None),
    ],
)  # fmt: skip
def test_pod_of_a_cgroup(line: str, uid: str | None) -> None:
    assert pod_of(line) == uid


@given(st.text())
def test_any_text_is_a_uid_or_no_pod(text: str) -> None:
    found = pod_of(text)
    assert found is None or set(found) <= set("0123456789abcdef-")


def test_user_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "status").write_text("Name:\tUid: 7\nUid:\t1000\t0\t0\t0\nGid:\t5\t5\t5\t5\n")
    (tmp_path / "43").mkdir()
    (tmp_path / "43" / "status").write_text("Name:\tx\n")
    assert [ProcTree(tmp_path).user(pid) for pid in (42, 43, 44)] == [1000, None, None]


@pytest.mark.parametrize(
    ("stat", "found"),
    [
        ("42 (a) R 1 2) () S " + " ".join(["0"] * 18) + " 4200 0\n", (4200, "a) R 1 2) (", "42-4200")),
        ("", None),
        ("42 (x) S", None),
        ("42 (x) S " + "y " * 30, None),
    ],
    ids=["a command like fields", "empty", "short", "no numbers"],
)
def test_stat_of_a_process(tmp_path: Path, stat: str, found: tuple[int, str, str] | None) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "cgroup").write_text("0::/\n")
    (tmp_path / "42" / "stat").write_text(stat)
    process = ProcTree(tmp_path).find(42)
    assert (process and (process.started, process.name, process.key)) == found
    assert ProcTree(tmp_path).find(43) is None


def test_the_pod_of_a_known_process_is_read_once(tmp_path: Path) -> None:
    """Regression: each reading of a GPU read the control groups of all its processes."""
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    node.start(0, 42, "a")
    processes = ProcTree(tmp_path / "proc")
    known = processes.find(42)
    (tmp_path / "proc" / "42" / "cgroup").unlink()
    assert processes.find(42, known) is known
    node.start(0, 42, "b")
    (tmp_path / "proc" / "42" / "stat").write_text("42 (other) S " + " ".join(["0"] * 18) + " 4300 0 0\n")
    reused = processes.find(42, known)
    assert reused is not None
    assert (reused.started, reused.pod_uid) == (4300, uid("b")), "a reused process ID is another process"
