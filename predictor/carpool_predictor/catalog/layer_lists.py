"""Reads GPUMemNet's layer lists: `gpumemnet/[('linear', 1173, 2753031), …]`. No PyTorch: `listed` builds them."""

import ast
from collections.abc import Sequence
from typing import Annotated

import msgspec

from carpool_predictor.catalog.notation import KINDS, Layer
from carpool_predictor.features import TraceError

_Entry = tuple[str, Annotated[int, msgspec.Meta(ge=1, le=2**40)], Annotated[int, msgspec.Meta(ge=0, le=2**40)]]


def read_layers(text: str) -> list[Layer]:
    """Read a list as it stands in the data.

    Raises:
        TraceError: It is none, or names a kind of layer that GPUMemNet does not have.
    """
    try:
        layers = msgspec.convert(ast.literal_eval(text), type=list[_Entry])
    except (ValueError, SyntaxError, MemoryError, RecursionError) as e:
        raise invalid(f"expected a list such as [('linear', 1173, 2753031), ('ReLU', 1173, 0)]: {e}") from e
    if not layers:
        raise invalid("expected at least one layer, found an empty list")
    for index, layer in enumerate(layers):
        if layer[0] not in KINDS:
            raise invalid(f"layer {index} {layer}: expected one of {', '.join(KINDS)}, found {layer[0]!r}")
    return layers


def sample_shape(layers: Sequence[Layer], given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of one sample: the given one, or that which a first linear layer's parameters imply.

    Raises:
        TraceError: The list starts with a convolution, whose input it does not tell; or no shape fits.
    """
    if given is not None:
        if len(given) not in (1, 3) or given[1:2] != given[2:]:
            raise invalid(f"expected input [features] or [channels, size, size], found {list(given)}")
        return tuple(given)
    kind, outputs, parameters = layers[0]
    if kind != "linear":
        raise invalid(f"a list that starts with {kind!r} needs input, such as [3, 32, 32]: the list does not tell it")
    features, rest = divmod(parameters - outputs, outputs)
    if rest or features < 1:
        raise invalid(f"layer 0 {layers[0]}: expected outputs × (inputs + 1) parameters")
    return (features,)


def invalid(message: str) -> TraceError:
    """Return the error that says what is wrong with a list."""
    return TraceError("LayerListInvalid", message)
