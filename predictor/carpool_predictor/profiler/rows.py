"""Rows of measurements, flushed as they come; a file that was cut off anywhere can be continued."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec


class RowsError(ValueError):
    """A file of rows cannot be continued; the message says why."""


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; empty where something was not measured. Sizes in MiB, times in seconds."""

    key: str
    kind: Literal["solo", "pair"]
    mode: Literal["exclusive", "time-slicing", "mps"]
    status: Literal["ok", "out_of_memory", "failed"]
    """Out of memory is censored: the peak is more than `capacity_mib`."""
    reason: str = ""
    model: str
    batch_size: int
    optimizer: str
    precision: str
    partner_model: str = ""
    partner_batch_size: int | None = None
    partner_optimizer: str = ""
    partner_precision: str = ""
    capacity_mib: int
    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    peak_process_mib: float | None = None
    gpu_util_percent: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    dram_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    power_w: float | None = None
    steps: int | None = None
    step_time_s: float | None = None
    """Alone."""
    partner_step_time_s: float | None = None
    shared_step_time_s: float | None = None
    """Beside the partner."""
    partner_shared_step_time_s: float | None = None
    slowdown: float | None = None
    partner_slowdown: float | None = None
    product: str
    driver: str
    cuda: str
    torch: str
    elapsed_s: float


COLUMNS = MeasuredRow.__struct_fields__


def done(path: Path, product: str) -> set[str]:
    """Return the keys that a file holds already; a last line that was cut off is removed.

    Raises:
        RowsError: The file holds something else, or was measured on another product.
    """
    if not path.exists() or path.stat().st_size == 0:
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    reader = csv.DictReader(io.StringIO(whole.decode()))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise RowsError(f"expected {path} to hold rows of this version of `carpool profile`; choose another --out")
    rows = list(reader)
    others = {row["product"] for row in rows} - {product}
    if others:
        raise RowsError(f"{path} was measured on {', '.join(sorted(others))}, this is {product}; choose another --out")
    return {row["key"] for row in rows}


class RowWriter:
    """Appends rows; each is on the disk before the next is measured."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        if self._file.tell() == 0:
            self._writer.writeheader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: MeasuredRow) -> None:
        """Append one row."""
        values = msgspec.to_builtins(row)
        self._writer.writerow({name: "" if value is None else _short(value) for name, value in values.items()})
        self._file.flush()
        os.fsync(self._file.fileno())


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path) -> Iterable[MeasuredRow]:
    """Read rows back."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield msgspec.convert({k: v for k, v in row.items() if v != ""}, type=MeasuredRow, strict=False)
