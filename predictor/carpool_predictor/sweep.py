"""`python -m carpool_predictor.sweep --records FILE`: traces the whole catalog in one process; resumable.

The file holds one `ModelRecord` as JSON a line, flushed as it comes; models that it holds already are left out.
`python -m carpool_predictor.packing` makes the feature store of the wheel from it. An hour or so of one core.
"""

import gc
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
import msgspec
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision

from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import HUB
from carpool_predictor.evaluation.memory.measurements import FILE, read_rows
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.features import ModelRecord, TraceError

if TYPE_CHECKING:
    from carpool_predictor.tracing.operators import Remembered

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


def record(name: str, training: Training, timeout_s: int, remembered: "Remembered | None" = None) -> ModelRecord:
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


@click.command(help=__doc__)
@click.option("--records", required=True, type=click.Path(path_type=Path), help="JSON lines of records, extended.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements: the models in it go first.")
@click.option("--precision", type=click.Choice([p.value for p in Precision]), default="fp32", show_default=True)
@click.option("--missing", is_flag=True, help="Leave out models that the feature store has in this precision already.")
@click.option("--only-measured", is_flag=True, help="Leave out models that no measurement exists of.")
@click.option("--timeout", default=90, show_default=True, help="Seconds for one model.")
def main(records: Path, data: Path | None, precision: str, missing: bool, only_measured: bool, timeout: int) -> None:
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
    from carpool_predictor.tracing.operators import Remembered

    remembered = Remembered()
    gc.freeze()  # what PyTorch imported need not be searched for garbage again and again
    todo = order([n for n in names if not only_measured or n in set(measured)], measured)
    with records.open("ab", buffering=0) as file:
        for i, name in enumerate(todo):
            if name not in known:
                found = record(name, training, timeout, remembered)
                file.write(msgspec.json.encode(found) + b"\n")
                click.echo(f"{i + 1}/{len(todo)} {name} {found.failure or 'ok'}")


if __name__ == "__main__":
    main()
