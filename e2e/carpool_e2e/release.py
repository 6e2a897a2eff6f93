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
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import yaml
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from rich.console import Console

from carpool_e2e import binaries, images
from carpool_e2e.chart import CHART, PROJECT
from carpool_e2e.errors import BuildError, HarnessError

CHANGELOG = PROJECT / "CHANGELOG.md"

_PACKAGE = re.compile(r"(\./)?(var/lib/dpkg/status\.d/[^/]+|opt/carpool/lib/.*/[^/]+\.dist-info/METADATA)")
"""Files of an image that describe one package."""
_DOCUMENTS = re.compile(r"(?:\./)?usr/share/doc/([^/]+)(?:/copyright)?")
"""Folder of a Debian package with its copyright file; several packages of one source may share it by a link."""
_MACHINE_READABLE = re.compile(r"Format: *https?://www\.debian\.org/doc/packaging-manuals/copyright-format/1\.0")
_GNU = re.compile(r"([AL]?GPL)-(\d)(\.\d)?(\+?)")

ALIASES = {
    "expat": "MIT", "mit license": "MIT", "apache-2": "Apache-2.0", "apache 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0", "3-clause bsd license": "BSD-3-Clause", "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "python software foundation license": "PSF-2.0",
}  # fmt: skip
"""Names of licenses in Debian's and Python's packages, in small letters → in SPDX."""


def versions() -> dict[str, str]:
    """Return the version of each thing that has one, by its place."""
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


def build(
    version: str, out: Path, commit: str, architectures: Sequence[str], console: Console, *, trace: bool = False
) -> None:
    """Write a release into an empty folder, and check it; with `trace` it has the operator's image with PyTorch, too.

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
    archive.write_bytes(images.ensure(console, commit, architectures, trace=trace).read_bytes())
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
        f"the images {wanted} of the chart, found {found}": wanted == found - {images.image_name("operator", "trace")},
        "the same CRDs in chart and wheel": all(crd in objects for crd in crds) and len(crds) == 2,
    }.items():
        if not holds:
            raise HarnessError(f"expected {what}")


_WORDS = r" +(and|or) +"


def spdx(name: str) -> str:
    """Return the SPDX expression of the name of a license; empty if it is none."""
    if gnu := _GNU.fullmatch(name):
        name = f"{gnu[1]}-{gnu[2]}{gnu[3] or '.0'}-{'or-later' if gnu[4] else 'only'}"
    try:
        return canonicalize_license_expression(ALIASES.get(name.lower(), name))
    except InvalidLicenseExpression:
        return ""


def debian_license(package: str, copyright_file: str) -> tuple[str, dict[str, str]]:
    """Return the SPDX expression of a package's files, and the texts of those licenses that SPDX does not list, by ID.

    Both are empty if Debian's copyright file is not machine-readable (format 1.0).
    """
    if not _MACHINE_READABLE.match(copyright_file):
        return "", {}
    paragraphs = [HeaderParser().parsestr(one) for one in re.split(r"\n\s*\n", copyright_file)]
    texts = dict[str, str]()
    for one in paragraphs:
        name, _, text = one.get("License", "").partition("\n")
        texts[name.strip()] = texts.get(name.strip()) or text
    own = dict[str, str]()

    def identified(name: str) -> str:
        if not (found := spdx(name)):
            found = f"LicenseRef-{package}-{re.sub('[^A-Za-z0-9.]+', '-', name)}"
            own[found] = texts.get(name) or name
        return found

    def expression(names: str, separator: str = r", +(and|or) +") -> str:
        """Return an expression; Debian's comma binds less than its words."""
        words = re.split(separator, names)
        if len(words) == 1:
            return identified(names) if separator == _WORDS else expression(names, _WORDS)
        parts = (word.upper() if at % 2 else expression(word, _WORDS) for at, word in enumerate(words))
        return f"({' '.join(parts)})"

    fields = {one.get("License", "").partition("\n")[0].strip() for one in paragraphs if "Files" in one}
    return " AND ".join(sorted(expression(names) for names in fields if names)), own


def python_license(about: Message) -> str:
    """Return the SPDX expression of a Python package's metadata; empty if they name no license that SPDX lists."""
    classified = [one for one in about.get_all("Classifier", []) if one.startswith("License :: ")]
    names = [about.get("License-Expression", ""), about.get("License", "")]
    names += [one.rpartition(" :: ")[2] for one in classified if len(classified) == 1]
    return next(filter(None, map(spdx, names)), "")


def sbom(archive: Path, image: images.Image) -> dict[str, Any]:
    """Return the packages of an image, those of Debian and of Python, as a document of SPDX 2.3."""
    unknown, own = "NOASSERTION", dict[str, str]()
    packages = [
        {
            "SPDXID": f"SPDXRef-Package-{number}", "name": name, "versionInfo": version, "downloadLocation": unknown,
            "filesAnalyzed": False, "licenseConcluded": unknown, "licenseDeclared": license_ or unknown,
            "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                              "referenceLocator": f"pkg:{kind}/{name}@{version}"}],
        }
        for number, (kind, name, version, license_) in enumerate(sorted({*_packages(archive, image.digest, own)}))
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
        "hasExtractedLicensingInfos": [{"licenseId": id_, "extractedText": text} for id_, text in own.items()],
    }


def _packages(archive: Path, digest: str, own: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, version and SPDX license (empty if none is known) of each package of an image.

    The texts of licenses that SPDX does not list are put into OWN.
    """
    debian, documents, links = dict[str, str](), dict[str, str](), dict[str, str]()
    with tarfile.open(archive) as layout:

        def blob(name: str) -> Any:
            return layout.extractfile(f"./blobs/{name.replace(':', '/')}")

        for layer in json.load(blob(digest))["layers"]:
            with tarfile.open(fileobj=gzip.GzipFile(fileobj=blob(layer["digest"]))) as files:
                for member in files:
                    folder = _DOCUMENTS.fullmatch(member.name)
                    if folder and member.issym():
                        links[folder[1]] = member.linkname
                    if not member.isfile() or not (folder or _PACKAGE.fullmatch(member.name)):
                        continue
                    content = files.extractfile(member)
                    assert content is not None
                    text = content.read().decode()
                    about = HeaderParser().parsestr(text)
                    if folder:
                        documents[folder[1]] = text
                    elif "Package" in about:
                        debian[about["Package"]] = about["Version"]
                    else:
                        name = about["Name"].lower().replace("_", "-")
                        yield "pypi", name, about["Version"], python_license(about)
    for name, version in debian.items():
        license_, texts = debian_license(name, documents.get(links.get(name, name), ""))
        own.update(texts)
        yield "deb/debian", name, version, license_


def _run(command: Sequence[str], folder: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout.strip()
