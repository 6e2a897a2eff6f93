"""Configuration of a node: kubelet, containerd, CNI and the script that prepares its namespaces. Rendering only."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool_e2e.system import CNI_FOLDERS

PAUSE_IMAGE = "localhost/pause:3.10"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
POD_SUBNET = "198.19.0.0/24"
"""Addresses of pods, the same on every node: each has a network namespace, and pods of different nodes never meet."""

OVERLAID = ("/var/lib", "/var/log", "/run")
"""Directories of the machine over which a node sees an overlay of its own; it writes nothing to the machine's."""

SHIELDED_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Kernel settings that a kubelet would change on the machine: it is shown files that hold what it wants."""


@dataclass(frozen=True)
class NodeFiles:
    """Where a node keeps its files."""

    folder: Path
    name: str
    cgroup: str
    """Name of its cgroup in every hierarchy."""

    @property
    def kubelet_config(self) -> Path:
        """The kubelet's configuration."""
        return self.folder / "kubelet.json"

    @property
    def containerd_config(self) -> Path:
        """Containerd's configuration."""
        return self.folder / "containerd.toml"

    @property
    def script(self) -> Path:
        """The first process of its namespaces."""
        return self.folder / "init.sh"

    @property
    def ready(self) -> Path:
        """Exists once the namespaces are prepared."""
        return self.folder / "prepared"


def kubelet_config(files: NodeFiles, ca_file: Path, dns: str) -> dict[str, Any]:
    """Return the KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Only the API server holds a certificate of this authority.
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(ca_file)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupRoot": f"/{files.cgroup}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        # Nobody serves DNS there; without an address every pod would get a warning.
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "evictionHard": {"memory.available": "10Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        # A small machine runs two of these.
        "housekeepingInterval": "10s",
        "volumeStatsAggPeriod": "0s",
        "enableContentionProfiling": False,
        "enableProfilingHandler": False,
    }


def kubelet_arguments(files: NodeFiles, kubeconfig: Path, address: str, labels: dict[str, str]) -> list[str]:
    """Return the kubelet's arguments."""
    return [
        f"--config={files.kubelet_config}",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={files.name}",
        f"--node-ip={address}",
        f"--node-labels={','.join(f'{k}={v}' for k, v in labels.items())}",
        "--cert-dir=/var/lib/kubelet/pki",
    ]


def cni_config() -> dict[str, Any]:
    """Return the CNI chain: a point-to-point link for each pod, nothing to clean up when the namespaces end."""
    addresses = {"type": "host-local", "subnet": POD_SUBNET, "routes": [{"dst": "0.0.0.0/0"}]}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}]}


def containerd_config(files: NodeFiles, runc: str) -> str:
    """Return containerd's configuration, version 3."""
    folder = files.folder
    bin_dirs = json.dumps([str(f) for f in CNI_FOLDERS])
    return f"""\
version = 3
root = "{folder}/containerd"
state = "/run/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE_IMAGE}"

[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = {bin_dirs}
    conf_dir = "{folder}/cni"

  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
"""


def init_script(files: NodeFiles) -> str:
    """Return the script that is the first process of a node's mount, PID and network namespaces."""
    folder = files.folder
    lines = ["set -eu", f"mkdir -p {folder}/upper", f"mount -t tmpfs carpool {folder}/upper"]
    for target in OVERLAID:
        upper, work = f"{folder}/upper{target}/upper", f"{folder}/upper{target}/work"
        lines += [
            f"mkdir -p {upper} {work}",
            f"mount -t overlay carpool -o lowerdir={target},upperdir={upper},workdir={work} {target}",
        ]
    for path in ("/var/lib/kubelet", "/var/lib/carpool"):
        real = f"{folder}/{Path(path).name}"
        lines += [f"mkdir -p {path} {real}", f"mount --bind {real} {path}"]
    # The node agent may start before the kubelet has made its directories.
    lines += ["mkdir -p /var/run/cdi /var/lib/kubelet/device-plugins /var/lib/kubelet/pod-resources"]
    for name, value in SHIELDED_SYSCTLS.items():
        shield = f"{folder}/sysctl/{name}"
        lines += [
            f"if [ -e /proc/sys/{name} ]; then mkdir -p {Path(shield).parent}; echo {value} > {shield}; "
            f"mount --bind {shield} /proc/sys/{name}; fi"
        ]
    lines += ["ip link set lo up", f"touch {files.ready}"]
    # As the first process it inherits orphans, and must wait for them.
    lines += ["while :; do sleep 3600 & wait; done"]
    return "\n".join(lines) + "\n"
