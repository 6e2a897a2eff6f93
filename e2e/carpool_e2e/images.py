"""The product's images, built without Docker: buildah runs the Dockerfile on a base of this machine's Debian packages.

The cache keeps the archive by the content of its sources, and buildah's layers: new code is one new layer.
"""

import ast
import gzip
import hashlib
import json
import os
import platform
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

from carpool_e2e.binaries import FOR_EMULATION, FOR_IMAGES, cache_root, install_packages, locked
from carpool_e2e.chart import PROJECT
from carpool_e2e.errors import BuildError

TARGETS = ("operator", "extender", "agent")
"""Targets of the Dockerfile; each is an image."""

ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architecture of an image, in the words of OCI and Debian → in the kernel's."""
NATIVE = next((name for name, machine in ARCHITECTURES.items() if machine == platform.machine()), "amd64")

REGISTRY = "localhost"

PYTHON_PACKAGES = ("base-files", "dash", "libstdc++6", "openssl", "python-is-python3")
BASES = {"PYTHON_IMAGE": PYTHON_PACKAGES, "BUILD_IMAGE": (*PYTHON_PACKAGES, "coreutils", "findutils", "python3-pip")}
"""Argument of the Dockerfile → Debian packages that, with their dependencies, make the image which it names."""

UNUSED = (
    "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bash-completion",
    "usr/lib/*/gconv",
)  # fmt: skip
"""Folders that no process reads: manuals, translations, and glibc's character sets; Python has its own."""

CERTIFICATES = "/etc/ssl/certs"

ARCHIVE_AGE_S, LAYER_AGE_S = 24 * 3600.0, 7 * 24 * 3600.0
"""Age after which archives without use and layers without a name are removed."""


@dataclass(frozen=True)
class Image:
    """One image of an archive."""

    name: str
    architecture: str
    digest: str
    """Digest of the image's manifest for this architecture."""
    size_mb: float
    """Size of its unpacked layers, in MB."""


def image_name(target: str, variant: str = "") -> str:
    """Return an image's name with the version of the project; that of a variant ends in `-VARIANT`."""
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return f"{REGISTRY}/carpool/{target}:{version}{variant and f'-{variant}'}"


def context_files() -> Iterator[Path]:
    """Return the files of the Dockerfile's context, sorted; .dockerignore lists its folders."""
    lines = (PROJECT / ".dockerignore").read_text().splitlines()
    roots = [PROJECT / line.removeprefix("!") for line in lines if line.startswith("!")]
    for root in sorted(roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield path


def ensure(
    console: Console, commit: str = "", architectures: Sequence[str] = (NATIVE,), *, trace: bool = False
) -> Path:
    """Return an OCI archive of the three images, from the cache or built.

    Args:
        console: Where a build is announced.
        commit: Commit that `carpool --version` names in them; empty for none.
        architectures: Architectures of each image; QEMU emulates those that are not the machine's own.
        trace: Whether there is an image of the operator with PyTorch as well, its variant `trace`.

    Raises:
        MissingError: The machine lacks buildah or QEMU and cannot install it.
        BuildError: A step failed; the message ends with its output.
    """
    install_packages(FOR_IMAGES, console)
    if foreign := [one for one in architectures if one != NATIVE]:
        install_packages(FOR_EMULATION, console)
        for one in foreign:
            _run(["update-binfmts", "--enable", f"qemu-{ARCHITECTURES[one]}"])
    root = cache_root(os.environ) / "images"
    root.mkdir(parents=True, exist_ok=True)
    # One checkout at a time builds, and from a copy: its sources may change meanwhile.
    with locked(root / "lock"), tempfile.TemporaryDirectory(dir=root, prefix=".build-") as scratch:
        bases = {
            one: {argument: _package_uris(_apt(root, one), packages) for argument, packages in BASES.items()}
            for one in architectures
        }
        archive = root / f"{copy_sources(Path(scratch, 'context'), json.dumps([commit, bases, trace]))}.tar"
        if not archive.exists():
            console.print(
                f"Building the images of operator, extender and agent for {' and '.join(architectures)}: 20 s after a "
                "change of code, else minutes; with emulation several times as long"
            )
            _build(root, Path(scratch), bases, commit, trace=trace).replace(archive)
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
    """Return the images of an archive, those of each architecture."""
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
            Image(
                index["annotations"]["org.opencontainers.image.ref.name"], one["platform"]["architecture"],
                one["digest"], size_mb(one["digest"]),
            )
            for index in json.load(file("index.json"))["manifests"]
            for one in json.load(blob(index["digest"]))["manifests"]
        ]  # fmt: skip


def run(archive: Path, image: Image, *command: str) -> str:
    """Run a command in an image of an archive, and return its output."""
    buildah = _buildah(cache_root(os.environ) / "images")
    source = f"oci-archive:{archive}:{image.name}"
    container = _run([*buildah, "from", "--quiet", f"--arch={image.architecture}", source])
    try:
        return _run([*buildah, "run", "--isolation=chroot", container, "--", *command])
    finally:
        _run([*buildah, "rm", container])


