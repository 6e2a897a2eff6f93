"""Finds the binaries of a cluster: TEST_ASSET_*, KUBEBUILDER_ASSETS, PATH, the cache; builds what is missing."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from carpool_e2e import system
from carpool_e2e.errors import BuildError, MissingError
from carpool_e2e.tools import MODULES, Module, Tool, accepts


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
        BuildError: A build failed; the message ends with what the compiler said.
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
        system.ensure(system.FOR_RUNC, console)
    total = sum(tool.build_s for _, tool in missing)
    console.print(
        f"Building {len(missing)} binaries from source, once, into {cache_root(environ)}: "
        f"about {_minutes(total)} on two cores with nothing cached, less otherwise."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, left="")
        for number, (module, tool) in enumerate(missing, 1):
            left = sum(t.build_s for _, t in missing[number - 1 :])
            label = f"{tool.name} ({number}/{len(missing)})"
            progress.update(task, description=label, completed=total - left, left=f"≤ {_minutes(left)} left")
            if not console.is_terminal:
                console.print(f"  {label}: at most about {_minutes(left)} left")
            for spent in _build(module, tool, environ):
                progress.update(task, completed=total - left + min(spent, tool.build_s * 0.95))
        progress.update(task, completed=total, left="")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def build_command(module: Module, tool: Tool, target: Path) -> list[str]:
    """Return the command that builds one binary, to be run in the module's folder."""
    tags = ["-tags", module.tags] if module.tags else []
    return ["go", "build", "-trimpath", *tags, "-ldflags", module.stamped_ldflags, "-o", str(target), tool.package]


def _build(module: Module, tool: Tool, environ: Mapping[str, str]) -> Iterator[float]:
    """Build one binary into the cache; yields the seconds spent so far, now and then."""
    folder = cache_folder(module, environ)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        if (folder / tool.name).exists():
            return  # another process built it while this one waited for the lock
        started = time.monotonic()
        target, log = Path(scratch) / tool.name, Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                build_command(module, tool, target),
                cwd=module.folder,
                env={**environ, "CGO_ENABLED": "1" if module.cgo else "0", "GOFLAGS": "-mod=readonly"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    yield time.monotonic() - started
                    time.sleep(0.2)
            finally:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise BuildError(f"{tool.name} did not build in {module.folder}:\n{log.read_text()[-4000:]}")
        target.replace(folder / tool.name)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
