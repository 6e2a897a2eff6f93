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

from carpool_core.settings import KubeSettings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_LIFETIME_S = 60.0
"""A projected token is renewed at 80% of its hour or more; rereading each minute is early enough."""


class KubeConfigError(ValueError):
    """The API server cannot be reached as configured; the message says what to set."""


@dataclass(frozen=True)
class Endpoint:
    """An API server and the credentials for it."""

    server: str
    """Base URL without a slash at its end."""
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    token: "Token"
    namespace: str = "default"


class Token:
    """A bearer token, fixed or read from a file again and again; empty where client certificates speak for us."""

    def __init__(self, fixed: str = "", file: Path | None = None) -> None:
        self._value, self._file = fixed, file
        self._read_at: float | None = None

    def at(self, monotonic: float) -> str:
        """Return the token; a file is read again once its last reading is a minute old.

        Raises:
            KubeConfigError: The file cannot be read and never could.
        """
        if self._file is not None and (self._read_at is None or monotonic - self._read_at >= _TOKEN_LIFETIME_S):
            try:
                self._value = self._file.read_text().strip()
            except OSError as error:
                if not self._value:
                    raise KubeConfigError(f"cannot read the token file {self._file}: {error.strerror}") from error
            self._read_at = monotonic
        return self._value

    def forget(self) -> None:
        """Read the file again at the next use, because the server refused the token."""
        self._read_at = None


def load_endpoint(
    settings: KubeSettings, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> Endpoint:
    """Find the API server from the kubeconfig, or where none is set from inside a pod, elsewhere as kubectl does.

    Raises:
        KubeConfigError: None of them is there, or the kubeconfig is not usable.
    """
    if settings.kubeconfig:
        path = Path(settings.kubeconfig).expanduser()
        return _from_kubeconfig(path)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        usual = Path(environ.get("HOME", "/nonexistent"), ".kube", "config")
        if _is_there(usual):
            return _from_kubeconfig(usual)
        raise KubeConfigError(
            f"no way to the Kubernetes API: set KUBECONFIG (or --kubeconfig) to a kubeconfig file, of which {usual} "
            "would be the usual one, or run in a pod with a ServiceAccount"
        )
    namespace = service_account / "namespace"
    return Endpoint(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        tls=_tls(ca=service_account / "ca.crt"),
        token=Token(file=service_account / "token"),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise KubeConfigError(
            f"cannot look at the usual kubeconfig {path}: {error.strerror}; set KUBECONFIG (or --kubeconfig) to one "
            "that may be read"
        ) from error


def _from_kubeconfig(path: Path) -> Endpoint:
    import yaml  # half a megabyte that a pod never needs

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise KubeConfigError(f"cannot read the kubeconfig {path}: {error}") from error
    if not isinstance(config, dict) or not config.get("current-context"):
        raise KubeConfigError(f"the kubeconfig {path} has no current-context: run `kubectl config use-context NAME`")
    context = _named(config, "contexts", "context", config["current-context"], path)
    cluster = _named(config, "clusters", "cluster", context.get("cluster", ""), path)
    user = _named(config, "users", "user", context["user"], path) if context.get("user") else {}
    for plugin in ("exec", "auth-provider"):
        if plugin in user:
            raise KubeConfigError(
                f"the kubeconfig {path} gets its credentials from `{plugin}`, which Carpool does not run; "
                "use a token, a tokenFile or client certificates: `kubectl create token` prints one"
            )
    server = str(cluster.get("server", "")).rstrip("/")
    if not server:
        raise KubeConfigError(f"the kubeconfig {path} has a cluster without a server")
    token_file = user.get("tokenFile")
    return Endpoint(
        server=server,
        tls=_kubeconfig_tls(cluster, user, path.parent) if server.startswith("https://") else None,
        token=Token(fixed=user.get("token", ""), file=path.parent / token_file if token_file else None),
        namespace=context.get("namespace") or "default",
    )


def _named(config: Mapping[str, Any], plural: str, singular: str, name: str, path: Path) -> dict[str, Any]:
    for entry in config.get(plural) or []:
        if entry.get("name") == name:
            return dict(entry.get(singular) or {})
    raise KubeConfigError(f"the kubeconfig {path} names the {singular} {name!r}, which is not among its {plural}")


def _kubeconfig_tls(cluster: Mapping[str, Any], user: Mapping[str, Any], base: Path) -> ssl.SSLContext:
    if cluster.get("tls-server-name"):
        raise KubeConfigError(
            "the kubeconfig sets tls-server-name, which Carpool cannot use: name the server as its certificate does"
        )
    with (
        _file_of(cluster, "certificate-authority", base) as ca,
        _file_of(user, "client-certificate", base) as certificate,
        _file_of(user, "client-key", base) as key,
    ):
        return _tls(ca=ca, certificate=certificate, key=key, insecure=bool(cluster.get("insecure-skip-tls-verify")))


@contextmanager
def _file_of(entry: Mapping[str, Any], key: str, base: Path) -> Iterator[Path | None]:
    """Yield the file behind KEY, or a private temporary one with the content of KEY-data: OpenSSL reads only files."""
    if data := entry.get(f"{key}-data"):
        with tempfile.NamedTemporaryFile(prefix="carpool-") as file:
            file.write(base64.b64decode(data))
            file.flush()
            yield Path(file.name)
    else:
        yield base / entry[key] if entry.get(key) else None


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
