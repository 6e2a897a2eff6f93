"""A cluster of kind: when it is the way to go, how it comes up, and how it is removed."""

import asyncio
import copy
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from rich.console import Console

from carpool_e2e import binaries
from carpool_e2e.binaries import CONTROL_PLANE_TOOLS, MODULES, NODE_TOOLS, Version, parse_version
from carpool_e2e.chart import CHART, NAMESPACE, PROJECT, RELEASE, Manifest
from carpool_e2e.cluster import FULL
from carpool_e2e.demo.scenes import Stage
from carpool_e2e.demo.show import play
from carpool_e2e.errors import HarnessError, MissingError
from carpool_e2e.nodes import MANAGED_LABELS
from carpool_e2e.workloads.pod import IMAGE as ENVIRONMENT_IMAGE
from carpool_e2e.workloads.pod import environment_paths


@dataclass(frozen=True)
class Command:
    """A call of another program."""

    arguments: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        """Return it as it would be typed."""
        return " ".join(self.arguments)


class CommandError(HarnessError):
    """A program failed, or is not there; the message says which and what it said."""


class Commands(Protocol):
    """Calls other programs."""

    def run(self, command: Command) -> None:
        """Call a program and show what it says while it works.

        Raises:
            CommandError: It failed.
        """

    def capture(self, command: Command) -> str:
        """Call a program and return what it prints.

        Raises:
            CommandError: It failed.
        """


