"""The feature store: what the catalog's models cost at their default inputs, traced once and carried in the wheel.

`python -m carpool_predictor.store --records FILE` makes it from what `carpool_predictor.sweep` wrote: zlib over JSON
without names, so that loading it can run nothing. Needs no PyTorch.
"""

import difflib
import sys
import zlib
from functools import cache
from importlib import resources
from pathlib import Path

import click
import msgspec
from carpool_core.resources.features import LayerCounts, ModelFeatures
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision

from carpool_predictor.records import FAMILIES, ModelRecord, StepRecord, read_records
from carpool_predictor.suites import DataError
from carpool_predictor.trees import MalformedError

FORMAT = 1
FILE = "artifacts/catalog.json.z"
MEASURED_FILE = "artifacts/measured.json.z"
"""Models that the measured release of timm built otherwise than the one that the catalog was traced with."""
MAX_BYTES = 64 << 20
"""Largest store that is unpacked; a larger one is no store."""

STATE = {
    Optimizer.SGD: 0.0,
    Optimizer.SGD_MOMENTUM: 1.0,
    Optimizer.ADAM: 2.0,
    Optimizer.ADAMW: 2.0,
}
"""Bytes of optimizer state for each byte of trainable parameters. Others are traced: what Adagrad's and RMSprop's
updates leave in the allocator is up to a fifth of the whole, and not reckoned well."""
TEMPORARY = {
    Optimizer.SGD: 0.0,
    Optimizer.SGD_MOMENTUM: 0.0,
    Optimizer.ADAM: 1.0,
    Optimizer.ADAMW: 1.0,
}
"""Bytes that PyTorch's multi-tensor update takes for itself, likewise; a test compares both with traces."""


class _Step(msgspec.Struct, frozen=True, array_like=True):
    plain: tuple[int, ...]
    flops: float
    bytes_moved: float
    by_kind: tuple[int, ...]
    families: list[list[float]]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    family: str
    input_shape: tuple[int, ...]
    sizes: tuple[int, int, int]
    layers: tuple[int, ...]
    steps: list[_Step]
    failure: str


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    versions: dict[str, str]
    optimizer: Optimizer
    precision: Precision
    entries: list[_Entry]


_PLAIN = tuple(
    name
    for name in StepRecord.__struct_fields__
    if name not in ("flops", "bytes_moved", "by_kind", "families", "updates")
)


class Store:
    """Records by catalog name."""

    def __init__(self, document: _Document) -> None:
        self._document = document
        self._entries = {entry.name: entry for entry in document.entries}

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that defined the models."""
        return self._document.versions

    def names(self) -> list[str]:
        """Name every model that was traced."""
        return [entry.name for entry in self._document.entries if not entry.failure]

    def failures(self) -> dict[str, str]:
        """Say of each model that could not be traced why."""
        return {entry.name: entry.failure for entry in self._document.entries if entry.failure}

    def nearest(self, name: str) -> list[str]:
        """Suggest names."""
        return difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)

    def record(self, name: str) -> ModelRecord | None:
        """Return a model's record; None where it was not traced."""
        entry = self._entries.get(name)
        return None if entry is None or entry.failure else self._unpacked(entry)

    def family(self, name: str) -> str | None:
        """Return the Python module, within its library, that defines a model; None where it was not traced."""
        entry = self._entries.get(name)
        return None if entry is None or entry.failure else entry.family

    def features(self, model: CatalogModel, training: Training) -> ModelFeatures | None:
        """Return a model's features for a training; None where the store cannot know them.

        It knows models at their default input and number of classes, in its own precision, without checkpointing.
        Optimizers differ by their state, which is reckoned.
        """
        known = (
            training.precision is self._document.precision
            and training.optimizer in STATE
            and not training.activation_checkpointing
        )
        record = self.record(model.name) if known and model.num_classes is None else None
        if record is None or (model.input is not None and tuple(model.input) != record.input_shape):
            return None
        return with_optimizer(record, training.optimizer).features()

    def _unpacked(self, entry: _Entry) -> ModelRecord:
        parameters, trainable, size = entry.sizes
        return ModelRecord(
            name=entry.name,
            family=entry.family,
            input_shape=entry.input_shape,
            optimizer=self._document.optimizer,
            precision=self._document.precision,
            parameters=parameters,
            trainable_parameters=trainable,
            parameter_bytes=size,
            layers=LayerCounts(**dict(zip(LayerCounts.__struct_fields__, entry.layers, strict=True))),
            steps=tuple(map(_unpacked_step, entry.steps)),
        )


def _unpacked_step(step: _Step) -> StepRecord:
    return StepRecord(
        **dict(zip(_PLAIN, step.plain, strict=True)),
        flops=step.flops,
        bytes_moved=step.bytes_moved,
        by_kind=step.by_kind,
        families={name: counts for name, counts in zip(FAMILIES, step.families, strict=True) if counts},
    )