def _build(
    root: Path, scratch: Path, bases: Mapping[str, Mapping[str, Sequence[str]]], commit: str, *, trace: bool
) -> Path:
    """Build the images, and return the archive. BASES: architecture → argument of the Dockerfile → its packages."""
    buildah, layout, pip, mounts = _buildah(root), scratch / "layout", scratch / "pip.conf", {CERTIFICATES}
    settings = _pip_settings()
    pip.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]))
    # A certificate or a folder of wheels that they name.
    mounts |= {word for value in settings.values() for word in value.split() if os.path.isabs(word)}
    build = [*buildah, "build", "--quiet", "--layers", "--isolation=chroot", "--pull=never"]
    build += [f"--volume={path}:{path}:ro" for path in sorted(mounts) if os.path.exists(path)]
    build += [f"--volume={pip}:/etc/pip.conf:ro", f"--build-arg=CARPOOL_COMMIT={commit}"]
    built = dict[str, list[str]]()
    for architecture, uris in bases.items():
        names = {
            argument: _base(root, scratch / architecture, architecture, argument, uris[argument]) for argument in uris
        }
        arguments = [f"--arch={architecture}", *(f"--build-arg={key}={value}" for key, value in names.items())]
        targets = {image_name(target): [f"--target={target}"] for target in TARGETS}
        if trace:
            extras = "--build-arg=OPERATOR_EXTRAS=operator,trace"
            targets[image_name("operator", "trace")] = ["--target=operator", extras]
        for name, of_target in targets.items():
            image = _run([*build, *arguments, *of_target, str(scratch / "context")]).splitlines()[-1]
            built.setdefault(name, []).append(image)
    index = f"{REGISTRY}/carpool/index:{scratch.name.strip('.')}"  # the names may be those of an earlier build
    for name, of_architectures in built.items():
        _run([*buildah, "manifest", "create", index, *of_architectures])
        _run([*buildah, "manifest", "push", "--quiet", "--all", index, f"oci:{layout}:{name}"])
        _run([*buildah, "manifest", "rm", index])
    archive = scratch / "images.tar"
    _run(["tar", f"--directory={layout}", f"--file={archive}", "--create", "."])
    return archive


def _base(root: Path, scratch: Path, architecture: str, argument: str, uris: Sequence[str]) -> str:
    """Return the name of a base image, made of Debian's packages unless an earlier build left it."""
    buildah, name = _buildah(root), f"{REGISTRY}/carpool/python:{_digest([*uris, *UNUSED])}"
    if not _run([*buildah, "images", "--quiet", "--filter", f"reference={name}"]):
        _install_packages(_apt(root, architecture), BASES[argument], scratch / argument)
        container = _run([*buildah, "from", f"--arch={architecture}", "scratch"])
        _run([*buildah, "add", "--quiet", container, str(scratch / argument / "root"), "/"])
        _run([*buildah, "config", f"--arch={architecture}", "--env=PATH=/usr/local/bin:/usr/bin:/bin", container])
        _run([*buildah, "commit", "--quiet", "--rm", container, name])
    return name


def _buildah(root: Path) -> list[str]:
    return ["buildah", f"--root={root / 'storage'}", f"--runroot={root / 'run'}"]


def _package_uris(apt: Sequence[str], packages: Sequence[str]) -> list[str]:
    """Return what apt would fetch on a machine without any package, sorted: `'URI' FILE SIZE DIGEST`."""
    return sorted(_run([*apt, "--no-install-recommends", "--print-uris", "install", *packages]).splitlines())


def _apt(root: Path, architecture: str) -> list[str]:
    """Return apt's command as if the machine were of that architecture and had no package, with lists of its own."""
    folder = root / "apt" / architecture
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    options = {"APT::Architecture": architecture, "APT::Architectures::": architecture, "Debug::NoLocking": 1,
               "Dir::State::lists": folder / "lists", "Dir::State::status": os.devnull,
               "Dir::Cache": folder}  # fmt: skip
    apt = ["apt-get", "-qq", "-y", *(f"-o={key}={value}" for key, value in options.items())]
    updated = folder / "updated"
    if not updated.exists() or time.time() - updated.stat().st_mtime > LAYER_AGE_S:
        _run([*apt, "update"])
        updated.touch()
    return apt


def _install_packages(apt: Sequence[str], packages: Sequence[str], folder: Path) -> None:
    """Unpack packages into FOLDER/root; /var/lib/dpkg/status.d lists them for scanners, as in distroless images."""
    (folder / "archives/partial").mkdir(parents=True)
    download = [f"-o=Dir::Cache::archives={folder / 'archives'}", "--no-install-recommends", "--download-only"]
    _run([*apt, *download, "install", *packages])
    root = folder / "root"
    status = root / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    for package in sorted((folder / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])
        (status / package.name.split("_")[0]).write_text(_run(["dpkg-deb", "--field", str(package)]) + "\n")
    for unused in (folder for pattern in UNUSED for folder in root.glob(pattern)):
        shutil.rmtree(unused)
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
