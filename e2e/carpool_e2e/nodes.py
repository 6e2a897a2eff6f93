"""Nodes with a kubelet: each in namespaces of its own, with its own containerd and network link."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from carpool_core.keys import LABEL_MANAGED

from carpool_e2e import images, nodeconfig
from carpool_e2e.binaries import Binaries
from carpool_e2e.controlplane import ControlPlane
from carpool_e2e.errors import HarnessError, StartError
from carpool_e2e.nodeconfig import CONTAINERD_SOCKET, NodeFiles
from carpool_e2e.processes import Process, ProcessTable, first_child, wait_for
from carpool_e2e.residue import create_cgroups, link_name
from carpool_e2e.system import static_busybox

MANAGED_LABELS = {LABEL_MANAGED: "managed"}

_MAX_NODES = 16


@dataclass(frozen=True)
class Link:
    """The network link between the machine and a node."""

    name: str
    host_address: str
    node_address: str


def link_of(slot_name: str, slot: int, index: int) -> Link:
    """Return the link of a cluster's node: its addresses are of the range for benchmarks, which nobody routes.

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
        containerd = self._start(first, "containerd", ["--config", str(self.files.containerd_config)])
        ctr = [self.binaries["ctr"], "-a", CONTAINERD_SOCKET]
        containerd.wait_until(lambda: self._inside(first, [*ctr, "version"]).returncode == 0)
        archive = str(self.files.folder / "images.tar")
        imported = self._inside(first, [*ctr, "-n", "k8s.io", "images", "import", archive])
        if imported.returncode != 0:
            raise StartError(f"{self.name} cannot load its images: {imported.stderr.decode()}")
        return first

    def start_kubelet(self, first: int) -> Process:
        """Start the kubelet and wait until it answers."""
        token = self.plane.tokens[f"kubelet-{self.name}"]
        kubeconfig = self.plane.write_kubeconfig(f"kubelet-{self.name}", token, self.link.host_address)
        arguments = nodeconfig.kubelet_arguments(self.files, kubeconfig, self.link.node_address, MANAGED_LABELS)
        kubelet = self._start(first, "kubelet", arguments)
        kubelet.wait_until(lambda: self.plane.api.answers(f"/api/v1/nodes/{self.name}"))
        return kubelet

    def _start(self, first: int, binary: str, arguments: list[str]) -> Process:
        return self.table.start(
            f"{binary}-{self.name}", [self.binaries[binary], *arguments], {"TMPDIR": "/tmp"}, namespaces_of=first
        )

    def _write_files(self) -> None:
        files, folder = self.files, self.files.folder
        busybox = static_busybox()
        if busybox is None:
            raise HarnessError("expected a static busybox, found none")
        (folder / "cni").mkdir(parents=True)
        (folder / "cni" / "10-pods.conflist").write_text(json.dumps(nodeconfig.cni_config()))
        config = nodeconfig.kubelet_config(files, self.plane.ca_file, self.link.host_address)
        files.kubelet_config.write_text(json.dumps(config))
        files.containerd_config.write_text(nodeconfig.containerd_config(files, self.binaries["runc"]))
        files.script.write_text(nodeconfig.init_script(files))
        images.write(folder / "images.tar", busybox)

    def _start_namespaces(self) -> int:
        shell = shutil.which("sh") or "/bin/sh"
        unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
        outer = self.table.start(
            f"namespaces-{self.name}", [*unshare, "--propagation", "private", shell, str(self.files.script)]
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


def make(
    names: list[str], state: Path, slot: tuple[str, int], plane: ControlPlane, binaries: Binaries, table: ProcessTable
) -> list[KubeletNode]:
    """Describe the nodes of a cluster; nothing is started yet."""
    slot_name, number = slot
    return [
        KubeletNode(
            NodeFiles(state / f"n{index}", name, f"{slot_name}-{name}"),
            link_of(slot_name, number, index),
            plane,
            binaries,
            table,
        )
        for index, name in enumerate(names)
    ]
