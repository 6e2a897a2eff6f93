"""Reads the shipped models and other versioned documents."""

from collections.abc import Callable
from importlib import resources
from typing import TypeVar

import msgspec

from carpool_predictor.features import MalformedError

Model = TypeVar("Model")


class _Version(msgspec.Struct, frozen=True):
    """The part of a document that decides whether the rest can be read."""

    format: int | None = None


def decode(
    content: bytes, kind: type[Model], name: str, version: int = 1, repair: str = "install carpool again"
) -> Model:
    """Return the document in a file's content, JSON whose field `format` may be absent.

    Messages contain its name, such as "an activity model", and for an older format the advice `repair`.

    Raises:
        MalformedError: The content is truncated, changed, or of another format.
    """
    try:
        found = msgspec.json.decode(content, type=_Version).format
        if found is not None and found != version:
            advice = "upgrade carpool" if found > version else repair
            raise MalformedError(f"expected {name} of format {version}, found {found}; {advice}")
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise MalformedError(f"expected {name}: {e}") from e


def load(name: str, read: Callable[[bytes], Model]) -> Model:
    """Return the shipped model in a file; raises MalformedError if it is missing or invalid."""
    file = resources.files("carpool_predictor").joinpath("artifacts", name)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise MalformedError(f"expected the model {file}: {error}; install carpool again") from error
    return read(content)
