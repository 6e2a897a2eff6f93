"""Certificates and keys of a cluster, made by openssl."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from carpool_e2e.errors import MissingError

_DAYS = "30"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def extensions(names: Sequence[str]) -> str:
    """Return openssl's configuration for an authority (no names) or a leaf with these `DNS:` and `IP:` names."""
    lines = ["[req]", "distinguished_name = dn", "x509_extensions = ext", "[dn]", "[ext]"]
    if names:
        lines += [
            "basicConstraints = critical, CA:FALSE",
            "extendedKeyUsage = serverAuth, clientAuth",
            f"subjectAltName = {', '.join(names)}",
        ]
    else:
        lines += ["basicConstraints = critical, CA:TRUE", "keyUsage = critical, keyCertSign, cRLSign"]
    return "\n".join(lines) + "\n"


def make(folder: Path, name: str, subject: str, names: Sequence[str] = (), authority: str = "") -> None:
    """Write `NAME.crt` and `NAME.key`, signed by the authority of that name, or by itself."""
    config = folder / f"{name}.cnf"
    config.write_text(extensions(names))
    signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"] if authority else []
    command = ["openssl", "req", "-x509", *_KEY, "-config", config.name, "-subj", subject, "-days", _DAYS, *signed]
    _openssl([*command, "-keyout", f"{name}.key", "-out", f"{name}.crt"], folder)


def make_key(file: Path) -> None:
    """Write a private key that signs tokens."""
    _openssl(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", file.name], file.parent)


def _openssl(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingError(f"expected openssl 3 or later to run {' '.join(command)}, found: {done.stderr.strip()}")
