"""NVIDIA's programs from Debian's non-free packages."""

import subprocess
import tempfile
from pathlib import Path

import pytest


def download(package: str, folder: Path) -> None:
    """Unpack one of Debian's packages of NVIDIA's programs, from the mirror that the machine is set up with."""
    targets = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, check=True)
    mirror = next((uri for uri in targets.stdout.decode().split() if uri.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        pytest.skip("needs a mirror of Debian")
    with tempfile.TemporaryDirectory() as scratch:
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (Path(scratch) / "sources.list").write_text(f"deb [signed-by={keys}] {mirror} trixie non-free\n")
        (Path(scratch) / "lists" / "partial").mkdir(parents=True)
        places = f"-oDir::Etc::SourceList={scratch}/sources.list -oDir::Etc::SourceParts=- -oDir::Cache={scratch}"
        for verb in ("update", f"download {package}"):
            command = f"apt-get -qq -oAPT::Sandbox::User=root -oDir::State::Lists={scratch}/lists {places} {verb}"
            subprocess.run(command.split(), cwd=scratch, check=True)
        (file,) = Path(scratch).glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", file, folder], check=True)
