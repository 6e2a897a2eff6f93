"""The file of the counters: its format and its writer.

The file has 4096 bytes, which the agent writes once: a header and 15 records of 256 bytes. All numbers are unsigned,
64 bits, in the machine's byte order, at multiples of 8 bytes.

    offset  header
    0       magic "CARPOOL" and a zero byte
    8       version of the format: 1

Each process that trains claims one record with an exclusive POSIX lock (`fcntl`, F_SETLK) on its 256 bytes, which ends
with the process, and is its only writer. Record k, 0..14, begins at 256 * (k + 1):

    offset  field           meaning
    0       sequence        odd while the record changes; readers retry or skip the reading
    8       started_ns      time of the claim; another value marks another process
    16      updated_ns      time of the last change
    24      steps           training steps: an optimizer that steps again begins a new step
    32      optimizer_steps steps of all optimizers
    40      skipped_steps   steps that a GradScaler left out; `steps` contains them
    48      steps_ns        time of all steps but the first
    56      first_step_ns   time from the start of the process to the end of its first step
    64      samples         samples of the batches, as far as known
    72      data_ns         time in which the training waited for its data loader
    80      batches         batches from data loaders
    88      checkpoint_ns   time in which the training waited for checkpoints to be written
    96      checkpoints     calls that wrote one
    104     copy_ns         time in which the training waited for copies from the host to a device
    112     copies          such copies
    120     optimizers      optimizers of a step; two for most GANs
    128     waits_for       what the training waits for now: 1 data, 2 a checkpoint, 0 neither

Times are nanoseconds of CLOCK_MONOTONIC. The counters of a record only grow; `waits_for` is no counter, and changes
without the sequence. An unused record is zero.
"""

import atexit
import fcntl
import functools
import mmap
import os
import struct
import threading
import time
from typing import Any, Callable, Optional, Sequence, Set

SIZE, RECORD_SIZE, RECORDS = 4096, 256, 15
MAGIC, VERSION = b"CARPOOL\0", 1
FIELDS = (
    "sequence", "started_ns", "updated_ns", "steps", "optimizer_steps", "skipped_steps", "steps_ns", "first_step_ns",
    "samples", "data_ns", "batches", "checkpoint_ns", "checkpoints", "copy_ns", "copies", "optimizers",
    "waits_for",
)  # fmt: skip
_VALUES = struct.Struct(f"={len(FIELDS) - 2}Q")
"""A record without its sequence and `waits_for`."""
_WAITS_FOR = FIELDS.index("waits_for")
_DATA, _CHECKPOINT = 1, 2
_WRITE_EVERY_NS = 50_000_000
"""Steps that follow each other faster share one change of the record."""
_SAMPLED, _SAMPLED_FROM, _SAMPLED_RATE = 8, 100, 4
"""After 100 steps the size of one batch in 8 is measured. If steps are short, more than 4 of them in one change of the
record, copies are timed between one change in 8 and the next. The measured changes represent the others."""

_clock = time.monotonic_ns
_thread = threading.get_ident


def header() -> bytes:
    """Return the first bytes of a file."""
    return MAGIC + struct.pack("=Q", VERSION)


