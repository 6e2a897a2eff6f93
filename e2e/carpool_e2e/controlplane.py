"""etcd, the API server and the controller manager."""

import base64
import json
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_e2e.binaries import Binaries
from carpool_e2e.errors import MissingError
from carpool_e2e.processes import Ports, ProcessTable

_DAYS = "30"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def extensions(names: Sequence[str]) -> str:
    """Return openssl's configuration for an authority (no names) or a leaf with these `DNS:` and `IP:` names."""
    lines = ["[req]", "distinguished_name = dn", "x509_extensions = ext", "[dn]", "[ext]"]
    if names:
        lines += [
            "basicConstraints = critical, CA:FALSE",
            "extendedKeyUsage = serverAuth, clientAuth",
            f"subjectAltName = {', '.join(names)}",
        ]
    else:
        lines += ["basicConstraints = critical, CA:TRUE", "keyUsage = critical, keyCertSign, cRLSign"]
    return "\n".join(lines) + "\n"


def make(folder: Path, name: str, subject: str, names: Sequence[str] = (), authority: str = "") -> None:
    """Write `NAME.crt` and `NAME.key`, signed by the authority of that name, or by itself."""
    config = folder / f"{name}.cnf"
    config.write_text(extensions(names))
    signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"] if authority else []
    command = ["openssl", "req", "-x509", *_KEY, "-config", config.name, "-subj", subject, "-days", _DAYS, *signed]
    _openssl([*command, "-keyout", f"{name}.key", "-out", f"{name}.crt"], folder)


def _openssl(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingError(f"expected openssl 3 or later to run {' '.join(command)}, found: {done.stderr.strip()}")


@dataclass(frozen=True)
class Api:
    """An API server and the token of its caller."""

    server: str
    ca_file: Path
    token: str

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Make a call and return the decoded answer, or the text of one that is not JSON.

        Raises:
            urllib.error.HTTPError: The server refused.
            OSError: The server cannot be reached.
        """
        request = urllib.request.Request(  # noqa: S310 - the URL is our own server's
            f"{self.server}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        context = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:  # noqa: S310
            raw = answer.read()
            return json.loads(raw) if "json" in answer.headers.get("Content-Type", "") else raw.decode()

    def answers(self, path: str) -> bool:
        """Whether a path answers with success."""
        try:
            self.call("GET", path)
        except OSError:
            return False
        return True

    def token_of(self, namespace: str, service_account: str, node: str = "") -> str:
        """Return a new token of a ServiceAccount, bound to a Node where one is named."""
        spec: dict[str, Any] = {"expirationSeconds": 24 * 3600}
        if node:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.call("POST", path, body)["status"]["token"])


def kubeconfig(server: str, ca_file: Path, token: str) -> str:
    """Return a kubeconfig file with one user; it needs no other file, so that it can be copied into a container."""
    ca = base64.b64encode(ca_file.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "carpool",
        "clusters": [{"name": "carpool", "cluster": {"server": server, "certificate-authority-data": ca}}],
        "users": [{"name": "carpool", "user": {"token": token}}],
        "contexts": [{"name": "carpool", "context": {"cluster": "carpool", "user": "carpool"}}],
    }
    return json.dumps(config, indent=1)


USERS = {
    "admin": ("carpool-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "default-scheduler": ("system:kube-scheduler", ""),
    "fleet": ("carpool-fleet", "system:masters"),
}
"""Static users: name in the harness → user name and group."""

SERVICE_RANGE = "10.0.0.0/24"
SERVICE_ADDRESS, SERVICE_PORT = "10.0.0.1", 443
"""The Service `kubernetes`, as pods are given it in KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT."""


@dataclass(frozen=True)
class ControlPlane:
    """A control plane's files and addresses."""

    state: Path
    ports: Ports
    tokens: dict[str, str]

    @property
    def pki(self) -> Path:
        """Folder of certificates and keys."""
        return self.state / "pki"

    @property
    def ca_file(self) -> Path:
        """The authority that signed the API server's certificate."""
        return self.pki / "ca.crt"

    def server(self, host: str = "127.0.0.1") -> str:
        """Return the API server's URL as seen from where `host` is its address."""
        return f"https://{host}:{self.ports.apiserver}"

    @property
    def api(self) -> Api:
        """The API server, asked as administrator."""
        return Api(self.server(), self.ca_file, self.tokens["admin"])

    def write_kubeconfig(self, name: str, token: str, host: str = "127.0.0.1") -> Path:
        """Write a kubeconfig into the state directory and return its path."""
        file = self.state / f"{name}.kubeconfig"
        # Whole or not at all: the extender may be reading it while it is written again for the scheduler beside it.
        new = file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(kubeconfig(self.server(host), self.ca_file, token))
        return new.replace(file)

    def write_credentials(self, account: str, token: str) -> Path:
        """Write what a pod of a ServiceAccount finds in its file system, and return the folder."""
        folder = self.state / f"{account}.serviceaccount"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes(self.ca_file.read_bytes())
        return folder


def prepare(state: Path, ports: Ports, node_names: list[str], addresses: list[str]) -> ControlPlane:
    """Make certificates, tokens and kubeconfigs.

    Args:
        state: The cluster's state directory.
        ports: Its ports.
        node_names: Nodes with a kubelet, each of which gets a token.
        addresses: Addresses besides the loopback under which the API server is reached.
    """
    kubelets = {f"kubelet-{name}": (f"system:node:{name}", "system:nodes") for name in node_names}
    users = {**USERS, **kubelets}
    plane = ControlPlane(state, ports, {name: secrets.token_hex(16) for name in users})
    plane.pki.mkdir()
    make(plane.pki, "ca", "/CN=carpool-e2e")
    make(plane.pki, "front-proxy-ca", "/CN=carpool-e2e-front-proxy")
    names = [f"DNS:{name}" for name in ("localhost", "kubernetes.default.svc")]
    names += [f"IP:{address}" for address in ("127.0.0.1", SERVICE_ADDRESS, *addresses)]
    make(plane.pki, "apiserver", "/CN=kube-apiserver", names, "ca")
    make(plane.pki, "kubelet-client", "/O=system:masters/CN=kube-apiserver", ["DNS:none"], "ca")
    _openssl(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "tokens.key"], plane.pki)
    lines = [f'{plane.tokens[name]},{user},{name},"{group}"' for name, (user, group) in users.items()]
    (plane.pki / "users.csv").write_text("\n".join(lines) + "\n")
    for name in USERS:
        plane.write_kubeconfig(name, plane.tokens[name])
    return plane


