"""On a real API server: an operator that is confined to one namespace works there, with rights nowhere else."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from carpool_e2e.chart import NAMESPACE
from carpool_e2e.cluster import Cluster, carpool_command
from carpool_e2e.controlplane import Api, kubeconfig

pytestmark = pytest.mark.e2e

RBAC = "/apis/rbac.authorization.k8s.io/v1"
JOBS = "/apis/carpool.dev/v1alpha1/namespaces/{}/gputrainingjobs"
OWN, OTHER = "confined-own", "confined-other"
ACCOUNT = "confined-carpool-operator"


def path_of(manifest: dict[str, Any]) -> str:
    namespace = manifest["metadata"].get("namespace")
    prefix = "/api/v1" if manifest["kind"] == "ServiceAccount" else RBAC
    return f"{prefix}{f'/namespaces/{namespace}' if namespace else ''}/{manifest['kind'].lower()}s"


@pytest.fixture
def api(control_plane: Cluster, render: Any) -> Iterator[Api]:
    """Two namespaces, and the rights of a second release whose operator is confined to the first."""
    api = control_plane.plane.api
    chart = render(fullnameOverride="confined-carpool", settings={"namespaces": [OWN]})
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    mine = [o for o in chart.all(*kinds) if o["metadata"]["name"] == ACCOUNT]
    for name in (OWN, OTHER):
        api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    for manifest in mine:
        api.call("POST", path_of(manifest), manifest)
    yield api
    for manifest in mine:
        api.call("DELETE", f"{path_of(manifest)}/{ACCOUNT}")
    for name in (OWN, OTHER):
        for job in api.call("GET", JOBS.format(name))["items"]:
            api.call("DELETE", f"{JOBS.format(name)}/{job['metadata']['name']}")
        api.call("DELETE", f"/api/v1/namespaces/{name}")


def test_operator_works_with_rights_in_its_namespace_only(api: Api, tmp_path: Path) -> None:
    """Regression: it listed the jobs of the whole cluster at its start, and had the right to create pods anywhere."""
    spec = {"template": {"spec": {"containers": [{"name": "train", "image": "localhost/none"}]}}}
    for namespace in (OWN, OTHER):
        job = {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuTrainingJob", "metadata": {"name": "x"}, "spec": spec}
        api.call("POST", JOBS.format(namespace), job)
    config = tmp_path / "kubeconfig"
    config.write_text(kubeconfig(api.server, api.ca_file, api.token_of(NAMESPACE, ACCOUNT)))
    command = [carpool_command(), "operator", f"--namespaces={OWN}", "--metrics-port=0"]
    log = tmp_path / "log"
    with log.open("w") as out:
        operator = subprocess.Popen([*command, f"--kubeconfig={config}"], stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not (status := api.call("GET", f"{JOBS.format(OWN)}/x").get("status", {})).get("conditions"):
            assert operator.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    finally:
        operator.terminate()
        operator.wait(20)
    placed = next(c for c in status["conditions"] if c["type"] == "Placed")
    assert placed["reason"] == "NoGpuNodes"
    assert "status" not in api.call("GET", f"{JOBS.format(OTHER)}/x")
    assert "forbidden" not in log.read_text().casefold()
