"""Rows of the preflight, and those about the node outside of its GPUs: container runtime, SELinux, directories."""

import functools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from carpool_deviceplugin.quoting import quoted


class Verdict(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    """Carpool does not work on this node or GPU."""
    SKIPPED = "skipped"
    MISSING = "missing"
    """The node lacks something; the agent runs without it, with fewer features."""
    UNKNOWN = "unknown"
    """The files that decide are not visible here, or the GPU was not read yet."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of checks."""

    name: str
    verdict: Verdict
    found: str
    """Measured values, the deviation, or what is absent."""
    needed: str = ""
    advice: str = ""
    """How to provide what is needed."""

    def __str__(self) -> str:
        needed = f"expected {self.needed}, found {self.found}" if self.needed else self.found
        return needed + (f"; {self.advice}" if self.advice else "")

    def lines(self) -> Iterator[str]:
        """Return the row as lines of the table below `HEADER`."""
        yield f"{self.verdict:<8} {self.name:<17} {self.found}"
        for title, text in (("needed:", self.needed), ("what to do:", self.advice)):
            if text:
                yield f"{'':<26} {title:<11} {text}"


HEADER = f"{'STATE':<8} {'CHECK':<17} FOUND"


def row(
    name: str, lacks: str, needed: str, advice: str, *, passed: str, otherwise: Verdict = Verdict.MISSING
) -> Outcome:
    """Return a row that passed if `lacks`, what the node lacks, is empty; `passed` is what was found then."""
    if lacks:
        return Outcome(name=name, verdict=otherwise, found=lacks, needed=needed, advice=advice)
    return Outcome(name=name, verdict=Verdict.PASSED, found=passed)


class NodeInfo(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a Node's `status.nodeInfo` that the preflight reads."""

    container_runtime_version: str = ""
    """Such as `containerd://1.7.27`."""
    os_image: str = ""
    """Such as `Talos (v1.11.0)`."""


NO_INFO = NodeInfo()
_DEFAULT_SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")
"""Default of containerd and CRI-O."""


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The part of the container runtime's configuration that concerns CDI."""

    runtime: str
    """`containerd` or `cri-o`."""
    schema: int = 0
    """Version of containerd's file format; only containerd 2 reads 3."""
    enables_cdi: bool | None = None
    """None if it is not set."""
    spec_dirs: Sequence[str] = _DEFAULT_SPEC_DIRS
    problem: str = ""
    """The file that cannot be read, and why; empty if all can."""


class _Cri(msgspec.Struct, frozen=True):
    enable_cdi: bool | None = None
    cdi_spec_dirs: list[str] | None = None

    def or_else(self, earlier: "_Cri") -> "_Cri":
        """Return these settings, and the earlier ones of those that are not set."""
        values = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
        return _Cri(*(before if own is None else own for own, before in values))


class _Crio(msgspec.Struct, frozen=True):
    runtime: _Cri = _Cri()


class _ConfigFile(msgspec.Struct, frozen=True):
    """The part of a container runtime's file that is read."""

    version: int = 0
    imports: list[str] = []
    plugins: dict[str, _Cri] = {}
    crio: _Crio = _Crio()


_CONFIGS = {
    "containerd": (
        "etc/cri/containerd.toml",
        "var/lib/rancher/*/agent/etc/containerd/config.toml",
        "var/snap/microk8s/current/args/containerd.toml",
        "etc/k0s/containerd.toml",
        "etc/containerd/config.toml",
    ),
    "cri-o": ("etc/crio/crio.conf", "etc/crio/crio.conf.d/*.conf"),
}
"""Configuration files by runtime, relative to the node's root. CRI-O reads all. Of containerd's the first one counts, a
distribution's own: Talos, k3s, RKE2, MicroK8s, k0s."""
_PROGRAMS = {
    "containerd": (
        "var/lib/rancher/*/data/current/bin/containerd",
        "var/lib/rancher/*/bin/containerd",
        "snap/microk8s/current/bin/containerd",
        "var/lib/k0s/bin/containerd",
        "usr/local/bin/containerd",
        "usr/bin/containerd",
    ),
    "cri-o": ("usr/local/bin/crio", "usr/bin/crio"),
}
"""Programs by runtime, relative to the node's root; a distribution's own comes first. Only root can replace them."""
_CRI_PLUGINS = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
"""Names of containerd's plugin that handles CDI: up to version 1, and from 2 on."""


def _parse_config(runtime: str, files: Sequence[Path], root: Path) -> RuntimeConfig:
    """Later files count more; up to containerd 1.7 a plugin's section replaces that of an earlier file."""
    found, schema, pending = _Cri(), 0, [*files]
    for path in pending:  # grows by the imports
        try:
            content = msgspec.toml.decode(path.read_bytes(), type=_ConfigFile)
            for one in content.imports:
                pattern = os.path.normpath(Path("/") / path.parent.relative_to(root) / one)
                pending += [file for file in sorted(root.glob(pattern[1:])) if file not in pending]
        except (OSError, ValueError, msgspec.MsgspecError) as e:
            file = quoted(Path("/") / path.relative_to(root))
            return RuntimeConfig(runtime, problem=f"{file}, which cannot be read: {getattr(e, 'strerror', None) or e}")
        schema, found = content.version or schema, content.crio.runtime.or_else(found)
        for section in (content.plugins[name] for name in _CRI_PLUGINS if name in content.plugins):
            found = section.or_else(_Cri() if schema < 3 else found)
    dirs = _DEFAULT_SPEC_DIRS if found.cdi_spec_dirs is None else found.cdi_spec_dirs
    return RuntimeConfig(runtime, schema, found.enable_cdi, dirs)


@dataclass(frozen=True)
class Host:
    """Port to the facts of the node, which it reads from files.

    In the agent's pod the node's file system is not visible: then `root` is None, and the Node object's facts count.
    A directory of the node counts only if it exists there, because the agent mounts it.
    """

    root: Path | None = Path("/")
    """The node's file system."""
    proc: Path = Path("/proc")
    info: NodeInfo = NO_INFO

    @staticmethod
    def find(info: NodeInfo = NO_INFO) -> "Host":
        """Return the node that this process runs on; only root with all capabilities sees its file system."""
        init = Path("/proc/1/root")
        try:
            is_visible = _shows_host(Path("/proc")) and (init / "etc").is_dir()
        except OSError:
            is_visible = False
        return Host(init if is_visible else None, info=info)

    @property
    def advice(self) -> str:
        """How to let a process see the node's file system; it names what this one lacks."""
        if not self.shows_processes:
            lacks = "the host's PID namespace: hostPID: true in a pod"
        elif os.geteuid():
            lacks = f"root's rights: its user is {os.geteuid()}"
        elif missing := self._capabilities("1") & ~self._capabilities("self"):
            lacks = f"capabilities (capsh --decode={missing:x} names them): privileged: true in a pod"
        else:
            lacks = "the right to open /proc/1/root, for example because of a user namespace"
        return f"run carpool node check as root on the node; this process lacks {lacks}"

    def _capabilities(self, process: str) -> int:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", self._text(self.proc / process / "status"), re.M)
        return int(found[1], 16) if found else 0

    @property
    def shows_processes(self) -> bool:
        """Whether /proc shows the host's PID namespace."""
        return _shows_host(self.proc)

    @functools.cached_property
    def programs(self) -> frozenset[str]:
        """The names of the programs that ran at the first use, which Linux cuts after 15 characters."""
        names: set[str] = set()
        for directory in self.proc.glob("[0-9]*"):
            try:
                names.add((directory / "comm").read_text(errors="replace").strip())
            except OSError:
                continue  # it has ended
        return frozenset(names)

    @property
    def os_name(self) -> str:
        """Name of the operating system; empty if unknown."""
        found = re.search(r'^PRETTY_NAME="?([^"\n]*)', self._text(self.root and self.root / "etc/os-release"), re.M)
        return self.info.os_image or (found[1] if found else "")

    def selinux_type(self) -> str:
        """Return the SELinux type of this process, such as `container_t`; empty if nothing is enforced."""
        label = self._text(self.proc / "self/attr/current").strip("\0\n ").split(":")
        is_permissive = self._text((self.root or Path("/")) / "sys/fs/selinux/enforce").strip() == "0"
        return "" if len(label) < 3 or is_permissive else label[2]

    def runtime_config(self, runtime: str = "") -> RuntimeConfig | None:
        """Return the configuration of the container runtime; None if no file of it is visible.

        Without a name it is that of CRI-O if that runs, otherwise the first one found.
        """
        runtime = runtime or ("cri-o" if "crio" in self.programs else "")
        for name in [runtime] if runtime else _CONFIGS:
            if self.root is not None and (files := self._find(_CONFIGS.get(name, ()))):
                return _parse_config(name, files if name == "cri-o" else files[:1], self.root)
        return None

    def _find(self, patterns: Sequence[str]) -> list[Path]:
        return [] if self.root is None else [path for one in patterns for path in sorted(self.root.glob(one))]

    def runtime_version(self, runtime: str) -> str:
        """Return the version that the node's container runtime prints; empty if none does."""
        for program in self._find(_PROGRAMS[runtime]):
            try:
                printed = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout
            except (OSError, ValueError, subprocess.TimeoutExpired):
                continue
            if found := re.search(r"\sv?(\d+\.\d+\S*)", printed):
                return found[1]
        return ""

    @staticmethod
    def _text(path: Path | None) -> str:
        try:
            return path.read_text(errors="replace") if path else ""
        except OSError:
            return ""

    def sockets(self, directory: Path) -> list[str]:
        """Return the names of the sockets in a directory."""
        try:
            return sorted(path.name for path in self.on_node(directory).iterdir() if path.is_socket())
        except OSError:
            return []

    def is_writable(self, directory: Path) -> bool | None:
        """Whether files can be written to a directory, which may have to be created first; None if that is unknown."""
        path = self.on_node(directory)
        while self.root is not None and not path.exists() and path != path.parent:
            path = path.parent
        return path.is_dir() and os.access(path, os.W_OK | os.X_OK) if path.exists() else None

    def on_node(self, path: Path) -> Path:
        """Return where this process sees a path of the node; without the node's root, where it is mounted."""
        return path if self.root is None else self.root / path.relative_to("/")


def _shows_host(proc: Path) -> bool:
    """Whether /proc shows the host's PID namespace, where process 2 is kthreadd."""
    try:
        return (proc / "2" / "comm").read_text().strip() == "kthreadd"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Directories:
    """Directories of the node that the agent writes to."""

    state: Path
    cdi: Path
    device_plugins: Path


def check_host(host: Host, directories: Directories) -> Iterator[Outcome]:
    """Check container runtime, SELinux, directories and other device plugins."""
    yield _check_runtime(host, directories.cdi)
    yield _check_selinux(host.selinux_type())
    yield _check_directories(host, directories)
    yield _check_device_plugins(host, directories.device_plugins)


_WRITING_DOMAINS = ("", "spc_t", "super_t")
"""SELinux types of containers that may write the node's directories, the last one Bottlerocket's; empty: none."""


def _check_selinux(domain: str) -> Outcome:
    is_confined = domain.startswith("container_")
    lacks = domain if is_confined else f"domain {domain}; whether the chart's pods run in it is not known here"
    return row(
        "selinux",
        "" if domain in _WRITING_DOMAINS else lacks,
        "a domain that may write the agent's directories on the node",
        "set nodeAgent.seLinuxOptions to {type: spc_t, level: s0}: a client that cannot open MPS's socket runs without "
        "limits" + ("" if is_confined else "; then this row of the agent's GpuNode passes"),
        passed=f"domain {domain}" if domain else "not enforced",
        otherwise=Verdict.FAILED if is_confined else Verdict.UNKNOWN,
    )


def _check_device_plugins(host: Host, directory: Path) -> Outcome:
    names = [name for name in host.sockets(directory) if name not in ("kubelet.sock", "carpool.sock")]
    others = [name for name in names if "nvidia" in name.casefold()]
    if "gpu-kubelet-plu" in host.programs:
        others.append("gpu-kubelet-plugin (NVIDIA's DRA driver)")
    if not others and not host.on_node(directory).is_dir():
        advice = "set CARPOOL_DEVICE_PLUGIN_DIR (nodeAgent.kubeletDir) to the kubelet's"
        return row(
            "device-plugins",
            f"no directory {quoted(directory)}",
            "the kubelet's directory of device plugins, which names the programs that assign GPUs",
            f"{host.advice}; or {advice}" if host.root is None else advice,
            passed="",
            otherwise=Verdict.UNKNOWN,
        )
    return row(
        "device-plugins",
        ", ".join(others),
        "no other program that assigns this node's GPUs",
        "keep it off the node, for example with the label nvidia.com/gpu.deploy.device-plugin=false of GPU Operator",
        passed=f"none for GPUs; others: {', '.join(names)}" if names else "none",
        otherwise=Verdict.FAILED,
    )


def check_system(host: Host) -> Outcome:
    """Check the operating system, for GPUs that need its driver."""
    is_fine = (system := host.os_name) and not system.startswith(_UNSUPPORTED)
    return row(
        "operating-system",
        "" if is_fine else system or "a name that is not visible here",
        "a system whose driver the chart can mount, not GKE's Container-Optimized OS",
        "use nodes of another one, and leave these out of nodeAgent.nodeSelector" if system else host.advice,
        passed=system,
        otherwise=Verdict.FAILED if system else Verdict.UNKNOWN,
    )


def _check_runtime(host: Host, cdi_dir: Path) -> Outcome:
    name, _, version = host.info.container_runtime_version.partition("://")
    config = host.runtime_config(name)
    if config is not None and not name:
        name = config.runtime
        version = host.runtime_version(name) or ("2" if config.schema >= 3 else "")
    numbers, found = tuple(map(int, re.findall(r"\d+", version)[:2])), f"{name} {version}".strip()

    def outcome(lacks: str, advice: str = "", otherwise: Verdict = Verdict.FAILED) -> Outcome:
        needed = f"a container runtime that reads CDI specifications from {cdi_dir}"
        return row("container-runtime", lacks, needed, advice, passed=f"{found} with CDI", otherwise=otherwise)

    if not name:
        advice = host.advice if host.root is None else "see that containerd 2 or CRI-O runs: these need none"
        return outcome("no runtime's configuration", advice, Verdict.UNKNOWN)
    if name not in _CONFIGS:
        return outcome(found, "use containerd 1.7 or newer, or CRI-O 1.28 or newer")
    oldest = _OLDEST[name]
    if numbers and numbers < oldest:
        return outcome(found, f"update it to {oldest[0]}.{oldest[1]} or newer")
    if name == "cri-o" and not numbers:
        lacks = f"{found} of a version that it did not print"
        return outcome(lacks, "run crio --version; before 1.28, update it", Verdict.UNKNOWN)
    if config and config.problem:
        return outcome(config.problem, "correct it", Verdict.UNKNOWN)
    if name == "containerd":
        is_on = config.enables_cdi if config else None
        if is_on is None and numbers:
            is_on = True if numbers >= (2,) else False if config else None
        advice = "set enable_cdi = true in the configuration of its CRI plugin, and restart it"
        if is_on is None and config:
            lacks = f"{found} of a version that it did not print, and no setting enable_cdi"
            return outcome(lacks, f"run containerd --version; before version 2, {advice}", Verdict.UNKNOWN)
        if is_on is None:
            lacks = f"{found}, which has CDI off unless its configuration sets enable_cdi; that is not visible here"
            return outcome(lacks, "run carpool node check as root on the node, which reads it", Verdict.UNKNOWN)
        if not is_on:
            return outcome(f"{found} with CDI off", advice)
    if config and _normal(cdi_dir) not in map(_normal, config.spec_dirs):
        lacks = f"{found} with cdi_spec_dirs {', '.join(config.spec_dirs) or 'empty'}"
        return outcome(lacks, "add it there, or set CARPOOL_CDI_DIR (nodeAgent.cdiDir) to one of them")
    return outcome("")


_OLDEST = {"containerd": (1, 7), "cri-o": (1, 28)}
"""First versions that read CDI devices from the kubelet's field for them."""


def _normal(path: str | Path) -> str:
    """Return the path without the usual link from /var/run to /run."""
    return re.sub(r"^/var/run(?=/)", "/run", str(path).rstrip("/"))


_UNSUPPORTED = "Container-Optimized OS"
_WRITABLE = {
    "Talos": "/run or /var; set nodeAgent.cdiDir to one of containerd's cdi_spec_dirs there, nodeAgent.cdiStaticDir to "
    "empty",
    "Bottlerocket": "/etc, /run or /var, of which only /var outlasts a restart of the node",
    _UNSUPPORTED: "/etc, /run or /var, of which only /var outlasts a restart of the node",
}
"""Writable directories of operating systems with a read-only root, by the beginning of their name."""


def _check_directories(host: Host, directories: Directories) -> Outcome:
    variables = {
        "CARPOOL_STATE_DIR": directories.state,
        "CARPOOL_CDI_DIR": directories.cdi,
        "CARPOOL_DEVICE_PLUGIN_DIR": directories.device_plugins,
    }
    found = {f"{name} {quoted(path)}": host.is_writable(path) for name, path in variables.items()}
    lacks, unseen = ([name for name, is_writable in found.items() if is_writable is one] for one in (False, None))
    system = host.os_name
    known = next((advice for name, advice in _WRITABLE.items() if system.startswith(name)), "")
    advice = f"choose directories below {known}" if known else "run as root, or set another that is not read-only"
    return row(
        "directories",
        ", ".join(lacks) or (f"not visible here: {', '.join(unseen)}" if unseen else ""),
        "directories that can be written to",
        advice if lacks else host.advice,
        passed=f"all writable{f' on {system}' if system else ''}",
        otherwise=Verdict.FAILED if lacks else Verdict.UNKNOWN,
    )
