"""What comes from the system's package manager: installed where that is allowed, named where not."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from carpool_e2e.errors import MissingError

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


def missing(needs: Iterable[Need]) -> list[Need]:
    """Return what the machine lacks."""
    return [need for need in needs if not need.present()]


def ensure(needs: Iterable[Need], console: Console) -> None:
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
    if not _install(packages) and not (_apt("update") and _install(packages)):
        raise MissingError(f"`{by_hand}` failed; install these packages, then try again")
    if still := missing(lacking):
        raise MissingError(f"{', '.join(n.what for n in still)}: still not found after `{by_hand}`")


def _apt(*arguments: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(["apt-get", "-qq", *arguments], env=environment, check=False).returncode == 0


def _install(packages: list[str]) -> bool:
    return _apt("install", "-y", "--no-install-recommends", *packages)
