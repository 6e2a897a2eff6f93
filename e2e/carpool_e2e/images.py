"""The product's images, built without Docker: buildah runs the Dockerfile on a base of this machine's Debian packages.

The cache keeps the archive by the content of its sources, and buildah's layers: new code is one new layer.
"""

import ast
import gzip
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from rich.console import Console

from carpool_e2e.binaries import FOR_IMAGES, cache_root, install_packages, locked, update_packages
from carpool_e2e.chart import PROJECT
from carpool_e2e.errors import BuildError

TARGETS = ("operator", "extender", "agent")
"""Targets of the Dockerfile; each is an image."""

REGISTRY = "localhost"

PYTHON_PACKAGES = ("base-files", "dash", "libstdc++6", "openssl", "python-is-python3")
BASES = {"PYTHON_IMAGE": PYTHON_PACKAGES, "BUILD_IMAGE": (*PYTHON_PACKAGES, "coreutils", "findutils", "python3-pip")}
"""Argument of the Dockerfile → Debian packages that, with their dependencies, make the image which it names."""

UNUSED = ("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bash-completion")

CERTIFICATES = "/etc/ssl/certs"

ARCHIVE_AGE_S, LAYER_AGE_S = 24 * 3600.0, 7 * 24 * 3600.0
"""Age after which archives without use and layers without a name are removed."""


@dataclass(frozen=True)
class Image:
    """One image of an archive."""

    name: str
    digest: str
    size_mb: float
    """Size of its unpacked layers, in MB."""


def image_name(target: str) -> str:
    """Return an image's name with the version of the project."""
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return f"{REGISTRY}/carpool/{target}:{version}"


def context_files() -> Iterator[Path]:
    """Return the files of the Dockerfile's context, sorted; .dockerignore lists its folders."""
    lines = (PROJECT / ".dockerignore").read_text().splitlines()
    roots = [PROJECT / line.removeprefix("!") for line in lines if line.startswith("!")]
    for root in sorted(roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield path


def ensure(console: Console, commit: str = "") -> Path:
    """Return an OCI archive of the three images, from the cache or built.

    Args:
        console: Where a build is announced.
        commit: Commit that `carpool --version` names in them; empty for none.

    Raises:
        MissingError: The machine lacks buildah and cannot install it.
        BuildError: A step failed; the message ends with its output.
    """
    install_packages(FOR_IMAGES, console)
    root = cache_root(os.environ) / "images"
    root.mkdir(parents=True, exist_ok=True)
    # One checkout at a time builds, and from a copy: its sources may change meanwhile.
    with locked(root / "lock"), tempfile.TemporaryDirectory(dir=root, prefix=".build-") as scratch:
        bases = {argument: _package_uris(packages) for argument, packages in BASES.items()}
        archive = root / f"{copy_sources(Path(scratch, 'context'), json.dumps([commit, bases]))}.tar"
        if not archive.exists():
            console.print(
                "Building the images of operator, extender and agent: 20 s after a change of code, else minutes"
            )
            _build(root, Path(scratch), bases, commit).replace(archive)
            _prune(root)
        archive.touch()  # in use, so that no other checkout removes it
    return archive


def copy_sources(context: Path, arguments: str) -> str:
    """Copy the Dockerfile and its context, and return a digest of the copy and of the build's arguments."""
    digest = hashlib.sha256(arguments.encode())
    for path in [PROJECT / "Dockerfile", *context_files()]:
        copy = context / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
        digest.update(f"{path.relative_to(PROJECT)}\0".encode() + copy.read_bytes())
    return digest.hexdigest()[:16]


def _prune(root: Path) -> None:
    """Remove archives without use for a day, and unnamed layers that are older than a week."""
    now = time.time()
    for old in root.glob("*.tar"):
        if now - old.stat().st_mtime > ARCHIVE_AGE_S:
            old.unlink()
    images = json.loads(_run([*_buildah(root), "images", "--all", "--json"]))
    unnamed = [image for image in images if not image.get("names")]
    for image in sorted(unnamed, key=lambda image: image["created"], reverse=True):
        if now - image["created"] > LAYER_AGE_S:
            subprocess.run([*_buildah(root), "rmi", image["id"]], capture_output=True, check=False)  # a base stays


def listed(archive: Path) -> list[Image]:
    """Return the images of an archive."""
    with tarfile.open(archive) as tar:

        def file(name: str) -> IO[bytes]:
            found = tar.extractfile(f"./{name}")
            assert found is not None, name
            return found

        def blob(digest: str) -> IO[bytes]:
            return file(f"blobs/{digest.replace(':', '/')}")

        @cache
        def unpacked(layer: str) -> int:
            return gzip.GzipFile(fileobj=blob(layer)).seek(0, os.SEEK_END)

        def size_mb(image: str) -> float:
            return sum(unpacked(layer["digest"]) for layer in json.load(blob(image))["layers"]) / 1e6

        return [
            Image(entry["annotations"]["org.opencontainers.image.ref.name"], entry["digest"], size_mb(entry["digest"]))
            for entry in json.load(file("index.json"))["manifests"]
        ]


def _build(root: Path, scratch: Path, bases: Mapping[str, Sequence[str]], commit: str) -> Path:
    """Build the images, and return the archive."""
    buildah = _buildah(root)
    names = {argument: f"{REGISTRY}/carpool/python:{_digest(uris)}" for argument, uris in bases.items()}
    for argument, name in names.items():
        if not _run([*buildah, "images", "--quiet", "--filter", f"reference={name}"]):
            _install_packages(BASES[argument], scratch / argument)
            container = _run([*buildah, "from", "scratch"])
            _run([*buildah, "add", "--quiet", container, str(scratch / argument / "root"), "/"])
            _run([*buildah, "config", "--env=PATH=/usr/local/bin:/usr/bin:/bin", container])
            _run([*buildah, "commit", "--quiet", "--rm", container, name])
    layout, pip, mounts = scratch / "layout", scratch / "pip.conf", {CERTIFICATES}
    settings = _pip_settings()
    pip.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]))
    # A certificate or a folder of wheels that they name.
    mounts |= {word for value in settings.values() for word in value.split() if os.path.isabs(word)}
    build = [*buildah, "build", "--quiet", "--layers", "--isolation=chroot", "--pull=never"]
    build += [f"--build-arg={key}={value}" for key, value in {**names, "CARPOOL_COMMIT": commit}.items()]
    build += [f"--volume={path}:{path}:ro" for path in sorted(mounts) if os.path.exists(path)]
    build += [f"--volume={pip}:/etc/pip.conf:ro"]
    for target in TARGETS:
        name = image_name(target)
        _run([*build, f"--target={target}", f"--tag={name}", str(scratch / "context")])
        _run([*buildah, "push", "--quiet", name, f"oci:{layout}:{name}"])
    archive = scratch / "images.tar"
    _run(["tar", f"--directory={layout}", f"--file={archive}", "--create", "."])
    return archive


