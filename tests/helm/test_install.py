"""The chart's life with the real helm on a real API server."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_e2e.cluster import EMPTY, Cluster, KubectlError, running
from kubectl import eventually

pytestmark = pytest.mark.e2e

CHART = Path(__file__).parents[2] / "helm" / "carpool"
RELEASE, NAMESPACE = "carpool", "carpool-system"
CRD, NEW_FIELD = "gputrainingjobs.carpool.dev", "restarts"
KINDS = (
    "clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,secrets,configmaps,deployments,daemonsets,"
    "leases,validatingadmissionpolicies,validatingadmissionpolicybindings,networkpolicies,poddisruptionbudgets"
)
VALUES = ("--set=global.imageRegistry=localhost", "--set=nodeAgent.runtimeClassName=")


@pytest.fixture(scope="module")
def empty() -> Iterator[Cluster]:
    """A control plane without anything of the chart."""
    with running(EMPTY) as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        yield cluster


Helm = Callable[..., str]


def helm_of(cluster: Cluster, helm: str, home: Path) -> Helm:
    """Return what calls helm on a cluster."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(cluster.kubeconfig)}

    def call(*arguments: str, namespace: str = NAMESPACE, fails: bool = False) -> str:
        """Return the output of helm; with `fails`, its error."""
        command = [helm, *arguments, f"--namespace={namespace}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode != 0) is fails, done.stderr
        return done.stderr if fails else done.stdout

    return call


@pytest.fixture
def release(empty: Cluster, helm: str, tmp_path: Path) -> Iterator[Helm]:
    call = helm_of(empty, helm, tmp_path)
    yield call
    call("uninstall", RELEASE, "--ignore-not-found")


def test_the_api_server_accepts_every_object(empty: Cluster, render: Any) -> None:
    everything = render(networkPolicies={"enabled": True, "from": [{"podSelector": {}}]}, scheduler={"replicas": 2})
    text = yaml.dump_all(everything.objects, Dumper=yaml.CSafeDumper)
    said = empty.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
    )
    assert len(said.splitlines()) == len(everything.objects)


JOB = {
    "apiVersion": "carpool.dev/v1alpha1",
    "kind": "GpuTrainingJob",
    "metadata": {"name": "running", "namespace": "default"},
    "spec": {"template": {"spec": {"containers": [{"name": "train", "image": "localhost/train"}]}}},
}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "running-worker-0-1", "namespace": "default"},
    "spec": {"containers": [{"name": "train", "image": "localhost/train"}]},
}


