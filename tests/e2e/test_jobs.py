"""What a user of the cluster sees of jobs that are not as usual."""

import json
import sys

import pytest
import yaml
from carpool_core.keys import SCHEDULER_NAME
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.fleet import TOLERATION
from carpool_e2e.workloads import training_template
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e


def test_misspelt_field_of_the_template_is_named(cluster: Cluster, watcher: Watcher) -> None:
    job = sleeper("misspelt", model={"catalog": {"name": "timm/resnet50"}})
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["train"]
    cluster.kubectl("apply", "--validate=false", "-f", "-", stdin=yaml.safe_dump(job))
    failed = eventually("Failed", lambda: watcher.condition("misspelt", "Failed"))
    assert failed["message"].startswith("spec.template.spec.containers[0].comand: a pod has no such field")
    assert watcher.condition("misspelt", "Predicted") == {}, "its model was not traced first"
    assert watcher.pods("misspelt") == []


def test_workers_know_each_other(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("pair", workers=2))
    watcher.running("pair")
    variables = [cluster.kubectl("exec", f"pair-worker-{worker}-1", "--", "/bin/sh", "-c", "env") for worker in (0, 1)]
    for worker, text in enumerate(variables):
        assert {"MASTER_ADDR=worker-0-1.pair-workers", f"RANK={worker}", "WORLD_SIZE=2"} <= set(text.splitlines())

    def hostnames() -> set[str]:
        """Names that the cluster's DNS resolves."""
        slices = watcher.read("endpointslices", "-l", "kubernetes.io/service-name=pair-workers")["items"]
        return {endpoint["hostname"] for one in slices for endpoint in one["endpoints"] or ()}

    eventually("an address of each worker", lambda: hostnames() == {"worker-0-1", "worker-1-1"})
    cluster.kubectl("delete", "gputrainingjob", "pair")
    eventually("the service to go with its job", lambda: watcher.read("service", "pair-workers") is None)


def test_job_without_a_product_runs_where_containers_start(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("anywhere", gpu={}))
    watcher.placed_once("anywhere")


def test_waiting_job_has_the_reasons_of_extender_and_scheduler(cluster: Cluster, watcher: Watcher) -> None:
    job = sleeper("both", gpu={}, memory={"limit": "30Gi"})
    spec = job["spec"]["template"]["spec"]
    spec["tolerations"] = [TOLERATION]
    spec["containers"][0]["resources"] = {"requests": {"cpu": "30"}}
    cluster.apply(job)

    def refusal() -> str | None:
        placed = watcher.condition("both", "Placed")
        return placed["message"] if placed.get("reason") == "NoGpuFits" else None

    message = eventually("NoGpuFits", refusal)
    assert message.startswith("needs 30,720 MiB; freest Simulated Tesla T4 has"), message
    assert message.endswith("; other nodes: 2 Insufficient cpu"), message


def test_pod_of_a_workers_name_does_not_replace_it(cluster: Cluster, watcher: Watcher) -> None:
    cluster.apply(sleeper("real"))
    job = watcher.running("real")
    worker = watcher.pods("real")[0]
    assert job["status"]["attempts"][0]["podUids"] == [worker["metadata"]["uid"]]
    forged = {key: worker["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
    container = {"name": "train", "image": "localhost/busybox:dev", "imagePullPolicy": "Never", "command": ["true"]}
    spec = {"schedulerName": SCHEDULER_NAME, "containers": [container]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": forged, "spec": spec}
    cluster["operator"].kill()
    cluster.kubectl("delete", "pod", "real-worker-0-1", "--force")
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    cluster["operator"].start()
    eventually("another attempt", lambda: len(watcher.job("real")["status"]["attempts"]) == 2)
    watcher.running("real")
    first, second = watcher.job("real")["status"]["attempts"]
    assert (first["outcome"], second["outcome"]) == ("PodDeleted", "Running")

    def names() -> list[str]:
        return [pod["metadata"]["name"] for pod in watcher.pods("real")]

    eventually("the other pod to be deleted", lambda: names() == ["real-worker-0-2"])


CALL = """
import os, ssl, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount"
url = "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}/api".format_map(os.environ)
call = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(account + "/token").read()})
print(urllib.request.urlopen(call, context=ssl.create_default_context(cafile=account + "/ca.crt")).status)
"""


def test_a_pod_reaches_the_api_server_with_its_own_credentials(cluster: Cluster, watcher: Watcher) -> None:
    """By the Service `kubernetes`; the path /api answers no anonymous caller."""
    spec = training_template([])["spec"]
    spec["containers"][0]["command"] = [sys.executable, "-c", CALL]
    metadata = {"name": "caller", "namespace": "default"}
    spec |= {"nodeName": "a100", "restartPolicy": "Never"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    eventually("its end", lambda: watcher.read("pod", "caller")["status"]["phase"] in ("Succeeded", "Failed"), 120)
    assert cluster.kubectl("logs", "caller") == "200\n"
