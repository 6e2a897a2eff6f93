"""A whole cluster: composed, started in parallel, and ended without a trace."""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console

from carpool_e2e import binaries, chart, controlplane, fleet, images, nodes, processes
from carpool_e2e.binaries import CONTROL_PLANE_TOOLS, NODE_TOOLS, Binaries
from carpool_e2e.chart import NAMESPACE, Adaptation, Local, localize
from carpool_e2e.controlplane import ControlPlane
from carpool_e2e.errors import HarnessError
from carpool_e2e.nodes import KubeletNode, NodeFiles
from carpool_e2e.processes import Process, ProcessTable, Slot

AGENT_PORT = 9400
READY_S = 60.0


def carpool_command() -> str:
    """Return the `carpool` command of the environment that the harness runs in."""
    return str(Path(sys.executable).with_name("carpool"))


def scheduler_config(text: str, kubeconfig: Path) -> str:
    """Return the scheduler's configuration with a kubeconfig, which a pod does not need."""
    config = yaml.safe_load(text)
    config["clientConnection"] = {"kubeconfig": str(kubeconfig), **config.get("clientConnection", {})}
    return yaml.safe_dump(config)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - the URL is our own process's
            return True
    except OSError:
        return False


PROJECT = chart.PROJECT
LOGS = PROJECT / "out" / "logs"
"""Where the logs of the last clusters are left."""


@dataclass(frozen=True)
class Shape:
    """Nodes and processes of a cluster."""

    kubelet_nodes: Mapping[str, str] = field(default_factory=dict)
    """Nodes with a kubelet: name → simulated GPUs. Without root they are nodes without a kubelet."""
    fleet: Mapping[str, str] = field(default_factory=dict)
    """Nodes without a kubelet: name → simulated GPUs."""
    carpool: bool = True
    """Whether operator, scheduler and agents run."""
    chart: bool = True
    """Whether the chart's other objects are applied."""
    images: bool = False
    """Whether the nodes have the images of the chart's pods, and the default scheduler runs for them."""


FULL = Shape(
    kubelet_nodes={"a100": "NVIDIA A100-SXM4-40GB:4", "h100": "NVIDIA H100 80GB HBM3:4"},
    fleet={f"t4-{i:02}": "Tesla T4:4" for i in range(20)},
)
BARE = Shape(carpool=False)
EMPTY = Shape(carpool=False, chart=False)
PODS = Shape({"a100": "NVIDIA A100-SXM4-40GB:4"}, carpool=False, chart=False, images=True)
"""For `helm install` as on any cluster."""


