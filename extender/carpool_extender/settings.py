"""Settings of the extender."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool_core.durations import ASSUMED_DURATION_S
from carpool_core.settings import (
    KubeSettings,
    LogSettings,
    SettingsError,
    metrics_port,
    setting,
    slots_per_gpu,
)

from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.framework.scores import POLICIES
from carpool_extender.queue.order import QueueOrder


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
class ConditionSettings:
    """What a GPU must be like before the policy looks at it."""

    max_sm_active: float | None = setting(
        None,
        flag="--most-sm-active",
        env="CARPOOL_MOST_SM_ACTIVE",
        help="Largest SM activity (0..1) of the jobs that a GPU has already; any when left out.",
    )
    max_joint_sm_active: float | None = setting(
        None,
        flag="--most-joint-sm-active",
        env="CARPOOL_MOST_JOINT_SM_ACTIVE",
        help="Largest SM activity (0..1) of a GPU's jobs together with the newcomer's; any when left out.",
    )
    min_free_mib: int | None = setting(
        None,
        flag="--least-free-mib",
        env="CARPOOL_LEAST_FREE_MIB",
        help="Least memory that is promised to nobody, in MiB, before another job comes; any when left out.",
    )
    max_jobs: int | None = setting(
        None,
        flag="--most-jobs",
        env="CARPOOL_MOST_JOBS",
        help="Most jobs on one GPU; as many as it has slots when left out.",
    )
    slowdown_quantile: Quantile = setting(
        Quantile.MEDIAN,
        flag="--slowdown-quantile",
        env="CARPOOL_SLOWDOWN_QUANTILE",
        help="Which predicted slowdown every job's maxSlowdown is held against. median: the expected one, which many "
        "cases exceed; upper: one that few exceed, so that fewer jobs share, and behind MPS hardly any at the default "
        "limit of 1.5.",
    )

    def conditions(self) -> AdmissionLimits:
        """Return them as decisions count with them.

        Raises:
            SettingsError: One is impossible.
        """
        return AdmissionLimits(
            self.max_sm_active,
            self.max_joint_sm_active,
            self.min_free_mib,
            self.max_jobs,
            quantile=self.slowdown_quantile,
        )


_ORDERS = (
    "Which of the jobs that wait is served first. Arrival: whoever came first. Alternate: the same, but of those that "
    "came within the same ten minutes the longest and the shortest take turns. LongestFirst: whoever takes longest, "
    "whenever it came. Lengths are the steps that jobs say, by the predicted time of a step; an hour where nobody said "
    "how many. Pods of a higher priority always come first."
)


def _policy() -> Any:
    return setting(
        "least-slowdown",
        flag="--policy",
        env="CARPOOL_POLICY",
        help=f"Which of the places that fit is taken: {', '.join(POLICIES)}.",
    )


def _job_policies() -> Any:
    return setting(
        False,
        flag="--job-policies",
        env="CARPOOL_JOB_POLICIES",
        help="Whether a job may choose another policy for itself, by its annotation carpool.dev/policy.",
    )


def _count_peaks() -> Any:
    return setting(
        True,
        flag="--count-peaks",
        env="CARPOOL_COUNT_PEAKS",
        help="Whether a job that never ran counts with the peak that it is measured to take, and a margin, once that "
        "has stood still (for 90 seconds: half as much again; for ten minutes: a tenth), so that others may join it: "
        "in place of the whole GPU of a job of which nothing was measured, and of the larger bound of a first run. "
        "Otherwise both stay until it ends.",
    )


@dataclass(frozen=True)
class AskSettings:
    """What decides, for whoever wants to know what the extender would decide: where left out, what the site says."""

    site: str = setting(
        "carpool-system/carpool",
        flag="--site",
        env="CARPOOL_SITE",
        help="Installation whose settings hold unless a flag or variable sets them, as NAMESPACE/NAME: they are read "
        "from its ConfigMap NAME-settings; if empty, the defaults hold.",
        allow_empty=True,
    )
    policy: str = _policy()
    job_policies: bool = _job_policies()
    count_peaks: bool = _count_peaks()
    slots_per_gpu: int = slots_per_gpu()
    queue_order: QueueOrder = setting(
        QueueOrder.ALTERNATE, flag="--queue-order", env="CARPOOL_QUEUE_ORDER", help=_ORDERS
    )
    conditions: ConditionSettings = field(default_factory=ConditionSettings)
    calibration: str = setting(
        "carpool-system/carpool-calibration",
        flag="--calibration",
        env="CARPOOL_CALIBRATION",
        help="ConfigMap, as NAMESPACE/NAME, in which the operator keeps what it learned, for what-if to predict with; "
        "as shipped where empty, or where it may not be read.",
        allow_empty=True,
    )
    share_unmeasured: bool = setting(
        False,
        flag="--share-unmeasured",
        env="CARPOOL_SHARE_UNMEASURED",
        help="Whether the operator lets jobs share GPUs of which too little was measured.",
    )
    kube: KubeSettings = field(default_factory=KubeSettings)


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
        8888,
        flag="--port",
        env="CARPOOL_EXTENDER_PORT",
        minimum=0,
        maximum=65535,
        help="TCP port of the verbs; 0 takes a free one.",
    )
    policy: str = _policy()
    job_policies: bool = _job_policies()
    count_peaks: bool = _count_peaks()
    slots_per_gpu: int = slots_per_gpu()
    queue_order: QueueOrder = setting(
        QueueOrder.ALTERNATE, flag="--queue-order", env="CARPOOL_QUEUE_ORDER", help=_ORDERS
    )
    candidates: int = setting(
        1,
        flag="--candidates",
        env="CARPOOL_CANDIDATES",
        minimum=1,
        help="Nodes that filter names at most, the best first: one where kube-scheduler takes the best anyway, as with "
        "the weight that the chart gives the extender; more where that is small, and the scheduler's own preferences "
        "shall count, too.",
    )
    bind_timeout_seconds: float = setting(
        20.0,
        flag="--bind-timeout-seconds",
        env="CARPOOL_BIND_TIMEOUT_SECONDS",
        minimum=1,
        maximum=3600,
        help="Seconds that a node's agent has to prepare a reservation; keep the extender's httpTimeout above it.",
    )
    default_duration_seconds: float = setting(
        ASSUMED_DURATION_S,
        flag="--default-duration-seconds",
        env="CARPOOL_DEFAULT_DURATION_SECONDS",
        minimum=1,
        help="Length in seconds that the queue assumes of a job whose spec says no steps.",
    )
    admission_timeout_seconds: float = setting(
        30.0,
        flag="--admission-timeout-seconds",
        env="CARPOOL_ADMISSION_TIMEOUT_SECONDS",
        minimum=1,
        maximum=3600,
        help="Seconds after which an admitted job that got no node goes back to the queue and backs off.",
    )
    scheduler_lease: str = setting(
        "",
        flag="--scheduler-lease",
        env="CARPOOL_SCHEDULER_LEASE",
        help="Lease of the kube-scheduler beside this extender, as NAMESPACE/NAME: the extender admits jobs while that "
        "scheduler leads. If empty, it always does; there may be one extender only then.",
        allow_empty=True,
    )
    scheduler_host: str = setting(
        "",
        flag="--scheduler-host",
        env="CARPOOL_SCHEDULER_HOST",
        help="Host name that the kube-scheduler beside this extender writes into its Lease; this host's if empty.",
        allow_empty=True,
    )
    metrics_port: int = metrics_port(9400)
    conditions: ConditionSettings = field(default_factory=ConditionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
