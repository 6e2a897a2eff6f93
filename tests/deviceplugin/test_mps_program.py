"""NVIDIA's program, as a program: run, read, and believed only where no client could have said it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps.daemons import Mps, MpsStatus
from carpool_deviceplugin.mps.port import PID_FILE, PROGRAM, MpsError
from carpool_deviceplugin.mps.program import RECORD, MpsProgram
from mps_world import GPU, lives, pid_of, server_of


def test_the_program_is_run(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    assert not mps.status(GPU).is_running
    mps.start(GPU)
    assert mps.status(GPU) == MpsStatus(True), "whatever it says that its server is, there is none"
    mps.stop(GPU)
    assert not mps.status(GPU).is_running


@pytest.mark.parametrize(
    ("effective", "says"),
    [
        ("000001ffffffffff", ""),
        ("0000000000200000", "the capabilities SETGID, SETUID; add them"),
        ("0000000000000000", "the capabilities SETGID, SETUID, SYS_ADMIN; add them"),
    ],
)
def test_mps_is_offered_where_it_can_be_run(program: MpsProgram, tmp_path: Path, effective: str, says: str) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{effective}\n")
    found = program.missing(tmp_path / "status")
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_program_that_refuses_is_quoted(program: MpsProgram, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match=f"{PROGRAM} ended with 1: no such device"):
        Mps(program, tmp_path / "mps").start(GpuUuid(GPU.replace("8f", "9f")))


def test_program_that_is_absent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{PROGRAM} on PATH" in MpsProgram.missing()
    with pytest.raises(MpsError, match=f"expected {PROGRAM} on PATH, found none"):
        Mps(MpsProgram(), tmp_path / "mps").start(GPU)


def test_program_that_hangs_is_left(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
    quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
    began = time.monotonic()
    assert "does not answer" in quick.status(GPU).problem
    assert time.monotonic() - began < 5
    quick.stop(GPU)
    assert not quick.status(GPU).is_running


def test_a_daemon_that_holds_what_it_printed_to_may_print_more(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: it was waited for, and when that was mended it ended by the first word after its start."""
    file = tmp_path / "bin" / PROGRAM
    prints = "print('a warning', flush=True)"
    text = file.read_text().replace("    os.closerange(0, 3)\n", f"    {prints}\n")
    file.write_text(text.replace("        if (pipe / ", f"        {prints}\n        if (pipe / "))
    assert file.read_text().count(prints) > 1
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    time.sleep(0.2)
    assert mps.status(GPU).is_running
    mps.stop(GPU)


FLOOD = 'import sys\nwhile True: sys.stdout.write("7" * 4096 + " ")\n'


@pytest.mark.parametrize(
    "answer",
    [
        'sys.stdout.write("9" * 5000 + " SERVER")',
        'sys.stdout.buffer.write(b"\\xff\\x00 SERVER")',
        'sys.stdout.buffer.write("\u0967 \u00b2 12345678 -1 SERVER".encode())',
    ],
    ids=["long", "bytes", "digits"],
)
def test_any_answer_is_read(program: MpsProgram, tmp_path: Path, answer: str) -> None:
    """Regression: it may be a client's; a number of 5,000 digits or a byte 0xff ended the agent, again and again."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    server = server_of(mps.pipe(GPU))
    file = tmp_path / "bin" / PROGRAM
    told = answer.replace("SERVER", str(server))
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read()\n{told}\n")
    found = mps.status(GPU)
    assert found == MpsStatus(True, frozenset({server}), frozenset({server}))
    mps.end(GPU)


def test_an_answer_without_an_end_is_not_gathered(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: it took the agent's memory."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "bin" / PROGRAM).write_text(f"#!{sys.executable}\n{FLOOD}")
    found = mps.status(GPU)
    assert (found.is_silent, "at most 65,536 bytes, found more" in found.problem) == (True, True)
    mps.end(GPU)


@pytest.mark.parametrize("how", ["link", "pipe", "directory", "number"])
def test_what_a_client_writes_about_the_daemon_is_not_believed(program: MpsProgram, tmp_path: Path, how: str) -> None:
    """Regression: a link to /dev/zero took the agent's memory, a pipe its threads, a number another GPU's daemon."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    (file := tmp_path / "mps" / GPU / "pipe" / PID_FILE).unlink()
    match how:
        case "link":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case "number":
            file.write_text((tmp_path / "mps" / other / "pipe" / PID_FILE).read_text())
    assert mps.is_running(GPU)
    mps.stop(GPU)
    assert (mps.is_running(GPU), mps.is_running(other)) == (False, True)
    mps.end(GPU)
    assert mps.is_running(other)
    mps.stop(other)


