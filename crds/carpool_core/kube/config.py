"""Address of the API server and credentials for it: from a kubeconfig, or from a pod's ServiceAccount."""

import os
import ssl
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from carpool_core.settings import KubeSettings
from carpool_core.values import without_nulls

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_LIFETIME_S = 60.0
"""The kubelet renews a projected token at 80% of its hour, so rereading it each minute is early enough."""
_UNSUPPORTED = ("as", "as-uid", "as-groups", "as-user-extra", "tls-server-name", "proxy-url")
"""Without these, calls would go to another server, or run as another user."""
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
"""Extension of a cluster that its exec plugins get as `config`."""


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
    has_certificate: bool = False
    """Whether a client certificate identifies the caller, whatever the token."""

    def for_token(self, token: str) -> "Endpoint":
        """Return the same API server with the token of another caller.

        Raises:
            KubeConfigError: Its client certificate would identify the caller, because the API server looks at it first.
        """
        if self.has_certificate:
            raise KubeConfigError(
                f"the credentials for {self.server} are a client certificate, which would take the place of every "
                "caller's token: run in a pod with a ServiceAccount, or name a kubeconfig with a token"
            )
        return replace(self, token=Token(lambda _: token))


def load_endpoint(
    settings: KubeSettings, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> Endpoint:
    """Return the API server of the kubeconfig; without one that of the pod, and outside of pods as kubectl does.

    Raises:
        KubeConfigError: None of them exists, or the kubeconfig is not usable.
    """
    if settings.kubeconfig:
        return _from_kubeconfig(settings.kubeconfig, settings.context)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or settings.context:
        default = Path(environ.get("HOME", "/nonexistent"), ".kube", "config")
        if os.path.exists(default):  # unlike Path.exists, it does not raise where the folder may not be read
            return _from_kubeconfig(str(default), settings.context)
        raise KubeConfigError(
            f"expected a kubeconfig, found neither KUBECONFIG (or --kubeconfig) nor {default}: set KUBECONFIG to a "
            "kubeconfig file, or run in a pod with a ServiceAccount"
        )
    namespace = service_account / "namespace"
    return Endpoint(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        tls=_tls(_content(service_account, "ca.crt")),
        token=_token_file(service_account, "token"),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def _content(folder: Path, name: str) -> bytes:
    """Return the content of a file; empty without a name."""
    try:
        return (folder / name).read_bytes() if name else b""
    except OSError as error:
        raise KubeConfigError(f"cannot read {folder / name}: {error.strerror}") from error


def _token_file(folder: Path, name: str) -> Token:
    return Token(lambda _: _content(folder, name).decode().strip())


class _Named(msgspec.Struct):
    """A context, cluster or user."""

    name: str
    context: dict[str, Any] = {}
    cluster: dict[str, Any] = {}
    user: dict[str, Any] = {}


class _File(msgspec.Struct, rename="kebab"):
    """A kubeconfig file."""

    contexts: list[_Named] = []
    clusters: list[_Named] = []
    users: list[_Named] = []
    current_context: str = ""


class _Context(msgspec.Struct):
    cluster: str
    user: str = ""
    namespace: str = "default"


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: bytes = b""
    insecure_skip_tls_verify: bool = False
    extensions: list[dict[str, Any]] = []


class _Variable(msgspec.Struct):
    name: str
    value: str


class _Exec(msgspec.Struct, rename="camel"):
    """A program that prints credentials."""

    api_version: str
    command: str
    args: list[str] = []
    env: list[_Variable] = []
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False
    install_hint: str = ""


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    client_certificate: str = ""
    client_certificate_data: bytes = b""
    client_key: str = ""
    client_key_data: bytes = b""
    exec: _Exec | None = None


class _ExecStatus(msgspec.Struct, rename="camel"):
    """What an exec plugin returns; certificate and key as PEM."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    status: _ExecStatus


def _from_kubeconfig(names: str, context: str | None) -> Endpoint:
    """Return the endpoint of a context of one or several kubeconfig files; `names` is as in `KUBECONFIG`."""
    import yaml  # half a megabyte that no pod needs

    try:
        files = [
            (path.parent, msgspec.convert(without_nulls(yaml.safe_load(path.read_bytes()) or {}), _File))
            for path in (Path(name).expanduser().absolute() for name in names.split(os.pathsep) if name)
            if os.path.exists(path)
        ]
        return _endpoint_of(names, files, context)
    except KubeConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # among them msgspec's
        raise KubeConfigError(f"cannot use the kubeconfig {names}: {error}") from error


def _endpoint_of(names: str, files: Sequence[tuple[Path, _File]], context: str | None) -> Endpoint:
    """Return the endpoint of a context, from files with their folders."""
    # 1. Find the context, its cluster and its user: of equal names the first counts.
    if not files:
        raise KubeConfigError(f"expected a kubeconfig at {names}, found none")
    context = context or next((file.current_context for _, file in files if file.current_context), "")
    if not context:
        raise KubeConfigError(
            f"the kubeconfig {names} has no current-context: run `kubectl config use-context NAME`, or name one with "
            "--context"
        )

    def find(kind: str, name: str) -> tuple[Path, dict[str, Any]]:
        for folder, file in files:
            for named in getattr(file, f"{kind}s"):
                if named.name == name:
                    return folder, getattr(named, kind)
        raise KubeConfigError(f"the kubeconfig {names} has no {kind} {name}")

    chosen = msgspec.convert(find("context", context)[1], _Context)
    cluster_folder, cluster_fields = find("cluster", chosen.cluster)
    user_folder, user_fields = find("user", chosen.user) if chosen.user else (Path(), {})
    for field in _UNSUPPORTED:
        if cluster_fields.get(field) or user_fields.get(field):
            raise KubeConfigError(
                f"the kubeconfig {names} sets {field}, which Carpool does not support: name a context without it"
            )
    cluster, user = msgspec.convert(cluster_fields, _Cluster), msgspec.convert(user_fields, _User)
    if not cluster.server:
        raise KubeConfigError(f"the kubeconfig {names} has a cluster without a server: set its `server`")
    # 2. Read the certificates and the token, or run the program that prints them.
    authority = cluster.certificate_authority_data or _content(cluster_folder, cluster.certificate_authority)
    certificate = user.client_certificate_data or _content(user_folder, user.client_certificate)
    key = user.client_key_data or _content(user_folder, user.client_key)
    token = _token_file(user_folder, user.token_file) if user.token_file else Token(lambda _: user.token)
    if user.exec is not None:
        config = (one.get("extension") for one in cluster.extensions if one.get("name") == _EXEC_EXTENSION)
        shown = cluster_fields | {
            "certificate-authority-data": b64encode(authority).decode(),
            "config": next(config, None),
        }
        plugin = _Plugin(user.exec, user_folder, shown, names)
        certificate, key = plugin.status.client_certificate_data.encode(), plugin.status.client_key_data.encode()
        token = Token(plugin.token)
    elif user_fields and not (user.token_file or user.token or certificate):
        raise KubeConfigError(
            f"the kubeconfig {names} has no credentials that Carpool supports: use a token, a tokenFile, client "
            "certificates or an `exec` plugin"
        )
    return Endpoint(
        server=cluster.server.rstrip("/"),
        tls=_tls(authority, certificate, key, verify=not cluster.insecure_skip_tls_verify)
        if cluster.server.startswith("https://")
        else None,
        token=token,
        namespace=chosen.namespace,
        has_certificate=bool(certificate),
    )


class _Plugin:
    """Runs the exec plugin of a kubeconfig, again when its token has expired or was refused.

    Args:
        spec: The plugin.
        folder: Folder of the kubeconfig, to which the command is relative.
        cluster: Fields of the cluster, for plugins that ask for them.
        names: The kubeconfig.

    Raises:
        KubeConfigError: It returned no credentials.
    """

    def __init__(self, spec: _Exec, folder: Path, cluster: Mapping[str, Any], names: str) -> None:
        self._spec, self._folder, self._cluster, self._names = spec, folder, cluster, names
        self.status = self._run()

    def token(self, is_refused: bool) -> str:
        """Return the token."""
        expires = self.status.expiration_timestamp
        if is_refused or (expires is not None and expires <= datetime.now(UTC)):
            self.status = self._run()
        return self.status.token

    def _run(self) -> _ExecStatus:
        spec, is_interactive = self._spec, self._spec.interactive_mode != "Never" and os.isatty(0)
        asked = {"interactive": is_interactive} | ({"cluster": self._cluster} if spec.provide_cluster_info else {})
        info = msgspec.json.encode({"apiVersion": spec.api_version, "kind": "ExecCredential", "spec": asked}).decode()
        try:
            done = subprocess.run(
                [str(self._folder / spec.command) if os.sep in spec.command else spec.command, *spec.args],
                env={**os.environ, **{one.name: one.value for one in spec.env}, "KUBERNETES_EXEC_INFO": info},
                stdin=None if is_interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if is_interactive else subprocess.PIPE,
                check=True,
            )
            answer = msgspec.json.decode(done.stdout, type=_ExecCredential)
            status = answer.status
            if answer.api_version != spec.api_version:
                reason = f"expected version {spec.api_version}, found {answer.api_version}"
            elif status.token or (status.client_certificate_data and status.client_key_data):
                return status
            else:
                reason = "expected a token, or a certificate with its key, found neither"
        except subprocess.CalledProcessError as error:
            text = (error.stderr or b"").decode(errors="replace").strip()
            reason = f"it exited with status {error.returncode}{text and f': {text}'}"
        except (OSError, ValueError) as error:
            reason = str(error)
        hint = f"; {spec.install_hint.strip()}" if spec.install_hint else ""
        raise KubeConfigError(
            f"the exec plugin {spec.command} of the kubeconfig {self._names} gave no credentials: {reason}{hint}"
        )


def _tls(authority: bytes, certificate: bytes = b"", key: bytes = b"", *, verify: bool = True) -> ssl.SSLContext:
    """Return the context of connections to the API server, from PEM data; without authority the system's count."""
    try:
        context = ssl.create_default_context(cadata=authority.decode() or None)
        if certificate:
            # OpenSSL reads client certificates from files only.
            with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
                files = [Path(folder, "tls.crt"), Path(folder, "tls.key")]
                for file, data in zip(files, (certificate, key), strict=True):
                    file.write_bytes(data)
                context.load_cert_chain(files[0], files[1])
    except (OSError, ValueError) as error:  # among them ssl.SSLError
        raise KubeConfigError(f"cannot load the certificates for the API server: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
