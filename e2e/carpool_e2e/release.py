"""`make release VERSION=`: wheel, chart, images, their SBOMs, and notes in one folder, checked from an empty one."""

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from carpool_e2e import binaries, images
from carpool_e2e.chart import CHART, PROJECT
from carpool_e2e.errors import BuildError, HarnessError

CHANGELOG = PROJECT / "CHANGELOG.md"

_PACKAGE = re.compile(r"(\./)?(var/lib/dpkg/status\.d/[^/]+|opt/carpool/lib/.*/[^/]+\.dist-info/METADATA)")
"""Files of an image that describe one package."""


def versions() -> dict[str, str]:
    """Return the version of each thing that has one, by where it stands."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return {
        "pyproject.toml": project,
        "Chart.yaml version": about["version"],
        "Chart.yaml appVersion": about["appVersion"],
    }


def notes(version: str) -> str:
    """Return the section of a version in CHANGELOG.md.

    Raises:
        HarnessError: There is none.
    """
    found = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", CHANGELOG.read_text(), re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise HarnessError(f"CHANGELOG.md: expected a section '## {version}' with text, found none; write it")
    return found[1].strip() + "\n"


def build(version: str, out: Path, commit: str, architectures: Sequence[str], console: Console) -> None:
    """Write a release into an empty folder, and check it.

    Raises:
        HarnessError: A version differs, a part is missing, or a check fails.
    """
    if wrong := {place: found for place, found in versions().items() if found != version}:
        raise HarnessError(f"expected version {version} everywhere, found {wrong}; change these, or VERSION")
    if out.exists() and any(out.iterdir()):
        raise HarnessError(f"expected an empty folder {out}, found files; remove it")
    out.mkdir(parents=True, exist_ok=True)
    (out / "NOTES.md").write_text(notes(version))
    helm = binaries.ensure(["helm"], console=console)["helm"]
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(PROJECT)])
    _run([helm, "package", str(CHART), "--destination", str(out)])
    archive = out / f"carpool-images-{version}.tar"
    archive.write_bytes(images.ensure(console, commit, architectures).read_bytes())
    for image in images.listed(archive):
        name = image.name.rsplit("/", 1)[-1].replace(":", "-")
        (out / f"{name}-{image.architecture}.spdx.json").write_text(json.dumps(sbom(archive, image), indent=1))
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    check(version, out, helm)


def check(version: str, release: Path, helm: str) -> None:
    """Install the wheel beside nothing, render the chart, and compare what they name.

    Raises:
        HarnessError: Something differs.
    """
    release = release.resolve()
    with tempfile.TemporaryDirectory() as empty:
        _run([sys.executable, "-m", "venv", "venv"], empty)
        _run(["venv/bin/pip", "install", "--quiet", f"{next(release.glob('*.whl'))}[cli]"], empty)
        said = _run(["venv/bin/carpool", "--version"], empty)
        crds = list(yaml.safe_load_all(_run(["venv/bin/carpool", "crds"], empty)))
        chart = [helm, "template", "carpool", str(release / f"carpool-{version}.tgz"), "--set", "board.enabled=true"]
        rendered = _run([*chart, "--set", "global.imageRegistry=localhost", "--kube-version", "v1.30.0"], empty)
    objects = [one for one in yaml.safe_load_all(rendered) if one]
    wanted = {*re.findall(r"image: \"?(localhost/carpool/[^\s\"]+)", rendered)}
    found = {image.name for image in images.listed(release / f"carpool-images-{version}.tar")}
    for what, holds in {
        f"`carpool --version` to name {version}, found {said!r}": f" {version}" in said,
        f"the images {wanted} of the chart, found {found}": wanted == found,
        "the same CRDs in chart and wheel": all(crd in objects for crd in crds) and len(crds) == 2,
    }.items():
        if not holds:
            raise HarnessError(f"expected {what}")


def sbom(archive: Path, image: images.Image) -> dict[str, Any]:
    """Return the packages of an image, those of Debian and of Python, as a document of SPDX 2.3."""
    unknown = "NOASSERTION"
    packages = [
        {
            "SPDXID": f"SPDXRef-Package-{number}", "name": name, "versionInfo": version, "downloadLocation": unknown,
            "filesAnalyzed": False, "licenseConcluded": unknown, "licenseDeclared": license_ or unknown,
            "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                              "referenceLocator": f"pkg:{kind}/{name}@{version}"}],
        }
        for number, (kind, name, version, license_) in enumerate(sorted({*_packages(archive, image.digest)}))
    ]  # fmt: skip
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": image.name,
        "documentNamespace": f"https://carpool.dev/spdx/{image.digest}",
        "creationInfo": {"created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "creators": ["Tool: carpool"]},
        "documentDescribes": [package["SPDXID"] for package in packages],
        "packages": packages,
    }


def _packages(archive: Path, digest: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, version and SPDX license (empty if none is declared) of each package of an image."""
    with tarfile.open(archive) as layout:

        def blob(name: str) -> Any:
            return layout.extractfile(f"./blobs/{name.replace(':', '/')}")

        for layer in json.load(blob(digest))["layers"]:
            with tarfile.open(fileobj=gzip.GzipFile(fileobj=blob(layer["digest"]))) as files:
                for member in files:
                    if member.isfile() and _PACKAGE.fullmatch(member.name):
                        content = files.extractfile(member)
                        assert content is not None
                        about = HeaderParser().parsestr(content.read().decode())
                        if "Package" in about:
                            yield "deb/debian", about["Package"], about["Version"], ""
                        else:
                            yield (
                                "pypi",
                                about["Name"].lower().replace("_", "-"),
                                about["Version"],
                                about.get("License-Expression", ""),
                            )


def _run(command: Sequence[str], folder: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout.strip()
