"""Finds the binaries of a cluster: TEST_ASSET_*, KUBEBUILDER_ASSETS, PATH, the cache; builds what is missing."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from carpool_e2e.errors import BuildError, MissingError

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))


@dataclass(frozen=True)
class Need:
    """Something that the machine must have."""

    what: str
    package: str
    """Debian's package."""
    present: Callable[[], bool]


def _command(name: str, package: str) -> Need:
    return Need(f"the command {name}", package, lambda: shutil.which(name) is not None)


def _cni() -> bool:
    return any((folder / "ptp").exists() for folder in CNI_FOLDERS)


def static_busybox() -> Path | None:
    """Return a busybox that needs no shared library; None where there is none."""
    found = shutil.which("busybox")
    if found is None:
        return None
    # A dynamic executable names its interpreter in the first block.
    return None if b"ld-linux" in Path(found).read_bytes()[:4096] else Path(found)


FOR_RUNC = (
    Need("libseccomp's headers", "libseccomp-dev", lambda: Path("/usr/include/seccomp.h").exists()),
    _command("pkg-config", "pkg-config"),
    _command("cc", "gcc"),
)
FOR_CONTROL_PLANE = (_command("openssl", "openssl"),)
FOR_NODES = (
    _command("unshare", "util-linux"),
    _command("ip", "iproute2"),
    Need("a static busybox", "busybox-static", lambda: static_busybox() is not None),
    Need("the CNI plugins ptp and host-local", "containernetworking-plugins", _cni),
)

FOR_BROWSER = (_command("chromium", "chromium"),)
FOR_COPIES = (_command("skopeo", "skopeo"),)
FOR_IMAGES = (_command("buildah", "buildah"), _command("dpkg-deb", "dpkg"))
FOR_EMULATION = (_command("update-binfmts", "binfmt-support"), _command("qemu-aarch64-static", "qemu-user-static"))


def missing(needs: Iterable[Need]) -> list[Need]:
    """Return what the machine lacks."""
    return [need for need in needs if not need.present()]


def install_packages(needs: Iterable[Need], console: Console) -> None:
    """Install what is missing.

    Raises:
        MissingError: Something is missing and cannot be installed from here.
    """
    lacking = missing(needs)
    if not lacking:
        return
    packages = [need.package for need in lacking]
    by_hand = f"apt-get install {' '.join(packages)}"
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        found = ", ".join(need.what for need in lacking)
        raise MissingError(f"{found}: expected on this machine, not found; as root: {by_hand} (Debian's names)")
    console.print(f"Installing {' '.join(packages)}")
    if not _install(packages) and not (update_packages() and _install(packages)):
        raise MissingError(f"`{by_hand}` failed; install these packages, then try again")
    if still := missing(lacking):
        raise MissingError(f"{', '.join(n.what for n in still)}: still not found after `{by_hand}`")


