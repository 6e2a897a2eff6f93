"""The chart with two replicas on two nodes: the node of both leaders freezes, and placement goes on."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from carpool_e2e.chart import CHART, NAMESPACE, RELEASE
from carpool_e2e.cluster import Cluster, Shape, running, why_no_kubelets
from carpool_e2e.demo.manifests import sleeper
from kubectl import Watcher, eventually
from test_pods import AGENT, OPERATOR, SCHEDULER

pytestmark = pytest.mark.e2e

GPUS = "NVIDIA A100-SXM4-40GB:2"
SHAPE = Shape({"a": GPUS, "b": GPUS}, carpool=False, chart=False, images=True)
VALUES = {
    "global.imageRegistry": "localhost",
    "operator.replicas": 2,
    "scheduler.replicas": 2,
    "nodeAgent.simulatedGpus": GPUS,
}
COMPONENTS = {"operator": "operator", "kube-scheduler": "scheduler"}
"""Container that elects a leader → component."""
MOST_S = 20.0
"""Longest time from the loss of both leaders to the placement of a job."""


@pytest.fixture(scope="module")
def replicated(helm: str) -> Iterator[Cluster]:
    """After `helm install` with two replicas of operator and scheduler, all of them ready."""
    if reason := why_no_kubelets():
        pytest.skip(reason)
    with running(SHAPE) as cluster:
        values = [f"--set={key}={value}" for key, value in VALUES.items()]
        command = [helm, "install", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--create-namespace", *values]
        subprocess.run(command, check=True, env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)})
        for workload in (OPERATOR, SCHEDULER, AGENT):
            cluster.kubectl("rollout", "status", workload, "-n", NAMESPACE, "--timeout=180s", timeout_s=190)
        yield cluster


def pods_of(watcher: Watcher, component: str) -> dict[str, str]:
    """Node of each pod that is not about to end, by name."""
    found = watcher.read("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")["items"]
    living = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in living}


def leader_of(watcher: Watcher, component: str) -> str:
    """Name of the pod that leads; empty while none does."""
    lease = watcher.read("lease", f"carpool-{component}", "-n", NAMESPACE)
    return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]


def restarts_on(watcher: Watcher, node: str) -> set[str]:
    """Containers of a node that were started again."""
    pods = watcher.read("pods", "-n", NAMESPACE, f"--field-selector=spec.nodeName={node}")["items"]
    return {one["name"] for pod in pods for one in pod["status"].get("containerStatuses", []) if one["restartCount"]}


def processes_of(first: int) -> list[int]:
    """All processes of a node: those of its PID namespace, and their descendants in those of containers."""
    parents: dict[int, int] = {}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if os.readlink(entry / "ns" / "pid") == os.readlink(f"/proc/{first}/ns/pid"):
                found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def pinned(name: str, node: str) -> dict[str, Any]:
    """A job for the node that is left: the GPUs of the frozen one count as lost only after a minute."""
    job = sleeper(name, "sleep 2")
    job["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return job


def test_replicas_are_on_different_nodes(replicated: Cluster) -> None:
    for component in COMPONENTS.values():
        assert sorted(pods_of(Watcher(replicated), component).values()) == ["a", "b"]


def test_placement_goes_on_when_the_node_of_both_leaders_freezes(replicated: Cluster) -> None:
    watcher = Watcher(replicated)

    def nodes_of_leaders() -> list[str]:
        """Node of each leader; empty while one of them is not known."""
        found = [
            pods_of(watcher, component).get(leader_of(watcher, component), "") for component in COMPONENTS.values()
        ]
        return found if all(found) else []

    for _ in range(4):
        if len({*eventually("leaders of both", nodes_of_leaders, 90)}) == 1:
            break
        # It gives up the Lease, as a rule to the other; meanwhile the scheduler's may have moved, too.
        replicated.kubectl("delete", "pod", leader_of(watcher, "operator"), "-n", NAMESPACE, "--ignore-not-found")
        replicated.kubectl("rollout", "status", OPERATOR, "-n", NAMESPACE, "--timeout=120s", timeout_s=130)
    (lost,) = {*eventually("leaders of both", nodes_of_leaders, 90)}
    replicated.kubectl("rollout", "status", OPERATOR, "-n", NAMESPACE, "--timeout=120s", timeout_s=130)
    (left,) = SHAPE.kubelet_nodes.keys() - {lost}
    frozen = processes_of(replicated.namespaces[lost])
    send(frozen, signal.SIGSTOP)
    began = time.monotonic()
    try:
        replicated.apply(pinned("survivor", left))
        eventually("a reservation", lambda: watcher.reserved("survivor"))
        took_s = time.monotonic() - began
        print(f"placed {took_s:.1f} s after the leaders were lost")
        assert took_s < MOST_S
        replicated.kubectl("wait", "gtj/survivor", "--for=condition=Complete", "--timeout=60s", timeout_s=70)
    finally:
        send(frozen, signal.SIGCONT)
        for name in (f"containerd-{lost}", f"kubelet-{lost}", f"service-proxy-{lost}"):
            replicated[name].resume()
    # The former leaders find that others lead, and end. In its last seconds kube-scheduler still places pods: they are
    # bound once and reported twice.
    eventually("the former leaders to have ended", lambda: restarts_on(watcher, lost) >= COMPONENTS.keys(), 120)
    replicated.apply(pinned("next", left))
    replicated.kubectl("wait", "gtj/next", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    for job in ("survivor", "next"):
        assert [attempt["number"] for attempt in watcher.job(job)["status"]["attempts"]] == [1]
        (pod,) = watcher.pods(job)
        assert (pod["spec"]["nodeName"], pod["status"]["phase"]) == (left, "Succeeded")
        events = [event for event in watcher.read("events")["items"] if job in event["involvedObject"]["name"]]
        counted = Counter((event["involvedObject"]["name"], event["reason"], event["message"]) for event in events)
        assert {*counted.values()} == {1}, counted
        assert {event.get("count") or 1 for event in events} == {1}
