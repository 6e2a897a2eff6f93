"""Fits the activity model and writes it: `python -m carpool_predictor.activity_train --data DIR --out FILE`."""

from pathlib import Path

import click
import msgspec

from carpool_predictor.activity_fit import fit
from carpool_predictor.activity_rows import KINDS, clean, read_rows

SEED = 0


def train(data: Path, out: Path) -> None:
    """Fit from the measurements below `data`, write the model to the file `out`. The same data give the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    rows = [row for kind in KINDS for row in clean(read_rows(data, kind))]
    out.write_bytes(msgspec.json.encode(fit(rows, SEED)) + b"\n")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), envvar="CARPOOL_DATA", required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).with_name("activity.json"))
def main(data: Path, out: Path) -> None:
    """Fit the activity model."""
    train(data, out)


if __name__ == "__main__":
    main()