@dataclass
class Cluster:
    """A running cluster."""

    slot: Slot
    shape: Shape
    plane: ControlPlane
    binaries: Binaries
    table: ProcessTable
    rendered: chart.Rendered
    kubelets: dict[str, KubeletNode] = field(default_factory=dict)
    """Nodes with a kubelet."""
    namespaces: dict[str, int] = field(default_factory=dict)
    """First process of each such node's namespaces."""

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.plane.state / "admin.kubeconfig"

    def __getitem__(self, name: str) -> Process:
        """Return a process: `operator`, `extender`, `kube-scheduler`, `agent-NODE`, `kubelet-NODE`, `fleet`, …."""
        return self.table[name]

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Run kubectl as administrator and return what it prints.

        Raises:
            KubectlError: It failed; the message is its output.
        """
        done = subprocess.run(
            [self.binaries["kubectl"], *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            check=False,
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *manifests: chart.Manifest) -> str:
        """Apply manifests."""
        text = yaml.dump_all(manifests, Dumper=yaml.CSafeDumper)
        return self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def wait_for_nodes(self) -> None:
        """Wait until every node is Ready and, where agents run, offers GPUs: a job before that waits with a warning."""
        conditions = ["--for=condition=Ready"]
        if self.shape.carpool:
            conditions.append(r"--for=jsonpath={.status.allocatable.carpool\.dev/gpu}")
        for condition in conditions:
            self.kubectl("wait", "node", "--all", condition, "--timeout=60s", timeout_s=69)

    def start_operator(self) -> None:
        """Start the operator and wait until it is ready."""
        port = self.plane.ports.operator_metrics
        operator = self._start_pod("operator", "operator", {"CARPOOL_METRICS_PORT": str(port)})
        operator.wait_until(lambda: _answers(f"http://127.0.0.1:{port}/readyz"), READY_S)

    def start_scheduler(self) -> None:
        """Start the extender and the kube-scheduler that asks it, and wait until both are ready."""
        ports = self.plane.ports
        environment = {
            "CARPOOL_METRICS_PORT": str(ports.extender_metrics),
            "CARPOOL_EXTENDER_PORT": str(ports.extender),
        }
        extender = self._start_pod("scheduler", "extender", environment)
        extender.wait_until(lambda: _answers(f"http://127.0.0.1:{ports.extender_metrics}/healthz"), READY_S)
        scheduler = self._start("kube-scheduler", self._scheduler())
        extender.wait_until(lambda: _answers(f"http://127.0.0.1:{ports.extender_metrics}/readyz"), READY_S)
        scheduler.wait_until(self._scheduler_leads, READY_S)

    def start_board(self) -> str:
        """Start `carpool board` with the administrator's rights, which ends with the cluster; return its address."""
        address = f"http://127.0.0.1:{self.plane.ports.board}"
        options = [f"--kubeconfig={self.kubeconfig}", f"--port={self.plane.ports.board}"]
        board = self.table.start("board", [carpool_command(), "board", *options])
        board.wait_until(lambda: _answers(address), READY_S)
        return address

    def start_agent(self, node: KubeletNode, first: int, gpus: str) -> None:
        """Start the agent of a node in the node's namespaces, and wait until it is ready.

        Args:
            node: The node, whose kubelet has registered it.
            first: First process of the node's namespaces.
            gpus: Its simulated GPUs, such as `NVIDIA A100-SXM4-40GB:4`.
        """
        name = f"agent-{node.name}"
        token = self.plane.api.token_of(NAMESPACE, "carpool-node-agent", node.name)
        (node.files.service_account / "token").write_text(token)
        (node.files.service_account / "ca.crt").write_bytes(self.plane.ca_file.read_bytes())
        environment = {
            "KUBERNETES_SERVICE_HOST": node.link.host_address,
            "KUBERNETES_SERVICE_PORT": str(self.plane.ports.apiserver),
            "CARPOOL_SIMULATED_GPUS": gpus,
            "CARPOOL_CARBON_GRAMS_PER_KWH": "400",
        }
        workload = self.rendered.one("DaemonSet", "carpool-node-agent")
        adaptation = Adaptation(node.files.folder, node.name, node.link.node_address, environment=environment)
        agent = self._start(name, localize(self.rendered, workload, "agent", adaptation), first)
        agent.wait_until(lambda: _answers(f"http://{node.link.node_address}:{AGENT_PORT}/readyz"), READY_S)

    def agent_environment(self) -> dict[str, str]:
        """Return what the chart sets for an agent, for the agents that run without a kubelet."""
        workload = self.rendered.one("DaemonSet", "carpool-node-agent")
        return localize(self.rendered, workload, "agent", Adaptation(self.plane.state)).environment

    def _scheduler_leads(self) -> bool:
        lease = self.plane.api.call(
            "GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/carpool-scheduler"
        )
        return bool(lease["spec"].get("holderIdentity"))

    def _scheduler(self) -> Local:
        ports = self.plane.ports
        kubeconfig = self._kubeconfig("carpool-scheduler")
        text = {"127.0.0.1:8888": f"127.0.0.1:{ports.extender}", "=10259": f"={ports.scheduler}"}
        deployment = self.rendered.one("Deployment", "carpool-scheduler")
        local = localize(self.rendered, deployment, "kube-scheduler", Adaptation(self.plane.state, text=text))
        files = {path: scheduler_config(content, kubeconfig) if path.name == "config.yaml" else content
                 for path, content in local.files.items()}  # fmt: skip
        outside = [f"--{what}-kubeconfig={kubeconfig}" for what in ("authentication", "authorization")]
        command = [self.binaries["kube-scheduler"], *local.command[1:], *outside, "--bind-address=127.0.0.1"]
        return Local(command, local.environment, files)

    def _start_pod(self, workload: str, container: str, environment: dict[str, str]) -> Process:
        """Start a container of a Deployment with the credentials that its pod would have; a kubeconfig without root."""
        deployment = self.rendered.one("Deployment", f"carpool-{workload}")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        credentials = None
        if os.getuid() == 0:
            credentials = self.plane.write_credentials(account, self.plane.api.token_of(NAMESPACE, account))
            port = str(self.plane.ports.apiserver)
            environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port, **environment}
        else:
            environment = {"KUBECONFIG": str(self._kubeconfig(account)), **environment}
        adaptation = Adaptation(self.plane.state, environment=environment)
        local = localize(self.rendered, deployment, container, adaptation)
        return self._start(container, local, credentials=credentials)

    def _kubeconfig(self, service_account: str) -> Path:
        return self.plane.write_kubeconfig(service_account, self.plane.api.token_of(NAMESPACE, service_account))

    def _start(
        self, name: str, local: Local, namespaces_of: int | None = None, credentials: Path | None = None
    ) -> Process:
        local.write_files()
        command = [carpool_command() if local.command[0] == "carpool" else local.command[0], *local.command[1:]]
        return self.table.start(
            name, command, {"PYTHONUNBUFFERED": "1", **local.environment}, namespaces_of, credentials
        )


