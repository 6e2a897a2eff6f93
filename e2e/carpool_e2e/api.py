"""A few plain calls to the API server: the harness waits for it, makes tokens and objects, and needs no more."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Api:
    """An API server and the token of whoever asks."""

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
    """Return a kubeconfig file with one user; it stands alone, so that it can be copied into a container."""
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
