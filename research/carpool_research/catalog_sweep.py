"""Traces the whole catalog into records (`sweep`), and packs records into the wheel's feature store (`pack`).

`sweep` appends one `ModelRecord` as JSON a line, under every optimizer. It skips models that the file has already. The
whole catalog takes several hours of one core.
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
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import published_models
from carpool_predictor.features import TraceError

from carpool_research.memory.fit import FILE, read_rows
from carpool_research.tables import DataError

if TYPE_CHECKING:
    from carpool_predictor.tracing.operators import OperatorCache

BATCH_SIZES = (16, 64)
"""Traced batch sizes of image models; others are interpolated."""
TEXT_BATCH_SIZES = (4, 16)
"""Traced batch sizes of `transformers` models, whose samples are whole texts."""
FIRST = Optimizer.SGD_MOMENTUM
"""Optimizer of the measured runs; the store holds the differences of the others from it."""
STORED = (
    Optimizer.SGD, FIRST, Optimizer.ADAM, Optimizer.ADAMW, Optimizer.ADAGRAD, Optimizer.RMSPROP,
)  # fmt: skip
"""Optimizers under which each model is traced; others are traced on demand."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The traced steps of one model, or the reason why it could not be traced."""

    name: str
    family: str = ""
    """Python module that defines it."""
    input_shape: tuple[int, ...] = ()
    features: dict[Optimizer, ModelFeatures] = {}
    """Features under each traced optimizer, `FIRST` among them."""
    failure: str = ""
    """Reason and message if the model could not be traced."""


class TooSlow(BaseException):
    """A model exceeded its time limit. No exception handler of the model catches it."""


