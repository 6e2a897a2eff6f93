"""Docker, kind, kubectl and helm in memory, at the level of which images and clusters exist."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from carpool_e2e.kind import Command, CommandError

VERSIONS = {
    "docker": "28.2.2",
    "kind": "kind v0.29.0 go1.24.2 linux/amd64",
    "kubectl": "Client Version: v1.33.1\nKustomize Version: v5.6.0",
    "helm": 'version.BuildInfo{Version:"v3.18.0"}',
}
SCHEDULER = "registry.example.org/kube-scheduler:v1.33.1"
SOMEBODY_ELSES = "kind"


@dataclass
class FakeCluster:
    """What a cluster of kind holds."""

    config: dict[str, Any]
    images: dict[str, set[str]] = field(default_factory=dict)
    """Node → images."""
    daemonsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    releases: set[str] = field(default_factory=set)


@dataclass
class FakeMachine:
    """Plays the four programs at the level of which images and clusters exist; refuses what they would refuse."""

    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))
    """Programs on PATH."""
    engine: bool = True
    images: set[str] = field(default_factory=set)
    clusters: dict[str, FakeCluster] = field(default_factory=lambda: {SOMEBODY_ELSES: FakeCluster({})})
    kubeconfigs: dict[str, str] = field(default_factory=dict)
    """File → cluster."""
    fails: str = ""
    """Begin of the one command that fails."""
    done: list[str] = field(default_factory=list)
    """Commands that changed something, in order."""

    def run(self, command: Command) -> None:
        self.capture(command)

    def capture(self, command: Command) -> str:
        program, *arguments = command.arguments
        if program not in self.versions:
            raise CommandError(f"{program}: expected on PATH, found No such file or directory")
        if self.fails and str(command).startswith(self.fails):
            raise CommandError(f"`{command}` failed with status 1: as told")
        if arguments[0] == "version":
            if program == "docker":
                self._need(self.engine, "Cannot connect to the Docker daemon")
            return self.versions[program]
        play: Callable[[list[str], str], str] = getattr(self, f"_{program}")
        return play(arguments, command.stdin)

    @staticmethod
    def _need(true: bool, otherwise: str) -> None:
        if not true:
            raise CommandError(otherwise)

    def _docker(self, arguments: list[str], stdin: str) -> str:
        self._need(self.engine, "Cannot connect to the Docker daemon")
        assert arguments[0] == "build"
        tag = _after(arguments, "--tag")
        if stdin:
            assert arguments[-1] == "-"
        else:
            dockerfile = (Path(arguments[-1]) / "Dockerfile").read_text()
            target = _after(arguments, "--target")
            self._need(f" AS {target}\n" in dockerfile, f"target stage {target} could not be found")
            self._need("ARG PIP_EXTRA_INDEX_URL" in dockerfile, "build-args were not consumed")
        self.images.add(tag)
        self.done.append(f"build {tag}")
        return ""

    def _kind(self, arguments: list[str], stdin: str) -> str:
        self._need(self.engine, "Cannot connect to the Docker daemon")
        match arguments[:2]:
            case ["get", "clusters"]:
                return "\n".join(self.clusters)
            case ["create", "cluster"]:
                name = _after(arguments, "--name")
                self._need(name not in self.clusters, f'node(s) already exist for a cluster with the name "{name}"')
                self.clusters[name] = FakeCluster(json.loads(stdin))
                file = Path(_after(arguments, "--kubeconfig"))
                file.write_text("a kubeconfig")
                self.kubeconfigs[str(file)] = name
            case ["delete", "cluster"]:
                name = _after(arguments, "--name")
                self.clusters.pop(name, None)
                self.kubeconfigs = {file: of for file, of in self.kubeconfigs.items() if of != name}
            case ["load", "docker-image"]:
                name = _after(arguments, "--name")
                images = set(arguments[2 : arguments.index("--name")])
                self._need(images <= self.images, f"images {images - self.images} not present locally")
                for node in _after(arguments, "--nodes").split(","):
                    self._need(node in _nodes(name, self.clusters[name]), f"unknown node {node}")
                    self.clusters[name].images[node] = images
        self.done.append(f"{arguments[0]} {name}")
        return ""

    def _helm(self, arguments: list[str], stdin: str) -> str:
        values = json.loads(stdin)
        release = arguments[1]
        name = f"{values['fullnameOverride']}-node-agent"
        daemonset = {
            "kind": "DaemonSet",
            "metadata": {"name": name},
            "spec": {"selector": {"matchLabels": {"instance": release}}, "agent": values["nodeAgent"]},
        }
        if arguments[0] == "template":
            return f"---\n# Source: daemonset.yaml\n{yaml.safe_dump(daemonset)}"
        assert arguments[0] == "install"
        there = self._at(arguments)
        self._need(release not in there.releases, "cannot re-use a name that is still in use")
        there.releases.add(release)
        there.daemonsets[name] = daemonset
        self.done.append(f"install {release}")
        return ""

    def _kubectl(self, arguments: list[str], stdin: str) -> str:
        there = self._at(arguments)
        if "get" in arguments:
            return SCHEDULER
        if "apply" in arguments:
            name = json.loads(stdin)["metadata"]["name"]
            there.daemonsets[name] = json.loads(stdin)
            self.done.append(f"apply {name}")
        else:
            name = arguments[arguments.index("status") + 1].removeprefix("daemonset/")
            self._need(name in there.daemonsets, f'daemonsets "{name}" not found')
            self.done.append(f"wait {name}")
        return ""

    def _at(self, arguments: list[str]) -> FakeCluster:
        file = _after(arguments, "--kubeconfig")
        self._need(file in self.kubeconfigs, f"{file}: no such cluster")
        return self.clusters[self.kubeconfigs[file]]


def _after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def _nodes(name: str, of: FakeCluster) -> list[str]:
    """The names that kind gives its nodes: the first of a role has no number."""
    seen: dict[str, int] = {}
    names = []
    for node in of.config["nodes"]:
        role = node["role"]
        seen[role] = seen.get(role, 0) + 1
        names.append(f"{name}-{role}{seen[role] if seen[role] > 1 else ''}")
    return names
