"""Address of the API server and credentials for it: from a kubeconfig, or from a pod's ServiceAccount."""

import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import LogRecord, getLogger
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from carpool_core.settings import KubeSettings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_LIFETIME_S = 60.0
"""The kubelet renews a projected token at 80% of its hour, so rereading it each minute is early enough."""
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


def _from_kubeconfig(names: str, context: str | None) -> Endpoint:
    kubeconfig = _KubeConfig(names, context)
    # Client certificates that are given as data become files, because OpenSSL reads only files.
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
        found = kubeconfig.load(folder)
        tls = _tls(found.ssl_ca_cert, found.cert_file, found.key_file, verify=found.verify_ssl)
    return Endpoint(
        server=found.host,
        tls=tls if found.host.startswith("https://") else None,
        token=kubeconfig.token(found),
        namespace=kubeconfig.namespace,
        has_certificate=bool(found.cert_file),
    )


class _KubeConfig:
    """One or several kubeconfig files, read by the official client. `names` is as in `KUBECONFIG`.

    Raises:
        KubeConfigError: No file can be read, or the context needs what Carpool does not support.
    """

    def __init__(self, names: str, context: str | None) -> None:
        try:
            from kubernetes.config.kube_config import KubeConfigMerger  # 40 MB of memory, which no pod needs
        except ModuleNotFoundError as error:
            raise KubeConfigError(
                f"cannot read the kubeconfig {names} without the package kubernetes; install it from a checkout of "
                "Carpool: pip install '.[cli]'"
            ) from error

        self._names = os.pathsep.join(str(Path(name).expanduser().absolute()) for name in names.split(os.pathsep))
        with self._errors():
            merged = KubeConfigMerger(self._names)
            if merged.config is None:
                raise KubeConfigError(f"expected a kubeconfig at {names}, found none")
            # kubectl takes the current context of the first file, the client that of the last.
            current = (read.get("current-context") for read in merged.config_files.values())
            self._context = context or next(filter(None, current), None)
            if not self._context:
                raise KubeConfigError(
                    f"the kubeconfig {names} has no current-context: "
                    "run `kubectl config use-context NAME`, or name one with --context"
                )
            self._config = merged.config
            chosen = self._config["contexts"].get_with_name(self._context)["context"]
            self.namespace: str = chosen.safe_get("namespace") or "default"
            user = chosen.safe_get("user")
            self._user: Any = self._config["users"].get_with_name(user)["user"] if user else None
            self._cluster = self._config["clusters"].get_with_name(chosen["cluster"])["cluster"]
            self._refuse_unsupported()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from kubernetes.config import ConfigException
        from yaml import YAMLError

        try:
            yield
        except KubeConfigError:
            raise
        # The client reads the files without checking them, so that a wrong type raises any of these.
        except (ConfigException, YAMLError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise KubeConfigError(f"cannot use the kubeconfig {self._names}: {error}") from error

    def _refuse_unsupported(self) -> None:
        """Refuse what the client or we ignore: the call would go to another server, or run as another user."""
        if self._user is not None and any(key in self._user for key in _IMPERSONATION):
            raise KubeConfigError(
                f"the kubeconfig {self._names} impersonates another user (`as`), which Carpool does not support: "
                "name a context without impersonation"
            )
        for key in ("tls-server-name", "proxy-url"):
            if self._cluster.safe_get(key):
                raise KubeConfigError(
                    f"the kubeconfig {self._names} sets {key}, which Carpool does not support: "
                    "name a cluster that can be reached without it"
                )
        if not self._cluster.safe_get("server"):
            raise KubeConfigError(f"the kubeconfig {self._names} has a cluster without a server: set its `server`")

    def load(self, folder: str) -> Any:
        """Return the client's `Configuration`; runs the context's exec plugin if it has one.

        `folder` receives the certificates that the kubeconfig or the plugin gives as data.
        """
        from kubernetes.client import Configuration
        from kubernetes.config.kube_config import KubeConfigLoader

        with self._errors(), _logged_errors() as logged:
            found: Any = Configuration()
            loader = KubeConfigLoader(self._config, self._context, temp_file_path=folder, config_base_path=None)
            loader.load_and_set(found)
            if self._user is not None and len(self._user) and not (found.api_key or found.cert_file):
                raise KubeConfigError(self._without_credentials(logged))
            return found

    def _without_credentials(self, logged: list[LogRecord]) -> str:
        plugin = self._user.safe_get("exec")
        if plugin is None:
            return (
                f"the kubeconfig {self._names} has no credentials that Carpool supports: "
                "use a token, a tokenFile, client certificates or an `exec` plugin"
            )
        reason = (
            "; ".join(record.getMessage() for record in logged)
            or "it returned neither a token nor a certificate with its key"
        )
        hint = str(self._user["exec"].safe_get("installHint") or "").strip()
        command = self._user["exec"].safe_get("command")
        return (
            f"the exec plugin {command} of the kubeconfig {self._names} gave no credentials: {reason}"
            f"{f'; {hint}' if hint else ''}"
        )

    def token(self, found: Any) -> Token:
        """Return the token of a loaded configuration. A refusal makes the client read it or run the plugin again."""
        if not found.api_key:
            return Token()
        file = self._user.safe_get("tokenFile")
        if file and not self._user.safe_get("token"):
            return Token(_file_reader(Path(self._user.path).parent / file))

        def read(is_refused: bool) -> str:
            nonlocal found
            if is_refused:
                with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
                    found = self.load(folder)
            (name,) = found.api_key  # releases of the client differ in it
            return str(found.get_api_key_with_prefix(name)).removeprefix("Bearer ")

        return Token(read)


@contextmanager
def _logged_errors() -> Iterator[list[LogRecord]]:
    """Collect what is logged meanwhile: the client logs why an exec plugin failed instead of raising it."""
    handler, root = BufferingHandler(1000), getLogger()
    root.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        root.removeHandler(handler)


def _tls(
    ca: str | None, certificate: str | None = None, key: str | None = None, *, verify: bool = True
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise KubeConfigError(
            f"cannot load the certificates for the API server ({ca}, {certificate}): {error}"
        ) from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