def with_optimizer(record: ModelRecord, optimizer: Optimizer) -> ModelRecord:
    """Reckon a record for another optimizer: its state is there from the start, its temporaries during the update."""
    if optimizer is record.optimizer:
        return record
    trainable = record.parameter_bytes * record.trainable_parameters // max(record.parameters, 1)
    added = int((STATE[optimizer] - STATE[record.optimizer]) * trainable)
    updating = record.parameter_bytes + int((1 + STATE[optimizer] + TEMPORARY[optimizer]) * trainable)

    def changed(step: StepRecord) -> StepRecord:
        before = step.peak_before_update + added
        peak = max(before, updating)
        return msgspec.structs.replace(
            step,
            peak_bytes=peak,
            peak_before_update=before,
            activation_bytes=min(step.activation_bytes, peak),
            reserved_bytes=max(step.reserved_bytes + added, peak),
            reserved_workspace_bytes=max(step.reserved_workspace_bytes + added, peak),
            workspace_peak=max(step.workspace_peak + added, peak),
        )

    return msgspec.structs.replace(record, optimizer=optimizer, steps=tuple(map(changed, record.steps)))


def pack(records: list[ModelRecord], versions: dict[str, str]) -> bytes:
    """Write a store; the same records give the same bytes."""
    entries = [
        _Entry(
            name=r.name,
            family=r.family,
            input_shape=r.input_shape,
            sizes=(r.parameters, r.trainable_parameters, r.parameter_bytes),
            layers=tuple(getattr(r.layers, name) for name in LayerCounts.__struct_fields__),
            steps=[
                _Step(
                    plain=tuple(getattr(s, name) for name in _PLAIN),
                    flops=s.flops,
                    bytes_moved=s.bytes_moved,
                    by_kind=s.by_kind,
                    families=[s.families.get(name, []) for name in FAMILIES],
                )
                for s in r.steps
            ],
            failure=r.failure,
        )
        for r in sorted(records, key=lambda r: r.name)
    ]
    document = _Document(
        format=FORMAT,
        versions=versions,
        optimizer=Optimizer.SGD_MOMENTUM,
        precision=Precision.FP32,
        entries=entries,
    )
    return zlib.compress(msgspec.json.encode(document), 9)


def unpack(content: bytes) -> Store:
    """Read a store.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(content, MAX_BYTES)
        if not inflate.eof:
            raise MalformedError("the feature store is cut short, or larger than any store")
        document = msgspec.json.decode(text, type=_Document)
    except (zlib.error, msgspec.DecodeError) as e:
        raise MalformedError(f"expected a feature store: {e}") from e
    if document.format != FORMAT:
        raise MalformedError(f"expected a feature store of format {FORMAT}, found {document.format}; upgrade carpool")
    return Store(document)


@cache
def shipped() -> Store:
    """Return the store that the package carries; read once, some tens of milliseconds."""
    return unpack(resources.files("carpool_predictor").joinpath(FILE).read_bytes())


def differs(record: ModelRecord) -> bool:
    """Whether the catalog of the package has this model, and otherwise."""
    known = shipped().record(record.name)
    return not record.failure and known is not None and known.features() != record.features()


@cache
def measured() -> Store:
    """Return the models of the measurements that the catalog has otherwise."""
    return unpack(resources.files("carpool_predictor").joinpath(MEASURED_FILE).read_bytes())


@click.command(help=__doc__)
@click.option("--records", required=True, type=click.Path(path_type=Path), help="Records of the sweep.")
@click.option(
    "--measured",
    "is_measured",
    is_flag=True,
    help="Keep the records that differ from the store, of a sweep with the timm that was measured, installed here.",
)
def main(records: Path, is_measured: bool) -> None:
    """Write the store beside this module."""
    import timm
    import torch
    import torchvision  # type: ignore[import-untyped]

    try:
        found = list(read_records(records))
    except DataError as e:
        click.echo(str(e), err=True)
        sys.exit(2)
    if is_measured:
        # A model without a configuration of its own in that release was fed what later ones say.
        found = [r for r in found if differs(r) and timm.models.get_pretrained_cfg(r.name.partition("/")[2])]
    versions = {m.__name__: str(m.__version__) for m in (timm, torch, torchvision)}
    content = pack(found, versions)
    (Path(__file__).parent / (MEASURED_FILE if is_measured else FILE)).write_bytes(content)
    failed = sum(bool(r.failure) for r in found)
    click.echo(f"{len(found) - failed} models, {failed} that could not be traced, {len(content):,} bytes")


if __name__ == "__main__":
    main()