def _apt(*arguments: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(["apt-get", "-qq", *arguments], env=environment, check=False).returncode == 0


def update_packages() -> bool:
    """Fetch the lists of the machine's Debian packages; return whether that succeeded."""
    return _apt("update")


def _install(packages: list[str]) -> bool:
    return _apt("install", "-y", "--no-install-recommends", *packages)


TOOLS_ROOT = Path(__file__).resolve().parents[1] / "tools"

Version = tuple[int, ...]


@dataclass(frozen=True)
class Tool:
    """One binary."""

    name: str
    package: str
    """Go package that it is built from."""
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
    """Linker flags; `{version}`, `{major}` and `{minor}` are replaced by the pinned version."""
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
_PROMETHEUS = "github.com/prometheus/prometheus"


def _kubernetes(name: str, ask: tuple[str, ...] = ("--version",)) -> Tool:
    # Kubernetes changes from minor to minor what the harness configures.
    return Tool(name, f"k8s.io/kubernetes/cmd/{name}", (1, 36), (1, 37), ask)


def _prometheus(name: str) -> Tool:
    return Tool(name, f"{_PROMETHEUS}/cmd/{name}", (3, 0))


MODULES = (
    Module(
        "kubernetes",
        (
            _kubernetes("kube-apiserver"),
            _kubernetes("kube-controller-manager"),
            _kubernetes("kube-scheduler"),
            _kubernetes("kubelet"),
            _kubernetes("kubectl", ("version", "--client")),
        ),
        "k8s.io/kubernetes",
        f"-s -w -X {_COMPONENT}.gitVersion={{version}} -X {_COMPONENT}.gitMajor={{major}} "
        f"-X {_COMPONENT}.gitMinor={{minor}}",
    ),
    Module("etcd", (Tool("etcd", "go.etcd.io/etcd/server/v3", (3, 5)),), "go.etcd.io/etcd/server/v3"),
    Module(
        "containerd",
        (
            Tool("containerd", f"{_CONTAINERD}/cmd/containerd", (2, 0)),
            Tool("containerd-shim-runc-v2", f"{_CONTAINERD}/cmd/containerd-shim-runc-v2", (2, 0), ask=("-v",)),
            Tool("ctr", f"{_CONTAINERD}/cmd/ctr", (2, 0)),
        ),
        _CONTAINERD,
        f"-s -w -X {_CONTAINERD}/version.Version={{version}}",
    ),
    Module(
        "runc",
        (Tool("runc", "github.com/opencontainers/runc", (1, 1)),),
        "github.com/opencontainers/runc",
        tags="seccomp",
        cgo=True,
    ),
    Module(
        "nvidia",
        (Tool("nvidia-ctk", "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk", (1, 20)),),
        "github.com/NVIDIA/nvidia-container-toolkit",
        "-s -w -X github.com/NVIDIA/nvidia-container-toolkit/internal/info.version={version}",
        cgo=True,
    ),
    Module(
        "krew",
        (Tool("krew", "sigs.k8s.io/krew/cmd/krew", (0, 4), ask=("version",)),),
        "sigs.k8s.io/krew",
        "-s -w -X sigs.k8s.io/krew/internal/version.gitTag={version}",
    ),
    Module("helm", (Tool("helm", "helm.sh/helm/v4/cmd/helm", (3, 14), ask=("version",)),), "helm.sh/helm/v4"),
    Module(
        "prometheus",
        (_prometheus("prometheus"), _prometheus("promtool")),
        _PROMETHEUS,
        "-s -w -X github.com/prometheus/common/version.Version={version}",
        tags="remove_all_sd",
    ),
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


@dataclass(frozen=True)
class Binaries:
    """Where each binary is."""

    paths: Mapping[str, Path]

    def __getitem__(self, name: str) -> str:
        """Return the path of a binary."""
        return str(self.paths[name])

    def search_path(self) -> str:
        """Return a PATH on which all of them are found first."""
        folders = dict.fromkeys(str(path.parent) for path in self.paths.values())
        return os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that built binaries are kept in."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"


def cache_folder(module: Module, environ: Mapping[str, str]) -> Path:
    """Return the folder of a module's binaries; another one whenever a requirement or a flag changes."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((module.folder / name).read_bytes())
    digest.update(f"{module.stamped_ldflags} {module.tags}".encode())
    return cache_root(environ) / f"bin-{module.name}-{digest.hexdigest()[:16]}"


def asset_variable(tool: Tool) -> str:
    """Return the environment variable that names this one binary, such as TEST_ASSET_KUBE_APISERVER."""
    return "TEST_ASSET_" + tool.name.upper().replace("-", "_")


def find(tool: Tool, module: Module, environ: Mapping[str, str]) -> Path | None:
    """Find a binary without building anything.

    Raises:
        MissingError: TEST_ASSET_* names a file that does not exist.
    """
    if named := environ.get(asset_variable(tool)):
        if not Path(named).exists():
            raise MissingError(f"{asset_variable(tool)}={named}: expected a binary there, found none")
        return Path(named)
    built = cache_folder(module, environ) / tool.name
    assets = environ.get("KUBEBUILDER_ASSETS")
    if assets and (Path(assets) / tool.name).exists():
        return Path(assets) / tool.name
    on_path = shutil.which(tool.name, path=environ.get("PATH", os.defpath))
    if on_path and accepts(tool, Path(on_path)):
        return Path(on_path)
    return built if built.exists() else None


def ensure(names: Iterable[str], environ: Mapping[str, str] | None = None, console: Console | None = None) -> Binaries:
    """Find the named binaries, and build those that are nowhere.

    Raises:
        MissingError: Something has to be built, and there is no Go or C compiler.
        BuildError: A build failed; the message ends with the output of the compiler.
    """
    environ = os.environ if environ is None else environ
    wanted = frozenset(names)
    paths: dict[str, Path] = {}
    missing: list[tuple[Module, Tool]] = []
    for module in MODULES:
        for tool in module.tools:
            if tool.name not in wanted:
                continue
            found = find(tool, module, environ)
            if found is None:
                missing.append((module, tool))
                paths[tool.name] = cache_folder(module, environ) / tool.name
            else:
                paths[tool.name] = found
    if missing:
        _build_all(missing, environ, console or Console(stderr=True))
    return Binaries(paths)


def _build_all(missing: list[tuple[Module, Tool]], environ: Mapping[str, str], console: Console) -> None:
    if shutil.which("go") is None:
        names = ", ".join(tool.name for _, tool in missing)
        raise MissingError(
            f"{names}: expected on PATH or under KUBEBUILDER_ASSETS, found neither; to build them Go is needed "
            "(https://go.dev/dl, 1.26 or later)"
        )
    if any(module.cgo for module, _ in missing):
        install_packages(FOR_RUNC, console)
    console.print(f"Building {len(missing)} binaries from source, once, into {cache_root(environ)}: up to ten minutes")
    for number, (module, tool) in enumerate(missing, 1):
        console.print(f"  {tool.name} ({number}/{len(missing)})")
        _build(module, tool, environ)


def build_command(module: Module, tool: Tool, target: Path) -> list[str]:
    """Return the command that builds one binary, to be run in the module's folder."""
    tags = ["-tags", module.tags] if module.tags else []
    return ["go", "build", "-trimpath", *tags, "-ldflags", module.stamped_ldflags, "-o", str(target), tool.package]


def _build(module: Module, tool: Tool, environ: Mapping[str, str]) -> None:
    """Build one binary into the cache."""
    folder = cache_folder(module, environ)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        if (folder / tool.name).exists():
            return  # another process built it while this one waited for the lock
        target = Path(scratch) / tool.name
        done = subprocess.run(
            build_command(module, tool, target),
            cwd=module.folder,
            env={**environ, "CGO_ENABLED": "1" if module.cgo else "0", "GOFLAGS": "-mod=readonly"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"{tool.name} did not build in {module.folder}:\n{(done.stdout + done.stderr)[-4000:]}")
        target.replace(folder / tool.name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
