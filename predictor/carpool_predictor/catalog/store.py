"""The feature store: traced steps of the catalog's models at their default inputs, in the package. No PyTorch.

`carpool_research.catalog_sweep` writes one file per precision: zlib over JSON, so that loading cannot run code. A model
is decoded when it is first used, which keeps memory small.
"""

import difflib
import zlib
from functools import cache
from importlib import resources

import msgspec
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import CrossEntropy, Optimizer, Precision

from carpool_predictor.catalog.hub import full_name
from carpool_predictor.features import MalformedError

FORMAT = 2
_MIXED = "artifacts/catalog-mixed.json.z"
_FULL = "artifacts/catalog-fp32.json.z"
FILES = {
    Precision.FP32: _FULL, Precision.TF32: _FULL, Precision.BF16_MIXED: _MIXED, Precision.FP16_MIXED: _MIXED
}  # fmt: skip
"""Files by precision; those that share one run the same operators in the same widths."""
MEASURED_FILE = "artifacts/measured.json.z"
"""Models that differ between the measured release of timm and the traced one."""
_STORED_LOSSES = (CrossEntropy.FULL, CrossEntropy.NATIVE)
"""Losses between which the precisions of the store make no difference."""
_HUB = "transformers/"
_SEGMENTATION = {"deeplabv3", "fcn", "lraspp"}
MOST_CLASSES = 1000
"""Outputs of a classifier up to which a stored model is used for one with another classifier: ImageNet's."""
MAX_BYTES = 64 << 20
"""Largest unpacked store in bytes."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A traced step without names."""

    plain: tuple[int, int, int, int, int, int, int]
    """Batch size, peak, activations, reserved, unfolded, largest, kernels."""
    flops: float
    bytes_moved: float
    updates: list[tuple[int, int, int, int, float] | None]
    """Peak, activations, reserved, kernels and bytes moved, in the order of `others`; None if not traced."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A traced model without names."""

    family: str
    input_shape: tuple[int, ...]
    sizes: tuple[int, int, int]
    """Parameters, trainable parameters, bytes of parameters and buffers."""
    layers: tuple[int, int, int, int, int, int, int]
    steps: list[Step]


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a file of the store."""

    format: int
    versions: dict[str, str]
    """Versions of the libraries that defined the models."""
    optimizer: Optimizer
    others: list[Optimizer]
    precision: Precision
    entries: dict[str, msgspec.Raw]
    """Traced models by name."""
    failures: dict[str, str]
    """Reasons of the models that could not be traced, by name."""


_ENTRY = msgspec.json.Decoder(Entry)


class Store:
    """Records of one precision by catalog name."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def nearest(self, name: str) -> list[str]:
        """Return the nearest names."""
        return difflib.get_close_matches(name, self.document.entries, n=3, cutoff=0.5)

    def family(self, name: str) -> str | None:
        """Return the library's Python module that defines a model, or None if it was not traced."""
        entry = self._entry(name)
        return None if entry is None else entry.family

    def input_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a sample with which a model was traced, or None if it was not."""
        entry = self._entry(name)
        return None if entry is None else entry.input_shape

    def traced(self, name: str, optimizer: Optimizer | None = None) -> ModelFeatures | None:
        """Return a model's features at its default input, or None if it was not traced with the optimizer.

        The default is the document's first optimizer.
        """
        entry, optimizer = self._entry(name), optimizer or self.document.optimizer
        steps = [] if entry is None else [self._step(step, optimizer) for step in entry.steps]
        found = [step for step in steps if step is not None]
        if entry is None or len(found) < len(steps):
            return None
        parameters, trainable_parameters, parameter_bytes = entry.sizes
        return ModelFeatures(
            name=name,
            parameters=parameters,
            trainable_parameters=trainable_parameters,
            parameter_bytes=parameter_bytes,
            layers=LayerCounts(**dict(zip(LayerCounts.__struct_fields__, entry.layers, strict=True))),
            optimizer=optimizer,
            precision=self.document.precision,
            steps=found,
        )

    def _step(self, step: Step, optimizer: Optimizer) -> TracedStep | None:
        """Return a step under an optimizer, or None if it was not traced with it."""
        batch_size, peak, activations, reserved, unfolded, largest, kernels = step.plain
        bytes_moved = step.bytes_moved
        if optimizer is not self.document.optimizer:
            update = dict(zip(self.document.others, step.updates, strict=False)).get(optimizer)
            if update is None:
                return None
            peak, activations, reserved, kernels, bytes_moved = update
        return TracedStep(
            batch_size=batch_size,
            peak_bytes=peak,
            activation_bytes=activations,
            reserved_bytes=reserved,
            unfolded_bytes=unfolded,
            largest_bytes=largest,
            flops=step.flops,
            bytes_moved=bytes_moved,
            kernels=kernels,
        )

    def features(
        self, model: CatalogModel, training: Training, *, any_classifier: bool = False
    ) -> ModelFeatures | None:
        """Return a model's features for a training, or None.

        The store has models at their default input and number of classes, trained whole and without checkpointing.

        Args:
            model: The model.
            training: How it is trained.
            any_classifier: Whether an image classifier may have another number of classes, up to `MOST_CLASSES`.
        """
        plain = Training(
            batch_size=training.batch_size, optimizer=training.optimizer, precision=training.precision,
            cross_entropy=training.cross_entropy, steps=training.steps,
        )  # fmt: skip
        # Rows have subclasses, which msgspec never takes as equal.
        is_plain = msgspec.structs.astuple(training) == msgspec.structs.astuple(plain)
        if not is_plain or training.cross_entropy not in _STORED_LOSSES:
            return None
        if model.num_classes is not None and not (any_classifier and self._is_near(model, model.num_classes)):
            return None
        if model.input is not None and tuple(model.input) != self.input_shape(model.name):
            return None
        found = self.traced(model.name, training.optimizer)
        return (
            None
            if found is None
            else msgspec.structs.replace(found, precision=training.precision, cross_entropy=training.cross_entropy)
        )

    def _is_near(self, model: CatalogModel, num_classes: int) -> bool:
        """Whether a number of classes changes little: text models get another head, segmentation a map for each."""
        is_classifier = not model.name.startswith(_HUB) and self.family(model.name) not in _SEGMENTATION
        return is_classifier and num_classes <= MOST_CLASSES

    def _entry(self, name: str) -> Entry | None:
        """Return a model's entry; names of the hub work without their organization.

        Raises:
            MalformedError: The entry is invalid.
        """
        entries = self.document.entries
        text = entries.get(name)
        if text is None and name.startswith(_HUB):
            text = entries.get(_HUB + full_name(name.removeprefix(_HUB)))
        try:
            return None if text is None else _ENTRY.decode(text)
        except msgspec.DecodeError as e:
            raise MalformedError(f"expected a model in the feature store under {name!r}: {e}") from e


def unpack(content: bytes) -> Store:
    """Return the store in a file's content.

    Raises:
        MalformedError: The content is truncated, changed, or of another version.
    """
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(content, MAX_BYTES)
        if not inflate.eof:
            raise MalformedError("the feature store is truncated or too large")
        document = msgspec.json.decode(text, type=Document)
    except (zlib.error, msgspec.DecodeError) as e:
        raise MalformedError(f"expected a feature store: {e}") from e
    if document.format != FORMAT:
        raise MalformedError(f"expected a feature store of format {FORMAT}, found {document.format}; upgrade carpool")
    return Store(document)


@cache
def _read(file: str) -> Store:
    return unpack(resources.files("carpool_predictor").joinpath(file).read_bytes())


def shipped(precision: Precision = Precision.FP32) -> Store:
    """Return the package's store for a precision in `FILES`."""
    return _read(FILES[precision])


def measured() -> Store:
    """Return the models that the measured release of timm defines differently."""
    return _read(MEASURED_FILE)


def features(model: CatalogModel, training: Training, *, any_classifier: bool = False) -> ModelFeatures | None:
    """Return a catalog model's features for a training, or None if no store has them (see `Store.features`)."""
    if training.precision not in FILES:
        return None
    return shipped(training.precision).features(model, training, any_classifier=any_classifier)
