"""A release: its versions and notes agree. `make release` builds one and checks it from an empty folder."""

import asyncio
import hashlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.parser import HeaderParser
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web
from carpool_e2e import images, release
from carpool_e2e.binaries import FOR_COPIES, ensure, install_packages
from carpool_e2e.errors import HarnessError
from documents import ELSEWHERE, ROOT, Shell, commands
from packaging.licenses import canonicalize_license_expression
from rich.console import Console

VERSION = release.versions()["pyproject.toml"]


def test_code_chart_and_images_have_one_version_with_notes() -> None:
    assert {*release.versions().values()} == {VERSION}
    assert {images.image_name(target).rpartition(":")[2] for target in images.TARGETS} == {VERSION}
    assert release.notes(VERSION)
    for target in (["release", f"VERSION={VERSION}"], ["image", "ARCH=amd64 arm64"]):
        made = subprocess.run(
            ["make", "--no-print-directory", "--dry-run", *target, "TRACE=1"],
            capture_output=True, text=True, check=True, cwd=release.PROJECT,
        )  # fmt: skip
        assert made.stdout.rstrip().endswith("--arch=amd64 --arch=arm64 --trace")
    plugin = subprocess.run(
        ["make", "--dry-run", "krew"], capture_output=True, text=True, check=True, cwd=release.PROJECT
    )
    assert f"s|@VERSION@|{VERSION}|" in plugin.stdout


def test_a_version_without_notes_or_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        HarnessError, match=r"expected version 9\.9\.9 everywhere, found .*pyproject.toml.*; change these"
    ):
        release.build("9.9.9", tmp_path, "", [images.NATIVE], Console())
    monkeypatch.setattr(release, "CHANGELOG", tmp_path / "CHANGELOG.md")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION}\n\n## 0.0.9\n\n- Old.\n")
    with pytest.raises(HarnessError, match=f"expected a section '## {re.escape(VERSION)}' with text, found none"):
        release.notes(VERSION)
    assert release.notes("0.0.9") == "- Old.\n"
    (tmp_path / "left").touch()
    with pytest.raises(HarnessError, match="expected an empty folder"):
        release.build(VERSION, tmp_path, "", [images.NATIVE], Console())


@pytest.fixture(scope="module")
def both() -> Path:
    """Archive of the agent's image for both architectures, one of which is built under emulation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "TARGETS", ["agent"])
        return images.ensure(Console(), "", [*images.ARCHITECTURES])


@pytest.mark.e2e
@pytest.mark.timeout(2400)  # emulation
def test_an_image_has_both_architectures(both: Path) -> None:
    """One name stands for both; the other one's program runs under QEMU."""
    found = {image.architecture: image for image in images.listed(both)}
    assert found.keys() == images.ARCHITECTURES.keys()
    assert len({image.name for image in found.values()}) == 1
    for architecture, image in found.items():
        assert image.size_mb <= 200
        assert images.run(both, image, "carpool", "--version").startswith(f"carpool {VERSION}"), architecture
        code = "import platform, grpc, msgspec, pynvml; print(platform.machine())"
        assert images.run(both, image, "python", "-c", code) == images.ARCHITECTURES[architecture]


@asynccontextmanager
async def registry() -> AsyncIterator[tuple[str, dict[str, bytes]]]:
    """A registry in memory: its address, and its content by path. It speaks the part of OCI's protocol that pushes."""
    content, parts, numbers = dict[str, bytes](), dict[str, bytes](), count()

    async def handle(request: web.Request) -> web.Response:
        path, body = request.path, await request.read()
        if request.method in ("GET", "HEAD"):
            return web.Response(body=content[path]) if path in content else web.Response(status=404)
        if request.method == "POST":
            path = f"{path}{next(numbers)}"
        elif request.method == "PATCH":
            parts[path] = parts.get(path, b"") + body
        else:
            where, _, reference = path.rpartition("/")
            blob = parts.pop(path, b"") + body
            digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
            if "digest" in request.query:
                assert request.query["digest"] == digest
                where, reference = where.removesuffix("/uploads"), digest
            content.update({f"{where}/{reference}": blob, f"{where}/{digest}": blob})
            return web.Response(status=201, headers={"Docker-Content-Digest": digest})
        return web.Response(status=202, headers={"Location": path})

    content["/v2/"] = b"{}"
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", content
    finally:
        await runner.cleanup()


@pytest.mark.e2e
@pytest.mark.timeout(2400)  # emulation
async def test_skopeo_copies_an_image_with_all_its_architectures(both: Path, tmp_path: Path) -> None:
    """By the command of docs/security.md, into a registry, but the agent's image, whole."""
    install_packages(FOR_COPIES, Console())
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "images.tar").symlink_to(both)
    async with registry() as (address, content):
        shell = Shell(tmp_path, {**os.environ}, {"REGISTRY": address})
        (command,) = (command for _, command in commands(ROOT / "docs" / "security.md") if command.startswith("skopeo"))
        done = await asyncio.to_thread(shell, command.replace("/operator:", "/agent:"), "--dest-tls-verify=false")
    assert done.returncode == 0, done.stderr
    index = json.loads(content[f"/v2/carpool/agent/manifests/{VERSION}"])
    copied = {one["platform"]["architecture"]: one["digest"] for one in index["manifests"]}
    assert copied == {one.architecture: one.digest for one in images.listed(both)}
    assert copied.keys() == images.ARCHITECTURES.keys()
    for digest in copied.values():
        image = json.loads(content[f"/v2/carpool/agent/manifests/{digest}"])
        parts = {part["digest"] for part in (image["config"], *image["layers"])}
        assert {f"/v2/carpool/agent/blobs/{part}" for part in parts} <= content.keys()


