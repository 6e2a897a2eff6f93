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

Times are nanoseconds of CLOCK_MONOTONIC. The counters of a record only grow. An unused record is zero.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
from typing import Any, Callable, Optional, Set

SIZE, RECORD_SIZE, RECORDS = 4096, 256, 15
MAGIC, VERSION = b"CARPOOL\0", 1
FIELDS = (
    "sequence", "started_ns", "updated_ns", "steps", "optimizer_steps", "skipped_steps", "steps_ns", "first_step_ns",
    "samples", "data_ns", "batches", "checkpoint_ns", "checkpoints", "copy_ns", "copies", "optimizers",
)  # fmt: skip
(
    _SEQUENCE, _STARTED, _UPDATED, _STEPS, _OPTIMIZER_STEPS, _SKIPPED, _STEPS_NS, _FIRST_STEP,
    _SAMPLES, DATA, _, CHECKPOINT, _, COPY, _, _OPTIMIZERS,
) = range(len(FIELDS))  # fmt: skip
"""Indices of the fields. DATA, CHECKPOINT and COPY are times, each followed by its count."""

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
        self.counters: Any = [0] * len(FIELDS)
        """The counters by index: a list, and from the first step on the mapped record."""
        self._is_claimed = self._is_timing = False
        self._thread = threading.main_thread().ident
        self._round: Set[object] = set()
        self._first: Optional[object] = None
        self._most = 0
        self._last_ns = 0
        self._file: Optional[int] = None  # open as long as the process holds the lock

    def _claim(self) -> None:
        """Claim a record and move the counters into it; without a free one, counting goes on in memory."""
        self._is_claimed = True
        self._thread = _thread()
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
                record = memory[RECORD_SIZE * number : RECORD_SIZE * (number + 1)].cast("Q")
                self.counters[_STARTED] = _clock()
                record[_SEQUENCE] |= 1
                for index in range(1, len(FIELDS)):
                    record[index] = self.counters[index]
                record[_SEQUENCE] += 1
                self.counters = record
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
        if _thread() != self._thread:
            return
        counters, present, now = self.counters, self._round, _clock()
        sequence = counters[_SEQUENCE]
        counters[_SEQUENCE] = sequence + 1
        counters[_UPDATED] = now
        counters[_OPTIMIZER_STEPS] += 1
        if samples:
            counters[_SAMPLES] += samples
        if is_skipped:
            counters[_SKIPPED] += 1
        if optimizer in present or not present:
            # If the optimizer that began the last step is another one, that step was two: the training went on with
            # another optimizer.
            counters[_STEPS] += 1 if optimizer == self._first or self._first is None else 2
            self._first = optimizer
            if self._last_ns:
                counters[_STEPS_NS] += now - self._last_ns
            else:
                counters[_FIRST_STEP] = now - self._begun_ns
            self._last_ns = now
            if len(present) != 1:
                present.clear()
                present.add(optimizer)
        else:
            present.add(optimizer)
        if len(present) > self._most:
            counters[_OPTIMIZERS] = self._most = len(present)
        counters[_SEQUENCE] = sequence + 2

    def timed(self, function: "Callable[..., Any]", index: int, args: Any, kwargs: Any) -> Any:
        """Call a function and add its time to a counter, unless another timed function calls it.

        Args:
            function: The function.
            index: CHECKPOINT, or DATA for a function that returns a batch.
            args: Its positional arguments.
            kwargs: Its other arguments.
        """
        if self._is_timing or _thread() != self._thread:
            return function(*args, **kwargs)
        self._is_timing = True
        begun = _clock()
        try:
            found = function(*args, **kwargs)
        finally:
            self._is_timing = False
        self._add(index, _clock() - begun, _samples(found) if index == DATA else 0)
        return found

    def timed_copy(self, copy: "Callable[..., Any]", tensor: Any, args: Any, kwargs: Any) -> Any:
        """Copy a tensor of the host, and count the time if the copy is on a device."""
        if self._is_timing or _thread() != self._thread:
            return copy(tensor, *args, **kwargs)
        begun = _clock()
        found = copy(tensor, *args, **kwargs)
        if not found.is_cpu:
            self._add(COPY, _clock() - begun)
        return found

    def _add(self, index: int, nanoseconds: int, samples: int = 0) -> None:
        counters = self.counters
        sequence = counters[_SEQUENCE]
        counters[_SEQUENCE] = sequence + 1
        counters[index] += nanoseconds
        counters[index + 1] += 1
        if samples:
            counters[_SAMPLES] += samples
        counters[_SEQUENCE] = sequence + 2

    @property
    def optimizer_steps(self) -> int:
        """Steps of all optimizers so far."""
        return int(self.counters[_OPTIMIZER_STEPS])


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
