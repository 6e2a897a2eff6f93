"""Reads the shipped models and verifies their SHA-256 digests, which lie beside them in `SHA256SUMS`.

The digests detect files that were changed or partly replaced. They do not protect against a change of both.
"""

import hashlib
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import TypeVar

from carpool_predictor.features import MalformedError

SUMS = "SHA256SUMS"
"""Name of the file that holds the digests."""
_ADVICE = "install carpool again"

Model = TypeVar("Model")


def load(name: str, read: Callable[[bytes], Model], folder: Path | None = None) -> Model:
    """Return a shipped model.

    Args:
        name: Name of its file.
        read: Decodes the file's content; its errors come before a wrong digest.
        folder: Folder of the file; the package's by default.

    Raises:
        MalformedError: The file is missing, unreadable, or has another digest.
    """
    location = resources.files("carpool_predictor").joinpath("artifacts") if folder is None else folder
    try:
        content, sums = location.joinpath(name).read_bytes(), location.joinpath(SUMS).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedError(f"expected {name} and {SUMS} in {location}: {error}; {_ADVICE}") from error
    model = read(content)
    wanted = dict(line.split("  ", 1)[::-1] for line in sums.splitlines() if "  " in line).get(name, "none")
    found = _digest(content)
    if found != wanted:
        raise MalformedError(
            f"expected {name} as it was shipped (SHA-256 {wanted:.12}), found it changed ({found:.12}); {_ADVICE}"
        )
    return model


def write_sums(paths: Iterable[Path]) -> Path:
    """Write the digests of the given files into their folder, and return the path of the digests."""
    written = sorted(paths)
    path = written[0].parent / SUMS
    path.write_text("".join(f"{_digest(one.read_bytes())}  {one.name}\n" for one in written), encoding="ascii")
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
