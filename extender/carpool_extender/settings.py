"""Settings of the extender."""

from dataclasses import dataclass, field
from pathlib import Path

from carpool_core.settings import (
    KubeSettings,
    LogSettings,
    SettingsError,
    metrics_port,
    prediction_key,
    setting,
    slots_per_gpu,
)

from carpool_extender.framework.admission_limits import AdmissionLimits, Quantile
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


@dataclass(frozen=True)
class DecisionSettings:
    """What decides where a job runs and when; `carpool explain` and `what-if` take the same settings."""

    policy: str = setting(
        "least-slowdown",
        flag="--policy",
        env="CARPOOL_POLICY",
        help=f"Policy that chooses among the places that fit: {', '.join(POLICIES)}.",
    )
    job_policies: bool = setting(
        False,
        flag="--job-policies",
        env="CARPOOL_JOB_POLICIES",
        help="Whether a job may choose another policy for itself, by its annotation carpool.dev/policy.",
    )
    count_peaks: bool = setting(
        True,
        flag="--count-peaks",
        env="CARPOOL_COUNT_PEAKS",
        help="Whether a job that never ran counts with its measured memory peak and a margin once the peak is stable: "
        "50% more after 90 seconds, 10% more after ten minutes. It then replaces the whole GPU of an unmeasured job, "
        "and the larger bound of a first run. Otherwise both stay until the job ends.",
    )
    slots_per_gpu: int = slots_per_gpu()
    queue_order: QueueOrder = setting(
        QueueOrder.ALTERNATE,
        flag="--queue-order",
        env="CARPOOL_QUEUE_ORDER",
        help="Order of waiting jobs of the same priority. Arrival: by time. Alternate: by time, but of the jobs of the "
        "same ten minutes the longest and the shortest alternate. LongestFirst: by length. A length is the number of "
        "steps in the spec times the predicted time of a step; one hour if the spec has no steps.",
    )


@dataclass(frozen=True)
class AskSettings(DecisionSettings):
    """Settings of `carpool explain` and `what-if`; the installation's own settings apply where one is left out."""

    site: str = setting(
        "carpool-system/carpool",
        flag="--site",
        env="CARPOOL_SITE",
        help="Installation whose settings apply where no flag or variable is given, as NAMESPACE/NAME: they are read "
        "from the ConfigMap that the chart writes, if the caller may read it; not read if empty.",
        allow_empty=True,
    )
    conditions: ConditionSettings = field(default_factory=ConditionSettings)
    calibration: str = setting(
        "carpool-system/carpool-calibration",
        flag="--calibration",
        env="CARPOOL_CALIBRATION",
        help="ConfigMap, as NAMESPACE/NAME, with the operator's calibration, by which what-if predicts; the shipped "
        "values if it is empty or may not be read.",
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
class ExtenderSettings(DecisionSettings):
    """Settings of `carpool extender`."""

    host: str = setting(
        "127.0.0.1",
        flag="--host",
        env="CARPOOL_EXTENDER_HOST",
        help="Address to listen on; kube-scheduler runs in the same pod.",
    )
    port: int = setting(
        8888,
        flag="--port",
        env="CARPOOL_EXTENDER_PORT",
        minimum=0,
        maximum=65535,
        help="TCP port of the verbs; 0 takes a free one.",
    )
    candidates: int = setting(
        1,
        flag="--candidates",
        env="CARPOOL_CANDIDATES",
        minimum=1,
        help="Maximum number of nodes that filter returns, the best first. 1 suits the chart's weight of the extender, "
        "with which kube-scheduler takes the best one anyway. A larger number with a smaller weight lets "
        "kube-scheduler's own preferences count, too.",
    )
    bind_timeout_seconds: float = setting(
        20.0,
        flag="--bind-timeout-seconds",
        env="CARPOOL_BIND_TIMEOUT_SECONDS",
        minimum=1,
        maximum=3600,
        help="Seconds that a node's agent has to prepare a reservation; keep the extender's httpTimeout above it.",
    )
    prediction_key: Path | None = prediction_key()
    metrics_port: int = metrics_port(9400)
    conditions: ConditionSettings = field(default_factory=ConditionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
