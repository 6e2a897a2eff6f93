"""The battery for real GPUs: on a machine that keeps its word every trial passes, elsewhere the right one fails."""

from pathlib import Path

import pytest
from battery_world import machine, try_out
from carpool_deviceplugin.node.battery.report import Verdict
from carpool_deviceplugin.testing.battery import FakeMachine


def test_every_trial_passes_on_a_machine_that_keeps_its_word(tmp_path: Path) -> None:
    there = machine(tmp_path)
    found = try_out(there)
    assert {o.verdict for name, o in found.items() if name != "mig"} == {Verdict.PASSED}, found
    assert "only with --mig" in found["mig"].said
    assert "2 processes made 20.0, 20.0 steps/s" in found["mps-two"].said
    assert "3 processes made" in found["mps-three"].said
    assert "100%: 0.97, 50%: 0.48, 25%: 0.24" in found["mps-threads"].said
    assert "told after 0 s, with both pods; they ended: RuntimeError" in found["mps-fault"].said
    assert "another daemon answered after" in found["mps-killed"].said
    assert "of 132 SMs" in found["activity"].said
    assert "not beside dmon: nvidia-smi is not on PATH" in found["cost"].said
    assert there.living() == []
    assert there.node.mps.daemons == {}, "the machine is left as it was"
    assert there.devices.actual(there.devices.uuids[0]).mode is None


@pytest.mark.parametrize(
    ("faithless", "trial", "says"),
    [
        (
            {"ignores_limits": True},
            "mps-two",
            "expected it to die of memory at 4,096 MiB, found it alive with 8,792 MiB",
        ),
        ({"kills_neighbours": True}, "mps-three", "expected every process to make steps"),
        ({"ignores_threads": True}, "mps-threads", "expected an SM activity of about each thread percentage"),
        ({"hides_fate": True}, "mps-fault", "expected the agent to name all pods that end together within 10 s"),
        ({"hides_fate": True}, "mps-killed", "expected the agent to name all pods that end together within 10 s"),
        ({"energy_leaks": True}, "energy", "expected power over time to be the counter within 10%"),
        ({"wastes_s": 0.01}, "cost", "expected at most 0.5% of a core, found 1.00%"),
    ],
)
def test_the_right_trial_fails_on_a_machine_that_does_not(tmp_path: Path, faithless, trial: str, says: str) -> None:
    there = machine(tmp_path, **faithless)
    found = try_out(there, trial)[trial]
    assert (found.verdict, says in found.said) == (Verdict.FAILED, True), found
    assert there.living() == [], "what failed is cleaned up, too"


@pytest.mark.parametrize(
    ("kind", "faithless", "trial", "says"),
    [
        ("H100", {"has_no_torch": True}, "mps-two", "it takes PyTorch with CUDA"),
        ("H100", {"has_no_cgroups": True}, "attribution", "it takes a cgroup of the pod: no cgroups here"),
        ("A100-40", {}, "activity", "SM activity is measured on Hopper and newer, or where DCGM's host engine runs"),
        ("T4", {}, "mig", "MIG is switched off"),
    ],
)
def test_what_cannot_be_tried_says_what_it_takes(tmp_path: Path, kind: str, faithless, trial: str, says: str) -> None:
    found = try_out(machine(tmp_path, kind, **faithless), trial, may_divide=True)[trial]
    assert (found.verdict, says in found.said) == (Verdict.SKIPPED, True), found


@pytest.mark.parametrize("kind", ["A100-80", "A30", "H200"])
def test_instances_are_made_and_destroyed_where_that_is_allowed(tmp_path: Path, kind: str) -> None:
    there = machine(tmp_path, kind)
    mig = there.node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    there = FakeMachine(there.node)
    assert try_out(there, "mig", may_divide=True)["mig"].verdict is Verdict.PASSED
    assert mig.instances == {}
    profile = mig.table.profiles[0]
    mig.create(profile.id, 0, profile.memory_slices)
    assert "somebody else's instances" in try_out(there, "mig", may_divide=True)["mig"].said
    assert len(mig.instances) == 1