class KubectlError(HarnessError):
    """kubectl failed; the message is its output."""


def why_no_kubelets() -> str:
    """Return why nodes with a kubelet cannot run here; empty if they can."""
    without = "nodes run without a kubelet, and containers do not start"
    if os.getuid() != 0:
        return f"kubelets need root (namespaces, mounts, cgroups); {without}"
    if shutil.which("unshare") and subprocess.run(["unshare", "-mpnf", "true"], check=False).returncode != 0:
        return f"kubelets need namespaces of their own, which this root may not make (CAP_SYS_ADMIN); {without}"
    if not all(os.access(hierarchy, os.W_OK) for hierarchy in processes.hierarchies() or [processes.CGROUP_ROOT]):
        return f"kubelets need cgroups, and {processes.CGROUP_ROOT} cannot be written; {without}"
    return ""


@contextmanager
def running(shape: Shape, console: Console | None = None) -> Iterator[Cluster]:
    """Run a cluster for the duration of a `with` block; `cluster.slot.keep()` lets it outlive that.

    Raises:
        HarnessError: PYTHONPATH is set.
        MissingError: The machine lacks something.
        StartError: A process did not become ready.
    """
    console = console or Console(stderr=True)
    if shape.carpool and (path := os.environ.get("PYTHONPATH")):
        # The cluster's processes do not get it, and containers do not see its folders: trainings would not start.
        raise HarnessError(f"expected no PYTHONPATH, because a cluster runs the installed packages; found {path}")
    if shape.kubelet_nodes and (reason := why_no_kubelets()):
        console.print(reason)
        shape = Shape({}, {**shape.kubelet_nodes, **shape.fleet}, shape.carpool)
    binaries.install_packages(binaries.FOR_CONTROL_PLANE + (binaries.FOR_NODES if shape.kubelet_nodes else ()), console)
    programs = binaries.ensure(CONTROL_PLANE_TOOLS | (NODE_TOOLS if shape.kubelet_nodes else set()), console=console)
    archives = (images.ensure(console),) if shape.images else ()
    slot = processes.acquire(console=console)
    table = ProcessTable(slot.directory, programs.search_path())
    try:
        console.print(f"Starting a cluster in {slot.directory}: {len(shape.kubelet_nodes)} nodes with a kubelet, "
                      f"{len(shape.fleet)} without; 15 to 30 s")  # fmt: skip
        started = time.monotonic()
        cluster = _start(slot, shape, programs, table, archives)
        console.print(f"It is up after {time.monotonic() - started:.0f} s")
        yield cluster
    finally:
        if not slot.kept:
            _save_logs(slot)
            slot.empty()
            table.reap()
        slot.release()


