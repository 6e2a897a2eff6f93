"""Settings of the node agent."""

from dataclasses import dataclass, field
from pathlib import Path

from carpool_core.settings import KubeSettings, LogSettings, autoscaling, metrics_port, setting, slots_per_gpu


@dataclass(frozen=True)
class AgentSettings:
    """Flags and environment variables of the node agent."""

    node_name: str = setting("", help="Name of the Node whose GPUs the agent manages; required.")
    simulated_gpus: str | None = setting(
        None, help='Products and counts of simulated GPUs, such as "NVIDIA A100-SXM4-40GB:4"; hardware if empty.'
    )
    kubelet: bool = setting(
        True, help="Whether the node has a kubelet; without one the agent only manages its GpuNode."
    )
    device_plugin_dir: Path = setting(
        Path("/var/lib/kubelet/device-plugins"), help="The kubelet's device plugin directory."
    )
    pod_resources_socket: Path = setting(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"), help="Socket of the kubelet's PodResources API."
    )
    cdi_dir: Path = setting(
        Path("/var/run/cdi"), help="Directory from which the container runtime reads CDI specifications."
    )
    cdi_static_dir: Path = setting(
        Path("/etc/cdi"), help="Second directory of CDI specifications, which the agent only reads; it may be absent."
    )
    state_dir: Path = setting(
        Path("/var/lib/carpool"),
        help="MPS pipes and simulated GPUs; parts are mounted into containers, so it has the same path on the node.",
    )
    mps_host: str = setting(
        "", help="Socket of `carpool node mps-host`, which starts the MPS daemons; the agent starts them if empty."
    )
    slots_per_gpu: int = slots_per_gpu()
    autoscaling: bool = autoscaling()
    mig_switch: bool = setting(
        False, help="Whether the agent may switch MIG on and off on an idle GPU; on Ampere that resets the GPU."
    )
    dcgm_exporter: str = setting(
        "", help="URL of dcgm-exporter's metrics on this node; the agent does not repeat its series; none if empty."
    )
    dcgm_address: str = setting(
        "localhost:5555",
        help="DCGM's host engine, HOST:PORT or unix:///PATH, used if its library can be loaded; none if empty.",
        allow_empty=True,
    )
    carbon_grams_per_kwh: float | None = setting(
        None,
        minimum=0,
        help="Carbon dioxide of the node's electricity, in g/kWh, for carpool_job_carbon_grams_total; none if empty.",
    )
    metrics_port: int = metrics_port(9400)
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
