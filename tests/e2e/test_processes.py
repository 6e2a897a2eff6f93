"""Processes of a cluster, without a cluster."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_e2e import processes
from carpool_e2e.processes import ProcessTable
from kubectl import eventually

TELL_AND_STAY = """echo "$GREETING from $1, marked $CARPOOL_E2E_STATE, home $NOT_HANDED_ON"; exec sleep 600"""


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    table = ProcessTable(tmp_path / "a state", "/usr/bin:/bin")
    table.state.mkdir()
    yield table
    processes.end_processes(table.state)
    table.reap()


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