@pytest.mark.parametrize("how", ["link", "pipe", "stranger", "other"])
def test_a_number_that_is_not_the_daemons_is_not_written_down(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = Mps(program, tmp_path / "others")
    other.start(GPU)
    file = tmp_path / "mps" / GPU / "pipe" / PID_FILE
    make = {"link": "ln -s /dev/zero", "pipe": "mkfifo", "stranger": f"echo {os.getpid()} >", "other": ""}[how]
    make = make or f"echo {pid_of(tmp_path / 'others')} >"
    script = f'#!/bin/sh\n[ "$1" = -d ] && {make} "{file}"\n'
    (tmp_path / "bin" / PROGRAM).write_text(script)
    with pytest.raises(MpsError, match="expected the MPS daemon's process ID"):
        Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps").start(GPU)
    other.end(GPU)
    assert not other.is_running(GPU)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hangs", "to start within"),
        ("refuses", "ended with 1"),
        ("silent", "expected the MPS daemon's process ID"),
        ("stays", "expected to write"),
    ],
)
def test_a_start_that_fails_leaves_no_daemon(program: MpsProgram, tmp_path: Path, how: str, says: str) -> None:
    """Regression: it went on, known to nobody, and the next one was started beside it."""
    mps = Mps(MpsProgram(private_shm=False, within_s=4), tmp_path / "mps")
    (there := mps.directory(GPU)).mkdir(parents=True)
    (there / "how").write_text(how)
    if how == "stays":
        (there / RECORD / "in").mkdir(parents=True)  # nothing can be written in its place
    with pytest.raises(MpsError, match=says):
        mps.start(GPU)
    assert not lives(int((there / "began").read_text()))


def test_a_start_that_was_cut_short_leaves_no_daemon(program: MpsProgram, tmp_path: Path) -> None:
    """Whoever started it was killed before it was written down; another GPU's is none of its business."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    for gpu in (GPU, other):
        mps.directory(gpu).mkdir(parents=True)
        (mps.directory(gpu) / "how").write_text("outlives its pipe")
        mps.start(gpu)
        (mps.directory(gpu) / RECORD).unlink()
    first, others = (int((mps.directory(gpu) / "began").read_text()) for gpu in (GPU, other))
    assert not mps.is_running(GPU)
    (mps.directory(GPU) / "how").write_text("")
    mps.start(GPU)
    assert (lives(first), lives(others), mps.is_running(GPU)) == (False, True, True)
    mps.stop(GPU)
    os.kill(others, signal.SIGKILL)


def test_a_link_in_place_of_the_control_pipe_is_not_followed(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    control = tmp_path / "mps" / GPU / "pipe" / "control"
    (tmp_path / "away").hardlink_to(control)
    (tmp_path / "link").symlink_to(tmp_path / "away")
    (tmp_path / "link").replace(control)  # at once: the daemon ends where it finds nothing
    assert "found a link that a client has put there" in mps.status(GPU).problem
    mps.stop(GPU)
    assert not mps.is_running(GPU)


def test_a_daemon_that_ignores_being_asked_to_end_is_ended(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
    os.kill(pid_of(tmp_path / "mps"), signal.SIGSTOP)
    Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps").stop(GPU)
    assert not mps.is_running(GPU)


def test_a_process_that_may_not_be_ended_is_said(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: under AppArmor the error ended the whole agent, and each one after it."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    with monkeypatch.context() as forbidding:
        forbidding.setattr(os, "kill", refuse)
        with pytest.raises(MpsError, match=r"expected to end process \d+ of MPS, found .*not permitted"):
            mps.end(GPU)
    mps.end(GPU)
    assert not mps.is_running(GPU)
