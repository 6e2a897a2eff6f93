"""What is asked of docker, kind, kubectl and helm. Rendering only."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from carpool_e2e.chart import CHART, NAMESPACE, PROJECT, RELEASE, Manifest
from carpool_e2e.kind.commands import Command
from carpool_e2e.nodes import MANAGED_LABELS
from carpool_e2e.tools import Version
from carpool_e2e.workloads.pod import IMAGE as ENVIRONMENT_IMAGE

PREFIX = "/carpool-environment"
"""Under which a worker sees this machine's Python: at their own paths the mounts would hide the worker's programs."""

TARGETS = ("operator", "extender", "agent")
"""The Dockerfile's images."""

LABEL_GPUS = "carpool.dev/simulated"
"""Label of a worker that says which simulated GPUs it has."""


@dataclass(frozen=True)
class Need:
    """A program that kind's cluster needs."""

    program: str
    ask: tuple[str, ...]
    """Arguments that make it print its version; docker prints the engine's, and fails where none answers."""
    at_least: Version
    why: str


NEEDS = (
    Need("docker", ("version", "--format", "{{.Server.Version}}"), (20, 10), "an engine that runs"),
    Need("kind", ("version",), (0, 27), "nodes with containerd 2, which knows CDI"),
    Need("kubectl", ("version", "--client"), (1, 30), "to ask the cluster"),
    Need("helm", ("version",), (3, 14), "to install the chart"),
)


def cluster_name(uid: int, project: Path = PROJECT) -> str:
    """Return the name of the one cluster that this user's demos of this checkout have."""
    return f"carpool-{uid}-{hashlib.sha256(str(project).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Plan:
    """A cluster of kind."""

    name: str
    kubeconfig: Path
    gpus: Mapping[str, str]
    """Workers: what `LABEL_GPUS` says of each → its simulated GPUs."""
    environment: Sequence[Path]
    """Directories of this machine that training containers see."""

    @property
    def version(self) -> str:
        """The chart's version of Carpool, with which the images are tagged."""
        return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])

    @property
    def images(self) -> list[str]:
        """Everything that the workers must have."""
        return [*(f"localhost/carpool/{target}:{self.version}" for target in TARGETS), ENVIRONMENT_IMAGE]

    @property
    def workers(self) -> list[str]:
        """The workers' names, which kind chooses."""
        return [f"{self.name}-worker{number if number > 1 else ''}" for number in range(1, len(self.gpus) + 1)]

    def config(self) -> dict[str, Any]:
        """Return kind's configuration: a control plane, and a worker with this machine's Python for each entry."""
        mounts = [{"hostPath": str(p), "containerPath": f"{PREFIX}{p}", "readOnly": True} for p in self.environment]
        workers: list[dict[str, Any]] = [
            {"role": "worker", "labels": {**MANAGED_LABELS, LABEL_GPUS: label}, "extraMounts": mounts}
            for label in self.gpus
        ]
        nodes = [{"role": "control-plane"}, *workers]
        return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "name": self.name, "nodes": nodes}

    def builds(self) -> list[Command]:
        """Build the images. The operator's takes PyTorch from PIP_EXTRA_INDEX_URL where that is set."""
        arguments = ("--build-arg", "PIP_EXTRA_INDEX_URL", str(PROJECT))
        builds = [
            Command(("docker", "build", "--target", target, "--tag", image, *arguments))
            for target, image in zip(TARGETS, self.images, strict=False)
        ]
        return [*builds, Command(("docker", "build", "--tag", ENVIRONMENT_IMAGE, "-"), "FROM busybox:stable\n")]

    def create(self) -> Command:
        """Make the cluster."""
        kubeconfig = ("--kubeconfig", str(self.kubeconfig))
        arguments = ("kind", "create", "cluster", "--name", self.name, "--config", "-", "--wait", "3m", *kubeconfig)
        return Command(arguments, json.dumps(self.config()))

    def load(self) -> Command:
        """Bring the images into the workers."""
        nodes = ("--nodes", ",".join(self.workers))
        return Command(("kind", "load", "docker-image", *self.images, "--name", self.name, *nodes))

    def delete(self) -> Command:
        """Remove the cluster."""
        return Command(("kind", "delete", "cluster", "--name", self.name, "--kubeconfig", str(self.kubeconfig)))

    def kubectl(self, *arguments: str, stdin: str = "") -> Command:
        """Ask the cluster."""
        return Command(("kubectl", "--kubeconfig", str(self.kubeconfig), *arguments), stdin)

    def ask_scheduler(self) -> Command:
        """Print the image of the cluster's own kube-scheduler, which its nodes hold already."""
        first = "{.items[0].spec.containers[0].image}"
        return self.kubectl(
            "-n", "kube-system", "get", "pods", "-l", "component=kube-scheduler", "-o", f"jsonpath={first}"
        )

    def values(self, scheduler_image: str, label: str) -> dict[str, Any]:
        """Return the chart's values for the workers of one label."""
        registry, _, rest = scheduler_image.rpartition("/")
        repository, _, tag = rest.partition(":")
        return {
            "global": {"imageRegistry": "localhost"},
            "fullnameOverride": RELEASE,
            "scheduler": {"image": {"registry": registry, "repository": repository, "tag": tag}},
            "nodeAgent": {"simulatedGpus": self.gpus[label], "nodeSelector": {**MANAGED_LABELS, LABEL_GPUS: label}},
        }

    def install(self, scheduler_image: str) -> Command:
        """Install the chart, with the agents of the first label, and wait until everything is ready."""
        label = next(iter(self.gpus))
        where = ("--namespace", NAMESPACE, "--create-namespace", "--kubeconfig", str(self.kubeconfig))
        arguments = ("helm", "install", RELEASE, str(CHART), *where, "--values", "-", "--wait", "--timeout", "5m")
        return Command(arguments, json.dumps(self.values(scheduler_image, label)))

    def render_agents(self, scheduler_image: str, label: str) -> Command:
        """Print the agents of another label: the chart knows one kind of simulated GPUs for all nodes."""
        only = ("--show-only", "templates/node-agent/daemonset.yaml", "--namespace", NAMESPACE, "--values", "-")
        values = json.dumps(self.values(scheduler_image, label))
        return Command(("helm", "template", f"{RELEASE}-{label}", str(CHART), *only), values)

    def apply_agents(self, rendered: str, label: str) -> Command:
        """Apply those agents beside the chart's own: they share all but their name, their nodes and their GPUs."""
        daemonset = yaml.safe_load(rendered)
        daemonset["metadata"]["name"] += f"-{label}"
        return self.kubectl("apply", "-f", "-", stdin=json.dumps(daemonset))

    def wait_for_agents(self, label: str) -> Command:
        """Wait until those agents are ready."""
        name = f"daemonset/{RELEASE}-node-agent-{label}"
        return self.kubectl("-n", NAMESPACE, "rollout", "status", name, "--timeout=3m")


def below(manifest: Mapping[str, Any], prefix: str = PREFIX) -> Manifest:
    """Return a job whose template finds the directories of its node under a prefix."""
    moved: Manifest = copy.deepcopy(dict(manifest))
    for volume in moved["spec"]["template"]["spec"].get("volumes", []):
        if "hostPath" in volume:
            volume["hostPath"]["path"] = f"{prefix}{volume['hostPath']['path']}"
    return moved
