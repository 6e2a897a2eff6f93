"""Jobs that wait are tried by their length, where the chart says so: kube-scheduler's own queue does it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from carpool_e2e.chart import Rendered, render
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import H100
from carpool_e2e.jobs import sleeper
from carpool_e2e.watching import Watcher, eventually

pytestmark = pytest.mark.e2e

OPERATOR = ("Deployment", "carpool-operator")
BACKOFF_S = 3.0
"""A little more than kube-scheduler keeps back a pod that was just refused, whatever its priority."""


@pytest.fixture
def longest_first(cluster: Cluster, watcher: Watcher) -> Iterator[None]:
    """The cluster as if the chart had been upgraded to that order, and back: its classes, and another operator."""
    rendered = render(cluster.binaries, {"settings.queueOrder": "LongestFirst"})
    classes = [one for one in rendered.manifests if one["kind"] == "PriorityClass"]
    others = [one for one in cluster.rendered.manifests if (one["kind"], one["metadata"]["name"]) != OPERATOR]
    # Rendered anew, the keys would be others than the extender's.
    upgraded = Rendered((*others, rendered.one(*OPERATOR)))
    cluster.apply(*classes)
    cluster["operator"].kill()
    replace(cluster.processes, rendered=upgraded).start_operator()
    yield
    watcher.clear()
    cluster["operator"].kill()
    cluster.processes.start_operator()
    cluster.kubectl("delete", "priorityclasses", *(one["metadata"]["name"] for one in classes))


def whole_node(name: str, **training: int) -> dict[str, Any]:
    """A job that wants all GPUs of a node to itself."""
    job = sleeper(name, gpu={"product": H100}, gpusPerWorker=4, sharing={"mode": "Exclusive"})
    job["spec"]["training"] |= training
    return job


def free(cluster: Cluster, watcher: Watcher, running: str) -> None:
    """End a job; kube-scheduler hears of it once the GPUs are given back and nobody is kept back any more.

    Both could let a shorter job in first: kube-scheduler tries nobody in between, nor again who was just refused.
    """
    time.sleep(BACKOFF_S)
    scheduler = cluster["kube-scheduler"]
    scheduler.pause()
    cluster.kubectl("delete", "gputrainingjob", running)
    eventually(f"what {running} held to be given back", lambda: not watcher.reserved(running))
    time.sleep(BACKOFF_S)
    scheduler.resume()


@pytest.mark.usefixtures("longest_first")
def test_the_longest_of_those_that_wait_starts_first(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(whole_node("first"))
    watcher.running("first")
    waiting = ["short", "unknown", "long"]
    for name, training in zip(waiting, ({"steps": 100}, {}, {"steps": 10**8}), strict=True):
        cluster.apply(whole_node(name, **training))
        eventually(f"{name} to wait", lambda name=name: watcher.condition(name, "Placed").get("reason") == "NoGpuFits")
    specs = [watcher.pods(name)[0]["spec"] for name in waiting]
    assert [(spec["priorityClassName"], spec["priority"], spec["preemptionPolicy"]) for spec in specs] == [
        ("carpool-length-00", 1, "Never"),
        ("carpool-length-11", 12, "Never"),
        ("carpool-length-23", 24, "Never"),
    ]
    assert "; 100,000,000 steps take about " in watcher.condition("long", "Predicted")["message"]
    running, order = "first", []
    while waiting:
        assert watcher.state(running) == "Running", "nobody is evicted"
        free(cluster, watcher, running)
        running = eventually("the next", lambda: next((name for name in waiting if watcher.reserved(name)), ""))
        watcher.running(running)
        waiting.remove(running)
        order.append(running)
    assert order == ["long", "unknown", "short"]
