"""What names of the catalog begin with, and what is said of those that it does not know."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from carpool_core.resources.job import CatalogModel

from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import published, split_name, unknown_to_the_hub
from carpool_predictor.features import Abstention, TraceError

LIBRARIES = ("timm", "torchvision", "transformers")


def unsupported(name: str) -> TraceError:
    """Return the error that says that models do not go by such a name."""
    return TraceError(
        "CatalogUnsupported",
        f"this version knows timm/NAME, torchvision/NAME and transformers/NAME, found {name}; give "
        "spec.model.features, as `carpool graph FILE.py:FACTORY --input …` prints them for any nn.Module",
    )


def unknown(library: str, name: str, near: Sequence[str]) -> TraceError:
    """Return the error that says that a library has no such model.

    Args:
        library: The library.
        name: The name in it.
        near: Full names that are near.
    """
    hint = f"the nearest names are {', '.join(near)}" if near else "no name is near"
    return TraceError("UnknownCatalogModel", f"{library} has no model {name!r}; {hint}")


_CONFIGURATION = "Config"
"""What the classes end with by which models of `transformers` go that have no name here."""


def refusal_of(model: CatalogModel) -> Abstention | None:
    """Say why a name can be none; None where it is one, or only its library can tell."""
    try:
        _check(model)
    except TraceError as e:
        return e.as_abstention()
    return None


def _check(model: CatalogModel) -> None:
    library, _, name = model.name.partition("/")
    if library not in LIBRARIES:
        raise unsupported(model.name)
    if library == "transformers":
        base, _ = split_name(name)
        if published(base) is None and not base.endswith(_CONFIGURATION):
            raise unknown_to_the_hub(base)
    elif store.shipped().family(model.name) is None and not _is_written(library, name):
        raise unknown(library, name, store.shipped().nearest(model.name))


def _is_written(library: str, name: str) -> bool:
    """Whether a name stands anywhere in a library's models, whose functions have their names; True where it is missing.

    That holds for names that are deprecated, and for releases of which the feature store knows nothing. What follows a
    dot names weights.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return True  # whoever traces says what is missing
    word = re.compile(rb"\b%s\b" % re.escape(name.partition(".")[0]).encode())
    files = Path(spec.origin).with_name("models").rglob("*.py")
    return any(word.search(file.read_bytes()) for file in files)
