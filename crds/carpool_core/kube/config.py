"""Address of the API server and credentials for it: from a kubeconfig, or from a pod's ServiceAccount."""

import base64
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from carpool_core.settings import KubeSettings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_LIFETIME_S = 60.0
"""The kubelet renews a projected token at 80% of its hour, so rereading it each minute is early enough."""
_CREDENTIALS = ("token", "tokenFile", "client-certificate", "client-certificate-data", "exec")
_IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")


class KubeConfigError(ValueError):
    """The configuration gives no usable API server or credentials; the message names what to change."""


class Token:
    """A bearer token that is reread each minute and after a refusal. Empty with client certificates.

    Args:
        read: Returns the token; may block. It gets True after the API server refused the former token.
    """

    def __init__(self, read: Callable[[bool], str] = lambda _: "") -> None:
        self._read = read
        self._value = ""
        self._due_at, self._retry_at = 0.0, 0.0
        self._is_refused = False

    def is_due(self, monotonic: float) -> bool:
        """Return whether `at` would reread the token, which may block."""
        return monotonic >= self._retry_at and (self._is_refused or monotonic >= self._due_at)

    def at(self, monotonic: float) -> str:
        """Return the token, or the former one if rereading it fails.

        Raises:
            KubeConfigError: The token cannot be read and never could.
        """
        if self.is_due(monotonic):
            try:
                self._value = self._read(self._is_refused)
            except KubeConfigError:
                if not self._value:
                    raise
                # The server refuses the former token at every call; without this pause each refusal would reread.
                self._retry_at = monotonic + _TOKEN_LIFETIME_S
            self._due_at, self._is_refused = monotonic + _TOKEN_LIFETIME_S, False
        return self._value

    def forget(self) -> None:
        """Reread the token at the next call, because the server refused it."""
        self._is_refused = True


@dataclass(frozen=True)
class Endpoint:
    """An API server and the credentials for it."""

    server: str
    """Base URL without a trailing slash."""
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    token: Token
    namespace: str = "default"
    """Namespace of the kubeconfig's context, or of the pod."""


