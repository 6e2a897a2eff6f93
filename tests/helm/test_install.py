"""Install, upgrade and uninstall with the real helm on a real API server."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_e2e.cluster import Cluster
from kubectl import eventually

pytestmark = pytest.mark.e2e

CHART = Path(__file__).parents[2] / "helm" / "carpool"
RELEASE, NAMESPACE = "second", "second-carpool"
KINDS = (
    "clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,secrets,configmaps,deployments,daemonsets,"
    "leases,validatingadmissionpolicies,validatingadmissionpolicybindings"
)


@pytest.fixture
def release(control_plane: Cluster, helm: str, tmp_path: Path) -> Callable[..., str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(control_plane.kubeconfig)}

    def call(*arguments: str, namespace: str = NAMESPACE) -> str:
        command = [helm, *arguments, f"--namespace={namespace}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_the_api_server_accepts_every_object(control_plane: Cluster, chart: Any) -> None:
    text = yaml.dump_all(chart.objects, Dumper=yaml.CSafeDumper)
    said = control_plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
    )
    assert len(said.splitlines()) == len(chart.objects)


def test_an_upgrade_keeps_the_certificates_and_uninstalling_leaves_nothing(
    control_plane: Cluster, release: Callable[..., str]
) -> None:
    def certificates() -> Any:
        secret = control_plane.kubectl("get", "secret", f"{RELEASE}-carpool-scheduler", "-n", NAMESPACE, "-o", "json")
        return json.loads(secret)["data"]

    values = ("--skip-crds", "--set", "global.imageRegistry=localhost")
    control_plane.kubectl("create", "namespace", NAMESPACE)
    try:
        notes = release("install", RELEASE, str(CHART), *values)
        assert "kubectl label node NODE carpool.dev/node=managed" in notes
        assert "SIMULATED" not in notes
        assert "resource definitions as they were first installed" not in notes
        before = certificates()
        notes = release("upgrade", RELEASE, str(CHART), *values, "--set", "nodeAgent.simulatedGpus=Tesla T4:1")
        assert "the node agents offer SIMULATED GPUs (Tesla T4:1)" in notes
        assert "kubectl apply --server-side --force-conflicts -f crds/" in notes
        assert certificates() == before
        release("uninstall", RELEASE)
        left = control_plane.kubectl("get", KINDS, "-A", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
        # Pods' ReplicaSets and what else follows its owner is the garbage collector's.
        assert left == ""
    finally:
        control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpus", "labels": {"carpool.dev/node": "managed"}}}


def test_an_upgrade_renews_the_agents_and_leaves_their_mps_daemons_alone(
    control_plane: Cluster, release: Callable[..., str]
) -> None:
    """The daemons were in the agent's pod: each upgrade ended every job that used them."""
    namespace, values = "upgraded", ["--skip-crds", "--set=global.imageRegistry=localhost"]
    values.append("--set=nodeAgent.runtimeClassName=")  # there is none in this cluster, so its pods would be refused

    def pods() -> dict[str, tuple[str, str]]:
        """UID and image of the node's pods, by component."""
        found = json.loads(control_plane.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        labels = {p["metadata"]["uid"]: p["metadata"]["labels"]["app.kubernetes.io/component"] for p in found}
        living = {p["metadata"]["uid"]: p for p in found if not p["metadata"].get("deletionTimestamp")}
        return {
            labels[uid]: (uid, pod["spec"]["containers"][0]["image"])
            for uid, pod in living.items()
            if labels[uid] in ("node-agent", "mps")
        }

    control_plane.kubectl("create", "namespace", namespace)
    control_plane.apply(NODE)
    try:
        release("install", "third", str(CHART), *values, namespace=namespace)
        before = eventually("pods of agent and daemons", lambda: found if len(found := pods()) == 2 else None)
        release("upgrade", "third", str(CHART), *values, "--set=nodeAgent.image.tag=next", namespace=namespace)

        def renewed() -> dict[str, tuple[str, str]] | None:
            found = pods()
            return found if found.get("node-agent", ("", ""))[1].endswith(":next") else None

        after = eventually("a new agent", renewed)
        assert after["mps"] == before["mps"]
        assert after["node-agent"][0] != before["node-agent"][0]
        control_plane.kubectl("delete", "pod", "-n", namespace, "-l", "app.kubernetes.io/component=mps")
        anew = eventually("new daemons", lambda: found if "mps" in (found := pods()) else None)
        assert anew["mps"][1].endswith(":next")
    finally:
        release("uninstall", "third", "--ignore-not-found", namespace=namespace)
        control_plane.kubectl("delete", "node", NODE["metadata"]["name"])
        control_plane.kubectl("delete", "namespace", namespace, "--wait=false")
