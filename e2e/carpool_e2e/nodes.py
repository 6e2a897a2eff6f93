"""Nodes with a kubelet: each in namespaces of its own, with its own containerd and network link."""

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from carpool_core.keys import LABEL_MANAGED

from carpool_e2e.binaries import CNI_FOLDERS, Binaries, static_busybox
from carpool_e2e.controlplane import SERVICE_ADDRESS, SERVICE_PORT, ControlPlane
from carpool_e2e.errors import HarnessError, StartError
from carpool_e2e.processes import (
    SERVICE_ACCOUNT,
    Process,
    ProcessTable,
    create_cgroups,
    first_child,
    link_name,
    wait_for,
)
from carpool_e2e.workloads import IMAGE as ENVIRONMENT_IMAGE

PAUSE_IMAGE = "localhost/pause:3.10"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
POD_SUBNET = "198.19.0.0/24"
"""Addresses of pods, the same on every node: each has a network namespace, and pods of different nodes never meet."""

REPORT_INTERVAL_S = 2
"""Interval of a kubelet's reports about its Node."""

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
    def service_account(self) -> Path:
        """Credentials of the node's agent."""
        return self.folder / "serviceaccount"

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
        # No server answers there; without an address every pod would get a warning.
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "evictionHard": {"memory.available": "10Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        # Tests wait for changes of allocatable resources.
        "nodeStatusUpdateFrequency": f"{REPORT_INTERVAL_S}s",
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
    for path in ("/var/lib/kubelet", "/var/lib/carpool", SERVICE_ACCOUNT):
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
    # A pod finds the Service `kubernetes` on its node: see start_service_proxy.
    lines += ["ip link set lo up", f"ip addr add {SERVICE_ADDRESS}/32 dev lo", f"touch {files.ready}"]
    # As the first process it inherits orphans, and must wait for them.
    lines += ["while :; do sleep 3600 & wait; done"]
    return "\n".join(lines) + "\n"


BUSYBOX_IMAGE = "localhost/busybox:dev"

_COMMANDS = ("sh", "sleep", "cat", "echo", "ls", "env", "true", "false", "date", "kill", "grep")
_DIRECTORIES = ("bin", "dev", "etc", "proc", "sys", "run", "root", "var")


def layer(busybox: bytes, programs: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Return a layer with busybox, its commands, other programs by path, and the directories of every container."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in _DIRECTORIES:
            _add(tar, name, type_=tarfile.DIRTYPE, mode=0o755)
        _add(tar, "tmp", type_=tarfile.DIRTYPE, mode=0o1777)
        _add(tar, "bin/busybox", busybox, mode=0o755)
        for command in _COMMANDS:
            _add(tar, f"bin/{command}", type_=tarfile.SYMTYPE, link="busybox")
        for path, content in programs.items():
            _add(tar, path, content, mode=0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        _add(tar, "etc/group", b"root:x:0:\n")
    return buffer.getvalue()


def scheduler_archive(binaries: Binaries, version: str) -> bytes:
    """Return an archive of an image with kube-scheduler, named and laid out as the upstream one."""
    program = {"usr/local/bin/kube-scheduler": Path(binaries["kube-scheduler"]).read_bytes()}
    return archive(layer(_busybox().read_bytes(), program), {f"localhost/kube-scheduler:{version}": ["kube-scheduler"]})


def _busybox() -> Path:
    busybox = static_busybox()
    if busybox is None:
        raise HarnessError("expected a static busybox, found none")
    return busybox


def _add(
    tar: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    type_: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    link: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = type_, mode, len(content), link
    tar.addfile(entry, io.BytesIO(content))


def archive(layer_tar: bytes, entrypoints: Mapping[str, Sequence[str]]) -> bytes:
    """Return a docker archive of images that share one layer.

    Args:
        layer_tar: The layer.
        entrypoints: Each image's name and what it runs by default.
    """
    digest = hashlib.sha256(layer_tar).hexdigest()
    files: dict[str, bytes] = {f"{digest}/layer.tar": layer_tar}
    manifest: list[dict[str, Any]] = []
    for name, entrypoint in entrypoints.items():
        config = json.dumps(
            {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
                "os": "linux",
                "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin:/usr/bin:/usr/local/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                # Two images of the same configuration would be one.
                "history": [{"comment": name}],
            }
        ).encode()
        file = f"{hashlib.sha256(config).hexdigest()}.json"
        files[file] = config
        manifest.append({"Config": file, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            _add(tar, path, content)
    return buffer.getvalue()


"""Where the agent finds its credentials, as in a pod."""
MANAGED_LABELS = {LABEL_MANAGED: "managed"}

_MAX_NODES = 16


@dataclass(frozen=True)
class Link:
    """The network link between the machine and a node."""

    name: str
    host_address: str
    node_address: str


def link_of(slot_name: str, slot: int, index: int) -> Link:
    """Return the link of a cluster's node: its addresses are of the range for benchmarks, which is never routed.

    Args:
        slot_name: Prefix of the cluster's names.
        slot: Number of the cluster.
        index: Number of the node in its cluster, below 16.
    """
    if index >= _MAX_NODES:
        raise HarnessError(f"expected at most {_MAX_NODES} nodes with a kubelet in a cluster, found number {index + 1}")
    prefix = f"198.18.{slot}"
    return Link(link_name(slot_name, index), f"{prefix}.{4 * index + 1}", f"{prefix}.{4 * index + 2}")


@dataclass(frozen=True)
class KubeletNode:
    """A node with a kubelet; started step by step, so that several nodes can start at the same time."""

    files: NodeFiles
    link: Link
    plane: ControlPlane
    binaries: Binaries
    table: ProcessTable
    archives: tuple[Path, ...] = ()
    """Archives of more images to load."""

    @property
    def name(self) -> str:
        """Its name in Kubernetes."""
        return self.files.name

    def start_runtime(self) -> int:
        """Prepare namespaces, start containerd and load the images; return the namespaces' first process."""
        self._write_files()
        create_cgroups(self.files.cgroup)
        first = self._start_namespaces()
        self._connect(first)
        containerd = self._start(first, "containerd", ["--config", str(self.files.folder / "containerd.toml")])
        ctr = [self.binaries["ctr"], "-a", CONTAINERD_SOCKET]
        containerd.wait_until(lambda: self._inside(first, [*ctr, "version"]).returncode == 0)
        for archive in (self.files.folder / "images.tar", *self.archives):
            imported = self._inside(first, [*ctr, "-n", "k8s.io", "images", "import", str(archive)])
            if imported.returncode != 0:
                raise StartError(f"{self.name} cannot load {archive}: {imported.stderr.decode()}")
        return first

    def start_kubelet(self, first: int) -> Process:
        """Start the kubelet and wait until it answers."""
        token = self.plane.tokens[f"kubelet-{self.name}"]
        kubeconfig = self.plane.write_kubeconfig(f"kubelet-{self.name}", token, self.link.host_address)
        arguments = kubelet_arguments(self.files, kubeconfig, self.link.node_address, MANAGED_LABELS)
        kubelet = self._start(first, "kubelet", arguments)
        kubelet.wait_until(lambda: self.plane.api.answers(f"/api/v1/nodes/{self.name}"))
        return kubelet

    def start_service_proxy(self, first: int) -> Process:
        """Start what forwards the address of the Service `kubernetes` to the API server, in place of kube-proxy.

        Pods reach the address through the node's end of their link. No packet filter is needed, which a container may
        lack.
        """
        netcat = [_busybox(), "nc"]
        to_server = [*netcat, self.link.host_address, self.plane.ports.apiserver]
        command = [str(part) for part in (*netcat, "-ll", "-p", SERVICE_PORT, "-e", *to_server)]
        return self.table.start(f"service-proxy-{self.name}", command, namespaces_of=first)

    def _start(self, first: int, binary: str, arguments: list[str]) -> Process:
        return self.table.start(
            f"{binary}-{self.name}", [self.binaries[binary], *arguments], {"TMPDIR": "/tmp"}, namespaces_of=first
        )

    def _write_files(self) -> None:
        files, folder = self.files, self.files.folder
        (folder / "cni").mkdir(parents=True)
        (folder / "cni" / "10-pods.conflist").write_text(json.dumps(cni_config()))
        config = kubelet_config(files, self.plane.ca_file, self.link.host_address)
        files.kubelet_config.write_text(json.dumps(config))
        (folder / "containerd.toml").write_text(containerd_config(files, self.binaries["runc"]))
        (folder / "init.sh").write_text(init_script(files))
        images = {PAUSE_IMAGE: ["/bin/sleep", "inf"], BUSYBOX_IMAGE: ["/bin/sh"], ENVIRONMENT_IMAGE: ["/bin/sh"]}
        (folder / "images.tar").write_bytes(archive(layer(_busybox().read_bytes()), images))

    def _start_namespaces(self) -> int:
        shell = shutil.which("sh") or "/bin/sh"
        unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
        outer = self.table.start(
            f"namespaces-{self.name}", [*unshare, "--propagation", "private", shell, str(self.files.folder / "init.sh")]
        )
        outer.wait_until(self.files.ready.exists, 20)
        pid = outer.popen.pid if outer.popen else 0
        return wait_for("the first process of a node", lambda: first_child(pid))

    def _connect(self, first: int) -> None:
        link = self.link
        _ip("link", "add", link.name, "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _ip("addr", "add", f"{link.host_address}/30", "dev", link.name)
        _ip("link", "set", link.name, "up")
        for arguments in (
            ("addr", "add", f"{link.node_address}/30", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", link.host_address),
        ):
            done = self._inside(first, ["ip", *arguments])
            if done.returncode != 0:
                raise StartError(f"ip {' '.join(arguments)} in {self.name}: {done.stderr.decode()}")

    def _inside(self, first: int, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        enter = ["nsenter", "-t", str(first), "-m", "-p", "-n", "--"]
        return subprocess.run([*enter, *command], capture_output=True, env=self.table.environment({}), check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
