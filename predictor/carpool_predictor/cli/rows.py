"""Many predictions at once: one JSON object a line in, one a line out, in order."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from msgspec import UNSET, UnsetType

from carpool_predictor.calibration.document import Calibration
from carpool_predictor.catalog import store
from carpool_predictor.cli.report import activity_json, interval_json, length_json, memory_json
from carpool_predictor.cli.row_errors import UNREADABLE, in_a_row, told
from carpool_predictor.features.abstention import Abstention
from carpool_predictor.prediction.estimator import Job, model_version, prepare, reason_of
from carpool_predictor.tracing.requests import TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer, TraceLimits

INVALID = frozenset(
    {
        "UnknownCatalogModel", "CatalogUnsupported", "LayerListInvalid", "InputShapeInvalid", "FeaturesAbsurd",
        "FeaturesMismatch",
    }
)  # fmt: skip
"""Abstentions that say that the row itself makes no sense."""
_REMEMBERED = 65536


class _Training(Training, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A resource ignores what it does not know; whoever misspells a field of a row would be told of the default."""


class _Catalog(CatalogModel, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Features(ModelFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked; exactly one of `catalog` and `features`."""

    id: str | int
    gpu: str
    training: _Training = _Training()
    catalog: _Catalog | UnsetType = UNSET
    features: _Features | UnsetType = UNSET


class _OnlyId(msgspec.Struct, frozen=True):
    id: str | int | None = None


class RowError(ValueError):
    """A row makes no sense; the message says why."""


_FIELDS = {
    path: tuple(field.encode_name for field in msgspec.structs.fields(part))
    for path, part in (("", Row), ("training", _Training), ("catalog", _Catalog), ("features", _Features))
}
_ROWS = msgspec.json.Decoder(Row)
_IDS = msgspec.json.Decoder(_OnlyId)
_ENCODER = msgspec.json.Encoder()


def read_row(line: bytes) -> Row:
    """Read one line.

    Raises:
        RowError: It is no such row.
    """
    try:
        row = _ROWS.decode(line)
    except UNREADABLE as e:
        raise RowError(f"BadRow: {told(e, line, _FIELDS)}") from e
    if (row.catalog is UNSET) == (row.features is UNSET):
        raise RowError(f"BadRow: expected exactly one of catalog and features, found {_which(row)}")
    return row


def _which(row: Row) -> str:
    return "neither" if row.catalog is UNSET else "both"


@lru_cache(maxsize=256)
def _product(name: str) -> GpuProduct:
    return find_product(name)


_Key = tuple[Any, ...]


def _key(model: CatalogModel, training: Training) -> _Key:
    """Return what features depend on, apart from the batch size."""
    shape = None if model.input is None else tuple(model.input)
    optimizer, precision, checkpointing = training.optimizer, training.precision, training.activation_checkpointing
    return model.name, shape, model.num_classes, optimizer, precision, checkpointing


class Answerer:
    """Answers rows; what was looked up, traced or prepared is remembered.

    Args:
        limits: What one trace may take.
        tracer: What traces models that the store lacks.
        calibration: What jobs that ran taught.
    """

    def __init__(
        self,
        limits: TraceLimits | None = None,
        tracer: SubprocessTracer | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._calibration = calibration
        self._tracer = tracer or SubprocessTracer(limits, known=lambda *_: None)
        self._stored: dict[_Key, ModelFeatures | None] = {}
        self._jobs: dict[tuple[_Key, int], tuple[Job | Abstention, float]] = {}

    def answers(self, lines: Sequence[bytes]) -> list[bytes]:
        """Answer each line with one line; models that the store lacks are traced first, side by side."""
        rows = [_read(line) for line in lines]
        if len(self._jobs) >= _REMEMBERED:
            self._jobs.clear()
        self._prepare(row for row in rows if isinstance(row, Row))
        return [row if isinstance(row, bytes) else self._answered(row) for row in rows]

    def _answered(self, row: Row) -> bytes:
        """Answer a row whatever happens: a fault of ours must not take the other rows with it."""
        try:
            return self._answer(row)
        except Exception as e:
            return _empty(row.id, "error", f"InternalError: {type(e).__name__}: {e}; please report this row")

    def _prepare(self, rows: Iterable[Row]) -> None:
        """Remember the job of every row that names a catalog model."""
        unknown: dict[tuple[_Key, int], TraceRequest] = {}
        for row in rows:
            if not isinstance(row.catalog, CatalogModel):
                continue
            begin = time.perf_counter()
            key = _key(row.catalog, row.training), row.training.batch_size
            if key in self._jobs or key in unknown:
                continue
            features = self._from_store(key[0], row.catalog, row.training)
            job = None if features is None else prepare(features, row.training)
            if isinstance(job, Job):
                self._jobs[key] = job, time.perf_counter() - begin
            else:
                # What the store knows does not reach to this batch size, or it knows nothing.
                unknown[key] = TraceRequest(model=ModelSource(catalog=row.catalog), training=row.training)

        async def one(key: tuple[_Key, int], request: TraceRequest) -> None:
            found, took_s = await self._tracer.timed(request)
            self._jobs[key] = prepare(found, request.training), took_s

        async def everything() -> None:
            await asyncio.gather(*(one(key, request) for key, request in unknown.items()))

        if unknown:
            asyncio.run(everything())

    def _from_store(self, key: _Key, model: CatalogModel, training: Training) -> ModelFeatures | None:
        if key not in self._stored:
            self._stored[key] = store.features(model, training)
        return self._stored[key]

    def _answer(self, row: Row) -> bytes:
        begin = time.perf_counter()
        try:
            product = _product(row.gpu)
        except UnknownProductError as e:
            return _empty(row.id, "error", f"UnknownProduct: {e}")
        job, prepared_s = self._job(row)
        if isinstance(job, Abstention):
            status = "error" if job.reason in INVALID else "abstained"
            reason = f"{job.reason}: {in_a_row(job.message)}"
            return _empty(row.id, status, reason, prepared_s + time.perf_counter() - begin)
        return _ENCODER.encode(_ok(row, job.calibrated(self._calibration, product), product, begin - prepared_s))

    def _job(self, row: Row) -> tuple[Job | Abstention, float]:
        """Return a row's job, and how long it took to prepare in seconds, for the first row that asked for it."""
        if isinstance(row.catalog, CatalogModel):
            key = _key(row.catalog, row.training), row.training.batch_size
            job, prepared_s = self._jobs[key]
            self._jobs[key] = job, 0.0
            return job, prepared_s
        if isinstance(row.features, ModelFeatures):
            return prepare(row.features, row.training), 0.0
        raise TypeError("a row that was read has a model")


def _read(line: bytes) -> Row | bytes:
    """Return the row, or the answer that it is none."""
    try:
        return read_row(line)
    except RowError as e:
        return _empty(_id_of(line), "error", str(e))


def _ok(row: Row, job: Job, product: GpuProduct, begin: float) -> dict[str, Any]:
    answer = job.on(product)
    found = answer.prediction
    return {
        "id": row.id,
        "status": "ok",
        "reason": reason_of(job, [answer]),
        "memory": memory_json(found.memory),
        "activity": activity_json(found.activity),
        "step_time_s": interval_json(found.step_time_seconds),
        **length_json(row.training.steps, found.step_time_seconds),
        "model_version": model_version(job.model),
        "elapsed_s": round(time.perf_counter() - begin, 6),
    }


def _empty(id_: str | int | None, status: str, reason: str, elapsed_s: float = 0.0) -> bytes:
    return _ENCODER.encode(
        {
            "id": id_,
            "status": status,
            "reason": reason,
            "memory": None,
            "activity": None,
            "step_time_s": None,
            "model_version": model_version(),
            "elapsed_s": round(elapsed_s, 6),
        }
    )


def _id_of(line: bytes) -> str | int | None:
    """Return the id of a line that is otherwise wrong, so that its answer can be told apart."""
    try:
        return _IDS.decode(line).id
    except UNREADABLE:
        return None


def chunks(lines: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    """Cut lines into lists of at most `size`; blank lines are no rows."""
    chunk: list[bytes] = []
    for line in lines:
        if line.strip():
            chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
