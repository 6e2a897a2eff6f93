"""Checks catalog names without importing a library, because a trace takes seconds to refuse one."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from carpool_core.resources.job import CatalogModel

from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import CORRECT, published, split_name, unknown_to_the_hub
from carpool_predictor.features import Abstention, TraceError

LIBRARIES = ("timm", "torchvision", "transformers")


def unsupported(name: str) -> TraceError:
    """Return the error for a name without a supported library."""
    return TraceError(
        "CatalogUnsupported",
        f"this version supports timm/NAME, torchvision/NAME and transformers/NAME, found {name}; give "
        "spec.model.features, as `carpool graph FILE.py:FACTORY --input …` prints them for any nn.Module",
    )


def unknown(library: str, name: str, near: Sequence[str]) -> TraceError:
    """Return the error for a model that its library does not have, with the nearest full names."""
    hint = f"the nearest names are {', '.join(near)}" if near else "no name is near"
    return TraceError("UnknownCatalogModel", f"{library} has no model {name!r}, {hint}; {CORRECT}")


_CONFIGURATION = "Config"
"""Suffix of the configuration classes of `transformers`, which are valid names too."""


def refusal_of(model: CatalogModel) -> Abstention | None:
    """Return why a name is invalid; None if it is valid or only its library can decide."""
    try:
        _check(model)
    except TraceError as e:
        return e.as_abstention()
    return None


def _check(model: CatalogModel) -> None:
    library, _, name = model.name.partition("/")
    if library not in LIBRARIES:
        raise unsupported(model.name)
    base, _ = split_name(name)
    if library == "transformers":
        if published(base) is None and not base.endswith(_CONFIGURATION):
            raise unknown_to_the_hub(base)
    elif store.shipped().family(f"{library}/{base}") is None and not _is_written(library, base):
        raise unknown(library, base, store.shipped().nearest(f"{library}/{base}"))


def _is_written(library: str, name: str) -> bool:
    """Whether a name occurs in the source of a library's models; True if the library is missing.

    This accepts deprecated names and newer releases than the feature store's. The part after a dot names weights.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return True  # the trace reports the missing library
    word = re.compile(rb"\b%s\b" % re.escape(name.partition(".")[0]).encode())
    files = Path(spec.origin).with_name("models").rglob("*.py")
    return any(word.search(file.read_bytes()) for file in files)
