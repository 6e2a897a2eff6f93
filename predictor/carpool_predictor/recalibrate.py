"""`python -m carpool_predictor.recalibrate --data DIR`: traces a sample of measured models and refits the calibration.

For those who change the tracer; DIR holds `gpumemnet/timm_a100_40gb.csv`. Takes about ten minutes of one core, most of
it tracing; `--traces FILE` keeps the traces, and reuses those that are there. Writes `calibration.json` beside this
module; docs/model-cards/memory.md repeats its figures, and a test compares them.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer

from carpool_predictor.abstention import TraceError
from carpool_predictor.calibration import DataError, Row, calibrate, read_rows

_TRAINING = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)
"""The measurements do not say how the models were trained; FP32 and SGD with momentum fit best."""


def sample(rows: Iterable[Row], per_family: int, seed: int) -> list[str]:
    """Choose models at random, equally many of each family."""
    families: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        families[row.family].add(row.model)
    rng = random.Random(seed)  # noqa: S311  (a reproducible sample, no secret)
    return [
        name
        for family in sorted(families)
        for name in rng.sample(sorted(families[family]), min(per_family, len(families[family])))
    ]


def trace_all(names: Iterable[str]) -> Iterator[ModelFeatures]:
    """Trace models in this process; those that fail are told on stderr and left out."""
    from carpool_predictor.catalog import recipe_of
    from carpool_predictor.tracing import trace_recipe

    for name in names:
        try:
            features = trace_recipe(recipe_of(CatalogModel(name=f"timm/{name}")), _TRAINING)
            yield msgspec.structs.replace(features, name=name)
        except TraceError as e:
            click.echo(f"{name}: {e.reason}: {e}", err=True)


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Folder of measurements.")
@click.option("--traces", required=True, type=click.Path(path_type=Path), help="JSON lines of traced features.")
@click.option("--per-family", default=4, show_default=True, help="Models traced of each family.")
@click.option("--seed", default=20260101, show_default=True, help="Seed of sample and splits.")
@click.option("--version", default="2026.11", show_default=True, help="Version of the numbers.")
def main(data: Path, traces: Path, per_family: int, seed: int, version: str) -> None:
    """Trace what is missing, fit, write."""
    try:
        rows = read_rows(data / "gpumemnet" / "timm_a100_40gb.csv")
    except DataError as e:
        click.echo(str(e), err=True)
        sys.exit(2)
    names = sample(rows, per_family, seed)
    decoder = msgspec.json.Decoder(ModelFeatures)
    known = {f.name: f for f in map(decoder.decode, traces.read_bytes().splitlines())} if traces.exists() else {}
    with traces.open("ab") as file:
        for features in trace_all(name for name in names if name not in known):
            known[features.name] = features
            file.write(msgspec.json.encode(features) + b"\n")
    calibration = calibrate(rows, {n: known[n] for n in names if n in known}, version=version, seed=seed)
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2)
    Path(__file__).with_name("calibration.json").write_bytes(text + b"\n")
    click.echo(text.decode())


if __name__ == "__main__":
    main()
