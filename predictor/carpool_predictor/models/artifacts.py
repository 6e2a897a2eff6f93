"""Reads the shipped models."""

from collections.abc import Callable
from importlib import resources
from typing import TypeVar

from carpool_predictor.features import MalformedError

Model = TypeVar("Model")


def load(name: str, read: Callable[[bytes], Model]) -> Model:
    """Return a shipped model.

    Args:
        name: Name of its file.
        read: Decodes the file's content.

    Raises:
        MalformedError: The file is missing or invalid.
    """
    file = resources.files("carpool_predictor").joinpath("artifacts", name)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise MalformedError(f"expected the model {file}: {error}; install carpool again") from error
    return read(content)
