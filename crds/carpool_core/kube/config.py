"""Where the API server is and who we are to it: from a kubeconfig, or from the pod's ServiceAccount."""

import base64
import math
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from carpool_core.clock import SystemClock, parse_rfc3339
from carpool_core.settings import KubeSettings

_FILE_LASTS_S = 60.0
"""A projected token is renewed at 80% of its hour or more; rereading each minute is early enough."""
_PLUGIN_ENDS_S = 60.0
"""A plugin that asks nobody anything has so long."""
_GROUP = "client.authentication.k8s.io/"
_VERSIONS = (f"{_GROUP}v1", f"{_GROUP}v1beta1")


class KubeConfigError(ValueError):
    """The API server cannot be reached as configured; the message says what to set."""


class Fresh(NamedTuple):
    """A token that was just read."""

    value: str
    lasts_s: float
    """Seconds after which it is to be read again."""


class Token:
    """A bearer token, fixed or renewed again and again; empty where client certificates speak for us.

    Args:
        fixed: One that lasts.
        renew: Reads it, if it does not.
        first: What was read already.
    """

    def __init__(
        self, fixed: str = "", *, renew: Callable[[], Fresh] | None = None, first: Fresh | None = None
    ) -> None:
        self._value, self._renew, self._first = fixed, renew, first
        self._until: float | None = None
        self._rests_until = -math.inf

    def is_due(self, monotonic: float) -> bool:
        """Say whether `at` would read it now, which may take a while: a plugin may ask somebody."""
        if self._renew is None or monotonic < self._rests_until:
            return False
        return self._until is None or monotonic >= self._until

    def at(self, monotonic: float) -> str:
        """Return the token, read again where it has lasted long enough; the former one where that fails.

        Raises:
            KubeConfigError: It cannot be read and never could.
        """
        if self._renew is not None and self.is_due(monotonic):
            try:
                self._value, lasts_s = self._first or self._renew()
            except KubeConfigError:
                if not self._value:
                    raise
                # Whoever uses the old one will be refused, and each refusal asks for another.
                self._rests_until, lasts_s = monotonic + _FILE_LASTS_S, _FILE_LASTS_S
            self._first, self._until = None, monotonic + lasts_s
        return self._value

    def forget(self) -> None:
        """Read it again at the next use, because the server refused it."""
        self._until = None


def token_file(path: Path) -> Callable[[], Fresh]:
    """Return what reads a token from a file."""

    def read() -> Fresh:
        try:
            return Fresh(path.read_text(encoding="utf-8").strip(), _FILE_LASTS_S)
        except OSError as error:
            raise KubeConfigError(f"cannot read the token file {path}: {error.strerror}") from error

    return read


