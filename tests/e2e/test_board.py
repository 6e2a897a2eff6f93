"""`carpool board` against a real API server: whose rights count."""

import re
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from carpool_e2e.cluster import Cluster, carpool_command
from carpool_e2e.demo.manifests import sleeper
from kubectl import eventually

pytestmark = pytest.mark.e2e

PATHS = ("/v1/gpus", "/v1/queue", "/v1/jobs?namespace=default", "/v1/jobs/default/shown", "/v1/explain/default/shown")
READ = ["get", "list", "watch"]
BOARD = [
    {"apiGroups": ["carpool.dev"], "resources": ["gputrainingjobs", "gpunodes"], "verbs": READ},
    {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": READ},
]
TEAM = [{**BOARD[0], "resources": ["gputrainingjobs"]}]


def token_with(cluster: Cluster, name: str, kind: str, rules: list[dict[str, list[str]]]) -> str:
    """Make a ServiceAccount with these rights, and return its token."""
    meta, group = {"name": name, "namespace": "default"}, "rbac.authorization.k8s.io"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}
    role = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": meta, "rules": rules}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    reference = {"apiGroup": group, "kind": kind, "name": name}
    binding = {"apiVersion": f"{group}/v1", "kind": f"{kind}Binding", "metadata": meta, "roleRef": reference}
    cluster.apply(account, role, {**binding, "subjects": [subject]})
    return cluster.plane.api.token_of("default", name)


@contextmanager
def board(kubeconfig: Path, host: str, *options: str) -> Iterator[str]:
    """Run `carpool board`, and return its address."""
    command = [carpool_command(), "board", "--kubeconfig", str(kubeconfig), "--host", host, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = process.stdout.readline()
            found = re.search(r"https?://[\d.]+:\d+", printed)
            assert found, printed
            yield found[0]
        finally:
            process.terminate()
            assert process.wait(30) == 0


def status(url: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_viewers_have_their_own_rights(control_plane: Cluster) -> None:
    own = token_with(control_plane, "board-itself", "ClusterRole", BOARD)
    everything = token_with(control_plane, "board-viewer", "ClusterRole", BOARD)
    team = token_with(control_plane, "board-team", "Role", TEAM)
    kubeconfig = control_plane.plane.write_kubeconfig("board", own)
    control_plane.apply(sleeper("shown"))

    def found(url: str, token: str = "") -> list[int]:
        return [status(url + path, token) for path in PATHS]

    with board(kubeconfig, "127.0.0.1") as url:
        eventually("all documents", lambda: found(url) == [200] * 5)
    with board(kubeconfig, "127.0.0.2") as url:
        eventually("all documents", lambda: found(url, everything) == [200] * 5)
        assert found(url, team) == [403, 403, 200, 200, 403]
        assert found(url, "invalid") == found(url) == [401] * 5


def issue(file: Path) -> str:
    """Write a certificate with its key, and return the certificate."""
    new = file.with_suffix(".new")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=board", "-keyout", str(new)]
    certificate = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    new.write_text(new.read_text() + certificate)
    new.replace(file)
    return certificate


def test_renewed_certificate_is_used_without_a_restart(control_plane: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "tls.pem"
    certificate = issue(file)
    with board(control_plane.kubeconfig, "127.0.0.1", "--tls-cert", str(file)) as url:
        host, port = url.removeprefix("https://").split(":")
        assert ssl.get_server_certificate((host, int(port))) == certificate
        trusted = ssl.create_default_context(cafile=str(file))
        trusted.check_hostname = False
        assert urllib.request.urlopen(f"{url}/jobs", context=trusted, timeout=60).status == 200  # noqa: S310
        renewed = issue(file)
        eventually("the new one", lambda: ssl.get_server_certificate((host, int(port))) == renewed)


def test_missing_certificate_is_a_sentence(control_plane: Cluster, tmp_path: Path) -> None:
    command = [carpool_command(), "board", "--kubeconfig", str(control_plane.kubeconfig), "--port", "0"]
    command += ["--tls-cert", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "CARPOOL_BOARD_TLS_CERT and CARPOOL_BOARD_TLS_KEY: expected a certificate and its key" in done.stderr


def test_missing_cluster_is_a_sentence(control_plane: Cluster, tmp_path: Path) -> None:
    nowhere = tmp_path / "kubeconfig"
    nowhere.write_text(re.sub(r"(https://127.0.0.1):\d+", r"\1:1", control_plane.kubeconfig.read_text()))
    command = [carpool_command(), "board", "--kubeconfig", str(nowhere), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "the cluster could not be reached" in done.stderr) == (2, True), done.stderr
