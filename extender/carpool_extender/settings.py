"""Settings of the extender."""

from dataclasses import dataclass, field
from pathlib import Path

from carpool_core.settings import KubeSettings, LogSettings, SettingsError, setting


@dataclass(frozen=True)
class TlsSettings:
    """Mutual TLS: both sides show a certificate."""

    cert: Path | None = setting(
        None, flag="--tls-cert", env="CARPOOL_EXTENDER_TLS_CERT", help="The extender's certificate, PEM; required."
    )
    key: Path | None = setting(
        None, flag="--tls-key", env="CARPOOL_EXTENDER_TLS_KEY", help="The certificate's private key, PEM; required."
    )
    client_ca: Path | None = setting(
        None,
        flag="--client-ca",
        env="CARPOOL_EXTENDER_CLIENT_CA",
        help="CA that signed the scheduler's client certificate, PEM; required.",
    )

    def files(self) -> tuple[Path, Path, Path]:
        """Return certificate, key and client CA.

        Raises:
            SettingsError: One is not set, or is no file.
        """
        found = []
        for path, name in (
            (self.cert, "CARPOOL_EXTENDER_TLS_CERT"),
            (self.key, "CARPOOL_EXTENDER_TLS_KEY"),
            (self.client_ca, "CARPOOL_EXTENDER_CLIENT_CA"),
        ):
            if path is None:
                raise SettingsError(f"{name}: expected a PEM file, found nothing; the extender speaks mutual TLS only")
            if not path.is_file():
                raise SettingsError(f"{name}: expected a PEM file, found no file at {path}")
            found.append(path)
        return found[0], found[1], found[2]


@dataclass(frozen=True)
class ExtenderSettings:
    """Everything that can be set."""

    host: str = setting(
        "127.0.0.1",
        flag="--host",
        env="CARPOOL_EXTENDER_HOST",
        help="Address to listen on; kube-scheduler stands beside.",
    )
    port: int = setting(
        8888, flag="--port", env="CARPOOL_EXTENDER_PORT", help="TCP port of the verbs; 0 takes a free one."
    )
    policy: str = setting(
        "least-slowdown",
        flag="--policy",
        env="CARPOOL_POLICY",
        help="Which of the places that fit is taken: least-slowdown or most-available-memory.",
    )
    slots_per_gpu: int = setting(
        8, flag="--slots-per-gpu", env="CARPOOL_SLOTS_PER_GPU", help="Most tenants of one GPU; as the agents have it."
    )
    bind_timeout_seconds: float = setting(
        20.0,
        flag="--bind-timeout-seconds",
        env="CARPOOL_BIND_TIMEOUT_SECONDS",
        help="Seconds that a node's agent has to prepare a reservation; keep the extender's httpTimeout above it.",
    )
    metrics_port: int = setting(
        9400, flag="--metrics-port", env="CARPOOL_METRICS_PORT", help="TCP port of /metrics, /healthz and /readyz."
    )
    tls: TlsSettings = field(default_factory=TlsSettings)
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
