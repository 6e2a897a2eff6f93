"""Each process is ended as by `kill -9` between two steps of a job's way: the job ends up placed once, and runs."""

import sys
from pathlib import Path

import pytest
from carpool_e2e.cluster import Cluster
from carpool_e2e.jobs import sleeper
from carpool_e2e.watching import Watcher, eventually

pytestmark = pytest.mark.e2e

CREATE = "carpool_core.kube.client:KubeClient.create"
PATCH = "carpool_core.kube.client:KubeClient.patch"

CRASHES = {
    "operator, after creating the pod, before writing the status": ("operator", CREATE, "after", "'Pod'"),
    "operator, before creating the pod": ("operator", CREATE, "before", "'Pod'"),
    "extender, after the reservation, before the Binding": ("extender", PATCH, "after", "reservations"),
    "extender, just before the Binding": ("extender", CREATE, "before", "binding"),
    "extender, after the Binding, before its answer": ("extender", CREATE, "after", "binding"),
    "agent, between Allocate and PreStartContainer": (
        "agent-a100", "carpool_deviceplugin.plugin:Plugin.pre_start", "before", "",
    ),
    "agent, after the reservation, before it reports the partition": (
        "agent-a100", PATCH, "before", "'state': 'Ready'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("crash", CRASHES, ids=list(CRASHES))
def test_a_process_ends_between_two_steps(cluster: Cluster, watcher: Watcher, once: Path, crash: str) -> None:
    name, at, when, matching = CRASHES[crash]
    process = cluster[name]
    healthy = process.command
    process.kill()
    process.command = [
        sys.executable, "-m", "carpool_e2e.crashing",
        "--at", at, "--when", when, "--matching", matching, "--once", str(once), "--", *healthy[1:],
    ]  # fmt: skip
    try:
        process.start()
        cluster.apply(sleeper("crash"))
        eventually(f"{name} to end", lambda: once.exists() and not process.running)
        assert name == "operator" or watcher.reserved("crash"), f"{name} ended before there was a reservation"
    finally:
        process.command = healthy
        process.kill()
        process.start()
    watcher.placed_once("crash", timeout_s=90)


def test_the_extender_dies_while_it_waits_for_the_agent(cluster: Cluster, watcher: Watcher) -> None:
    cluster["agent-a100"].pause()
    cluster.apply(sleeper("halfway"))
    eventually("a reservation", lambda: watcher.reserved("halfway"))
    cluster["extender"].kill()
    cluster["extender"].start()
    cluster["agent-a100"].resume()
    watcher.placed_once("halfway", timeout_s=90)


def test_a_job_goes_on_while_everything_of_carpool_is_down(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("steady", "sleep 4"))
    watcher.running("steady")
    names = ("operator", "extender", "agent-a100")
    for name in names:
        cluster[name].kill()
    pod = watcher.pods("steady")[0]["metadata"]["name"]
    eventually("the container to finish", lambda: watcher.read("pod", pod)["status"]["phase"] == "Succeeded")
    for name in names:
        cluster[name].start()
    eventually("Complete", lambda: watcher.state("steady") == "Complete")
    assert watcher.job("steady")["status"].get("restarts", 0) == 0
    eventually("the reservation released", lambda: not watcher.reserved("steady"))