def test_the_chart_lives_through_upgrade_rollback_uninstallation_and_another_installation(
    empty: Cluster, release: Helm, previous: Path
) -> None:
    """Regression: an installation after an upgrade and an uninstallation ended in `conflict with "kubectl"`."""

    def has_new_field() -> bool:
        crd = json.loads(empty.kubectl("get", "crd", CRD, "-o", "json", "--show-managed-fields"))
        managers = {entry["manager"] for entry in crd["metadata"]["managedFields"]}
        assert managers == {"helm", "kube-apiserver"}, "the CRD has one owner"
        return (
            NEW_FIELD in crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        )

    def untouched() -> list[tuple[str, str]]:
        found = json.loads(empty.kubectl("get", "gtj/running", "pod/running-worker-0-1", "-o", "json"))["items"]
        return [(one["metadata"]["uid"], one["metadata"]["resourceVersion"]) for one in found]

    def warned() -> bool:
        file = f"{previous}/definitions/carpool.dev_gputrainingjobs.yaml"
        strict = ("--server-side", "--force-conflicts", "--dry-run=server", "--warnings-as-errors")
        try:
            empty.kubectl("apply", *strict, "-f", file)
        except KubectlError as error:
            return f"expected the resource definition {CRD} of Carpool" in str(error)
        return False

    chart = str(CHART)
    release("install", RELEASE, str(previous), *VALUES)
    empty.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=120s")
    assert not has_new_field()
    empty.apply(JOB, POD)
    status = json.dumps({"status": {"state": "Running", "observedGeneration": 1, "conditions": []}})
    empty.kubectl("patch", "gtj", "running", "--subresource=status", "--type=merge", "-p", status)
    before = untouched()
    notes = release("upgrade", RELEASE, chart, *VALUES)
    assert "pod-security.kubernetes.io/enforce=privileged" in notes
    assert has_new_field()
    release("rollback", RELEASE, "1")
    assert not has_new_field()
    off = [f"--set=monitoring.{what}=false" for what in ("podMonitors", "dashboards", "rules")]
    notes = release("upgrade", RELEASE, chart, *VALUES, *off, "--set=nodeAgent.simulatedGpus=Tesla T4:1")
    assert "Prometheus" not in notes
    assert "the node agents offer SIMULATED GPUs (Tesla T4:1)" in notes
    eventually("a warning about definitions of another version", warned)
    release("uninstall", RELEASE)
    assert has_new_field()
    left = empty.kubectl("get", KINDS, "-A", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    # Pods' ReplicaSets and what else follows its owner is the garbage collector's.
    assert left == ""
    notes = release("install", RELEASE, chart, *VALUES)
    assert "kubectl label node NODE carpool.dev/node=managed" in notes
    assert "ATTENTION" not in notes
    assert has_new_field()
    assert untouched() == before
    empty.kubectl("delete", "gtj/running", "pod/running-worker-0-1", "--now")


def test_a_second_installation_is_refused_with_a_sentence(empty: Cluster, release: Helm) -> None:
    notes = release("install", RELEASE, str(CHART), VALUES[0], "--set=monitoring.rules=false")
    assert "no Prometheus Operator, so monitoring.dashboards, monitoring.podMonitors installed nothing:" in notes
    assert "ATTENTION: expected the RuntimeClass nvidia, found none" in notes
    refused = release(
        "install", "another", str(CHART), *VALUES, "--create-namespace", namespace="elsewhere", fails=True
    )
    assert "expected no other installation of Carpool in this cluster, found release carpool in namespace" in refused
    assert release("list", "-q", namespace="elsewhere") == ""


def test_resource_definitions_of_kubectl_are_handed_over(helm: str, previous: Path, tmp_path: Path) -> None:
    """As versions did that left them to kubectl. Its own cluster: deleting definitions can take more than a minute."""
    with running(EMPTY) as cluster:
        release = helm_of(cluster, helm, tmp_path)
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("apply", "--server-side", "-f", str(CHART / "definitions"))
        refused = release("install", RELEASE, str(CHART), *VALUES, fails=True)
        assert "cannot be imported into the current release" in refused
        by_others = ("install", RELEASE, str(CHART), *VALUES, "--set=crds.enabled=false", "--dry-run=server")
        release(*by_others)
        cluster.kubectl("apply", "--server-side", "-f", str(previous / "definitions"))
        refused = release(*by_others, fails=True)
        assert f"expected the resource definition {CRD} of this chart, because crds.enabled is false, found" in refused
        release("install", RELEASE, str(CHART), *VALUES, "--take-ownership", "--force-conflicts")
        release("upgrade", RELEASE, str(CHART), *VALUES)


NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpus", "labels": {"carpool.dev/node": "managed"}}}


def test_an_upgrade_renews_the_agents_and_leaves_their_mps_daemons_alone(empty: Cluster, release: Helm) -> None:
    """The daemons were in the agent's pod: each upgrade ended every job that used them."""

    def pods() -> dict[str, tuple[str, str]]:
        """UID and image of the node's pods, by component."""
        found = json.loads(empty.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
        labels = {p["metadata"]["uid"]: p["metadata"]["labels"]["app.kubernetes.io/component"] for p in found}
        living = {p["metadata"]["uid"]: p for p in found if not p["metadata"].get("deletionTimestamp")}
        return {
            labels[uid]: (uid, pod["spec"]["containers"][0]["image"])
            for uid, pod in living.items()
            if labels[uid] in ("node-agent", "mps")
        }

    empty.apply(NODE)
    try:
        release("install", RELEASE, str(CHART), *VALUES)
        before = eventually("pods of agent and daemons", lambda: found if len(found := pods()) == 2 else None)
        release("upgrade", RELEASE, str(CHART), *VALUES, "--set=nodeAgent.image.tag=next")

        def renewed() -> dict[str, tuple[str, str]] | None:
            found = pods()
            return found if found.get("node-agent", ("", ""))[1].endswith(":next") else None

        after = eventually("a new agent", renewed)
        assert after["mps"] == before["mps"]
        assert after["node-agent"][0] != before["node-agent"][0]
        empty.kubectl("delete", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=mps")
        anew = eventually("new daemons", lambda: found if "mps" in (found := pods()) else None)
        assert anew["mps"][1].endswith(":next")
    finally:
        empty.kubectl("delete", "node", NODE["metadata"]["name"])