def read_records(path: Path) -> Iterator[ModelRecord]:
    """Read the records of a sweep without an incomplete last line.

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
        *(f"transformers/{n}" for n in published_models()),
        *(f"timm/{n}" for n in timm.list_models()),
        *(f"torchvision/{n}" for n in models.list_models()),
    ]


def family_of(name: str) -> str:
    """Return the module that defines a model (timm's own division into families), or its configuration's class."""
    import timm
    from torchvision import models

    library, _, short = name.partition("/")
    if library == "transformers":
        return published_models()[short].config.removesuffix("Config").lower()
    entry = timm.models.model_entrypoint(short) if library == "timm" else models.get_model_builder(short)
    return str(entry.__module__).rpartition(".")[2]


def interleave_families(names: Iterable[str], family: dict[str, str]) -> list[str]:
    """Order models so that families alternate: an unfinished sweep is a balanced sample."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        families[family[name]].append(name)
    return [name for row in zip_longest(*families.values()) for name in row if name is not None]


def order(names: Sequence[str], first: Iterable[str]) -> list[str]:
    """Return the names with measured models first."""
    family = {name: family_of(name) for name in names}
    wanted = set(first)
    parts = [n for n in names if n in wanted], [n for n in names if n not in wanted]
    return [name for part in parts for name in interleave_families(part, family)]


def record(name: str, precision: Precision, timeout_s: int, operators: "OperatorCache") -> ModelRecord:
    """Trace one model under each optimizer in this process; a failure becomes a record."""
    from carpool_predictor.catalog.recipes import recipe_of
    from carpool_predictor.tracing.models import trace_recipe

    def alarm(_: int, __: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(timeout_s)
    family = family_of(name)
    sizes = TEXT_BATCH_SIZES if name.startswith("transformers/") else BATCH_SIZES
    try:
        recipe = recipe_of(CatalogModel(name=name))
        features = {
            optimizer: trace_recipe(recipe, Training(optimizer=optimizer, precision=precision), sizes, operators)
            for optimizer in STORED
        }
        return ModelRecord(name=name, family=family, input_shape=recipe.input_shape, features=features)
    except TraceError as e:
        return ModelRecord(name=name, family=family, failure=f"{e.reason}: {e}"[:300])
    except TooSlow:
        return ModelRecord(name=name, family=family, failure=f"TraceTimedOut: longer than {timeout_s} s")
    finally:
        signal.alarm(0)


@click.command()
@click.option("--records", required=True, type=click.Path(path_type=Path), help="JSON lines of records; appended to.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements, whose models go first.")
@click.option("--precision", type=click.Choice([p.value for p in Precision]), default="fp32", show_default=True)
@click.option("--missing", is_flag=True, help="Skip models that the feature store has in this precision.")
@click.option("--only-measured", is_flag=True, help="Skip models without measurements.")
@click.option("--timeout", default=300, show_default=True, help="Seconds for one model.")
def sweep(records: Path, data: Path | None, precision: str, missing: bool, only_measured: bool, timeout: int) -> None:
    """Trace models that the records lack."""
    measured: list[str] = []
    if data is not None:
        try:
            measured = sorted({f"timm/{r.model}" for r in read_rows(data / FILE)})
        except DataError as e:
            click.echo(str(e), err=True)
            sys.exit(2)
    known = {r.name for r in read_records(records)} if records.exists() else set()
    if missing and Precision(precision) in store.FILES:
        known |= set(store.shipped(Precision(precision)).document.entries)
    names = catalog_names()
    from carpool_predictor.tracing.operators import OperatorCache

    operators = OperatorCache()
    gc.freeze()  # the garbage collector need not scan PyTorch's own objects each time
    todo = order([n for n in names if not only_measured or n in set(measured)], measured)
    with records.open("ab", buffering=0) as file:
        for i, name in enumerate(todo):
            if name not in known:
                found = record(name, Precision(precision), timeout, operators)
                file.write(msgspec.json.encode(found) + b"\n")
                click.echo(f"{i + 1}/{len(todo)} {name} {found.failure or 'ok'}")


def pack(records: list[ModelRecord], versions: dict[str, str]) -> bytes:
    """Return a store; the same records give the same bytes.

    Raises:
        DataError: The records have several precisions.
    """
    traced = sorted((r for r in records if not r.failure), key=lambda r: r.name)
    precisions = {r.features[FIRST].precision for r in traced}
    if len(precisions) > 1:
        raise DataError(f"expected records of one precision, found {sorted(precisions)}")
    others = sorted({optimizer for r in traced for optimizer in r.features} - {FIRST})
    return zlib.compress(
        msgspec.json.encode(
            store.Document(
                format=store.FORMAT,
                versions=versions,
                optimizer=FIRST,
                others=others,
                precision=precisions.pop() if precisions else Precision.FP32,
                entries={r.name: msgspec.Raw(msgspec.json.encode(_entry(r, others))) for r in traced},
                failures={r.name: r.failure for r in sorted(records, key=lambda r: r.name) if r.failure},
            )
        ),
        9,
    )


def _entry(record: ModelRecord, others: list[Optimizer]) -> store.Entry:
    first = record.features[FIRST]
    return store.Entry(
        family=record.family,
        input_shape=record.input_shape,
        sizes=(first.parameters, first.trainable_parameters, first.parameter_bytes),
        layers=tuple(getattr(first.layers, name) for name in LayerCounts.__struct_fields__),
        steps=[
            _step(step, [record.features[o].steps[index] if o in record.features else None for o in others])
            for index, step in enumerate(first.steps)
        ],
    )


def _step(step: TracedStep, others: list[TracedStep | None]) -> store.Step:
    numbers = (
        step.batch_size, step.peak_bytes, step.activation_bytes, step.reserved_bytes, step.unfolded_bytes,
        step.largest_bytes, step.kernels,
    )  # fmt: skip
    updates = [
        None if o is None else (o.peak_bytes, o.activation_bytes, o.reserved_bytes, o.kernels, o.bytes_moved)
        for o in others
    ]
    return store.Step(plain=numbers, flops=step.flops, bytes_moved=step.bytes_moved, updates=updates)


def stored_record(known: store.Store, name: str) -> ModelRecord:
    """Return the record of a model in a store."""
    features = {o: found for o in STORED if (found := known.traced(name, o)) is not None}
    family, shape = known.family(name) or "", known.input_shape(name) or ()
    return ModelRecord(name=name, family=family, input_shape=shape, features=features)


def differs(record: ModelRecord) -> bool:
    """Whether the package's catalog has this model with other features."""
    stored = store.shipped().traced(record.name)
    return not record.failure and stored is not None and stored != record.features[FIRST]


def extended(records: list[ModelRecord], known: store.Store, versions: dict[str, str]) -> list[ModelRecord]:
    """Return the records and those of a store's other models.

    Args:
        records: Records of the sweep.
        known: The store.
        versions: Versions of the sweep's libraries; a store has one set of them for all models.

    Raises:
        DataError: The store's models were traced with other versions.
    """
    if known.document.entries and _releases(versions) != _releases(known.document.versions):
        raise DataError(
            f"expected the versions that the store was traced with ({_joined(known.document.versions)}), found "
            f"{_joined(versions)}; install those, or sweep all models again without --extend"
        )
    new = {r.name for r in records}
    kept = [stored_record(known, name) for name in known.document.entries if name not in new]
    failed = [
        ModelRecord(name=name, failure=failure) for name, failure in known.document.failures.items() if name not in new
    ]
    return [*records, *kept, *failed]


def _releases(versions: dict[str, str]) -> dict[str, str]:
    """Return versions without the suffix of a hardware build (`+cu132`), which does not change a trace."""
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _joined(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"


@click.command("pack")
@click.option("--records", required=True, type=click.Path(path_type=Path), help="Records of the sweep.")
@click.option(
    "--measured",
    "is_measured",
    is_flag=True,
    help="Keep records that differ from the store, after a sweep with the measured release of timm.",
)
@click.option("--extend", is_flag=True, help="Keep models of the store that the records lack.")
def pack_command(records: Path, is_measured: bool, extend: bool) -> None:
    """Write the store into the predictor's package."""
    import timm
    import torch
    import torchvision

    try:
        found = list(read_records(records))
        if is_measured:
            # Models without a configuration in that release were traced with the input of later releases.
            found = [r for r in found if differs(r) and timm.models.get_pretrained_cfg(r.name.partition("/")[2])]
        precision = next((r.features[FIRST].precision for r in found if r.features), Precision.FP32)
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
