"""Container images without a registry: docker archives of a static busybox and a few empty directories."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool_e2e.nodeconfig import PAUSE_IMAGE
from carpool_e2e.workloads.pod import IMAGE as ENVIRONMENT_IMAGE

BUSYBOX_IMAGE = "localhost/busybox:dev"

_COMMANDS = ("sh", "sleep", "cat", "echo", "ls", "env", "true", "false", "date", "kill", "grep")
_DIRECTORIES = ("bin", "dev", "etc", "proc", "sys", "run", "root", "var")


def layer(busybox: bytes) -> bytes:
    """Return a layer with busybox, its commands and the directories that every container needs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in _DIRECTORIES:
            _add(tar, name, type_=tarfile.DIRTYPE, mode=0o755)
        _add(tar, "tmp", type_=tarfile.DIRTYPE, mode=0o1777)
        _add(tar, "bin/busybox", busybox, mode=0o755)
        for command in _COMMANDS:
            _add(tar, f"bin/{command}", type_=tarfile.SYMTYPE, link="busybox")
        _add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        _add(tar, "etc/group", b"root:x:0:\n")
    return buffer.getvalue()


def _add(
    tar: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    type_: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    link: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = type_, mode, len(content), link
    tar.addfile(entry, io.BytesIO(content))


def archive(layer_tar: bytes, entrypoints: Mapping[str, Sequence[str]]) -> bytes:
    """Return a docker archive of images that share one layer.

    Args:
        layer_tar: The layer.
        entrypoints: Each image's name and what it runs by default.
    """
    digest = hashlib.sha256(layer_tar).hexdigest()
    files: dict[str, bytes] = {f"{digest}/layer.tar": layer_tar}
    manifest: list[dict[str, Any]] = []
    for name, entrypoint in entrypoints.items():
        config = json.dumps(
            {
                "architecture": _architecture(),
                "os": "linux",
                "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin:/usr/bin:/usr/local/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                # Two images of the same configuration would be one.
                "history": [{"comment": name}],
            }
        ).encode()
        file = f"{hashlib.sha256(config).hexdigest()}.json"
        files[file] = config
        manifest.append({"Config": file, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            _add(tar, path, content)
    return buffer.getvalue()


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def write(file: Path, busybox: Path) -> None:
    """Write the archive of all images that the cluster uses."""
    shell = ["/bin/sh"]
    images = {PAUSE_IMAGE: ["/bin/sleep", "inf"], BUSYBOX_IMAGE: shell, ENVIRONMENT_IMAGE: shell}
    file.write_bytes(archive(layer(busybox.read_bytes()), images))