class Issued(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a plugin says who we are (`ExecCredential.status` of client.authentication.k8s.io)."""

    token: str = ""
    client_certificate_data: str = ""
    """PEM."""
    client_key_data: str = ""
    """PEM."""
    expiration_timestamp: str | None = None

    def as_user(self) -> dict[str, str]:
        """Return its certificate as a kubeconfig's user has it; nothing where it has none."""
        parts = {"client-certificate-data": self.client_certificate_data, "client-key-data": self.client_key_data}
        return {key: base64.b64encode(value.encode()).decode() for key, value in parts.items() if value}


class _Answer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: Issued | None = None


class Plugin:
    """A program of a kubeconfig's `exec`, as EKS, GKE and AKS give their users.

    Args:
        said: The user's `exec`.
        cluster: What the plugin is told of the cluster where it asks for that.
        file: The kubeconfig that names it.
        now: The wall clock, in UTC.

    Raises:
        KubeConfigError: It is of an unknown version, or names no program.
    """

    def __init__(
        self, said: Mapping[str, Any], cluster: Mapping[str, Any], file: Path, now: Callable[[], datetime]
    ) -> None:
        self._said, self._cluster, self._file, self._now = said, cluster, file, now
        version, command = said.get("apiVersion"), str(said.get("command") or "")
        if version not in _VERSIONS or not command:
            raise KubeConfigError(
                f"expected an `exec` of {' or '.join(_VERSIONS)} with a command in the kubeconfig {file}, "
                f"found {command or 'no command'} of {version}: renew it with your provider's program"
            )
        # As kubectl has it: beside the kubeconfig where it is a path, else wherever PATH leads.
        self._command = str(file.parent / command) if os.sep in command else command

    def issue(self) -> Issued:
        """Run it.

        Raises:
            KubeConfigError: It is not there, fails, or does not answer with a credential.
        """
        mode = self._said.get("interactiveMode", "IfAvailable")
        may_ask = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not may_ask:
            raise KubeConfigError(
                f"{self._command} of the kubeconfig {self._file} has to ask you: run this in a terminal"
            )
        try:
            answer = subprocess.run(
                [self._command, *map(str, self._said.get("args") or [])],
                stdin=None if may_ask else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=self._environment(may_ask=may_ask),
                timeout=None if may_ask else _PLUGIN_ENDS_S,
                check=True,
            ).stdout
        except FileNotFoundError as error:
            hint = str(self._said.get("installHint") or "install it").strip()
            raise KubeConfigError(
                f"the kubeconfig {self._file} gets its credentials from {self._command}, which is not there: {hint}"
            ) from error
        except (OSError, subprocess.SubprocessError) as error:
            raise KubeConfigError(
                f"{self._command}, which the kubeconfig {self._file} names, failed: {error}"
            ) from error
        return self._read(answer)

    def renew(self) -> Fresh:
        """Run it for its token.

        Raises:
            KubeConfigError: It is not there, fails, or does not answer with a credential.
        """
        return self.fresh(self.issue())

    def fresh(self, issued: Issued) -> Fresh:
        """Return an answer's token and how long it lasts: without a word about that until the server refuses it.

        Raises:
            KubeConfigError: Its time makes no sense.
        """
        if not issued.expiration_timestamp:
            return Fresh(issued.token, math.inf)
        try:
            ends = parse_rfc3339(issued.expiration_timestamp)
        except ValueError as error:
            raise self._makes_no_sense(error) from error
        return Fresh(issued.token, max(0.0, (ends - self._now()).total_seconds()))

    def _read(self, answer: bytes) -> Issued:
        try:
            found = msgspec.json.decode(answer, type=_Answer)
        except msgspec.DecodeError as error:
            raise self._makes_no_sense(error) from error
        issued = found.status
        if found.api_version != self._said["apiVersion"] or found.kind != "ExecCredential" or issued is None:
            raise self._makes_no_sense(f"{found.kind or 'nothing'} of {found.api_version or 'no version'}")
        if not issued.token and not (issued.client_certificate_data and issued.client_key_data):
            raise self._makes_no_sense("neither a token nor a certificate with its key")
        return issued

    def _makes_no_sense(self, found: object) -> KubeConfigError:
        return KubeConfigError(
            f"expected an ExecCredential of {self._said['apiVersion']} from {self._command}, which the kubeconfig "
            f"{self._file} names, found {found}"
        )

    def _environment(self, *, may_ask: bool) -> dict[str, str]:
        spec: dict[str, Any] = {"interactive": may_ask}
        if self._said.get("provideClusterInfo"):
            spec["cluster"] = dict(self._cluster)
        info = {"apiVersion": self._said["apiVersion"], "kind": "ExecCredential", "spec": spec}
        added = {str(one["name"]): str(one["value"]) for one in self._said.get("env") or []}
        return {**os.environ, **added, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}


class Entry(NamedTuple):
    """A cluster, a user or a context."""

    said: Mapping[str, Any]
    file: Path
    """Where it stands; its relative paths begin beside that file."""


class KubeConfig:
    """What files say together.

    Args:
        names: One file, or several as `KUBECONFIG` lists them, of which those that are not there count for nothing.

    Raises:
        KubeConfigError: None can be read, or one is no kubeconfig.
    """

    def __init__(self, names: str) -> None:
        self.name = names
        # Whole paths, because a plugin beside a file would else be looked for wherever PATH leads.
        paths = [Path(name).expanduser().absolute() for name in names.split(os.pathsep) if name]
        there = [path for path in paths if is_there(path)] if len(paths) > 1 else paths
        if not there:
            raise KubeConfigError(f"expected a kubeconfig at one of {names}, found none")
        self._read = [(path, _read(path)) for path in there]

    def current(self) -> str:
        """Return the name of the current context.

        Raises:
            KubeConfigError: There is none.
        """
        for _, said in self._read:
            if context := said.get("current-context"):
                return str(context)
        raise KubeConfigError(
            f"the kubeconfig {self.name} has no current-context: run `kubectl config use-context NAME`"
        )

    def named(self, singular: str, name: str) -> Entry:
        """Return the context, the cluster or the user of that name.

        Raises:
            KubeConfigError: There is none.
        """
        plural = f"{singular}s"
        for file, said in self._read:
            for entry in _entries(said, plural, file):
                if entry.get("name") == name:
                    return Entry(dict(entry.get(singular) or {}), file)
        raise KubeConfigError(
            f"the kubeconfig {self.name} names the {singular} {name!r}, which is not among its {plural}"
        )


def is_there(path: Path) -> bool:
    """Say whether a kubeconfig exists.

    Raises:
        KubeConfigError: That may not be looked at.
    """
    try:
        return path.exists()
    except OSError as error:
        raise KubeConfigError(
            f"cannot look at the kubeconfig {path}: {error.strerror}; set KUBECONFIG (or --kubeconfig) to one "
            "that may be read"
        ) from error


def _entries(said: Mapping[str, Any], plural: str, file: Path) -> Sequence[Mapping[str, Any]]:
    entries = said.get(plural) or []
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise KubeConfigError(f"expected a list of {plural} with names in the kubeconfig {file}, found {entries!r}")
    return entries


def _read(path: Path) -> Mapping[str, Any]:
    import yaml  # half a megabyte that a pod never needs

    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KubeConfigError(f"cannot read the kubeconfig {path}: {error}") from error
    if said is not None and not isinstance(said, dict):
        raise KubeConfigError(f"expected a kubeconfig in {path}, found {type(said).__name__}")
    return said or {}


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
