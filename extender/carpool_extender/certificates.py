"""The certificates between kube-scheduler and the extender: made once for a pod, or read again when they change.

In the directory of `TlsSettings`:

    server.pem         the extender's certificate and key
    client/ca.crt      the authority's certificate, for both sides
    client/client.pem  kube-scheduler's certificate and key; the scheduler reads this folder only

The key of the authority is deleted once it has signed both.
"""

import asyncio
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from carpool_core.clock import Clock
from carpool_core.settings import SettingsError
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from carpool_extender.settings import TlsSettings

LIFETIME_DAYS = 10 * 365
"""Longer than any pod runs."""
CHECK_S = 10.0

_LEAVES = {
    "client/client.pem": ("carpool-scheduler", ["extendedKeyUsage = clientAuth"]),
    "server.pem": ("carpool-extender", ["extendedKeyUsage = serverAuth", "subjectAltName = IP:127.0.0.1"]),
}
"""File → name and extensions of a certificate that the authority signs. The last one is there when all are."""


class Certificates(Collector):
    """Makes the files of a pod, and keeps the server's context up to date with those of another program."""

    def __init__(
        self, settings: TlsSettings, clock: Clock, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    ) -> None:
        self._settings, self._clock, self._sleep = settings, clock, sleep
        self._context: ssl.SSLContext | None = None
        self._loaded: list[tuple[int, int]] = []
        self._ca: bytes | None = None
        self._in_use: dict[Path, float] = {}
        """The server's certificate and its client's CA, once the server uses them, and their ends."""
        self._failure: str | None = None
        self._log = structlog.get_logger()

    def files(self) -> tuple[Path, Path, Path]:
        """Return certificate, key and client CA, after making them if that is this process's task.

        Raises:
            SettingsError: One is not set, is no file, or cannot be made.
        """
        if self._settings.directory is not None:
            try:
                _make(self._settings.directory)
            except OSError as error:
                raise SettingsError(
                    f"CARPOOL_EXTENDER_TLS_DIR: expected a directory to write certificates to, and openssl 3 to make "
                    f"them, found {self._settings.directory}: {error}"
                ) from error
        return self._settings.files()

    def keep_current(self, context: ssl.SSLContext) -> None:
        """Load the files into the context of a server now, and in `run` whenever they change."""
        self._context = context
        self._load()

    async def run(self) -> None:
        """Load certificates until cancelled; a failure is tried again, while the old ones stay in use."""
        said: str | None = None
        while True:
            try:
                self._load()
                self._failure = None
            except (OSError, ValueError, SettingsError) as error:
                self._failure = f"{error}; the certificates loaded before stay in use"
            problem = self.problem()
            if problem is not None and problem != said:
                self._log.error("certificates", problem=problem)
            said = problem
            await self._sleep(CHECK_S)

    def problem(self) -> str | None:
        """Return which certificate has expired or cannot be loaded, and what to do; None if there is none."""
        if self._failure is not None:
            return self._failure
        now = self._clock.now().timestamp()
        for file, end in self._in_use.items():
            if now >= end:
                ended = datetime.fromtimestamp(end, UTC).isoformat()
                return (
                    f"expected a valid certificate in {file}, found one that expired at {ended}; renew it: it is read "
                    f"again within {CHECK_S:.0f} s"
                )
        return None

    @property
    def expires_at(self) -> float | None:
        """When the first of the certificates in use expires, in seconds since 1970; None before any is in use."""
        return min(self._in_use.values(), default=None)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield when the first certificate expires."""
        family = GaugeMetricFamily(
            "carpool_extender_certificate_expiry_seconds",
            "End of the extender's certificate or of its CA, whichever is first, in seconds since 1970.",
        )
        if self.expires_at is not None:
            family.add_metric([], self.expires_at)
        yield family

    def _load(self) -> None:
        certificate, key, client_ca = files = self._settings.files()
        found = [(stat.st_ino, stat.st_mtime_ns) for stat in (file.stat() for file in files)]
        if self._context is None or found == self._loaded:
            return
        ca = client_ca.read_bytes()
        if self._ca not in (None, ca):
            raise SettingsError(
                f"expected the CA with which the pod started in {client_ca}, found another; restart the pod, because "
                "kube-scheduler reads its CA once"
            )
        in_use = {file: expiry_of(file) for file in (certificate, client_ca)}
        try:
            # A failure leaves a context with the new certificate and no key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            self._context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise SettingsError(
                f"expected a certificate and its key in {certificate} and {key}, found {error}; correct them: they are "
                f"read again within {CHECK_S:.0f} s"
            ) from error
        self._loaded, self._ca, self._in_use = found, ca, in_use
        self._log.info("certificates loaded", certificate=str(certificate))


def expiry_of(file: Path) -> float:
    """Return when the first certificate of a file expires, in seconds since 1970.

    Raises:
        OSError: It cannot be read, or holds no certificate.
    """
    return ssl.cert_time_to_seconds(_openssl("x509", "-in", str(file), "-noout", "-enddate").strip().partition("=")[2])


def _make(directory: Path) -> None:
    """Make an authority and both certificates, unless an earlier start of the process did."""
    if (directory / "server.pem").exists():
        return
    (directory / "client").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        authority, ca = Path(folder, "authority.pem"), Path(folder, "ca.crt")
        extensions = ["basicConstraints = critical, CA:TRUE", "keyUsage = critical, keyCertSign"]
        _issue(authority, "carpool-authority", extensions)
        _openssl("x509", "-in", str(authority), "-out", str(ca))
        ca.replace(directory / "client" / "ca.crt")
        for name, (subject, extensions) in _LEAVES.items():
            _issue(directory / name, subject, ["basicConstraints = critical, CA:FALSE", *extensions], authority)


def _issue(file: Path, subject: str, extensions: Iterable[str], authority: Path | None = None) -> None:
    """Write a certificate and its new key, readable by this user only."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        config, key, certificate = (Path(folder, name) for name in ("config", "key", "certificate"))
        config.write_text("\n".join(["[req]", "distinguished_name = dn", "[dn]", "[ext]", *extensions, ""]))
        signed = [] if authority is None else ["-CA", str(authority), "-CAkey", str(authority)]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *signed]
        of = ["-days", str(LIFETIME_DAYS), "-config", str(config), "-extensions", "ext", "-subj", f"/CN={subject}"]
        _openssl("req", "-x509", *kind, *of, "-keyout", str(key), "-out", str(certificate))
        with key.open("a") as both:  # openssl gave the file its mode
            both.write(certificate.read_text())
        key.replace(file)


def _openssl(*arguments: str) -> str:
    """Run openssl and return its output. Raises OSError if it fails."""
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
