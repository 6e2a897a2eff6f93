"""Settings of the extender."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from carpool_core.durations import ASSUMED_DURATION_S
from carpool_core.settings import (
    KubeSettings,
    LogSettings,
    SettingsError,
    autoscaling,
    metrics_port,
    setting,
    slots_per_gpu,
)

from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.scores import POLICIES, SchedulerConfig, find_policy
from carpool_extender.queue.order import QueueOrder


@dataclass(frozen=True)
class TlsSettings:
    """Mutual TLS: both sides show a certificate."""

    directory: Path | None = setting(
        None,
        flag="--tls-dir",
        env="CARPOOL_EXTENDER_TLS_DIR",
        help="Directory in which the extender once makes certificates for ten years, for itself and, in the folder "
        "client, for the scheduler. If empty, the three settings below name files. A renewed certificate is read "
        "again; a new CA needs a restart of both processes.",
    )
    cert: Path | None = setting(
        None,
        flag="--tls-cert",
        env="CARPOOL_EXTENDER_TLS_CERT",
        help="The extender's certificate, PEM; required without --tls-dir.",
    )
    key: Path | None = setting(
        None,
        flag="--tls-key",
        env="CARPOOL_EXTENDER_TLS_KEY",
        help="The certificate's private key, PEM; required without --tls-dir.",
    )
    client_ca: Path | None = setting(
        None,
        env="CARPOOL_EXTENDER_CLIENT_CA",
        help="CA that signed the scheduler's client certificate, PEM; required without --tls-dir.",
    )

    def files(self) -> tuple[Path, Path, Path]:
        """Return certificate, key and client CA.

        Raises:
            SettingsError: One is not set, or is no file.
        """
        if self.directory is not None:
            return self.directory / "server.pem", self.directory / "server.pem", self.directory / "client" / "ca.crt"
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


_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
"""Name of a namespace; that of a group has the same form."""


def parse_tenancy_groups(text: str) -> dict[str, str]:
    """Return the tenancy group by namespace.

    Raises:
        SettingsError: The text has another form, or a namespace is in two groups.
    """
    found: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        group, _, namespaces = part.partition("=")
        for namespace in namespaces.split(","):
            if not _LABEL.fullmatch(group) or (namespace != "*" and not _LABEL.fullmatch(namespace)):
                raise SettingsError(f"CARPOOL_TENANCY_GROUPS: expected GROUP=NAMESPACE,NAMESPACE, found {part!r}")
            if found.setdefault(namespace, group) != group:
                raise SettingsError(
                    f"CARPOOL_TENANCY_GROUPS: expected one group for namespace {namespace}, found {found[namespace]} "
                    f"and {group}"
                )
    return found


@dataclass(frozen=True)
class SiteSettings:
    """Settings on which decisions depend: `explain` and `what-if` decide by the same ones as the extender."""

    policy: str = setting("least-slowdown", help=f"Policy that ranks the GPUs that fit: {', '.join(POLICIES)}.")
    job_policies: bool = setting(
        False, help="Whether a job may choose its own policy by the annotation carpool.dev/policy."
    )
    count_peaks: bool = setting(
        True,
        help="Whether the measured peak of a first run replaces its reserved memory once the peak is stable, so that "
        "other jobs may join its GPU. A peak that is stable for 90 seconds counts with a margin of 50%, after ten "
        "minutes with 10%. Otherwise the first run keeps its reserved memory, or the whole GPU, until it ends.",
    )
    tenancy_groups: str = setting(
        "",
        help="Namespaces that trust each other, as GROUP=NAMESPACE,NAMESPACE;GROUP=*. Jobs of one group share GPUs and "
        "MPS servers as those of one namespace do. * means all namespaces without a group. If empty, each namespace is "
        "alone.",
        allow_empty=True,
    )
    slots_per_gpu: int = slots_per_gpu()
    queue_order: QueueOrder = setting(
        QueueOrder.ALTERNATE,
        help="Order of pending jobs. Arrival: by the time at which they became admissible. Alternate: like Arrival, "
        "but the longest and the shortest job of each ten minutes alternate. LongestFirst: by length alone. The length "
        "is spec.training.steps times the predicted step time; --default-duration-seconds if it is unknown. Pods of a "
        "higher priority always come first.",
    )
    default_duration_seconds: float = setting(
        ASSUMED_DURATION_S,
        minimum=1,
        help="Length that the queue assumes for a job without spec.training.steps, in seconds.",
    )
    conditions: AdmissionLimits = field(default_factory=AdmissionLimits)
    kube: KubeSettings = field(default_factory=KubeSettings)

    def scheduler_config(self) -> SchedulerConfig:
        """Return how GPUs are filtered and ranked.

        Raises:
            UnknownPolicyError: The policy's name is not in the table.
        """
        return SchedulerConfig(find_policy(self.policy), self.slots_per_gpu, self.conditions)


@dataclass(frozen=True)
class AskSettings(SiteSettings):
    """Settings of `explain` and `what-if`; by default those of the installation."""

    site: str = setting(
        "carpool-system/carpool",
        help="Installation whose settings apply unless a flag or variable sets them, as NAMESPACE/NAME. They are read "
        "from its ConfigMap NAME-settings. If empty, the defaults apply.",
        allow_empty=True,
    )
    calibration: str = setting(
        "carpool-system/carpool-calibration",
        help="ConfigMap with the operator's calibration, as NAMESPACE/NAME, which what-if predicts with. If empty, or "
        "if you may not read it, the shipped models are used.",
        allow_empty=True,
    )
    share_unmeasured: bool = setting(
        False, help="Whether the operator lets jobs share GPUs for which too few runs were measured."
    )


@dataclass(frozen=True)
class ExtenderSettings(SiteSettings):
    """Settings of the extender."""

    host: str = setting(
        "127.0.0.1", env="CARPOOL_EXTENDER_HOST", help="Address to listen on; kube-scheduler runs in the same pod."
    )
    port: int = setting(
        8888, env="CARPOOL_EXTENDER_PORT", minimum=0, maximum=65535, help="TCP port of the verbs; 0 takes a free one."
    )
    candidates: int = setting(
        1,
        minimum=1,
        help="Largest number of nodes that filter returns, the best first. One is enough if kube-scheduler takes the "
        "best node anyway, as with the chart's weight of the extender. Use more with a small weight, so that the "
        "scheduler's own preferences count.",
    )
    bind_timeout_seconds: float = setting(
        20.0,
        minimum=1,
        maximum=3600,
        help="Time that a node's agent has to prepare a reservation, in seconds; the extender's httpTimeout must be "
        "longer.",
    )
    admission_timeout_seconds: float = setting(
        30.0,
        minimum=1,
        maximum=3600,
        help="Seconds after which an admitted job without a node returns to the queue and backs off.",
    )
    scheduler_lease: str = setting(
        "",
        help="Lease of the kube-scheduler beside this extender, as NAMESPACE/NAME: the extender admits jobs while that "
        "scheduler leads. If empty, it always does; there may be one extender only then.",
        allow_empty=True,
    )
    scheduler_host: str = setting(
        "",
        help="Host name that the kube-scheduler beside this extender writes into its Lease; this host's if empty.",
        allow_empty=True,
    )
    autoscaling: bool = autoscaling()
    metrics_port: int = metrics_port(9400)
    tls: TlsSettings = field(default_factory=TlsSettings)
    log: LogSettings = field(default_factory=LogSettings)
