"""Finding and removing what a cluster has on the machine: processes, network links, cgroups."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from carpool_e2e.errors import HarnessError

MARK = "CARPOOL_E2E_STATE"
"""Environment variable that every process of a cluster carries; its value is the cluster's state directory."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
KUBELET_CONTROLLERS = frozenset({"cpu", "cpuset", "hugetlb", "memory", "pids"})
"""What a kubelet wants of its cgroup root on cgroup v2."""

LINKS = Path("/sys/class/net")


@dataclass(frozen=True)
class Machine:
    """Where the kernel shows what clusters have outside of their directories."""

    links: Path = LINKS
    cgroups: Path = CGROUP_ROOT


THIS_MACHINE = Machine()


def marked_processes(state: Path, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that belong to a state directory, and their descendants that kept the environment."""
    wanted = f"{MARK}={state}".encode()
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except (OSError, ProcessLookupError):
            continue  # ended meanwhile, or not ours to read
        if wanted in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_processes(state: Path, timeout_s: float = 20.0) -> None:
    """Kill every process of a state directory, and wait until all are gone.

    All at once: an API server that outlives its etcd would linger on its port for a minute.

    Raises:
        HarnessError: Some process does not end.
    """
    deadline = time.monotonic() + timeout_s
    while pids := marked_processes(state):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(pids)
        if time.monotonic() > deadline:
            raise HarnessError(f"processes {pids} of {state} did not end within {timeout_s:.0f} s of SIGKILL")
        time.sleep(0.05)


def _reap(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # a descendant, or of an earlier harness: its own parent reaps it


def link_name(prefix: str, index: int) -> str:
    """Return the name of the host's end of a node's link."""
    return f"{prefix}-n{index}"


def remove_links(prefix: str, links: Path = LINKS) -> None:
    """Remove the network links whose name begins with `PREFIX-`.

    Raises:
        HarnessError: A link stays.
    """
    for link in sorted(links.glob(f"{prefix}-n*")):
        try:
            done = subprocess.run(["ip", "link", "delete", link.name], check=False, capture_output=True, text=True)
        except OSError as error:
            raise HarnessError(f"the network link {link.name} cannot be removed: `ip` does not run: {error}") from error
        # A link goes with its namespace, too, which may have ended just now.
        if done.returncode != 0 and link.exists():
            raise HarnessError(f"the network link {link.name} cannot be removed: {done.stderr.strip()}")


def hierarchies(root: Path = CGROUP_ROOT) -> list[Path]:
    """Return the mounted cgroup hierarchies that a kubelet uses: one on cgroup v2, one for each controller on v1."""
    if (root / "cgroup.controllers").exists():
        return [root]
    if not root.exists():
        return []
    # `unified` carries no controllers on a hybrid machine.
    return [d for d in sorted(root.iterdir()) if d.is_dir() and not d.is_symlink() and d.name != "unified"]


def create_cgroups(name: str, root: Path = CGROUP_ROOT) -> None:
    """Create a cgroup of that name in every hierarchy, with the root's CPUs and memory nodes on cgroup v1.

    Raises:
        HarnessError: On cgroup v2 a controller that a kubelet insists on cannot be handed down.
    """
    for hierarchy in hierarchies(root):
        _hand_down_controllers(hierarchy)
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for key in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / key).exists():
                (group / key).write_text((hierarchy / key).read_text())


def _hand_down_controllers(unified: Path) -> None:
    handed_down = unified / "cgroup.subtree_control"
    if not handed_down.exists():
        return  # cgroup v1
    available = set((unified / "cgroup.controllers").read_text().split())
    for controller in sorted(KUBELET_CONTROLLERS & available - set(handed_down.read_text().split())):
        try:
            handed_down.write_text(f"+{controller}")
        except OSError as error:
            raise HarnessError(
                f"{handed_down}: expected to hand down the controller {controller}, found {error}; a kubelet needs it; "
                "in a container, run it in the host's cgroup namespace (--cgroupns=host)"
            ) from error


def remove_cgroups(prefix: str, root: Path = CGROUP_ROOT, *, within_s: float = 5.0) -> None:
    """Remove the cgroups whose name begins with `PREFIX-`, and kill what is still in them.

    Raises:
        HarnessError: A cgroup stays.
    """
    if not root.exists():
        return
    roots = {*hierarchies(root), *[d for d in (root / "unified",) if d.exists()]}
    for group in [g for found in roots for g in found.glob(f"{prefix}-*")]:
        for directory in [*sorted(group.rglob("*/"), key=lambda d: -len(d.parts)), group]:
            _remove_cgroup(directory, within_s)


def _remove_cgroup(directory: Path, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise HarnessError(
                    f"the cgroup {directory} cannot be removed within {within_s:.0f} s: {error}"
                ) from error
            _kill_all_of(directory)
            time.sleep(0.1)
        else:
            return


def _kill_all_of(cgroup: Path) -> None:
    try:
        pids = (cgroup / "cgroup.procs").read_text().split()
    except OSError:
        return  # the cgroup has gone meanwhile, or else cannot be removed, which is told
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended meanwhile
