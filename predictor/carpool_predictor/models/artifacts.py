"""Reads the models that the package carries, and makes sure that they are those that were shipped.

Their digests lie beside them, as `sha256sum` writes them. Training writes both. That tells a file that was
changed or half replaced from one that is whole. It is no protection against who changes both; a signed image is.
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
    """Read a model.

    Args:
        name: Of its file.
        read: Makes the model of the file's content; what is wrong with it is for that to say first.
        folder: Where it lies; None: in the package.

    Raises:
        MalformedError: It is not there, cannot be read, or is not what was shipped.
    """
    lies_in = resources.files("carpool_predictor").joinpath("artifacts") if folder is None else folder
    try:
        content, sums = lies_in.joinpath(name).read_bytes(), lies_in.joinpath(SUMS).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedError(f"expected {name} and {SUMS} in {lies_in}: {error}; {_ADVICE}") from error
    model = read(content)
    wanted = dict(line.split("  ", 1)[::-1] for line in sums.splitlines() if "  " in line).get(name, "none")
    found = _digest(content)
    if found != wanted:
        raise MalformedError(
            f"expected {name} as it was shipped (SHA-256 {wanted:.12}), found it changed ({found:.12}); {_ADVICE}"
        )
    return model


def write_sums(paths: Iterable[Path]) -> Path:
    """Write the digests of models that lie in one folder.

    Args:
        paths: At least one.
    """
    written = sorted(paths)
    path = written[0].parent / SUMS
    path.write_text("".join(f"{_digest(one.read_bytes())}  {one.name}\n" for one in written), encoding="ascii")
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
