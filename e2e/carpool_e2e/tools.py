"""Which binaries a cluster needs, where each comes from, and which versions will do."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

TOOLS_ROOT = Path(__file__).resolve().parents[1] / "tools"

Version = tuple[int, ...]


@dataclass(frozen=True)
class Tool:
    """One binary."""

    name: str
    package: str
    """Go package that it is built from."""
    build_s: int
    """About how long a cold build takes on two cores after the ones before it, in seconds."""
    at_least: Version
    """Least version that is accepted from PATH."""
    below: Version = (1_000_000,)
    """First version that is not accepted from PATH any more."""
    ask: tuple[str, ...] = ("--version",)
    """Arguments that make it print its version."""


@dataclass(frozen=True)
class Module:
    """A Go module with the binaries that are built from it."""

    name: str
    """Folder under `e2e/tools`."""
    tools: tuple[Tool, ...]
    pinned: str
    """Go module whose required version is stamped into the binaries."""
    ldflags: str = "-s -w"
    """Linker flags; `{version}`, `{major}` and `{minor}` stand for the pinned version."""
    tags: str = ""
    cgo: bool = False

    @property
    def folder(self) -> Path:
        """Where its go.mod is."""
        return TOOLS_ROOT / self.name

    @property
    def version(self) -> str:
        """The version that go.mod requires, such as v1.36.3."""
        found = re.search(rf"^\s*{re.escape(self.pinned)} (v\S+)", (self.folder / "go.mod").read_text(), re.MULTILINE)
        if found is None:
            raise LookupError(f"expected a requirement of {self.pinned} in {self.folder / 'go.mod'}, found none")
        return found[1]

    @property
    def stamped_ldflags(self) -> str:
        """The linker flags with the version filled in."""
        major, minor, *_ = self.version.removeprefix("v").split(".")
        return self.ldflags.format(version=self.version, major=major, minor=minor)


_COMPONENT = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"


def _kubernetes(name: str, build_s: int, ask: tuple[str, ...] = ("--version",)) -> Tool:
    # Kubernetes changes from minor to minor what the harness configures.
    return Tool(name, f"k8s.io/kubernetes/cmd/{name}", build_s, (1, 36), (1, 37), ask)


MODULES = (
    Module(
        "kubernetes",
        (
            _kubernetes("kube-apiserver", 213),
            _kubernetes("kube-controller-manager", 47),
            _kubernetes("kube-scheduler", 4),
            _kubernetes("kubelet", 13),
            _kubernetes("kubectl", 18, ("version", "--client")),
        ),
        "k8s.io/kubernetes",
        f"-s -w -X {_COMPONENT}.gitVersion={{version}} -X {_COMPONENT}.gitMajor={{major}} "
        f"-X {_COMPONENT}.gitMinor={{minor}}",
    ),
    Module("etcd", (Tool("etcd", "go.etcd.io/etcd/server/v3", 23, (3, 5)),), "go.etcd.io/etcd/server/v3"),
    Module(
        "containerd",
        (
            Tool("containerd", f"{_CONTAINERD}/cmd/containerd", 40, (2, 0)),
            Tool("containerd-shim-runc-v2", f"{_CONTAINERD}/cmd/containerd-shim-runc-v2", 7, (2, 0), ask=("-v",)),
            Tool("ctr", f"{_CONTAINERD}/cmd/ctr", 7, (2, 0)),
        ),
        _CONTAINERD,
        f"-s -w -X {_CONTAINERD}/version.Version={{version}}",
    ),
    Module(
        "runc",
        (Tool("runc", "github.com/opencontainers/runc", 13, (1, 1)),),
        "github.com/opencontainers/runc",
        tags="seccomp",
        cgo=True,
    ),
    Module("helm", (Tool("helm", "helm.sh/helm/v4/cmd/helm", 84, (3, 14), ask=("version",)),), "helm.sh/helm/v4"),
)

CONTROL_PLANE_TOOLS = frozenset(
    {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "helm"}
)
NODE_TOOLS = frozenset({"kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc"})


def parse_version(text: str) -> Version | None:
    """Return the first dotted version in what a tool printed; None where there is none."""
    found = re.search(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups() if part is not None) if found else None


def accepts(tool: Tool, binary: Path) -> bool:
    """Whether a binary found on the PATH has a version that will do."""
    try:
        printed = subprocess.run([binary, *tool.ask], capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return False
    version = parse_version(printed.stdout + printed.stderr)
    return version is not None and tool.at_least <= version < tool.below
