"""The rendered chart: objects to apply, and workloads that the harness runs as processes."""

import base64
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from carpool_e2e.binaries import Binaries
from carpool_e2e.errors import HarnessError

PROJECT = Path(__file__).resolve().parents[2]
CHART = PROJECT / "helm" / "carpool"
NAMESPACE = "carpool-system"
RELEASE = "carpool"

WORKLOAD_KINDS = frozenset({"Deployment", "DaemonSet"})
CRD_KIND = "CustomResourceDefinition"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """Everything that the chart renders."""

    manifests: tuple[Manifest, ...]

    @property
    def crds(self) -> list[Manifest]:
        """The custom resources' definitions."""
        return [m for m in self.manifests if m["kind"] == CRD_KIND]

    @property
    def settings(self) -> list[Manifest]:
        """Everything that is neither a definition nor a workload: accounts, rights, policies, settings."""
        return [m for m in self.manifests if m["kind"] != CRD_KIND and m["kind"] not in WORKLOAD_KINDS]

    @property
    def at_rest(self) -> list[Manifest]:
        """The Deployments without pods, for readers of their settings: their processes run on this machine."""
        return [m | {"spec": m["spec"] | {"replicas": 0}} for m in self.manifests if m["kind"] == "Deployment"]

    def one(self, kind: str, name: str) -> Manifest:
        """Return the object of that kind and name.

        Raises:
            HarnessError: The chart renders no such object.
        """
        for manifest in self.manifests:
            if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name):
                return manifest
        raise HarnessError(f"expected the chart {CHART} to render {kind} {name}, found none")


@dataclass(frozen=True)
class Local:
    """A container of the chart as a process on this machine."""

    command: list[str]
    environment: dict[str, str]
    files: dict[Path, str]
    """Content of its ConfigMaps and Secrets, by the path where the process finds it."""

    def write_files(self) -> None:
        """Write the files, readable by this user only."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text)


@dataclass(frozen=True)
class Adaptation:
    """Differences between a pod and a process on this machine."""

    folder: Path
    """Where its ConfigMaps and Secrets are written."""
    node: str = ""
    address: str = "127.0.0.1"
    """Address of the node."""
    text: Mapping[str, str] = field(default_factory=dict)
    """Texts to replace in arguments and files: ports, mostly."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set beside or in place of the chart's."""


def kubernetes_version(binaries: Binaries) -> str:
    """Return the version of Kubernetes that the harness runs, such as v1.36.3."""
    command = [binaries["kube-apiserver"], "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def render(binaries: Binaries, values: Mapping[str, str] | None = None) -> Rendered:
    """Render the chart with these values for the version of Kubernetes that the harness runs.

    Raises:
        HarnessError: The chart refuses.
    """
    sets = [part for key, value in (values or {}).items() for part in ("--set", f"{key}={value}")]
    command = [binaries["helm"], "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--skip-tests"]
    done = subprocess.run(
        [*command, "--kube-version", kubernetes_version(binaries), "--set", "global.imageRegistry=localhost", *sets],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise HarnessError(f"the chart does not render: {done.stderr}")
    return Rendered(tuple(m for m in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if m))


def localize(rendered: Rendered, workload: Manifest, container_name: str, adaptation: Adaptation) -> Local:
    """Turn a container of a workload into a process: the same arguments and environment, files at local paths."""
    spec = workload["spec"]["template"]["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]  # init containers that restart are sidecars
    container = next(c for c in containers if c["name"] == container_name)
    volumes = {v["name"]: v for v in spec.get("volumes", [])}
    replacements = dict(adaptation.text)
    contents: dict[Path, str] = {}
    for mount in container.get("volumeMounts", []):
        if "emptyDir" in volumes[mount["name"]]:
            shared = adaptation.folder / "volumes" / mount["name"]  # by all containers of the pod
            replacements[mount["mountPath"]] = str(shared / mount.get("subPath", ""))
            continue
        files = _volume_files(rendered, volumes[mount["name"]])
        if files is None:
            continue  # the node's own directory, which the process finds at the same path
        local = adaptation.folder / container_name / mount["mountPath"].strip("/")
        replacements[mount["mountPath"]] = str(local)
        contents.update({local / name: text for name, text in files.items()})
    fields = {
        "metadata.name": f"{workload['metadata']['name']}-local",  # a process has no pod, and is the only one
        "metadata.namespace": NAMESPACE,
        "spec.nodeName": adaptation.node,
        "status.hostIP": adaptation.address,
    }
    environment = {e["name"]: _value(e, fields) for e in container.get("env", [])}
    return Local(
        command=[_replace(part, replacements) for part in [*container["command"], *container.get("args", [])]],
        environment={k: _replace(v, replacements) for k, v in environment.items()} | dict(adaptation.environment),
        files={path: _replace(text, replacements) for path, text in contents.items()},
    )


def _value(entry: Manifest, fields: Mapping[str, str]) -> str:
    if "value" in entry:
        return str(entry["value"])
    path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if path not in fields:
        raise HarnessError(
            f"environment variable {entry['name']}: expected a value or one of {[*fields]}, found {entry}"
        )
    return fields[path]


def _volume_files(rendered: Rendered, volume: Manifest) -> dict[str, str] | None:
    if "secret" in volume:
        source = volume["secret"]
        encoded = rendered.one("Secret", source["secretName"])["data"]
        data = {key: base64.b64decode(value).decode() for key, value in encoded.items()}
    elif "configMap" in volume:
        source = volume["configMap"]
        data = rendered.one("ConfigMap", source["name"])["data"]
    else:
        return None
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    return {item["path"]: data[item["key"]] for item in items}


def _replace(text: str, replacements: Mapping[str, str]) -> str:
    # In one pass, so that a replacement is never replaced again.
    if not replacements:
        return text
    pattern = "|".join(re.escape(old) for old in sorted(replacements, key=len, reverse=True))
    return re.sub(pattern, lambda found: replacements[found[0]], text)