def _start(slot: Slot, shape: Shape, binaries: Binaries, table: ProcessTable, archives: tuple[Path, ...]) -> Cluster:
    names, state = list(shape.kubelet_nodes), slot.directory
    links = [nodes.link_of(slot.name, slot.number, index) for index in range(len(names))]
    plane = controlplane.prepare(state, processes.choose(slot.number), names, [link.host_address for link in links])
    cluster = Cluster(slot, shape, plane, binaries, table, chart.render(binaries))
    if archives:
        scheduler = state / "kube-scheduler.tar"
        scheduler.write_bytes(nodes.scheduler_archive(binaries, chart.kubernetes_version(binaries)))
        archives = (*archives, scheduler)
    for index, (name, link) in enumerate(zip(names, links, strict=True)):
        files = NodeFiles(state / f"n{index}", name, f"{slot.name}-{name}")
        cluster.kubelets[name] = KubeletNode(files, link, plane, binaries, table, archives)
    with ThreadPoolExecutor(max_workers=8) as pool, _ending_processes_of(slot):
        runtimes = {node.name: pool.submit(node.start_runtime) for node in cluster.kubelets.values()}
        # Links exist on the machine's side only after the runtimes have begun, so the server listens everywhere.
        controlplane.start(plane, binaries, table, "0.0.0.0" if names else "127.0.0.1")
        if shape.chart:
            install(cluster)
        controlplane.start_controllers(plane, binaries, table)
        if archives:
            controlplane.start_default_scheduler(plane, binaries, table)
        work = [pool.submit(_start_node, cluster, name, runtime) for name, runtime in runtimes.items()]
        if shape.fleet:
            environment = cluster.agent_environment() if shape.carpool else None
            work.append(pool.submit(fleet.start, plane, table, shape.fleet, environment))
        if shape.carpool:
            work += [pool.submit(cluster.start_operator), pool.submit(cluster.start_scheduler)]
        for each in work:
            each.result()
    if names or shape.fleet:
        cluster.wait_for_nodes()
    return cluster


@contextmanager
def _ending_processes_of(slot: Slot) -> Iterator[None]:
    """End the processes if the start fails or is interrupted, so that no thread waits for them."""
    try:
        yield
    except BaseException:
        processes.end_processes(slot.directory)
        raise


def install(cluster: Cluster) -> None:
    """Apply everything of the chart but the workloads."""
    rendered = cluster.rendered
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}}
    crds = [crd["spec"] for crd in rendered.crds]
    cluster.apply(namespace, *rendered.crds)
    # `kubectl wait` fails while the status of a CRD has no conditions yet.
    served = [f"/apis/{crd['group']}/{crd['versions'][0]['name']}/{crd['names']['plural']}" for crd in crds]
    processes.wait_for("the CRDs", lambda: 1 if all(map(cluster.plane.api.answers, served)) else None, READY_S)
    cluster.apply(*rendered.settings, *rendered.at_rest)


def _start_node(cluster: Cluster, name: str, runtime: Future[int]) -> None:
    node, first = cluster.kubelets[name], runtime.result()
    cluster.namespaces[name] = first
    node.start_service_proxy(first)
    node.start_kubelet(first)
    if cluster.shape.carpool:
        cluster.start_agent(node, first, cluster.shape.kubelet_nodes[name])


def _save_logs(slot: Slot) -> None:
    source = slot.directory / "log"
    if source.exists():
        target = LOGS / slot.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