@pytest.mark.e2e
def test_an_sbom_lists_the_packages_of_an_image() -> None:
    archive = images.ensure(Console())
    for image in images.listed(archive):
        document = release.sbom(archive, image)
        assert json.dumps(document)
        found = {package["name"]: package for package in document["packages"]}
        assert {"carpool", "aiohttp", "openssl", "libc6"} <= found.keys()
        assert found["carpool"]["versionInfo"] == VERSION
        assert found["carpool"]["licenseDeclared"] == "Apache-2.0"
        assert len({package["SPDXID"] for package in document["packages"]}) == len(document["packages"])
        assert "pip" not in found, "the images have no installer"
        assert found["openssl"]["licenseDeclared"] == "(LicenseRef-openssl-Artistic OR GPL-1.0-or-later) AND Apache-2.0"
        licenses = {package["licenseDeclared"] for package in document["packages"]} - {"NOASSERTION"}
        assert {*map(canonicalize_license_expression, licenses)} == licenses, "each is an expression of SPDX"
        own = {*re.findall(r"LicenseRef-[\w.-]+", " ".join(licenses))}
        assert own == {one["licenseId"] for one in document["hasExtractedLicensingInfos"]}


COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
License: ignored

Files: *
License: GPL-2+ or Artistic

Files: a b
License: Expat
 Permission is hereby granted.

Files: c
License: GPL-1+ or Artistic, and BSD-3-clause

License: Artistic
 This program is free.
"""


def test_debians_license_is_read_where_it_is_machine_readable() -> None:
    own = "LicenseRef-tool-Artistic"
    found = (
        f"((GPL-1.0-or-later OR {own}) AND BSD-3-Clause) AND (GPL-2.0-or-later OR {own}) AND MIT",
        {own: " This program is free."},
    )
    license_, texts = release.debian_license("tool", COPYRIGHT)
    assert (license_, {id_: text.rstrip() for id_, text in texts.items()}) == found
    assert release.debian_license("libc6", "This is the Debian package of glibc.\n\nLicense: GPL-2+\n") == ("", {})


@pytest.mark.parametrize(
    ("fields", "license_"),
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: BSD", "MIT OR Apache-2.0"),
        ("License: Apache 2.0", "Apache-2.0"),
        ("License: see the file LICENSE\nClassifier: License :: OSI Approved :: MIT License", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License", ""),
        ("Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: Public Domain", ""),
        ("Name: without", ""),
    ],
)
def test_pythons_license_is_an_expression_a_name_or_the_only_classifier(fields: str, license_: str) -> None:
    assert release.python_license(HeaderParser().parsestr(fields)) == license_


@pytest.mark.e2e
@pytest.mark.timeout(1200)  # builds images, wheel and chart
def test_a_release_is_built_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release.build(VERSION, tmp_path, "", [images.NATIVE], Console())
    names = {file.name for file in tmp_path.iterdir()}
    assert {
        "NOTES.md",
        "SHA256SUMS",
        f"carpool-{VERSION}.tgz",
        f"operator-{VERSION}-{images.NATIVE}.spdx.json",
    } <= names
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    found, helm = images.listed(tmp_path / f"carpool-images-{VERSION}.tar"), ensure(["helm"])["helm"]
    more = [images.Image(images.image_name("operator", "trace"), images.NATIVE, "", 0)]
    monkeypatch.setattr(images, "listed", lambda _: [*found, *more])
    release.check(VERSION, tmp_path, helm)
    more += [images.Image("localhost/carpool/another:0", images.NATIVE, "", 0)]
    with pytest.raises(HarnessError, match="expected the images"):
        release.check(VERSION, tmp_path, helm)
    (tmp_path / f"carpool-{VERSION}.tgz").unlink()
    with pytest.raises(HarnessError):
        release.check(VERSION, tmp_path, helm)


@pytest.mark.e2e
def test_krew_installs_the_plugin(tmp_path: Path) -> None:
    """From the manifest and the archive, by the commands of docs/kubectl.md; the last one installs the wheel."""
    found = ensure(["krew", "kubectl"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl-krew").symlink_to(found["krew"])
    home = str(tmp_path)
    path = [f"{home}/.krew/bin", f"{home}/bin", str(Path(found["kubectl"]).parent), os.environ["PATH"]]
    kept = {name: value for name, value in os.environ.items() if name not in {"KREW_ROOT", "XDG_DATA_HOME"}}
    shell = Shell(tmp_path, {**kept, "HOME": home, "PATH": ":".join(path)})
    mine = next(prefix for prefix, test in ELSEWHERE.items() if test.endswith("test_krew_installs_the_plugin"))
    for command in [command for _, command in commands(ROOT / "docs" / "kubectl.md") if re.match(mine, command)]:
        done = shell(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"carpool {VERSION}")
    assert (tmp_path / ".local/share/carpool").is_dir()
