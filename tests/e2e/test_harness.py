"""Clusters side by side, and what is left of a cluster whose harness was ended."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_e2e import processes
from carpool_e2e.cluster import Cluster
from kubectl import eventually

pytestmark = pytest.mark.e2e

HOLDER = Path(__file__).with_name("hold_a_cluster.py")


class Held:
    """A cluster that another process holds."""

    def __init__(self, process: subprocess.Popen[str], slot: int) -> None:
        self.process, self.slot = process, slot
        self.directory = processes.default_root() / str(self.slot)
        self.name = processes.slot_name(processes.default_root(), self.slot)

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=180)

    def left(self) -> dict[str, object]:
        """Everything that is on the machine because of it."""
        found = {
            "processes": processes.marked_processes(self.directory),
            "links": [link.name for link in processes.LINKS.glob(f"{self.name}-*")],
            "cgroups": [str(g) for root in processes.hierarchies() for g in root.glob(f"{self.name}-*")],
            "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.directory) in line],
            "files": [str(self.directory)] if self.directory.exists() else [],
        }
        return {what: those for what, those in found.items() if those}


def started(*arguments: str) -> subprocess.Popen[str]:
    """Start Python with the usual answers to signals: nohup and shells have what they start ignore some."""
    command = ["env", "--default-signal=HUP,INT,TERM", sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def held() -> Iterator[Held]:
    process = started(str(HOLDER), "kubelet")
    assert process.stdout is not None
    held = Held(process, int(process.stdout.readline()))
    yield held
    if held.process.poll() is None:
        held.end(signal.SIGINT)


def test_what_kill_9_leaves_the_next_start_removes(control_plane: Cluster, held: Held) -> None:
    held.end(signal.SIGKILL)
    assert {"processes", "cgroups", "files"} <= set(held.left()), "a killed harness cannot clean up"
    fresh = processes.acquire()
    try:
        left = held.left()
        assert left.keys() <= ({"files"} if fresh.number == held.slot else set()), left
        assert list(fresh.directory.iterdir()) == []
    finally:
        fresh.empty()
        fresh.release()
    assert control_plane.plane.api.answers("/readyz"), "a cluster in use is left alone"


def test_two_clusters_do_not_disturb_each_other_and_an_interrupted_one_leaves_nothing(
    control_plane: Cluster, held: Held
) -> None:
    theirs = held.directory / control_plane.kubeconfig.relative_to(control_plane.slot.directory)
    assert theirs.read_text() != control_plane.kubeconfig.read_text()
    control_plane.kubectl("create", "configmap", "only-here")
    configmaps = control_plane.kubectl("get", "configmaps", "-o", "name", f"--kubeconfig={theirs}")
    assert "kube-root-ca.crt" in configmaps
    assert "only-here" not in configmaps
    held.end(signal.SIGTERM)  # other signals are handled alike: test_ending.py
    assert held.process.returncode != 0
    assert held.left() == {}
    assert control_plane.plane.api.answers("/readyz")


@pytest.mark.parametrize(
    ("first", "then"),
    [*zip(processes.LIKE_CTRL_C, processes.LIKE_CTRL_C, strict=True), (signal.SIGINT, signal.SIGTERM)],
    ids=lambda number: number.name,
)
def test_a_demo_that_is_ended_while_it_starts_leaves_nothing(first: signal.Signals, then: signal.Signals) -> None:
    demo = started("-m", "carpool_e2e", "demo")
    assert demo.stdout is not None
    line = next(one for one in demo.stdout if one.startswith("Starting a cluster in "))
    cluster = Held(demo, int(Path(line.removeprefix("Starting a cluster in ").split(":")[0]).name))
    eventually("processes of the cluster", lambda: processes.marked_processes(cluster.directory))
    demo.send_signal(first)
    demo.send_signal(then)  # `timeout` signals make and what it started, and make hands it on; CI insists after a while
    demo.communicate(timeout=180)
    assert demo.returncode == 1
    assert cluster.left() == {}


def test_the_charts_accounts_and_policies_are_there(control_plane: Cluster) -> None:
    accounts = control_plane.kubectl("get", "serviceaccounts", "-n", "carpool-system", "-o", "name").split()
    policies = control_plane.kubectl("get", "validatingadmissionpolicies", "-o", "name")
    assert {f"serviceaccount/carpool-{name}" for name in ("operator", "scheduler", "node-agent")} <= set(accounts)
    assert "carpool-pods" in policies
