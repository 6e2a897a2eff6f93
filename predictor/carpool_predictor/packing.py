"""`python -m carpool_predictor.packing --records FILE`: packs what a sweep wrote into the feature store."""

import sys
import zlib
from pathlib import Path

import click
import msgspec
from carpool_core.resources.features import LayerCounts
from carpool_core.values import Optimizer, Precision

from carpool_predictor.catalog import store
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.features import ModelRecord, StepRecord, UpdateRecord
from carpool_predictor.sweep import read_records


def pack(records: list[ModelRecord], versions: dict[str, str]) -> bytes:
    """Write a store; the same records give the same bytes.

    Raises:
        DataError: The records are of several optimizers or precisions.
    """
    traced = sorted((r for r in records if not r.failure), key=lambda r: r.name)
    kinds = {(r.optimizer, r.precision) for r in traced}
    if len(kinds) > 1:
        raise DataError(f"expected records of one optimizer and precision, found {sorted(kinds)}")
    optimizer, precision = kinds.pop() if kinds else (Optimizer.SGD_MOMENTUM, Precision.FP32)
    others = sorted({other for r in traced for step in r.steps for other in step.updates})
    return zlib.compress(
        msgspec.json.encode(
            store.Document(
                format=store.FORMAT,
                versions=versions,
                optimizer=optimizer,
                others=others,
                precision=precision,
                entries={r.name: msgspec.Raw(msgspec.json.encode(_entry(r, others))) for r in traced},
                failures={r.name: r.failure for r in sorted(records, key=lambda r: r.name) if r.failure},
            )
        ),
        9,
    )


def _entry(record: ModelRecord, others: list[Optimizer]) -> store.Entry:
    return store.Entry(
        family=record.family,
        input_shape=record.input_shape,
        sizes=(record.parameters, record.trainable_parameters, record.parameter_bytes),
        layers=tuple(getattr(record.layers, name) for name in LayerCounts.__struct_fields__),
        steps=[_step(step, others) for step in record.steps],
    )


def _step(step: StepRecord, others: list[Optimizer]) -> store.Step:
    numbers = (
        step.batch_size, step.peak_bytes, step.activation_bytes, step.reserved_bytes, step.unfolded_max,
        step.largest_bytes, step.kernels,
    )  # fmt: skip
    updates = [_update(step.updates.get(other)) for other in others if step.updates]
    return store.Step(plain=numbers, flops=step.flops, bytes_moved=step.bytes_moved, updates=updates)


def _update(update: UpdateRecord | None) -> tuple[int, int, int, int, float] | None:
    if update is None:
        return None
    return update.peak_bytes, update.activation_bytes, update.reserved_bytes, update.kernels, update.bytes_moved


def differs(record: ModelRecord) -> bool:
    """Whether the catalog of the package has this model, and otherwise."""
    known = store.shipped().record(record.name)
    return not record.failure and known is not None and known.features() != record.features()


def extended(records: list[ModelRecord], known: store.Store, versions: dict[str, str]) -> list[ModelRecord]:
    """Add to records what a store knows of other models.

    Args:
        records: Of the sweep.
        known: The store.
        versions: Of the libraries that the sweep ran with; a store says one set of them for all of its models.

    Raises:
        DataError: The store's models were traced with others.
    """
    if known.names() and _releases(versions) != _releases(known.versions):
        raise DataError(
            f"expected the versions that the store was traced with ({_said(known.versions)}), found {_said(versions)}; "
            "install those, or sweep all models anew and leave --extend out"
        )
    new = {r.name for r in records}
    kept = [found for name in known.names() if name not in new and (found := known.record(name)) is not None]
    failed = [ModelRecord(name=name, failure=failure) for name, failure in known.failures().items() if name not in new]
    return [*records, *kept, *failed]


def _releases(versions: dict[str, str]) -> dict[str, str]:
    """Leave out what a build adds for its hardware (`+cu132`): tracing takes place on none."""
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _said(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"


@click.command(help=__doc__)
@click.option("--records", required=True, type=click.Path(path_type=Path), help="Records of the sweep.")
@click.option(
    "--measured",
    "is_measured",
    is_flag=True,
    help="Keep the records that differ from the store, of a sweep with the timm that was measured, installed here.",
)
@click.option("--extend", is_flag=True, help="Keep the models that the store has and the records have not.")
def main(records: Path, is_measured: bool, extend: bool) -> None:
    """Write the store beside this module."""
    import timm
    import torch
    import torchvision  # type: ignore[import-untyped]

    try:
        found = list(read_records(records))
        if is_measured:
            # A model without a configuration of its own in that release was fed what later ones say.
            found = [r for r in found if differs(r) and timm.models.get_pretrained_cfg(r.name.partition("/")[2])]
        precision = next((r.precision for r in found), Precision.FP32)
        versions = {m.__name__: str(m.__version__) for m in (timm, torch, torchvision)}
        if extend and precision in store.FILES:
            found = extended(found, store.shipped(precision), versions)
        content = pack(found, versions)
    except DataError as e:
        click.echo(str(e), err=True)
        sys.exit(2)
    file = Path(__file__).parent / (store.MEASURED_FILE if is_measured else store.FILES[precision])
    file.write_bytes(content)
    failed = sum(bool(r.failure) for r in found)
    click.echo(f"{file.name}: {len(found) - failed} models, {failed} that could not be traced, {len(content):,} bytes")


if __name__ == "__main__":
    main()
