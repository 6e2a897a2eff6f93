"""What names of the catalog begin with, and what is said of those that it does not know."""

from collections.abc import Sequence

from carpool_predictor.features.abstention import TraceError

LIBRARIES = ("timm", "torchvision", "transformers", "gpumemnet")


def unsupported(name: str) -> TraceError:
    """Return the error that says that models do not go by such a name."""
    return TraceError(
        "CatalogUnsupported",
        f"this version knows timm/NAME, torchvision/NAME, transformers/NAME and gpumemnet/LAYERS, found {name}; give "
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