def _buildah(root: Path) -> list[str]:
    return ["buildah", f"--root={root / 'storage'}", f"--runroot={root / 'run'}"]


def _package_uris(packages: Sequence[str]) -> list[str]:
    """Return what apt would fetch on a machine without any package, sorted: `'URI' FILE SIZE DIGEST`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_apt(Path(folder)), "--print-uris", *packages]
        try:
            return sorted(_run(command).splitlines())
        except BuildError:
            update_packages()
            return sorted(_run(command).splitlines())


def _apt(folder: Path) -> list[str]:
    """Return the command that installs packages as if the machine had none, with files in a folder of its own."""
    status = folder / "status"
    (folder / "archives" / "partial").mkdir(parents=True)
    status.touch()
    options = (f"Dir::State::status={status}", f"Dir::Cache::archives={folder / 'archives'}", "Debug::NoLocking=1")
    return ["apt-get", "-qq", "-y", *(f"-o={option}" for option in options), "--no-install-recommends", "install"]


def _install_packages(packages: Sequence[str], folder: Path) -> None:
    """Unpack packages into FOLDER/root; /var/lib/dpkg/status.d lists them for scanners, as in distroless images."""
    _run([*_apt(folder), "--download-only", *packages])
    root = folder / "root"
    status = root / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    for package in sorted((folder / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])
        (status / package.name.split("_")[0]).write_text(_run(["dpkg-deb", "--field", str(package)]) + "\n")
    for unused in UNUSED:
        shutil.rmtree(root / unused, ignore_errors=True)
    for file in (root / "usr/share/doc").rglob("*"):
        if not file.is_dir() and file.name != "copyright":
            file.unlink()


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _pip_settings() -> dict[str, str]:
    """Return this machine's settings of pip, those of the environment too."""
    lines = _run([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    settings = dict(line.partition(".")[2].split("=", 1) for line in lines)
    return {key: ast.literal_eval(value).replace("\n", "\n  ") for key, value in settings.items()}


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        BuildError: It failed; the message ends with its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()
