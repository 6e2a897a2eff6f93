"""Carpool's own processes, run as the chart says: its arguments, its environment, its files, its ServiceAccounts."""

import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import yaml

from carpool_e2e.binaries import Binaries
from carpool_e2e.chart import NAMESPACE, Adaptation, Local, Rendered, localize
from carpool_e2e.controlplane import ControlPlane
from carpool_e2e.nodes import KubeletNode
from carpool_e2e.processes import Process, ProcessTable

AGENT_PORT = 9400
READY_S = 60.0


@dataclass(frozen=True)
class CarpoolProcesses:
    """Starts operator, scheduler, extender and agents."""

    rendered: Rendered
    plane: ControlPlane
    binaries: Binaries
    table: ProcessTable

    def start_operator(self) -> None:
        """Start the operator and wait until it is ready."""
        port = self.plane.ports.operator_metrics
        local = self._localize("operator", "operator", {"CARPOOL_METRICS_PORT": str(port)})
        self._start("operator", local).wait_until(lambda: _answers(f"http://127.0.0.1:{port}/readyz"), READY_S)

    def start_scheduler(self) -> None:
        """Start the extender and the kube-scheduler that asks it, and wait until both are ready."""
        ports = self.plane.ports
        environment = {
            "CARPOOL_METRICS_PORT": str(ports.extender_metrics),
            "CARPOOL_EXTENDER_PORT": str(ports.extender),
        }
        extender = self._start("extender", self._localize("scheduler", "extender", environment))
        scheduler = self._start("kube-scheduler", self._scheduler())
        extender.wait_until(lambda: _answers(f"http://127.0.0.1:{ports.extender_metrics}/readyz"), READY_S)
        scheduler.wait_until(self._scheduler_leads, READY_S)

    def start_agent(self, node: KubeletNode, first: int, gpus: str) -> None:
        """Start the agent of a node in the node's namespaces, and wait until it is ready.

        Args:
            node: The node, whose kubelet has registered it.
            first: First process of the node's namespaces.
            gpus: Its simulated GPUs, such as `NVIDIA A100-SXM4-40GB:4`.
        """
        name = f"agent-{node.name}"
        token = self.plane.api.token_of(NAMESPACE, "carpool-node-agent", node.name)
        kubeconfig = self.plane.write_kubeconfig(name, token, node.link.host_address)
        environment = {"KUBECONFIG": str(kubeconfig), "CARPOOL_SIMULATED_GPUS": gpus}
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
        local = self._localize("scheduler", "kube-scheduler", {}, text)
        files = {path: scheduler_config(content, kubeconfig) if path.name == "config.yaml" else content
                 for path, content in local.files.items()}  # fmt: skip
        outside = [f"--{what}-kubeconfig={kubeconfig}" for what in ("authentication", "authorization")]
        command = [self.binaries["kube-scheduler"], *local.command[1:], *outside, "--bind-address=127.0.0.1"]
        return Local(command, local.environment, local.service_account, files)

    def _localize(
        self, workload: str, container: str, environment: dict[str, str], text: dict[str, str] | None = None
    ) -> Local:
        deployment = self.rendered.one("Deployment", f"carpool-{workload}")
        kubeconfig = self._kubeconfig(deployment["spec"]["template"]["spec"]["serviceAccountName"])
        adapted = {"KUBECONFIG": str(kubeconfig), **environment}
        return localize(
            self.rendered, deployment, container, Adaptation(self.plane.state, text=text or {}, environment=adapted)
        )

    def _kubeconfig(self, service_account: str) -> Path:
        return self.plane.write_kubeconfig(service_account, self.plane.api.token_of(NAMESPACE, service_account))

    def _start(self, name: str, local: Local, namespaces_of: int | None = None) -> Process:
        local.write_files()
        command = [carpool_command() if local.command[0] == "carpool" else local.command[0], *local.command[1:]]
        return self.table.start(name, command, {"PYTHONUNBUFFERED": "1", **local.environment}, namespaces_of)


def carpool_command() -> str:
    """Return the `carpool` command of the environment that the harness runs in."""
    return str(Path(sys.executable).with_name("carpool"))


def scheduler_config(text: str, kubeconfig: Path) -> str:
    """Return the scheduler's configuration with a kubeconfig, which a pod has no need of."""
    config = yaml.safe_load(text)
    config["clientConnection"] = {"kubeconfig": str(kubeconfig), **config.get("clientConnection", {})}
    return yaml.safe_dump(config)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - the URL is our own process's
            return True
    except OSError:
        return False