def etcd_arguments(plane: ControlPlane) -> list[str]:
    """Return etcd's arguments: one member that does not wait for the disk, because nothing outlives the cluster."""
    client, peer = f"http://127.0.0.1:{plane.ports.etcd}", f"http://127.0.0.1:{plane.ports.etcd_peer}"
    return [
        "--name=default",
        f"--data-dir={plane.state / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_arguments(plane: ControlPlane, bind_address: str) -> list[str]:
    """Return the API server's arguments, with the authorisers and admission of a real cluster."""
    pki = plane.pki
    return [
        f"--etcd-servers=http://127.0.0.1:{plane.ports.etcd}",
        f"--bind-address={bind_address}",
        f"--secure-port={plane.ports.apiserver}",
        # The nodes serve the address of the Service `kubernetes` themselves.
        "--endpoint-reconciler-type=none",
        f"--advertise-address={SERVICE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={plane.ca_file}",
        # No API is aggregated, but servers behind the API server require it.
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        "--requestheader-username-headers=X-Remote-User",
        f"--token-auth-file={pki / 'users.csv'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'tokens.key'}",
        f"--service-account-signing-key-file={pki / 'tokens.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def controller_manager_arguments(plane: ControlPlane) -> list[str]:
    """Return the controller manager's arguments: each controller runs with the rights of its own ServiceAccount."""
    return [
        f"--kubeconfig={plane.state / 'controller-manager.kubeconfig'}",
        "--bind-address=127.0.0.1",
        f"--secure-port={plane.ports.controller_manager}",
        "--use-service-account-credentials=true",
        f"--root-ca-file={plane.ca_file}",
        f"--service-account-private-key-file={plane.pki / 'tokens.key'}",
        "--leader-elect=false",
        "--profiling=false",
    ]


def start(plane: ControlPlane, binaries: Binaries, table: ProcessTable, bind_address: str) -> None:
    """Start etcd and the API server, and wait until the server is ready."""
    table.start("etcd", [binaries["etcd"], *etcd_arguments(plane)])
    apiserver = table.start("kube-apiserver", [binaries["kube-apiserver"], *apiserver_arguments(plane, bind_address)])
    apiserver.wait_until(lambda: plane.api.answers("/readyz"))


def start_controllers(plane: ControlPlane, binaries: Binaries, table: ProcessTable) -> None:
    """Start the controller manager, and wait until a pod can be created.

    It starts after the CRDs are there: its garbage collector learns about new kinds only every thirty seconds.
    """
    arguments = controller_manager_arguments(plane)
    process = table.start("kube-controller-manager", [binaries["kube-controller-manager"], *arguments])
    process.wait_until(lambda: plane.api.answers("/api/v1/namespaces/default/serviceaccounts/default"))


def start_default_scheduler(plane: ControlPlane, binaries: Binaries, table: ProcessTable) -> None:
    """Start the scheduler of the pods that name none, such as those of the chart."""
    kubeconfig = plane.state / "default-scheduler.kubeconfig"
    arguments = [f"--kubeconfig={kubeconfig}", f"--secure-port={plane.ports.scheduler}", "--leader-elect=false"]
    table.start("default-scheduler", [binaries["kube-scheduler"], *arguments, "--bind-address=127.0.0.1"])
