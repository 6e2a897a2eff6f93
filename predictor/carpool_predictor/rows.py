"""Many predictions at once: one JSON object a line in, one a line out, in order."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import msgspec
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.values import Optimizer, Precision
from msgspec import UNSET, UnsetType

from carpool_predictor.calibration.document import Calibration
from carpool_predictor.catalog import store
from carpool_predictor.features import Abstention
from carpool_predictor.predict import PredictionContext, calibration_reason, model_version, prepare
from carpool_predictor.report import activity_json, interval_json, length_json, memory_json
from carpool_predictor.tracing.process import TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a row can raise; the last where brackets nest without end."""
_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_CHOICES: Mapping[str, type[StrEnum]] = {"training.optimizer": Optimizer, "training.precision": Precision}
_MOST = 200
"""Characters that are shown of what was found."""


def told(error: Exception, line: bytes, fields: Mapping[str, tuple[str, ...]]) -> str:
    """Say what is wrong with a row.

    Args:
        error: What the decoder said.
        line: The row.
        fields: Names of the known fields, for each path that has a list of its own; "" is the row itself.
    """
    located = _AT.fullmatch(str(error))
    what, path = (located["what"], located["path"]) if located else (str(error), "")
    if unknown := _UNKNOWN.fullmatch(what):
        return _unknown(unknown["field"], path, fields.get(path, ()))
    if not located or what.startswith("Object missing"):
        return str(error)
    choices = f", expected one of {', '.join(_CHOICES[path])}" if path in _CHOICES else ""
    return f"{what[0].lower()}{what[1:]} in {path}{choices}{_found(line, path)}"


def in_a_row(message: str) -> str:
    """Return what is said to the owner of a GpuTrainingJob in the words of a row, whose fields lie elsewhere."""
    return message.replace("spec.model.", "").replace("spec.training", "training")


def _unknown(field: str, path: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(_folded(field), [_folded(name) for name in known], n=1)
    meant = [name for name in known if _folded(name) in near]
    advice = f"did you mean {meant[0]}?" if meant else f"known fields are {', '.join(known)}"
    return f"unknown field {field!r} in {path or 'the row'}; {advice}"


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()


def _found(line: bytes, path: str) -> str:
    try:
        found: Any = msgspec.json.decode(line)
        for index, name in _STEP.findall(path):
            found = found[int(index) if index else name]
    except (*UNREADABLE, LookupError, TypeError):
        return ""  # after what is wrong the line goes on to be no JSON, or to say the same twice
    text = msgspec.json.encode(found).decode()
    return f", found {text if len(text) <= _MOST else f'{text[:_MOST]} and more'}"


INVALID = frozenset(
    {
        "UnknownCatalogModel", "CatalogUnsupported", "InputShapeInvalid", "FeaturesAbsurd",
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
        self._jobs: dict[tuple[_Key, int], tuple[PredictionContext | Abstention, float]] = {}

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
            if isinstance(job, PredictionContext):
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

    def _job(self, row: Row) -> tuple[PredictionContext | Abstention, float]:
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


def _ok(row: Row, job: PredictionContext, product: GpuProduct, begin: float) -> dict[str, Any]:
    answer = job.on(product)
    found = answer.prediction
    return {
        "id": row.id,
        "status": "ok",
        "reason": calibration_reason(job, [answer]),
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


ALONE = 1500
"""Rows up to which starting processes takes longer than it saves."""
CHUNK = 256
"""Rows that a process answers at once."""
_AHEAD = 4
"""Chunks in the hands of each process."""


class WorkerDied(RuntimeError):  # noqa: N818 (what happened)
    """A process that answered rows is gone; the message says what to make of it."""


@dataclass
class Tally:
    """What became of the rows."""

    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        """Rows that were answered."""
        return self.statuses.total()


class _Status(msgspec.Struct, frozen=True):
    status: str


_STATUS = msgspec.json.Decoder(_Status)


def predict_rows(
    rows: Iterator[bytes],
    out: IO[bytes],
    limits: TraceLimits,
    on_progress: Callable[[Tally, int], None],
    workers: int = 0,
    *,
    calibration: Calibration | None = None,
) -> Tally:
    """Answer each row of a file with a line of another.

    Args:
        rows: One row a line, such as an open file; blank lines are skipped.
        out: Takes one answer a line, in order, as soon as it is known.
        limits: What one trace may take.
        on_progress: Called with what was done and the bytes that it took.
        workers: Processes; as many as processors when 0.
        calibration: What jobs that ran taught.
    """
    tally = Tally()
    for lines, answers in _answered(rows, _Means(limits, calibration), workers or len(os.sched_getaffinity(0))):
        out.write(b"\n".join(answers) + b"\n")
        out.flush()
        tally.statuses.update(_STATUS.decode(answer).status for answer in answers)
        on_progress(tally, sum(map(len, lines)))
    return tally


class _Means(NamedTuple):
    """What every process answers with."""

    limits: TraceLimits
    calibration: Calibration | None

    def answerer(self) -> Answerer:
        return Answerer(self.limits, calibration=self.calibration)


def _answered(rows: Iterator[bytes], means: _Means, workers: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    first = list(islice(rows, ALONE + 1))
    lines = chunks(chain(first, rows), CHUNK)
    if workers == 1 or len(first) <= ALONE:
        answerer = means.answerer()
        yield from ((chunk, answerer.answers(chunk)) for chunk in lines)
        return
    with _Crew(workers, means) as crew:
        waiting: deque[tuple[list[bytes], Future[list[bytes]]]] = deque()
        for chunk in lines:
            waiting.append((chunk, crew.ask(chunk)))
            if len(waiting) > _AHEAD * workers:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _first(waiting: deque[tuple[list[bytes], Future[list[bytes]]]]) -> tuple[list[bytes], list[bytes]]:
    chunk, future = waiting.popleft()
    return chunk, future.result()


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class _Crew:
    """Processes that answer rows, each with a pipe of its own, which ends when it dies, even amid an answer.

    The standard library's pools have one pipe that all write to: with half an answer in it they wait without end.
    """

    def __init__(self, workers: int, means: _Means) -> None:
        self._spawn = multiprocessing.get_context("spawn")  # not forked: NumPy's threads do not survive that
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers = [self._started(means) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers)

    def _started(self, means: _Means) -> _Worker:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_work, args=(theirs, means))  # no daemon: those may start no traces
        process.start()
        theirs.close()  # else it would not end with the process
        return _Worker(process, ours)

    def __enter__(self) -> "_Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def ask(self, lines: list[bytes]) -> "Future[list[bytes]]":
        """Have rows answered by whoever is idle first."""
        return self._threads.submit(self._asked, lines)

    def _asked(self, lines: list[bytes]) -> list[bytes]:
        worker = self._idle.get()
        try:
            worker.connection.send(lines)
            answers: list[bytes] = worker.connection.recv()
        except (EOFError, OSError) as e:
            raise WorkerDied(
                "a process that answered rows was ended from outside, probably for its memory; what was written holds"
            ) from e
        finally:
            self._idle.put(worker)
        return answers


def _work(connection: Connection, means: _Means) -> None:
    """Answer rows until nobody asks any more; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answerer = means.answerer()
    with suppress(EOFError):
        while True:
            connection.send(answerer.answers(connection.recv()))
