"""Who we are to the API server: a bearer token that is fixed, stands in a file, or comes from a plugin of a cloud."""

import base64
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from carpool_core.clock import parse_rfc3339

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
