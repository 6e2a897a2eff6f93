"""`carpool predict --rows`: a file of rows through as many processes as there are processors, in order."""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import IO

import msgspec

from carpool_predictor.rows import Answerer, chunks
from carpool_predictor.source import TraceLimits

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
    rows: IO[bytes], out: IO[bytes], limits: TraceLimits, on_progress: Callable[[Tally, int], None], workers: int = 0
) -> Tally:
    """Answer each row of a file with a line of another.

    Args:
        rows: One row a line; blank lines are skipped.
        out: Takes one answer a line, in order, as soon as it is known.
        limits: What one trace may take.
        on_progress: Called with what was done and the bytes that it took.
        workers: Processes; as many as processors when 0.
    """
    tally = Tally()
    for lines, answers in _answered(rows, limits, workers or len(os.sched_getaffinity(0))):
        out.write(b"\n".join(answers) + b"\n")
        out.flush()
        tally.statuses.update(_STATUS.decode(answer).status for answer in answers)
        on_progress(tally, sum(map(len, lines)))
    return tally


def _answered(rows: IO[bytes], limits: TraceLimits, workers: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    first = list(islice(rows, ALONE + 1))
    lines = chunks(chain(first, rows), CHUNK)
    if workers == 1 or len(first) <= ALONE:
        answerer = Answerer(limits)
        yield from ((chunk, answerer.answers(chunk)) for chunk in lines)
        return
    # Not forked: NumPy's threads do not survive that.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(limits,)) as pool:
        waiting: deque[tuple[list[bytes], Future[list[bytes]]]] = deque()
        try:
            for chunk in lines:
                waiting.append((chunk, pool.submit(_answer, limits, chunk)))
                if len(waiting) > _AHEAD * workers:
                    yield _first(waiting)
            while waiting:
                yield _first(waiting)
        except BrokenProcessPool as e:
            raise WorkerDied(
                "a process that answered rows was ended from outside, probably for its memory; what was written holds"
            ) from e
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _first(waiting: deque[tuple[list[bytes], Future[list[bytes]]]]) -> tuple[list[bytes], list[bytes]]:
    chunk, future = waiting.popleft()
    return chunk, future.result()


def _begin(limits: TraceLimits) -> None:
    """Load what is needed, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _answerer(limits)


@cache
def _answerer(limits: TraceLimits) -> Answerer:
    """Return this process's own; it remembers what it looked up."""
    return Answerer(limits)


def _answer(limits: TraceLimits, lines: list[bytes]) -> list[bytes]:
    return _answerer(limits).answers(lines)
