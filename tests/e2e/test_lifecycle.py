"""Slots, processes and what is left of them; the machine's own processes stand in for a cluster's."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from carpool_e2e import processes
from carpool_e2e.errors import HarnessError, StartError
from carpool_e2e.processes import Process, ProcessTable
from kubectl import eventually
from rich.console import Console

FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    table = ProcessTable(tmp_path / "a state", os.environ["PATH"])
    table.state.mkdir()
    yield table
    processes.end_processes(table.state)
    table.reap()


def test_two_clusters_get_different_slots_and_ports(tmp_path: Path) -> None:
    first, second = processes.acquire(tmp_path), processes.acquire(tmp_path)
    assert (first.number, second.number) == (0, 1)
    assert set(vars(processes.choose(0)).values()).isdisjoint(vars(processes.choose(1)).values())
    for slot in (first, second):
        slot.empty()
        slot.release()
    assert list(tmp_path.iterdir()) == []


def test_a_slot_whose_lock_is_free_is_emptied_by_the_next_start(tmp_path: Path) -> None:
    stale = processes.acquire(tmp_path)
    (stale.directory / "etcd").mkdir()
    orphan = ProcessTable(stale.directory, os.environ["PATH"]).start("orphan", FOREVER)
    orphan.wait_until(lambda: processes.marked_processes(stale.directory))  # there a moment after exec
    os.close(stale.lock_fd)  # as the kernel does when the harness is killed
    again = processes.acquire(tmp_path)
    assert again.number == stale.number
    assert list(again.directory.iterdir()) == []
    assert orphan.popen is not None
    orphan.popen.wait(10)
    again.empty()
    again.release()


def test_a_kept_slot_is_left_alone_until_clean(tmp_path: Path) -> None:
    kept = processes.acquire(tmp_path)
    kept.keep()
    kept.release()
    other = processes.acquire(tmp_path)
    assert other.number != kept.number
    assert processes.clean(tmp_path) == [kept.number]
    assert other.directory.exists(), "clean leaves clusters alone that a process holds"
    other.empty()
    other.release()


def test_slot_that_cannot_be_emptied_stays_taken_and_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one network link that could not be removed stopped every start, in free slots too."""
    links, group = tmp_path / "net", tmp_path / "cgroup" / "cpu" / "cq0-a"
    monkeypatch.setattr(processes, "LINKS", links)
    monkeypatch.setattr(processes, "CGROUP_ROOT", tmp_path / "cgroup")
    root, console = tmp_path / "slots", Console(file=StringIO())
    broken, sound = processes.acquire(root), processes.acquire(root)
    assert (broken.number, sound.number) == (0, 1)
    (links / f"{broken.name}-n0").mkdir(parents=True)  # no link of the machine, so that `ip` cannot delete it
    group.mkdir(parents=True)
    for stale in (broken, sound):
        os.close(stale.lock_fd)
    fresh = processes.acquire(root, console)
    assert fresh.number == 1
    assert isinstance(console.file, StringIO)
    assert f"{broken.directory} cannot be emptied: the network link cq0-n0 cannot be removed" in console.file.getvalue()
    assert broken.directory.exists()
    assert not group.exists(), "what can be removed is"
    fresh.release()
    with pytest.raises(HarnessError, match="cq0-n0 cannot be removed"):
        processes.clean(root)
    assert not fresh.directory.exists()
    (links / "cq0-n0").rmdir()
    assert processes.clean(root) == [0]


def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    root = tmp_path / "root"
    root.symlink_to(target)
    with pytest.raises(HarnessError, match="found something else"):
        processes.acquire(root)


def test_a_process_that_ends_early_fails_with_its_log(table: ProcessTable) -> None:
    process = table.start("hasty", ["sh", "-c", "echo the reason; exit 3"])
    with pytest.raises(StartError, match=r"hasty ended with 3 before it was ready(?s:.*)the reason"):
        process.wait_until(lambda: False)


@pytest.mark.skipif(os.getuid() != 0, reason="entering namespaces needs root")
@pytest.mark.e2e
def test_a_paused_process_in_namespaces_of_its_own_can_be_killed(table: ProcessTable) -> None:
    outer = table.start("namespaces", ["unshare", "-mpnf", "--kill-child", *FOREVER])
    assert outer.popen is not None
    pid = outer.popen.pid
    outer.wait_until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text() != "")
    inner = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    process: Process = table.start("inside", FOREVER, namespaces_of=inner)
    process.pause()
    process.kill(timeout_s=5)
    process.start()
    process.pause()
    process.resume()
    assert process.running


