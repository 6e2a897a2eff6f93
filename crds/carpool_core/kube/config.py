"""Where the API server is and who we are to it: from a kubeconfig, or from the pod's ServiceAccount."""

import base64
import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_core.clock import SystemClock
from carpool_core.kube.credentials import KubeConfigError, Plugin, Token, token_file
from carpool_core.kube.kubeconfig import Entry, KubeConfig, is_there
from carpool_core.settings import KubeSettings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")
PLUGIN_EXTENSION = "client.authentication.k8s.io/exec"
"""Name of a cluster's extension that is meant for its plugins."""


@dataclass(frozen=True)
class Endpoint:
    """An API server and the credentials for it."""

    server: str
    """Base URL without a slash at its end."""
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    token: Token
    namespace: str = "default"


def load_endpoint(
    settings: KubeSettings, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> Endpoint:
    """Find the API server from the kubeconfig, or where none is set from inside a pod, elsewhere as kubectl does.

    Raises:
        KubeConfigError: None of them is there, or the kubeconfig is not usable.
    """
    if settings.kubeconfig:
        return _from_kubeconfig(settings.kubeconfig)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        usual = Path(environ.get("HOME", "/nonexistent"), ".kube", "config")
        if is_there(usual):
            return _from_kubeconfig(str(usual))
        raise KubeConfigError(
            f"no way to the Kubernetes API: set KUBECONFIG (or --kubeconfig) to a kubeconfig file, of which {usual} "
            "would be the usual one, or run in a pod with a ServiceAccount"
        )
    namespace = service_account / "namespace"
    return Endpoint(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        tls=_tls(ca=service_account / "ca.crt"),
        token=Token(renew=token_file(service_account / "token")),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def _from_kubeconfig(names: str) -> Endpoint:
    config = KubeConfig(names)
    context = config.named("context", config.current()).said
    cluster, cluster_file = config.named("cluster", context.get("cluster", ""))
    user, user_file = config.named("user", context["user"]) if context.get("user") else Entry({}, cluster_file)
    _refuse(cluster, user, names)
    server = str(cluster.get("server", "")).rstrip("/")
    if not server:
        raise KubeConfigError(f"the kubeconfig {names} has a cluster without a server")
    token = Token(fixed=user.get("token", ""))
    if file := user.get("tokenFile"):
        token = Token(renew=token_file(user_file.parent / file))
    elif plugin := user.get("exec"):
        known = Plugin(plugin, _told(cluster, cluster_file.parent), user_file, SystemClock().now)
        # A plugin that proves who we are by a certificate is asked once: a connection cannot change its own.
        issued = known.issue()
        user = {**user, **issued.as_user()}
        token = Token(renew=known.renew, first=known.fresh(issued)) if issued.token else Token()
    return Endpoint(
        server=server,
        tls=_kubeconfig_tls((cluster, cluster_file), (user, user_file)) if server.startswith("https://") else None,
        token=token,
        namespace=context.get("namespace") or "default",
    )


def _refuse(cluster: Mapping[str, Any], user: Mapping[str, Any], names: str) -> None:
    """Refuse what cannot be obeyed: to ignore it would be to speak to another server, or as another user."""
    if "auth-provider" in user:
        raise KubeConfigError(
            f"the kubeconfig {names} gets its credentials from `auth-provider`, which kubectl has dropped, too; "
            "use an `exec` plugin, a token, a tokenFile or client certificates: `kubectl create token` prints one"
        )
    if any(key in user for key in IMPERSONATION):
        raise KubeConfigError(f"the kubeconfig {names} speaks as somebody else (`as`), which Carpool cannot do")
    if cluster.get("tls-server-name"):
        raise KubeConfigError(
            "the kubeconfig sets tls-server-name, which Carpool cannot use: name the server as its certificate does"
        )
    if cluster.get("proxy-url"):
        raise KubeConfigError("the kubeconfig sets proxy-url, which Carpool cannot use: go where no proxy is needed")


def _told(cluster: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return what a plugin may know of a cluster: the same, but its authority as bytes."""
    told = {key: value for key, value in cluster.items() if key not in ("certificate-authority", "extensions")}
    if file := cluster.get("certificate-authority"):
        try:
            told["certificate-authority-data"] = base64.b64encode((base / file).read_bytes()).decode()
        except OSError as error:
            raise KubeConfigError(f"cannot load the certificates for the API server: {error}") from error
    for extension in cluster.get("extensions") or []:
        if extension.get("name") == PLUGIN_EXTENSION:
            told["config"] = extension.get("extension")
    return told


def _kubeconfig_tls(cluster: tuple[Mapping[str, Any], Path], user: tuple[Mapping[str, Any], Path]) -> ssl.SSLContext:
    with (
        _file_of(*cluster, "certificate-authority") as ca,
        _file_of(*user, "client-certificate") as certificate,
        _file_of(*user, "client-key") as key,
    ):
        return _tls(ca=ca, certificate=certificate, key=key, insecure=bool(cluster[0].get("insecure-skip-tls-verify")))


@contextmanager
def _file_of(entry: Mapping[str, Any], of: Path, key: str) -> Iterator[Path | None]:
    """Yield the file behind KEY, or a private temporary one with the content of KEY-data: OpenSSL reads only files."""
    if data := entry.get(f"{key}-data"):
        with tempfile.NamedTemporaryFile(prefix="carpool-") as file:
            file.write(base64.b64decode(data))
            file.flush()
            yield Path(file.name)
    else:
        yield of.parent / entry[key] if entry.get(key) else None


def _tls(
    *, ca: Path | None, certificate: Path | None = None, key: Path | None = None, insecure: bool = False
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise KubeConfigError(
            f"cannot load the certificates for the API server ({ca}, {certificate}): {error}"
        ) from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
