"""The certificates between kube-scheduler and the extender: made, renewed, and loaded while connections use them.

In the directory of `TlsSettings`:

    authority.pem      certificate and key that sign the others; only the extender reads it
    server.pem         the extender's certificate and key
    client/ca.crt      the authority's certificate, for both sides
    client/client.pem  kube-scheduler's certificate and key; the scheduler reads this folder only

Certificate and key share a file, so that a reader never sees one of them renewed and the other not.
"""

import asyncio
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from carpool_core.clock import Clock
from carpool_core.settings import SettingsError
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from carpool_extender.settings import TlsSettings

LIFETIME_DAYS = 365
AUTHORITY_DAYS = 10 * 365
"""Longer than any pod runs: kube-scheduler reads the authority once, and the other files for each connection."""
RENEW_AFTER = 2 / 3
"""Share of a certificate's life after which it is renewed."""
CHECK_S = 10.0

_LEAVES = {
    "server.pem": ("carpool-extender", ["extendedKeyUsage = serverAuth", "subjectAltName = IP:127.0.0.1"]),
    "client/client.pem": ("carpool-scheduler", ["extendedKeyUsage = clientAuth"]),
}
"""File → name and extensions of a certificate that the authority signs."""


class Validity(NamedTuple):
    """When a certificate is valid, in seconds since 1970."""

    not_before: float
    not_after: float

    def is_due(self, now: float) -> bool:
        """Return whether the certificate should be renewed."""
        return now >= self.not_before + RENEW_AFTER * (self.not_after - self.not_before)


class Certificates(Collector):
    """Keeps the files and the server's context up to date.

    Args:
        settings: Where the files are, and whether they are made here.
        clock: This machine's clock, which both sides read.
        sleep: Waits between two checks.
    """

    def __init__(
        self, settings: TlsSettings, clock: Clock, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    ) -> None:
        self._settings, self._clock, self._sleep = settings, clock, sleep
        self._context: ssl.SSLContext | None = None
        self._loaded: list[tuple[int, int]] = []
        self._in_use: dict[Path, Validity] = {}
        """The server's certificate and its client's CA, once the server uses them."""
        self._log = structlog.get_logger()

    def files(self) -> tuple[Path, Path, Path]:
        """Return certificate, key and client CA, after making or renewing them if that is this process's task.

        Raises:
            SettingsError: One is not set, is no file, or cannot be made.
        """
        if self._settings.directory is not None:
            try:
                self._renew(self._settings.directory)
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
        """Renew and load certificates until cancelled; a failure is tried again, while the old ones stay in use."""
        said: str | None = None
        while True:
            try:
                self._load()
                problem = self.problem()
            except (OSError, ValueError, SettingsError) as error:  # SSLError is an OSError
                problem = f"the certificates cannot be renewed or read: {error}"
            if problem is not None and problem != said:
                self._log.error("certificates", problem=problem)
            said = problem
            await self._sleep(CHECK_S)

    def problem(self) -> str | None:
        """Return why no connection can succeed: a certificate has expired; None if all are valid."""
        now = self._clock.now().timestamp()
        for file, validity in self._in_use.items():
            if now >= validity.not_after:
                ended = datetime.fromtimestamp(validity.not_after, UTC).isoformat()
                return (
                    f"expected a valid certificate in {file}, found one that expired at {ended}; renew it: it is read "
                    f"again within {CHECK_S:.0f} s"
                )
        return None

    @property
    def expires_at(self) -> float | None:
        """When the first of the certificates in use expires, in seconds since 1970; None before any is in use."""
        return min((validity.not_after for validity in self._in_use.values()), default=None)

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
        certificate, key, client_ca = self.files()
        found = [_version(file) for file in (certificate, key, client_ca)]
        if self._context is None or found == self._loaded:
            return
        in_use = {file: validity_of(file) for file in (certificate, client_ca)}
        self._context.load_cert_chain(certificate, key)
        self._context.load_verify_locations(client_ca)
        self._loaded, self._in_use = found, in_use
        self._log.info("certificates loaded", certificate=str(certificate))

    def _renew(self, directory: Path) -> None:
        """Make what is missing, and the certificates that have passed two thirds of their lives."""
        client, authority = directory / "client", directory / "authority.pem"
        client.mkdir(parents=True, exist_ok=True)
        if not authority.exists():
            extensions = ["basicConstraints = critical, CA:TRUE", "keyUsage = critical, keyCertSign"]
            _issue(authority, "carpool-authority", extensions, AUTHORITY_DAYS)
        if not (client / "ca.crt").exists():
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                _openssl("x509", "-in", str(authority), "-out", f"{folder}/ca.crt")
                Path(folder, "ca.crt").replace(client / "ca.crt")
        for name, (subject, extensions) in _LEAVES.items():
            file = directory / name
            if not file.exists() or validity_of(file).is_due(self._clock.now().timestamp()):
                _issue(file, subject, ["basicConstraints = critical, CA:FALSE", *extensions], LIFETIME_DAYS, authority)
                self._log.info("certificate made", file=str(file))


def validity_of(file: Path) -> Validity:
    """Return when the first certificate of a file is valid.

    Raises:
        OSError: It cannot be read, or holds no certificate.
    """
    return _validity(file, *_version(file))


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns


@lru_cache(maxsize=16)
def _validity(file: Path, *_version: int) -> Validity:
    dates = _openssl("x509", "-in", str(file), "-noout", "-dates").splitlines()
    return Validity(*(ssl.cert_time_to_seconds(date.partition("=")[2]) for date in dates))


def _issue(file: Path, subject: str, extensions: Iterable[str], days: int, authority: Path | None = None) -> None:
    """Write a certificate and its new key, readable by this user only."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        config, key, certificate = (Path(folder, name) for name in ("config", "key", "certificate"))
        config.write_text("\n".join(["[req]", "distinguished_name = dn", "[dn]", "[ext]", *extensions, ""]))
        signed = [] if authority is None else ["-CA", str(authority), "-CAkey", str(authority)]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", str(days), *signed]
        of = ["-config", str(config), "-extensions", "ext", "-subj", f"/CN={subject}"]
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
