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

    def call(*arguments: str) -> str:
        command = [helm, *arguments, f"--namespace={NAMESPACE}"]
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
        before = certificates()
        notes = release("upgrade", RELEASE, str(CHART), *values, "--set", "nodeAgent.simulatedGpus=Tesla T4:1")
        assert "the node agents offer SIMULATED GPUs (Tesla T4:1)" in notes
        assert certificates() == before
        release("uninstall", RELEASE)
        left = control_plane.kubectl("get", KINDS, "-A", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
        # Pods' ReplicaSets and what else follows its owner is the garbage collector's.
        assert left == ""
    finally:
        control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
