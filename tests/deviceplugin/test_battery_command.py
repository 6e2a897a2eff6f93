"""`carpool node battery`: what it tells, writes and refuses."""

import tempfile
from pathlib import Path

import pytest
from battery_world import machine, recording
from carpool_deviceplugin.node.battery.recording import differences
from carpool_deviceplugin.node.battery.report import read
from carpool_deviceplugin.node.commands import node as command
from carpool_deviceplugin.testing.battery import FakeMachine
from carpool_deviceplugin.testing.nvml_node import uid
from click.testing import CliRunner, Result


def run(there: FakeMachine, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["battery", *arguments], obj=there)


def test_the_command_tells_each_trial_and_writes_a_fixture(tmp_path: Path) -> None:
    out = tmp_path / "h100.json"
    found = run(machine(tmp_path), "--only", "contract", "--only", "mps-two", "--out", str(out))
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("NVIDIA H100 80GB HBM3, driver 580.95.05  GPU-")
    assert [line.split()[:2] for line in lines[1:3]] == [["passed", "contract"], ["passed", "mps-two"]]
    written = read(out)
    assert [o.name for o in written.outcomes] == ["contract", "mps-two"]
    assert differences(written.nvml, recording("H100")) == []


def test_a_failed_trial_ends_the_command_with_1(tmp_path: Path) -> None:
    found = run(machine(tmp_path, ignores_limits=True), "--only", "mps-two")
    assert (found.exit_code, "FAILED   mps-two" in found.output) == (1, True)


def in_use(there: FakeMachine) -> None:
    there.node.start(0, 42, "x")


def sick(there: FakeMachine) -> None:
    there.devices.actual(there.devices.uuids[0])
    there.node.nvml.raise_xid(0, 95)


@pytest.mark.parametrize(
    ("arguments", "spoil", "says"),
    [
        ([], in_use, f"found pods ['{uid('x')}']; the battery starts and kills processes there"),
        ([], sick, "expected one that is well and that nobody uses, found XID 95"),
        (["--gpu", "3"], None, "expected a GPU from 0 to 0, its UUID, or that of a MIG device on it, found '3'"),
        (["--only", "mps"], None, "'mps' is not one of 'contract', 'activity'"),
        (
            ["--out", "/nowhere/x.json"],
            None,
            "--out: expected to write to '/nowhere/x.json', found No such file or directory; give a file in ",
        ),
        (["--out", "/dev/full"], None, "--out: expected to write to '/dev/full', found No space left on device; free"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(tmp_path: Path, arguments: list[str], spoil, says: str) -> None:
    there = machine(tmp_path)
    if spoil is not None:
        spoil(there)
    found = run(there, *arguments)
    assert (found.exit_code, says in found.output) == (2, True), found.output


def test_where_nothing_could_be_tried_the_command_ends_with_2(tmp_path: Path) -> None:
    found = run(machine(tmp_path), "--only", "mig")  # without --mig
    assert (found.exit_code, found.output.splitlines()[-1]) == (2, "0 passed, 0 failed, 1 skipped")
    found = run(machine(tmp_path), "--only", "mig", "--only", "contract")
    assert (found.exit_code, found.output.splitlines()[-1]) == (0, "1 passed, 0 failed, 1 skipped")


def test_without_a_directory_to_write_to_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    found = run(machine(tmp_path))
    assert (found.exit_code, "set TMPDIR to a writable one" in found.output) == (2, True), found.output


def test_an_interpreter_that_is_not_there_is_told_before_all_else() -> None:
    found = CliRunner().invoke(command, ["battery", "--python", "/nowhere"])
    assert (found.exit_code, "--python: expected an interpreter" in found.output) == (2, True), found.output
