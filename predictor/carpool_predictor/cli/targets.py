"""What the command line can be asked about: a catalog name, a factory in a Python file, a features file."""

from pathlib import Path
from typing import Any

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training

from carpool_predictor.catalog import store
from carpool_predictor.catalog.names import LIBRARIES
from carpool_predictor.tracing.requests import FactoryModel, TraceRequest

Target = ModelFeatures | TraceRequest


class TargetError(ValueError):
    """What was asked about makes no sense; the message says what was expected."""


def parse_shape(text: str | None) -> list[int] | None:
    """Read `3,224,224`; None stays None.

    Raises:
        TargetError: The text is no list of positive whole numbers.
    """
    if text is None:
        return None
    try:
        shape = [int(part) for part in text.split(",")]
    except ValueError as e:
        raise TargetError(f"--input expects the shape of one sample, such as 3,224,224; found {text!r}") from e
    if min(shape) < 1 or len(shape) > 4:
        raise TargetError(f"--input expects one to four positive sizes, such as 3,224,224; found {text!r}")
    return shape


def target_of(what: str, shape: list[int] | None, num_classes: int | None, training: Training) -> Target:
    """Find out what a name on the command line stands for.

    Raises:
        TargetError: It is none of the three, or a file cannot be read.
    """
    if what.endswith((".yaml", ".yml", ".json")):
        if shape is not None or num_classes is not None:
            raise TargetError(
                f"expected neither --input nor --num-classes beside the features file {what}, which was traced with "
                "its own; leave them out, or trace the model again with `carpool graph`"
            )
        return read_features(Path(what))
    path, colon, function = what.rpartition(":")
    if colon:
        if not Path(path).is_file() or not path.endswith(".py"):
            raise TargetError(f"expected a Python file before the colon of {what!r}, found no such file")
        if num_classes is not None:
            raise TargetError(f"--num-classes is for catalog models; {what} builds its classifier itself: leave it out")
        if shape is None:
            raise TargetError(f"{what} needs --input, the shape of one sample, such as --input 3,224,224")
        return TraceRequest(factory=FactoryModel(path=path, function=function, input=shape), training=training)
    library, _, name = what.partition("/")
    if not name or library not in LIBRARIES:
        raise TargetError(
            "expected timm/NAME, torchvision/NAME, transformers/NAME, gpumemnet/LAYERS, FILE.py:FACTORY or a features "
            f"file (.yaml), found {what!r}{_meant(what)}"
        )
    source: dict[str, Any] = {"name": what, "input": shape, "numClasses": num_classes}
    try:
        catalog = msgspec.convert({k: v for k, v in source.items() if v is not None}, type=CatalogModel)
    except msgspec.ValidationError as e:
        raise TargetError(f"expected a catalog model such as timm/resnet50, found {what!r}: {e}") from e
    return TraceRequest(model=ModelSource(catalog=catalog), training=training)


def _meant(what: str) -> str:
    known = [f"{library}/{what}" for library in LIBRARIES if store.shipped().family(f"{library}/{what}") is not None]
    return f"; did you mean {' or '.join(known)}?" if known else ""


def read_features(path: Path) -> ModelFeatures:
    """Read what `carpool graph` wrote: a features block, alone or under the key `features`.

    Raises:
        TargetError: The file cannot be read or does not hold features.
    """
    try:
        content = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise TargetError(f"cannot read features from {path}: {e}") from e
    if isinstance(content, dict) and set(content) == {"features"}:
        content = content["features"]
    try:
        return msgspec.convert(content, type=ModelFeatures)
    except msgspec.ValidationError as e:
        raise TargetError(f"{path} does not hold features as `carpool graph` writes them: {e}") from e


def write_features(features: ModelFeatures) -> str:
    """Write a block to paste under `spec.model`."""
    return msgspec.yaml.encode({"features": msgspec.to_builtins(features)}, order=None).decode()
