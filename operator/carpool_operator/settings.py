"""Settings of the operator."""

from dataclasses import dataclass, field

from carpool_core.settings import KubeSettings, LogSettings, autoscaling, metrics_port, setting
from carpool_predictor.calibration.store import parse_config_map_name
from carpool_predictor.tracing.process import TraceLimits

from carpool_operator.attempts import Backoff


@dataclass(frozen=True)
class OperatorSettings:
    """Each field is a flag and an environment variable."""

    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
    namespaces: str = setting("", help="Namespaces whose jobs are handled, separated by commas; all if empty.")
    metrics_host: str = setting(
        "0.0.0.0",  # noqa: S104  # scraped and probed from outside the pod
        help="Address on which metrics and health are served.",
    )
    metrics_port: int = metrics_port(9402)
    workers: int = setting(16, minimum=1, help="Jobs that are reconciled at the same time.")
    trace_timeout_s: float = setting(
        120.0,
        flag="--trace-timeout-seconds",
        minimum=1,
        maximum=86400,
        help="Seconds after which tracing a catalog or graph model is cancelled.",
    )
    trace_memory_mib: int = setting(3072, minimum=1, help="Writable memory of the tracing subprocess, in MiB.")
    traces: int = setting(1, minimum=1, help="Models that are traced at the same time.")
    backoff_s: float = setting(
        10.0,
        flag="--backoff-seconds",
        minimum=0,
        maximum=86400,
        help="Seconds before the first restart of a failed job; doubled with each further one.",
    )
    backoff_most_s: float = setting(
        360.0,
        flag="--backoff-most-seconds",
        minimum=0,
        maximum=86400,
        help="Longest wait before a restart, in seconds.",
    )

    autoscaling: bool = autoscaling()
    calibration: str = setting(
        "",
        help="ConfigMap, as NAMESPACE/NAME, in which the operator stores the calibration that it learns from measured "
        "jobs. If empty, it learns nothing, and predictions are uncalibrated.",
    )
    share_unmeasured: bool = setting(
        False,
        help="Whether jobs share GPUs of a product and precision with too few measurements. Otherwise they run alone "
        "there until enough were measured. Without learning they always share, with a wider memory bound.",
    )

    lease: str = setting(
        "",
        env="CARPOOL_OPERATOR_LEASE",
        help="Lease, as NAMESPACE/NAME, by which several operators elect a leader. If empty, only one may run.",
    )
    identity: str = setting(
        "",
        env="CARPOOL_OPERATOR_IDENTITY",
        help="Unique name of this operator in the Lease; the host's name and a random UUID if empty.",
    )

    @property
    def calibration_place(self) -> tuple[str, str] | None:
        """Namespace and name of the ConfigMap; None if learning is off.

        Raises:
            SettingsError: The setting is not NAMESPACE/NAME.
        """
        return parse_config_map_name(self.calibration)

    @property
    def trace_limits(self) -> TraceLimits:
        """Limits of tracing a model."""
        return TraceLimits(timeout_s=self.trace_timeout_s, memory_mib=self.trace_memory_mib, concurrency=self.traces)

    @property
    def backoff(self) -> Backoff:
        """Backoff between attempts of a failed job."""
        return Backoff(first_s=self.backoff_s, most_s=self.backoff_most_s)

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """The namespaces; empty for all."""
        return tuple(name.strip() for name in self.namespaces.split(",") if name.strip())
