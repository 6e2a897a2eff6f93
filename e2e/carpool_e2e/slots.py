"""State directories of clusters: one numbered slot each, held by a file lock and emptied by whoever finds it stale.

Everything that a cluster leaves on the machine can be derived from its slot: processes carry the slot's directory in
their environment, links and cgroups its number in their name, and mounts live in namespaces that end with the
processes. So nothing has to be written down in time to survive `kill -9`.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from carpool_e2e import residue
from carpool_e2e.errors import HarnessError

MAX_SLOTS = 64
KEPT = "kept"
"""File in a slot's directory that tells the next start to leave it alone."""


def default_root() -> Path:
    """Return where slots live: the same for every run of a user, and short, because a unix socket's path is limited."""
    return Path(f"/tmp/carpool-{os.getuid()}")


@dataclass(frozen=True)
class Slot:
    """A numbered state directory whose lock this process holds."""

    root: Path
    number: int
    lock_fd: int
    machine: residue.Machine = residue.THIS_MACHINE

    @property
    def directory(self) -> Path:
        """Where the cluster keeps its state."""
        return self.root / str(self.number)

    @property
    def name(self) -> str:
        """Prefix of links and cgroups; unique on the machine."""
        return slot_name(self.root, self.number)

    @property
    def kept(self) -> bool:
        """Whether the next start leaves it alone."""
        return (self.directory / KEPT).exists()

    def keep(self) -> None:
        """Let the cluster outlive this process, until `clean`."""
        (self.directory / KEPT).touch()

    def empty(self) -> None:
        """End everything that belongs to this slot and remove its directory.

        Raises:
            HarnessError: Something stays, and with it the directory, so that nobody takes the slot.
        """
        removals: list[Callable[[], None]] = [
            partial(residue.end_processes, self.directory),
            partial(residue.remove_links, self.name, self.machine.links),
            partial(residue.remove_cgroups, self.name, self.machine.cgroups),
        ]
        failures = []
        for remove in removals:
            try:
                remove()
            except HarnessError as error:
                failures.append(str(error))
        if failures:
            raise HarnessError("; ".join(failures))
        _remove_tree(self.directory)

    def release(self) -> None:
        """Let go of the lock; its file goes too, unless the slot is still in use."""
        if not self.directory.exists():
            lock_file(self.root, self.number).unlink(missing_ok=True)
        os.close(self.lock_fd)


def lock_file(root: Path, number: int) -> Path:
    """Return the file whose lock says that a slot is in use."""
    return root / f"{number}.lock"


def slot_name(root: Path, number: int) -> str:
    """Return the prefix of a slot's links and cgroups; at most 8 characters, because a link's name has at most 15."""
    return f"cp{number}" if root == default_root() else f"cq{number}"


def acquire(
    root: Path | None = None, machine: residue.Machine = residue.THIS_MACHINE, console: Console | None = None
) -> Slot:
    """Take a free slot, after emptying every slot that a dead harness left behind.

    A slot that cannot be emptied is told of on the console and stays taken.

    Args:
        root: Where slots live.
        machine: Where the rest of them is.
        console: Where it is told what cannot be removed.

    Raises:
        HarnessError: All slots are in use.
    """
    root = root or default_root()
    _prepare(root)
    _, failures = _sweep(root, machine, also_kept=False)
    for failure in failures:
        (console or Console(stderr=True)).print(f"Another slot is used: {failure}", highlight=False, soft_wrap=True)
    for number in range(MAX_SLOTS):
        slot = _try_lock(root, number, machine)
        if slot is None:
            continue
        if not slot.directory.exists():
            slot.directory.mkdir(mode=0o700)
            return slot
        slot.release()
    raise HarnessError(f"all {MAX_SLOTS} clusters under {root} are in use; stop one, or run `make demo-clean`")


def clean(root: Path | None = None, machine: residue.Machine = residue.THIS_MACHINE) -> list[int]:
    """Empty every slot whose harness has ended, the kept ones too, and return their numbers.

    Raises:
        HarnessError: Some could not be emptied; the others were.
    """
    root = root or default_root()
    if not root.exists():
        return []
    _prepare(root)
    swept, failures = _sweep(root, machine, also_kept=True)
    if failures:
        raise HarnessError("\n".join(failures))
    return swept


def _sweep(root: Path, machine: residue.Machine, *, also_kept: bool) -> tuple[list[int], list[str]]:
    """Return the numbers of the slots that were emptied, and what is told of those that could not be."""
    swept, failures = [], []
    for number in sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit()):
        slot = _try_lock(root, number, machine)
        if slot is None:
            continue
        if also_kept or not slot.kept:
            try:
                slot.empty()
                swept.append(number)
            except HarnessError as error:
                failures.append(f"{slot.directory} cannot be emptied: {error}")
        slot.release()
    return swept, failures


def _prepare(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise HarnessError(f"{root} must be a directory of user {os.getuid()}; it is somebody else's: remove it")


def _try_lock(root: Path, number: int, machine: residue.Machine) -> Slot | None:
    path = lock_file(root, number)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
            return Slot(root, number, lock, machine)
        os.close(lock)  # whoever held it removed the file; another one may have made a new one


def _remove_tree(directory: Path) -> None:
    # A namespace lets go of its mounts a moment after its last process has ended.
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise HarnessError(f"the directory {directory} cannot be removed: {error}") from error
