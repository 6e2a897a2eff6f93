"""`carpool predict --rows`: one JSON object per line in, one answer per line out, in order."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import IO, Any

import msgspec
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.resources.schema import describe_decode_error
from msgspec import UNSET, UnsetType

from carpool_predictor.calibration.document import Calibration
from carpool_predictor.catalog import store
from carpool_predictor.features import Abstention
from carpool_predictor.optimizers import unknown_optimizer
from carpool_predictor.predict import PredictionContext, model_version, parts_of, prepare, summarize
from carpool_predictor.report import entry_json, status_of
from carpool_predictor.tracing.process import TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding a row; RecursionError for brackets that nest too deep."""


_MAX_CONTEXTS = 65536


class _Training(Training, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training that refuses unknown fields, so that a misspelt field is not replaced by its default."""


class _Catalog(CatalogModel, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Features(ModelFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the input; exactly one of `catalog` and `features` is set."""

    id: str | int
    gpu: str
    training: _Training = _Training()
    catalog: _Catalog | UnsetType = UNSET
    features: _Features | UnsetType = UNSET


class _OnlyId(msgspec.Struct, frozen=True):
    id: str | int | None = None


_ROWS = msgspec.json.Decoder(Row)
_IDS = msgspec.json.Decoder(_OnlyId)
_ENCODER = msgspec.json.Encoder()


_Key = tuple[str, tuple[int, ...] | None, int | None, bytes]


def _key(model: CatalogModel, training: Training) -> _Key:
    """Return everything that features depend on, except the batch size."""
    shape = None if model.input is None else tuple(model.input)
    plain = msgspec.structs.replace(training, batch_size=1, steps=None)
    return model.name, shape, model.num_classes, _ENCODER.encode(plain)


class Answerer:
    """Answers rows, and caches looked up, traced and prepared models; the tracer gets those that the store lacks."""

    def __init__(
        self,
        limits: TraceLimits | None = None,
        tracer: SubprocessTracer | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._calibration = calibration
        self._tracer = tracer or SubprocessTracer(limits)
        self._jobs: dict[tuple[_Key, int], tuple[PredictionContext | Abstention, float]] = {}

    def answers(self, lines: Sequence[bytes]) -> list[bytes]:
        """Return one answer per line; models that the store lacks are traced first, concurrently."""
        rows = [_read(line) for line in lines]
        if len(self._jobs) >= _MAX_CONTEXTS:
            self._jobs.clear()
        self._prepare(row for row in rows if isinstance(row, Row))
        return [row if isinstance(row, bytes) else self._answered(row) for row in rows]

    def _answered(self, row: Row) -> bytes:
        """Answer a row; an internal error becomes its answer, so that the other rows go on."""
        try:
            return self._answer(row)
        except Exception as e:
            return _empty(row.id, "error", "InternalError", f"{type(e).__name__}: {e}; please report this row")

    def _prepare(self, rows: Iterable[Row]) -> None:
        """Prepare and cache the context of each row with a catalog model."""
        unknown: dict[tuple[_Key, int], TraceRequest] = {}
        for row in rows:
            if not isinstance(row.catalog, CatalogModel):
                continue
            begin = time.perf_counter()
            key = _key(row.catalog, row.training), row.training.batch_size
            if key in self._jobs or key in unknown:
                continue
            features = store.features(row.catalog, row.training)
            job = None if features is None else prepare(features, row.training)
            if isinstance(job, PredictionContext):
                self._jobs[key] = job, time.perf_counter() - begin
            else:
                # The store lacks the model, or its batch sizes are too far away.
                unknown[key] = TraceRequest(model=ModelSource(catalog=row.catalog), training=row.training)

        async def one(key: tuple[_Key, int], request: TraceRequest) -> None:
            found, took_s = await self._tracer.timed(request)
            self._jobs[key] = prepare(found, request.training), took_s

        async def everything() -> None:
            await asyncio.gather(*(one(key, request) for key, request in unknown.items()))

        if unknown:
            asyncio.run(everything())

    def _answer(self, row: Row) -> bytes:
        begin = time.perf_counter()
        try:
            product = find_product(row.gpu)
        except UnknownProductError as e:
            return _empty(row.id, "error", "UnknownProduct", str(e))
        job, prepared_s = self._job(row)
        if isinstance(job, Abstention):
            message = job.message.replace("spec.model.", "").replace("spec.training", "training")  # a row's paths
            elapsed_s = prepared_s + time.perf_counter() - begin
            return _empty(row.id, status_of(job.reason), job.reason, message, elapsed_s)
        return _ENCODER.encode(_ok(row, job.calibrated(self._calibration, product), product, begin - prepared_s))

    def _job(self, row: Row) -> tuple[PredictionContext | Abstention, float]:
        """Return a row's context, and the seconds of its preparation for the first row that uses it."""
        if isinstance(row.catalog, CatalogModel):
            key = _key(row.catalog, row.training), row.training.batch_size
            job, prepared_s = self._jobs[key]
            self._jobs[key] = job, 0.0
            return job, prepared_s
        if isinstance(row.features, ModelFeatures):
            return prepare(row.features, row.training), 0.0
        raise TypeError("a row that was read has a model")


_OPTIMIZER_ERROR = re.compile(r"Invalid enum value '(.*)' - at `\$\.training\.optimizer`")


def _read(line: bytes) -> Row | bytes:
    """Return the row, or the answer to an invalid one."""
    try:
        row = _ROWS.decode(line)
    except UNREADABLE as e:
        unknown = _OPTIMIZER_ERROR.match(str(e))
        reason = unknown_optimizer(unknown[1]) if unknown else describe_decode_error(str(e))
        return _empty(_id_of(line), "error", "BadRow", reason)
    if (row.catalog is UNSET) != (row.features is UNSET):
        return row
    found = "neither" if row.catalog is UNSET else "both"
    return _empty(row.id, "error", "BadRow", f"expected exactly one of catalog and features, found {found}")


def _ok(row: Row, job: PredictionContext, product: GpuProduct, begin: float) -> dict[str, Any]:
    answer = job.on(product)
    prediction = summarize(job, [answer])
    parts = parts_of(job, product, answer.prediction.memory)
    return {
        "id": row.id,
        "status": "ok",
        "reason": prediction.reason,
        "message": prediction.message,
        **entry_json(answer, parts, is_inside=job.correction.inside, steps=row.training.steps),
        "model_version": prediction.model_version,
        "elapsed_s": round(time.perf_counter() - begin, 6),
    }


def _empty(id_: str | int | None, status: str, reason: str, message: str, elapsed_s: float = 0.0) -> bytes:
    return _ENCODER.encode(
        {
            "id": id_,
            "status": status,
            "reason": reason,
            "message": message,
            "gpu": None,
            "memory": None,
            "activity": None,
            "step_time_s": None,
            "inside_training": None,
            "model_version": model_version(),
            "elapsed_s": round(elapsed_s, 6),
        }
    )


def _id_of(line: bytes) -> str | int | None:
    """Return the id of an otherwise invalid line, to identify its answer."""
    try:
        return _IDS.decode(line).id
    except UNREADABLE:
        return None


MAX_SINGLE_PROCESS = 1500
"""Rows up to which one process answers faster than several."""
CHUNK = 64
"""Rows that a process receives at once; their answers fit a pipe's buffer, so that a killed process leaves none cut."""
_AHEAD = 8
"""Chunks queued for each process."""


class WorkerDied(RuntimeError):  # noqa: N818  (the event)
    """A worker process was killed."""


class _Status(msgspec.Struct, frozen=True):
    status: str


_STATUS = msgspec.json.Decoder(_Status)


def predict_rows(
    rows: Iterator[bytes],
    out: IO[bytes],
    limits: TraceLimits,
    on_progress: Callable[[Counter[str], int], None],
    workers: int = 0,
    *,
    calibration: Calibration | None = None,
) -> Counter[str]:
    """Write one answer line for each row, in order, as soon as it is ready; blank lines are skipped.

    `on_progress` is called with the counts so far and the bytes read since the last call. `workers` is the number of
    processes; 0 is one for each processor.

    Returns:
        The number of rows by status.
    """
    tally = Counter[str]()
    for lines, answers in _answered(rows, limits, calibration, workers or len(os.sched_getaffinity(0))):
        out.write(b"\n".join(answers) + b"\n")
        out.flush()
        tally.update(_STATUS.decode(answer).status for answer in answers)
        on_progress(tally, sum(map(len, lines)))
    return tally


_answerer: Answerer
"""State of a worker process."""


def _start(limits: TraceLimits, calibration: Calibration | None) -> None:
    """Begin a worker process; Ctrl-C ends it."""
    global _answerer
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _answerer = Answerer(limits, calibration=calibration)


def _answer_chunk(lines: list[bytes]) -> list[bytes]:
    return _answerer.answers(lines)


def _answered(
    rows: Iterator[bytes], limits: TraceLimits, calibration: Calibration | None, workers: int
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield rows with their answers, in order."""
    first = list(islice(rows, MAX_SINGLE_PROCESS + 1))
    not_blank = filter(bytes.strip, chain(first, rows))
    lines = iter(lambda: list(islice(not_blank, CHUNK)), [])
    if workers == 1 or len(first) <= MAX_SINGLE_PROCESS:
        answerer = Answerer(limits, calibration=calibration)
        yield from ((chunk, answerer.answers(chunk)) for chunk in lines)
        return
    spawn = multiprocessing.get_context("spawn")  # NumPy's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, spawn, _start, (limits, calibration))
    pending: deque[tuple[list[bytes], Future[list[bytes]]]] = deque()
    try:
        for chunk in lines:
            pending.append((chunk, pool.submit(_answer_chunk, chunk)))
            if len(pending) > _AHEAD * workers:
                yield _first_of(pending)
        while pending:
            yield _first_of(pending)
    except BrokenProcessPool as e:
        raise WorkerDied(
            "a worker process was killed, probably for its memory; the answers that were written are valid"
        ) from e
    finally:
        pool.shutdown(cancel_futures=True)


def _first_of(pending: deque[tuple[list[bytes], Future[list[bytes]]]]) -> tuple[list[bytes], list[bytes]]:
    chunk, answers = pending.popleft()
    return chunk, answers.result()