class Recorder:
    """Counts the steps of this process and what its training thread waits for.

    Until the first step it counts in memory. So processes that never train, such as a data loader's, claim no record.

    Args:
        path: The file; without one, it only counts in memory.
        begun_ns: Start of the process, in ns of the monotonic clock.
    """

    def __init__(self, path: str, begun_ns: int) -> None:
        self._path, self._begun_ns = path, begun_ns
        self._is_claimed = False
        self._thread = self._idle = threading.main_thread().ident  # _idle is None during a timed call
        self._steps = self._merged_steps = self._skipped_steps = self._optimizers = self._samples = 0
        self._started_ns = self._first_ns = self._last_ns = self._write_at_ns = 0
        self._data_ns = self._batches = self._batch_size = self._copy_ns = self._copies = 0
        self._checkpoint_ns = self._checkpoints = self._writes = self._written_steps = 0
        self.is_merging = False
        """Whether the steps of optimizers are parts of a step that another object counts."""
        self.copy_weight = 1
        """Number of copies that a measured copy counts for; 0 while none is measured."""
        self._round: Set[object] = set()
        self._first: Optional[object] = None
        self._only: Optional[object] = None  # the optimizer that begins every step, if no other one steps
        self._record = memoryview(bytearray(RECORD_SIZE)).cast("Q")  # a page of its own until it claims a shared one
        self._file: Optional[int] = None  # open as long as the process holds the lock

    def _claim(self) -> None:
        """Claim a record; without a free one, counting goes on in memory."""
        self._is_claimed = True
        self._thread = self._idle = _thread()
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            memory = memoryview(mmap.mmap(self._file, SIZE))
            if memory[:16] != header():
                return
            for number in range(1, RECORDS + 1):
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, RECORD_SIZE, RECORD_SIZE * number)
                except OSError:
                    continue
                self._started_ns = _clock()
                self._record = memory[RECORD_SIZE * number : RECORD_SIZE * (number + 1)].cast("Q")
                atexit.register(self.write)
                return
        except (OSError, ValueError):  # absent, or shorter
            return

    def forget(self) -> None:
        """Count in memory only, from zero: a forked child must not write into its parent's record."""
        Recorder.__init__(self, "", _clock())

    def count_step(self, optimizer: object, samples: int = 0, is_skipped: bool = False) -> None:
        """Count a step of an optimizer. It is a step of the training if this optimizer stepped since the last one.

        Args:
            optimizer: Any value that identifies it.
            samples: Samples of the step that no data loader yielded.
            is_skipped: Whether a GradScaler left it out.
        """
        if not self._is_claimed:
            self._claim()
        if _thread() == self._thread:
            self._samples += samples
            self._skipped_steps += is_skipped
            self._count_in_round(optimizer, _clock())
            self.write()

    def step_hook(self, is_traced: "Callable[[], bool]") -> "Callable[[Any, Any, Any], None]":
        """Return a hook of optimizers that counts their steps, except while `is_traced` or `is_merging`.

        It runs in every step, with a cold cache, so that each of its instructions costs. Most trainings have one
        optimizer, which one thread uses.
        """

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced():
                return
            if id(optimizer) != self._only:
                if not self.is_merging:
                    self.count_step(id(optimizer))
                return
            self._steps += 1
            self._last_ns = now = _clock()
            if now > self._write_at_ns:
                self.write()

        return count

    def _count_in_round(self, optimizer: object, now: int) -> None:
        """Count a step among those of other optimizers. A round has the optimizers of one training step."""
        present = self._round
        if optimizer in present or not present:
            # If the optimizer that began the last step is another one, that step was two: the training went on with
            # another optimizer.
            steps = 1 if optimizer == self._first or self._first is None else 2
            self._steps += steps
            self._merged_steps += 1 - steps
            self._first = self._only = optimizer
            self._first_ns = self._first_ns or now
            self._last_ns = now
            self._round = {optimizer}
        else:
            self._merged_steps += 1
            self._only = None
            present.add(optimizer)
        self._optimizers = max(self._optimizers, len(self._round))

    def write(self) -> None:
        """Write the counters into the record, if the process has one."""
        record, now = self._record, _clock()
        self._write_at_ns = now + _WRITE_EVERY_NS
        self._writes += 1
        is_fast = self._steps > _SAMPLED_FROM and self._steps - self._written_steps > _SAMPLED_RATE
        self._written_steps = self._steps
        self.copy_weight = 1 if not is_fast else 0 if self._writes % _SAMPLED else _SAMPLED
        if self._is_claimed:
            sequence = record[0] | 1
            record[0] = sequence
            _VALUES.pack_into(record, 8, self._started_ns, now, *self.counters())
            record[0] = sequence + 1

    def counters(self) -> Sequence[int]:
        """Return the values of `FIELDS[3:-1]`."""
        return (
            self._steps, self.optimizer_steps, self._skipped_steps, self._last_ns - self._first_ns,
            self._first_ns - self._begun_ns, self._samples, self._data_ns, self._batches,
            self._checkpoint_ns, self._checkpoints, min(self._copy_ns, _clock() - self._begun_ns), self._copies,
            self._optimizers,
        )  # fmt: skip

    def timing_batches(self, function: "Callable[[Any], Any]") -> "Callable[[Any], Any]":
        """Return `__next__` of a data loader's iterator with a count of batches and of the time until they came."""

        @functools.wraps(function)
        def wrapper(loader: Any) -> Any:
            if _thread() != self._idle:
                return function(loader)
            self._idle = None
            record = self._record
            record[_WAITS_FOR] = _DATA
            begun = _clock()
            try:
                batch = function(loader)
            finally:
                now = _clock()
                record[_WAITS_FOR] = 0
                self._idle = self._thread
            self._data_ns += now - begun
            if now > self._write_at_ns + _WRITE_EVERY_NS:  # no steps: an evaluation
                self.write()
            number = self._batches
            if number < _SAMPLED_FROM or not number % _SAMPLED:
                self._batch_size = _samples(batch)
            self._batches = number + 1
            self._samples += self._batch_size
            return batch

        return wrapper

    def save(self, function: "Callable[..., Any]", args: Any, kwargs: Any) -> Any:
        """Write a checkpoint, and count the time."""
        if _thread() != self._idle:
            return function(*args, **kwargs)
        self._idle = None
        begun, record = _clock(), self._record
        record[_WAITS_FOR] = _CHECKPOINT
        try:
            return function(*args, **kwargs)
        finally:
            self._idle = self._thread
            record[_WAITS_FOR] = 0
            self._checkpoint_ns += _clock() - begun
            self._checkpoints += 1

    def copy(self, function: "Callable[..., Any]", args: Any, kwargs: Any) -> Any:
        """Copy a tensor of the host, and count the time if the copy is on a device."""
        if _thread() != self._idle:
            return function(*args, **kwargs)
        begun = _clock()
        found = function(*args, **kwargs)
        if not found.is_cpu:
            took = _clock() - begun
            weight = 1 if took > _WRITE_EVERY_NS else self.copy_weight  # a rare one must not count several times
            self._copy_ns += weight * took
            self._copies += weight
        return found

    @property
    def optimizer_steps(self) -> int:
        """Steps of all optimizers so far."""
        return self._steps + self._merged_steps


def _samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 0 if it has none."""
    for _ in range(3):
        if isinstance(batch, (tuple, list)):
            if not batch:
                return 0
            batch = batch[0]
            continue
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 0
        if not hasattr(batch, "values") or not batch:
            return 0
        batch = next(iter(batch.values()))
    return 0


def _started_ns() -> int:
    import sys

    start = sys.modules.get("carpool_probe.start")
    return _clock() if start is None else start.STARTED_NS


recorder = Recorder(os.environ.get("CARPOOL_PROBE_FILE", ""), _started_ns())
"""The counters of this process."""
os.register_at_fork(after_in_child=recorder.forget)
