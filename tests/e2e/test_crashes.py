"""Each process is ended as by `kill -9` between two steps of a job's way: the job ends up placed once, and runs."""

import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from carpool_e2e.cluster import Cluster
from carpool_e2e.controlplane import make
from carpool_e2e.demo.manifests import sleeper
from kubectl import Watcher, eventually

CRASHING = str(Path(__file__).with_name("crashing.py"))

pytestmark = pytest.mark.e2e

CREATE = "carpool_core.kube.client:KubeClient.create"
PATCH = "carpool_core.kube.client:KubeClient.patch"

REPLACE_STATUS = "carpool_core.kube.client:KubeClient.replace_status"

DRY_RUN = "'is_dry_run': True"


def unpredicted(watcher: Watcher) -> bool:
    """Whether the job has neither a status nor a pod."""
    return not watcher.job("crash").get("status") and not watcher.pods("crash")


def unrecorded(watcher: Watcher) -> bool:
    """Whether the first attempt's pod exists, and the status does not have it yet."""
    return len(watcher.pods("crash")) == 1 and not watcher.job("crash").get("status")


def recorded(watcher: Watcher) -> bool:
    """Whether the status has the first attempt with the UID of its pod, and no placement."""
    status, uids = watcher.job("crash")["status"], [pod["metadata"]["uid"] for pod in watcher.pods("crash")]
    return [attempt["podUids"] for attempt in status["attempts"]] == [uids] and not status.get("placement")


def reserved(watcher: Watcher) -> bool:
    """Whether the pod has a reservation."""
    return len(watcher.reserved("crash")) == 1


class Crash(NamedTuple):
    """The process that ends, the call at which it ends, and a check of the cluster afterwards."""

    process: str
    at: str
    when: str
    matching: str
    stands: Callable[[Watcher], bool]


CRASHES = {
    "operator, before creating the pod": Crash("operator", CREATE, "before", "'Pod'", unpredicted),
    "operator, after creating the pod": Crash("operator", CREATE, "after", "'Pod'", unrecorded),
    "operator, before the first status": Crash("operator", REPLACE_STATUS, "before", "", unrecorded),
    "operator, after the first status": Crash("operator", REPLACE_STATUS, "after", "", recorded),
    "extender, after the reservation, before the Binding": Crash("extender", PATCH, "after", "reservations", reserved),
    "extender, just before the Binding": Crash("extender", CREATE, "before", "binding", reserved),
    "extender, after the Binding, before its answer": Crash("extender", CREATE, "after", "binding", reserved),
    "agent, between Allocate and PreStartContainer": Crash(
        "agent-a100", "carpool_deviceplugin.plugin:Plugin.pre_start", "before", "", reserved
    ),
    "agent, after the reservation, before it reports the partition": Crash(
        "agent-a100", PATCH, "before", "'state': 'Ready'", reserved
    ),
}


@pytest.mark.parametrize("crash", CRASHES.values(), ids=list(CRASHES))
def test_a_process_ends_between_two_steps(cluster: Cluster, watcher: Watcher, once: Path, crash: Crash) -> None:
    process = cluster[crash.process]
    healthy = process.command
    process.kill()
    process.command = [
        sys.executable, CRASHING, "--at", crash.at, "--when", crash.when,
        "--matching", crash.matching, "--not-matching", DRY_RUN, "--once", str(once), "--", *healthy[1:],
    ]  # fmt: skip
    try:
        process.start()
        cluster.apply(sleeper("crash"))
        eventually(f"{crash.process} to end", lambda: once.exists() and not process.running)
        assert crash.stands(watcher), f"{crash.process} ended, but not {crash.when} the call that is meant"
    finally:
        process.command = healthy
        process.kill()
        process.start()
    watcher.placed_once("crash", timeout_s=90)
    if crash.process == "operator":
        assert [attempt["number"] for attempt in watcher.job("crash")["status"]["attempts"]] == [1]


def test_the_extender_dies_while_it_waits_for_the_agent(cluster: Cluster, watcher: Watcher) -> None:
    cluster["agent-a100"].pause()
    cluster.apply(sleeper("halfway"))
    eventually("a reservation", lambda: watcher.reserved("halfway"))
    cluster["extender"].kill()
    cluster["extender"].start()
    cluster["agent-a100"].resume()
    watcher.placed_once("halfway", timeout_s=90)