def load_endpoint(
    settings: KubeSettings, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> Endpoint:
    """Return the API server of the kubeconfig; without one that of the pod, and outside of pods as kubectl does.

    Raises:
        KubeConfigError: None of them exists, or the kubeconfig is not usable.
    """
    if settings.kubeconfig:
        return _KubeConfig(settings.kubeconfig, settings.context).endpoint()
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or settings.context:
        default = Path(environ.get("HOME", "/nonexistent"), ".kube", "config")
        if os.path.exists(default):  # unlike Path.exists, it does not raise where the folder may not be read
            return _KubeConfig(str(default), settings.context).endpoint()
        raise KubeConfigError(
            f"expected a kubeconfig, found neither KUBECONFIG (or --kubeconfig) nor {default}: set KUBECONFIG to a "
            "kubeconfig file, or run in a pod with a ServiceAccount"
        )
    namespace = service_account / "namespace"
    return Endpoint(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        tls=_tls(str(service_account / "ca.crt")),
        token=Token(_file_reader(service_account / "token")),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def _file_reader(path: Path) -> Callable[[bool], str]:
    def read(_: bool) -> str:
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise KubeConfigError(f"cannot read the token file {path}: {error.strerror}") from error

    return read


class _Section:
    """A cluster, a context or a user of a kubeconfig, with the folder that its relative paths begin in."""

    def __init__(self, names: str, values: Mapping[str, Any], folder: Path) -> None:
        self._names, self._values, self._folder = names, values, folder

    @property
    def is_empty(self) -> bool:
        """Whether it has no values."""
        return not self._values

    def get(self, key: str) -> Any:
        """Return a value; None if it is absent or empty."""
        return self._values.get(key) or None

    def path(self, key: str) -> Path | None:
        """Return the path of a file; None without one."""
        return self._folder / value if (value := self.get(key)) else None

    def pem(self, key: str) -> str | None:
        """Return a certificate or key, from `KEY-data` or else from the file KEY; None without either."""
        try:
            if data := self.get(f"{key}-data"):
                return base64.b64decode(data, validate=True).decode()
            return None if (path := self.path(key)) is None else path.read_text()
        except (OSError, ValueError, TypeError) as error:
            raise KubeConfigError(f"cannot use the kubeconfig {self._names}: {key}: {error}") from error

    def command(self, name: str) -> str:
        """Return the path of a program, which is relative to the kubeconfig if it has a folder."""
        return str(self._folder / name) if os.sep in name else name


class _KubeConfig:
    """One or several kubeconfig files, of which the first with an entry wins. `names` is as in `KUBECONFIG`.

    Raises:
        KubeConfigError: No file can be read, or the context needs what Carpool does not support.
    """

    def __init__(self, names: str, context: str | None) -> None:
        files = [Path(name).expanduser().absolute() for name in names.split(os.pathsep) if name]
        self.names = os.pathsep.join(map(str, files))
        self._read = [(file.parent, self._load(file)) for file in files if os.path.exists(file)]
        if not self._read:
            raise KubeConfigError(f"expected a kubeconfig at {names}, found none")
        context = context or next((current for _, top in self._read if (current := top.get("current-context"))), None)
        if not context:
            raise KubeConfigError(
                f"the kubeconfig {names} has no current-context: "
                "run `kubectl config use-context NAME`, or name one with --context"
            )
        chosen = self._section("contexts", context)
        self.namespace = str(chosen.get("namespace") or "default")
        self.cluster = self._section("clusters", chosen.get("cluster"))
        user = chosen.get("user")
        self.user = self._section("users", user) if user else _Section(self.names, {}, Path())
        self._refuse_unsupported()

    def _load(self, file: Path) -> dict[str, Any]:
        from yaml import YAMLError, safe_load  # half a megabyte that no pod needs

        try:
            found = safe_load(file.read_text(encoding="utf-8"))
        except (YAMLError, OSError, ValueError) as error:
            raise KubeConfigError(f"cannot use the kubeconfig {self.names}: {error}") from error
        if not isinstance(found, dict):
            raise KubeConfigError(f"cannot use the kubeconfig {self.names}: expected a mapping in {file}")
        return found

    def _section(self, plural: str, name: object) -> _Section:
        """Return the first entry of a name."""
        for folder, top in self._read:
            entries = top.get(plural) or []
            for entry in entries if isinstance(entries, list) else []:
                if isinstance(entry, dict) and entry.get("name") == name:
                    values = entry.get(plural.removesuffix("s")) or {}
                    if isinstance(values, dict):
                        return _Section(self.names, values, folder)
        raise KubeConfigError(
            f"cannot use the kubeconfig {self.names}: expected {name} in its {plural}, found no such entry"
        )

    def _refuse_unsupported(self) -> None:
        """Refuse what is ignored otherwise: the call would go to another server, or run as another user."""
        if any(self.user.get(key) for key in _IMPERSONATION):
            raise KubeConfigError(
                f"the kubeconfig {self.names} impersonates another user (`as`), which Carpool does not support: "
                "name a context without impersonation"
            )
        for key in ("tls-server-name", "proxy-url"):
            if self.cluster.get(key):
                raise KubeConfigError(
                    f"the kubeconfig {self.names} sets {key}, which Carpool does not support: "
                    "name a cluster that can be reached without it"
                )
        if not self.cluster.get("server"):
            raise KubeConfigError(f"the kubeconfig {self.names} has a cluster without a server: set its `server`")
        if not self.user.is_empty and not any(self.user.get(key) for key in _CREDENTIALS):
            raise KubeConfigError(
                f"the kubeconfig {self.names} has no credentials that Carpool supports: "
                "use a token, a tokenFile, client certificates or an `exec` plugin"
            )

    def endpoint(self) -> Endpoint:
        """Return the API server and the credentials; runs the context's exec plugin if it has one."""
        token, certificate, key = Token(), self.user.pem("client-certificate"), self.user.pem("client-key")
        if value := self.user.get("token"):
            token = Token(lambda _: str(value))
        elif file := self.user.path("tokenFile"):
            token = Token(_file_reader(file))
        elif self.user.get("exec") and not certificate:
            plugin = _ExecPlugin(self)
            first = plugin.credentials()
            certificate, key = first.certificate, first.key
            token = Token(plugin.token) if first.token else token
        server = str(self.cluster.get("server")).rstrip("/")
        tls = None
        if server.startswith("https://"):
            ca, verify = self.cluster.pem("certificate-authority"), not self.cluster.get("insecure-skip-tls-verify")
            tls = _tls(None, certificate, key, data=ca, verify=verify)
        return Endpoint(server, tls, token, self.namespace)


class _ExecCredentialStatus(msgspec.Struct, frozen=True, rename="camel"):
    token: str = ""
    certificate: str | None = msgspec.field(default=None, name="clientCertificateData")
    key: str | None = msgspec.field(default=None, name="clientKeyData")
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """Answer of an exec plugin: `client.authentication.k8s.io`."""

    api_version: str = ""
    status: _ExecCredentialStatus | None = None


class _ExecPlugin:
    """A program that prints credentials.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """

    def __init__(self, config: _KubeConfig) -> None:
        self._config, self._section = config, config.user.get("exec")
        self._found = _ExecCredentialStatus()

    def token(self, is_refused: bool) -> str:
        """Return the token; the plugin runs again if the token was refused or has expired."""
        expires = self._found.expiration_timestamp
        if is_refused or (expires is not None and expires <= datetime.now(UTC)):
            self.credentials()
        return self._found.token

    def credentials(self) -> _ExecCredentialStatus:
        """Run the plugin.

        Raises:
            KubeConfigError: It failed, or printed no credentials.
        """
        found = self._run()
        if not found.token and not found.certificate:
            raise self._error("missing token or clientCertificateData in its answer")
        if found.certificate and not found.key:
            raise self._error("missing clientKeyData in its answer")
        self._found = found
        return found

    def _run(self) -> _ExecCredentialStatus:
        section, cluster = self._section, self._config.cluster
        if not isinstance(section, dict) or not section.get("command"):
            raise self._error("expected its command, found none")
        version = section.get("apiVersion")
        interactive = section.get("interactiveMode") != "Never" and sys.stdin is not None and sys.stdin.isatty()
        spec: dict[str, Any] = {"interactive": interactive}
        if section.get("provideClusterInfo"):
            extensions = {one.get("name"): one.get("extension") for one in cluster.get("extensions") or []}
            ca = cluster.pem("certificate-authority")
            spec["cluster"] = {
                "server": cluster.get("server"),
                "insecure-skip-tls-verify": bool(cluster.get("insecure-skip-tls-verify")),
                "certificate-authority-data": None if ca is None else base64.b64encode(ca.encode()).decode(),
                "config": extensions.get("client.authentication.k8s.io/exec"),
            }
        info = msgspec.json.encode({"apiVersion": version, "kind": "ExecCredential", "spec": spec}).decode()
        variables = {str(one.get("name")): str(one.get("value")) for one in section.get("env") or []}
        try:
            done = subprocess.run(
                [self._config.user.command(str(section["command"])), *map(str, section.get("args") or [])],
                env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": info},
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if interactive else subprocess.PIPE,
                check=False,
            )
        except OSError as error:
            raise self._error(str(error)) from error
        if done.returncode:
            stderr = (done.stderr or b"").decode(errors="replace").strip()
            raise self._error(f"process returned {done.returncode}{f': {stderr}' if stderr else ''}")
        try:
            answer = msgspec.json.decode(done.stdout, type=_ExecCredential)
        except msgspec.DecodeError as error:
            raise self._error(f"expected an ExecCredential as JSON: {error}") from error
        if answer.api_version != version:
            raise self._error(f"its version {answer.api_version} does not match {version}")
        return answer.status or _ExecCredentialStatus()

    def _error(self, reason: str) -> KubeConfigError:
        section = self._section if isinstance(self._section, dict) else {}
        hint = str(section.get("installHint") or "").strip()
        return KubeConfigError(
            f"the exec plugin {section.get('command')} of the kubeconfig {self._config.names} gave no credentials: "
            f"{reason}{f'; {hint}' if hint else ''}"
        )


def _tls(
    ca: str | None,
    certificate: str | None = None,
    key: str | None = None,
    *,
    data: str | None = None,
    verify: bool = True,
) -> ssl.SSLContext:
    """Return the client's TLS context.

    Args:
        ca: File of the authorities; the system's if `data` is None, too.
        certificate: Client certificate, PEM.
        key: Its key, PEM; None if the certificate contains it.
        data: Authorities, PEM.
        verify: Whether the server is verified.
    """
    try:
        context = ssl.create_default_context(cafile=ca, cadata=data)
        if certificate:
            # OpenSSL reads client certificates from files only.
            with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
                chain = Path(folder, "chain.pem")
                chain.write_text(certificate + "\n" + (key or ""))
                context.load_cert_chain(str(chain))
    except (OSError, ssl.SSLError) as error:
        raise KubeConfigError(f"cannot load the certificates for the API server: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
