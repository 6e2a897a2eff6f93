"""`python -m carpool_research.catalog_sweep --records FILE`: traces the whole catalog in one process; resumable.

The file holds one `ModelRecord` as JSON a line, flushed as it comes; models that it holds already are left out.
`python -m carpool_research.catalog_sweep` makes the feature store of the wheel from it. An hour or so of one core.
"""

import gc
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
import msgspec
from carpool_core.resources.features import LayerCounts
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import HUB
from carpool_predictor.features import ModelRecord, StepRecord, TraceError, UpdateRecord

from carpool_research.memory.fit import FILE, read_rows
from carpool_research.tables import DataError

if TYPE_CHECKING:
    from carpool_predictor.tracing.operators import OperatorCache

BATCH_SIZES = (16, 64)
"""Traced for each model of images; what lies between and around is interpolated."""
BATCH_SIZES_OF_TEXT = (4, 16)
"""Traced for each model of `transformers`: a sample is a whole text."""


OTHERS = tuple(optimizer for optimizer in Optimizer if optimizer is not Optimizer.SGD_MOMENTUM)
"""Optimizers that are reckoned beside the traced one."""


class TooSlow(BaseException):
    """A model took longer than its share: an alarm, which nobody on the way up may take for an error."""


def read_records(path: Path) -> Iterator[ModelRecord]:
    """Read the records of a sweep; a last line that was cut short is left out.

    Raises:
        DataError: There is no such file.
    """
    if not path.is_file():
        raise DataError(f"expected the records of a sweep at {path}, found no such file")
    decoder = msgspec.json.Decoder(ModelRecord)
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield decoder.decode(line)


def catalog_names() -> list[str]:
    """Return every model of timm and torchvision and the common ones of transformers, as `library/name`."""
    import timm
    from torchvision import models  # type: ignore[import-untyped]

    return [
        *(f"transformers/{n}" for n in HUB),
        *(f"timm/{n}" for n in timm.list_models()),
        *(f"torchvision/{n}" for n in models.list_models()),
    ]


def family_of(name: str) -> str:
    """Return the module that defines a model (timm's own division into families), or its configuration's class."""
    import timm
    from torchvision import models

    library, _, short = name.partition("/")
    if library == "transformers":
        return HUB[short].config.removesuffix("Config").lower()
    entry = timm.models.model_entrypoint(short) if library == "timm" else models.get_model_builder(short)
    return str(entry.__module__).rpartition(".")[2]


def in_turns(names: Iterable[str], family: dict[str, str]) -> list[str]:
    """Order models so that each family has its turn: an unfinished sweep is a balanced sample."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        families[family[name]].append(name)
    return [name for turn in zip_longest(*families.values()) for name in turn if name is not None]


def order(names: Sequence[str], first: Iterable[str]) -> list[str]:
    """Put the models that measurements exist of first."""
    family = {name: family_of(name) for name in names}
    wanted = set(first)
    return in_turns((n for n in names if n in wanted), family) + in_turns((n for n in names if n not in wanted), family)


def record(name: str, training: Training, timeout_s: int, remembered: "OperatorCache | None" = None) -> ModelRecord:
    """Trace one model, in this process, and reckon it under the other optimizers; a failure is a record, too."""
    from carpool_predictor.catalog.recipes import recipe_of
    from carpool_predictor.tracing.models import record_recipe

    def alarm(_: int, __: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(timeout_s)
    family = family_of(name)
    sizes = BATCH_SIZES_OF_TEXT if name.startswith("transformers/") else BATCH_SIZES
    try:
        found = record_recipe(recipe_of(CatalogModel(name=name)), training, sizes, OTHERS, remembered)
        return msgspec.structs.replace(found, family=family)
    except TraceError as e:
        return ModelRecord(name=name, family=family, precision=training.precision, failure=f"{e.reason}: {e}"[:300])
    except TooSlow:
        failure = f"TraceTimedOut: longer than {timeout_s} s"
        return ModelRecord(name=name, family=family, precision=training.precision, failure=failure)
    finally:
        signal.alarm(0)


@click.command()
@click.option("--records", required=True, type=click.Path(path_type=Path), help="JSON lines of records, extended.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements: the models in it go first.")
@click.option("--precision", type=click.Choice([p.value for p in Precision]), default="fp32", show_default=True)
@click.option("--missing", is_flag=True, help="Leave out models that the feature store has in this precision already.")
@click.option("--only-measured", is_flag=True, help="Leave out models that no measurement exists of.")
@click.option("--timeout", default=90, show_default=True, help="Seconds for one model.")
def sweep(records: Path, data: Path | None, precision: str, missing: bool, only_measured: bool, timeout: int) -> None:
    """Trace what is missing."""
    measured: list[str] = []
    if data is not None:
        try:
            measured = sorted({f"timm/{r.model}" for r in read_rows(data / FILE)})
        except DataError as e:
            click.echo(str(e), err=True)
            sys.exit(2)
    training = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM, precision=Precision(precision))
    known = {r.name for r in read_records(records)} if records.exists() else set()
    if missing and training.precision in store.FILES:
        known |= set(store.shipped(training.precision).names())
    names = catalog_names()
    from carpool_predictor.tracing.operators import OperatorCache

    remembered = OperatorCache()
    gc.freeze()  # what PyTorch imported need not be searched for garbage again and again
    todo = order([n for n in names if not only_measured or n in set(measured)], measured)
    with records.open("ab", buffering=0) as file:
        for i, name in enumerate(todo):
            if name not in known:
                found = record(name, training, timeout, remembered)
                file.write(msgspec.json.encode(found) + b"\n")
                click.echo(f"{i + 1}/{len(todo)} {name} {found.failure or 'ok'}")


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


@click.command("pack")
@click.option("--records", required=True, type=click.Path(path_type=Path), help="Records of the sweep.")
@click.option(
    "--measured",
    "is_measured",
    is_flag=True,
    help="Keep the records that differ from the store, of a sweep with the timm that was measured, installed here.",
)
@click.option("--extend", is_flag=True, help="Keep the models that the store has and the records have not.")
def pack_command(records: Path, is_measured: bool, extend: bool) -> None:
    """Write the store beside this module."""
    import timm
    import torch
    import torchvision

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
    file = Path(str(resources.files("carpool_predictor"))) / (
        store.MEASURED_FILE if is_measured else store.FILES[precision]
    )
    file.write_bytes(content)
    failed = sum(bool(r.failure) for r in found)
    click.echo(f"{file.name}: {len(found) - failed} models, {failed} that could not be traced, {len(content):,} bytes")
