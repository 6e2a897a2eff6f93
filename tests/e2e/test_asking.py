"""`carpool explain` and `carpool what-if` against a real API server, with no more rights than reading."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import yaml
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from carpool_e2e.bench.throughput import node_name, populate
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.fleet import FleetNode, node_status
from kubectl import carpool

pytestmark = pytest.mark.e2e

READER = "asker"
RULES = [{"apiGroups": ["carpool.dev"], "resources": ["gputrainingjobs", "gpunodes"], "verbs": ["get", "list"]}]


@pytest.fixture
def asker(control_plane: Cluster) -> Path:
    """A kubeconfig of a user who may read jobs and GpuNodes, and nothing else."""
    meta = {"name": READER}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "namespace": "default"}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": meta, "rules": RULES}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": READER},
        "subjects": [{"kind": "ServiceAccount", "name": READER, "namespace": "default"}],
    }
    control_plane.apply(account, role, binding)
    return control_plane.plane.write_kubeconfig(READER, control_plane.plane.api.token_of("default", READER))


async def _names(api: KubeApi) -> set[str]:
    """Names of the jobs and pods that are there; other tests on this cluster leave theirs."""
    pages = [await api.list_page(kind, Selector(namespace="default")) for kind in (GPU_TRAINING_JOBS, PODS)]
    return {msgspec.json.decode(item)["metadata"]["name"] for page in pages for item in page.items}


async def test_explain_and_what_if_list_every_gpu_and_create_nothing(
    control_plane: Cluster, asker: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(sleeper("asked")))
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(yaml.safe_dump(sleeper("misspelt", priority=3)))
    comand = tmp_path / "comand.yaml"
    wrong = sleeper("comand")
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = ["sleep"]
    comand.write_text(yaml.safe_dump(wrong))
    admin = control_plane.kubeconfig
    async with connect(KubeSettings(kubeconfig=str(control_plane.kubeconfig))) as api:
        before = await _names(api)
        await populate(api, 2, 2)
        for number in range(2):
            node = FleetNode(node_name(number), 16)
            await api.patch(NODES, node.name, node_status(node, datetime.now(UTC)), subresource="status")
        await api.create(GPU_TRAINING_JOBS, sleeper("waiting"), namespace="default")
        explained, asked, refused, elsewhere, missing, mistyped = await asyncio.gather(
            asyncio.to_thread(carpool, asker, "explain", "waiting", "-n", "default"),
            asyncio.to_thread(carpool, asker, "what-if", str(manifest), "-n", "default", "--all"),
            asyncio.to_thread(carpool, admin, "what-if", str(misspelt)),
            asyncio.to_thread(carpool, admin, "what-if", str(manifest)),
            asyncio.to_thread(carpool, asker, "explain", "absent", "-n", "default"),
            asyncio.to_thread(carpool, admin, "what-if", str(comand)),
        )
        created = await _names(api) - before
        await api.delete(GPU_TRAINING_JOBS, "waiting", namespace="default")
        for number in range(2):
            await api.delete(GPU_NODES, f"bench-{number:04}")
    assert explained.returncode == 0, explained.stderr
    assert "default/waiting has no place yet" in explained.stdout
    assert "4 GPUs of 2 nodes" in explained.stdout
    assert explained.stdout.count("fits by MPS, leaves 0 MiB") == 1  # its prediction is not there yet
    assert asked.returncode == 0, asked.stderr
    said = " ".join(asked.stdout.split())
    assert "would go to bench-000" in asked.stdout
    assert asked.stdout.count("fits by MPS") == 4
    assert "not checked by Carpool: CPU" in asked.stdout
    assert "settings: as shipped; the site's may differ: you may not read ConfigMap carpool-settings in" in said
    assert "not checked: whether the API server" in asked.stdout
    assert refused.returncode == 1
    assert "the API server would refuse it" in refused.stderr
    assert 'unknown field "spec.priority"' in refused.stderr
    assert "not checked: " not in elsewhere.stdout
    assert "would go to bench-000" in elsewhere.stdout
    assert "settings: " in elsewhere.stdout
    assert "may differ" not in elsewhere.stdout
    assert mistyped.returncode == 1
    assert "spec.template.spec.containers[0].comand: a pod has no such field" in mistyped.stderr
    assert missing.returncode == 2
    assert "Error: no GpuTrainingJob absent in namespace default" in missing.stderr
    assert created == {"waiting"}
