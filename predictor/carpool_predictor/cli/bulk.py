"""`carpool predict --rows`: a file of rows through as many processes as there are processors, in order."""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import IO, NamedTuple

import msgspec

from carpool_predictor.calibration.document import Calibration
from carpool_predictor.cli.rows import Answerer, chunks
from carpool_predictor.tracing.source import TraceLimits

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
        process = self._spawn.Process(target=_work, args=(theirs, means), daemon=True)
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