class Shell:
    """Calls programs that are on PATH."""

    def run(self, command: Command) -> None:
        """Call a program; what it says goes to the terminal."""
        self._call(command, capture=False)

    def capture(self, command: Command) -> str:
        """Call a program and return its standard output."""
        return self._call(command, capture=True)

    def _call(self, command: Command, *, capture: bool) -> str:
        # kind loads an image from an archive, which an image with attestations beside it does not survive whole.
        environment = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        try:
            done = subprocess.run(
                command.arguments, input=command.stdin, capture_output=capture, text=True, env=environment, check=False
            )
        except OSError as error:
            raise CommandError(f"{command.arguments[0]}: expected on PATH, found {error.strerror}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout or "what it said stands above").strip()
            raise CommandError(f"`{command}` failed with status {done.returncode}: {said}")
        return done.stdout or ""


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


FOLDER = PROJECT / "out" / "kind"
"""Where the cluster's kubeconfig and lock are."""


def plan(folder: Path = FOLDER) -> Plan:
    """Return this user's cluster for this checkout: the nodes of the harness that have a kubelet, and no others."""
    return Plan(cluster_name(os.getuid()), folder / "kubeconfig", FULL.kubelet_nodes, environment_paths())


def out_of_reach(environ: Mapping[str, str]) -> list[str]:
    """Return the binaries of the harness that are nowhere and cannot be built, because there is no Go."""
    if shutil.which("go", path=environ.get("PATH", os.defpath)):
        return []
    wanted = CONTROL_PLANE_TOOLS | NODE_TOOLS
    tools = [(tool, module) for module in MODULES for tool in module.tools if tool.name in wanted]
    return [tool.name for tool, module in tools if binaries.find(tool, module, environ) is None]


def lacking(commands: Commands) -> list[str]:
    """Return what kind's cluster needs and this machine lacks, a sentence each."""
    found = [] if sys.platform == "linux" else [f"Linux, whose Python the containers see; found {sys.platform}"]
    return [*found, *(sentence for need in NEEDS if (sentence := _lacks(commands, need)))]


def _lacks(commands: Commands, need: Need) -> str:
    at_least = ".".join(map(str, need.at_least))
    wanted = f"{need.program} {at_least} or later ({need.why})"
    try:
        printed = commands.capture(Command((need.program, *need.ask)))
    except CommandError as error:
        return f"{wanted}; found: {error}"
    version = parse_version(printed)
    return "" if version and version >= need.at_least else f"{wanted}; found {printed.strip() or 'no version'}"


def require(commands: Commands, binaries_missing: list[str]) -> None:
    """Make sure that kind can stand in for the binaries.

    Raises:
        MissingError: It cannot; the message says what of either way is missing.
    """
    if missing := lacking(commands):
        raise MissingError(
            f"{', '.join(binaries_missing)}: expected on PATH or under KUBEBUILDER_ASSETS, found neither. Install Go "
            "to build them (https://go.dev/dl, 1.26 or later), or what a cluster of kind needs:\n  "
            + "\n  ".join(missing)
        )


@dataclass
class KindCluster:
    """A running cluster."""

    plan: Plan
    kept: bool = False
    """Whether it outlives the `with` block."""


@contextmanager
def running(commands: Commands, plan: Plan, console: Console) -> Iterator[KindCluster]:
    """Run a cluster of kind for the duration of a `with` block; one that an earlier run left is replaced.

    Raises:
        HarnessError: A step failed, or another process has the cluster. Nothing but the images is left.
    """
    plan.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    with _held(plan.kubeconfig.parent) as free:
        if not free:
            raise HarnessError(f"kind's cluster {plan.name} is in use by another process; end that one first")
        _remove(commands, plan)
        cluster = KindCluster(plan)
        try:
            _up(commands, plan, console)
            yield cluster
        finally:
            if not cluster.kept:
                _remove(commands, plan)


def clean(commands: Commands, plan: Plan) -> bool:
    """Remove the cluster of an earlier run, and return whether there was one; one that is in use stays.

    The images stay in Docker, whose cache they are.

    Raises:
        CommandError: There may be one, but kind does not answer.
    """
    with _held(plan.kubeconfig.parent) as free:
        try:
            return free and _remove(commands, plan)
        except CommandError:
            if plan.kubeconfig.exists():
                raise
            return False  # no kind, or no engine, and no cluster was ever made from here


def _up(commands: Commands, plan: Plan, console: Console) -> None:
    for build in plan.builds():
        console.print(f"$ {build}", highlight=False, markup=False)
        commands.run(build)
    console.print(f"Starting kind's cluster {plan.name} with {len(plan.gpus)} workers")
    commands.run(plan.create())
    commands.run(plan.load())
    scheduler = commands.capture(plan.ask_scheduler()).strip()
    commands.run(plan.install(scheduler))
    for label in [*plan.gpus][1:]:
        commands.run(plan.apply_agents(commands.capture(plan.render_agents(scheduler, label)), label))
        commands.run(plan.wait_for_agents(label))


def _remove(commands: Commands, plan: Plan) -> bool:
    there = plan.name in commands.capture(Command(("kind", "get", "clusters"))).split()
    if there:
        commands.run(plan.delete())
    plan.kubeconfig.unlink(missing_ok=True)
    return there


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the cluster's lock; false where another process does. Without the folder nobody does, and none is made."""
    if not folder.exists():
        yield True
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@dataclass(frozen=True)
class KindStage(Stage):
    """A stage whose nodes have this machine's Python under a prefix."""

    def apply(self, *manifests: Mapping[str, Any], is_refused: bool = False) -> str:
        """Write manifests into files and apply them, with their directories as the workers have them."""
        return super().apply(*(below(manifest) for manifest in manifests), is_refused=is_refused)


def demo(commands: Commands, plan: Plan, console: Console, out: Path, *, keep: bool) -> None:
    """Bring up a cluster of kind and play the scenes. None needs the nodes without a kubelet: they are left out.

    Raises:
        HarnessError: The cluster does not come up.
        SceneError: Something did not go as it should.
    """
    out.mkdir(parents=True, exist_ok=True)
    with running(commands, plan, console) as cluster:
        cluster.kept = keep
        try:
            asyncio.run(_on_stage(plan, console, out))
        finally:
            if keep:
                console.print(how_to_reach(plan), highlight=False, soft_wrap=True)


def how_to_reach(plan: Plan) -> str:
    """Return what to type to use a cluster that was kept."""
    return (
        f"The cluster {plan.name} stays up until `make demo-clean` or the next `make demo`. To use it:\n"
        f"  export KUBECONFIG={plan.kubeconfig}"
    )


async def _on_stage(plan: Plan, console: Console, out: Path) -> None:
    async with connect(KubeSettings(kubeconfig=str(plan.kubeconfig))) as api:
        await play(KindStage(api, Path(shutil.which("kubectl") or "kubectl"), plan.kubeconfig, console, out))