def test_a_job_goes_on_while_everything_of_carpool_is_down(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("steady", "until [ -e /tmp/end ]; do sleep 0.1; done"))
    watcher.running("steady")
    names = ("operator", "extender", "agent-a100")
    for name in names:
        cluster[name].kill()
    pod = watcher.pods("steady")[0]["metadata"]["name"]
    cluster.kubectl("exec", pod, "--", "/bin/sh", "-c", ": > /tmp/end")
    eventually("the container to finish", lambda: watcher.read("pod", pod)["status"]["phase"] == "Succeeded")
    for name in names:
        cluster[name].start()
    eventually("Complete", lambda: watcher.state("steady") == "Complete")
    assert watcher.job("steady")["status"].get("restarts", 0) == 0
    eventually("the reservation released", lambda: not watcher.reserved("steady"))


def test_a_standby_goes_on_when_the_leading_operator_freezes(cluster: Cluster, watcher: Watcher) -> None:
    first = cluster["operator"]
    command = [*first.command, "--identity", "standby", "--metrics-port", "0"]
    standby = cluster.table.start("standby", command, first.environment, credentials=first.credentials)
    try:
        eventually("the standby to wait", lambda: "waits to lead" in standby.log.read_text())
        first.pause()
        began = time.monotonic()
        cluster.apply(sleeper("survivor"))
        eventually("a reservation", lambda: watcher.reserved("survivor"))
        assert time.monotonic() - began < 20
        first.resume()
        eventually("the first operator to end", lambda: not first.running)
        watcher.placed_once("survivor")
        assert [attempt["number"] for attempt in watcher.job("survivor")["status"]["attempts"]] == [1]
    finally:
        standby.kill(signal.SIGTERM)  # it gives up the Lease
        del cluster.table.processes["standby"]
        first.kill()
        first.start()


PLAIN_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "plain"},
    "spec": {
        "schedulerName": "carpool-scheduler",
        "containers": [{"name": "x", "image": "x", "resources": {"limits": {"carpool.dev/gpu": "1"}}}],
    },
}
"""A pod that no queue holds back: kube-scheduler asks the extender about it at once."""


def test_renewed_certificates_are_used_without_a_restart(cluster: Cluster, watcher: Watcher, tmp_path: Path) -> None:
    """Those of another program, which both processes find when they start, and which it then renews."""
    folder, port = cluster.plane.state / "volumes" / "tls", cluster.plane.ports.extender
    server, client = folder / "server.pem", folder / "client" / "client.pem"
    extender, scheduler = cluster["extender"], cluster["kube-scheduler"]

    def renew() -> None:
        make(tmp_path, "leaf", "/CN=leaf", ["IP:127.0.0.1"], "ca")
        for file in (server, client):
            new = tmp_path / file.name
            new.write_text((tmp_path / "leaf.crt").read_text() + (tmp_path / "leaf.key").read_text())
            new.replace(file)

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    scheduler.kill()
    extender.kill()
    make(tmp_path, "ca", "/CN=ca")
    (folder / "client" / "ca.crt").write_text((tmp_path / "ca.crt").read_text())
    renew()
    extender.start()
    scheduler.start()
    cluster.apply(sleeper("before"))
    watcher.placed_once("before", timeout_s=90)
    pid = scheduler.pid
    assert shown() in server.read_text()
    renew()
    eventually("the renewed certificate", lambda: shown() in server.read_text())
    extender.kill()
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "client" / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(server)
        with socket.create_server(("127.0.0.1", port)) as listener:  # in the extender's place, to see the scheduler's
            listener.settimeout(60)
            cluster.apply(PLAIN_POD)
            with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                certificate = connection.getpeercert(binary_form=True)
    finally:
        extender.start()
    assert certificate is not None
    assert ssl.DER_cert_to_PEM_cert(certificate) in client.read_text()
    cluster.kubectl("delete", "pod", "plain", "--now")
    cluster.apply(sleeper("renewed"))
    watcher.placed_once("renewed", timeout_s=90)
    assert scheduler.running
    assert scheduler.pid == pid