def test_a_port_in_use_is_passed_over() -> None:
    first = processes.choose(63).etcd
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert first not in vars(processes.choose(63)).values()


SKIP = "def test_x():\n    pytest.skip('no reason')"
SKIPPING = {"plain": SKIP, "module": "pytest.importorskip('no_such_module')", "gpu": f"@pytest.mark.gpu\n{SKIP}"}


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
@pytest.mark.parametrize(
    ("ci", "expected", "status"),
    [pytest.param("1", "1 failed, 1 skipped, 1 error", 1, id="CI"), pytest.param("0", "3 skipped", 0, id="elsewhere")],
)
def test_skip_is_an_error_in_ci_unless_the_test_needs_a_gpu(
    tmp_path: Path, ci: str, expected: str, status: int, options: tuple[str, ...]
) -> None:
    """A pytest of its own, with this project's conftest."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, content in SKIPPING.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{content}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += options
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["CARPOOL_CI"] = ci
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert expected in done.stdout
    assert done.returncode == status
    assert "1 skipped, which need an NVIDIA GPU" in done.stdout
    assert "\ntest_gpu.py::test_x\n" in done.stdout


def test_cgroups_that_cannot_be_removed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after 5 s the next one was tried, and there was no message that this one stayed."""
    monkeypatch.setattr(processes, "CGROUP_ROOT", tmp_path)
    (tmp_path / "cpu" / "cp0-a" / "kubepods").mkdir(parents=True)
    (tmp_path / "cpu" / "cp1-b").mkdir()
    processes.remove_cgroups("cp0")
    assert [group.name for group in (tmp_path / "cpu").iterdir()] == ["cp1-b"]
    (tmp_path / "cpu" / "cp1-b" / "busy").touch()
    with pytest.raises(HarnessError, match="cp1-b cannot be removed"):
        processes.remove_cgroups("cp1", within_s=0)


TELL_AND_STAY = """echo "$GREETING from $1, marked $CARPOOL_E2E_STATE, home $NOT_HANDED_ON"; exec sleep 600"""


def test_a_killed_process_is_started_again_by_its_script(table: ProcessTable, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", TELL_AND_STAY, "sh", "it's me"]
    first = table.start("greeter", command, {"GREETING": 'a $HOME "quoted"'})
    line = f'a $HOME "quoted" from it\'s me, marked {table.state}, home \n'
    eventually("a line in its log", lambda: first.log.read_text() == line)
    first.kill(signal.SIGKILL)
    assert processes.marked_processes(table.state) == []
    monkeypatch.setenv("NOT_HANDED_ON", "something")
    subprocess.run([table.script("greeter")], check=True, timeout=60)
    eventually("the same line once more", lambda: first.log.read_text() == 2 * line)
    assert len(processes.marked_processes(table.state)) == 1


def test_the_script_of_a_process_in_namespaces_enters_them(table: ProcessTable) -> None:
    inside = table.start("inside", ["true"], namespaces_of=4_000_000)
    assert " setsid nsenter -t 4000000 -m -p -n -- true " in inside.script()


RAISING = """
import signal, sys
from carpool_e2e import processes
processes.as_by_ctrl_c()
first, *others = (signal.Signals[name] for name in sys.argv[1:])
try:
    signal.raise_signal(first)
except KeyboardInterrupt:
    for other in others:
        signal.raise_signal(other)
    print("taken down")
"""


@pytest.mark.parametrize(
    ("numbers", "taken_down"),
    [
        ("INT TERM", True),
        ("INT HUP TERM TERM", True),
        ("TERM TERM", True),
        ("TERM HUP INT", True),
        ("HUP TERM", True),
        ("INT INT", False),
        ("TERM INT INT", False),
    ],
)
def test_what_follows_the_first_signal(numbers: str, taken_down: bool) -> None:
    """The first interrupts, others leave the clean-up alone, and only a second Ctrl-C ends it."""
    command = ["env", "--default-signal=HUP,INT,TERM", sys.executable, "-c", RAISING]
    names = [f"SIG{number}" for number in numbers.split()]
    ended = subprocess.run([*command, *names], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout == "taken down\n") is taken_down, ended.stderr
    assert (ended.returncode == 0) is taken_down
