"""Intervals and deadlines of the agent, and blocking calls with time limits."""

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from carpool_core.values import GpuUuid

from carpool_deviceplugin.gpu import DeviceError

_IDLE_S = 20.0
"""Idle threads end after this time."""

Work = Callable[[], None]


class CallThreads:
    """Unbounded thread pool. A call that never returns occupies only its own thread.

    Args:
        idle_s: Time after which an idle thread ends.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        """Run work, which must not raise, in an idle or a new thread."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None  # the last one that was used: the others may end
        if thread is None:
            threading.Thread(target=self._live, args=(work,), daemon=True).start()
        else:
            thread.put(work)

    def _live(self, work: Work) -> None:
        mine: SimpleQueue[Work] = SimpleQueue()
        while True:
            work()
            with self._lock:
                self._idle.append(mine)
            try:
                work = mine.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if mine in self._idle:
                        self._idle.remove(mine)
                        return
                work = mine.get()  # it was given away at the last moment


P = ParamSpec("P")
T = TypeVar("T")


Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals and deadlines in seconds, and the sleep function."""

    sleep: Sleep = asyncio.sleep
    """Waits this many seconds."""

    step_deadline_s: float = 10.0
    """Deadline of one step on a GPU."""
    progress_after_s: float = 0.3
    """Slower steps are reported as Preparing."""
    blocked_retry_s: float = 1.0
    """Retry interval while processes block a step."""
    resync_s: float = 10.0
    """Interval of full checks of each GPU."""
    sample_s: float = 1.0
    """Interval of measurements of tenants."""
    counters_s: float = 10.0
    """Interval of queries to other sources of counters."""
    idle_samples: int = 5
    """Idle GPUs are measured only every this many samples."""
    measures_s: float = 3.0
    """Minimum interval between status writes that contain only new measurements."""
    heartbeat_s: float = 25.0
    """Maximum interval between status writes. The scheduler drops GPUs without a report for a minute; one lost write is
    tolerated."""
    labels_s: float = 300.0
    """Interval of reads of the Node's labels; they are also read before each change of MIG instances."""
    kubelet_s: float = 1.0
    """Interval of checks of the kubelet's sockets."""
    holders_s: float = 10.0
    """Interval of queries for slot holders and of the removal of ended pods' files."""
    reservation_wait_s: float = 5.0
    """How long PreStartContainer waits for a reservation that may be in flight; the kubelet allows 30 s."""
    retry_s: float = 1.0
    """Delay after a failed call to the API server; doubles up to 32 times this."""


async def wait_for_event(event: asyncio.Event, seconds: float, sleep: Sleep) -> None:
    """Wait for an event, at most this many seconds."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(sleep(seconds))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


HARDWARE_INTERVALS = Intervals(
    sample_s=5.0, idle_samples=2, resync_s=60.0, measures_s=10.0, kubelet_s=3.0, holders_s=30.0
)
"""For real GPUs: their counters lose nothing between readings, and each reading costs. Health is checked with every
second sample, and after a change the whole GPU."""


class Caller(Protocol):
    """Makes blocking calls."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call; raises DeviceError without an answer in time, and exceptions of the function."""
        ...


class TimeLimitedCaller:
    """Runs blocking calls in threads with a deadline. While a call is stuck, further calls fail at once.

    Args:
        what: Subject for messages, such as `GPU GPU-1`.
        deadline_s: Deadline of a call.
        threads: Threads for the calls; own ones if None.
    """

    def __init__(self, what: str, deadline_s: float, threads: CallThreads | None = None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._threads = threads or CallThreads()
        self._stuck: asyncio.Future[object] | None = None

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread; raises DeviceError at the deadline, and exceptions of the function."""
        if self._stuck is not None and not self._stuck.done():
            raise DeviceError(f"{self._what}: an earlier call has not come back yet; look at the GPU's driver")
        loop = asyncio.get_running_loop()
        call: asyncio.Future[T] = loop.create_future()
        work = functools.partial(function, *args, **kwargs)
        self._threads.run(functools.partial(_answer, loop, call, work))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            call.cancel()  # its result and its exception have no reader
            raise
        if not done:
            self._stuck = call  # type: ignore[assignment]  # only whether it is done matters
            call.add_done_callback(
                lambda late: late.cancelled() or late.exception()
            )  # retrieve the exception, which has no reader
            raise DeviceError(f"{self._what}: expected an answer within {self._deadline_s:g} s, found none")
        return call.result()


def _answer(loop: asyncio.AbstractEventLoop, call: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    try:
        settle = functools.partial(_settle, call, call.set_result, work())
    except Exception as e:  # raised again where the call is awaited
        settle = functools.partial(_settle, call, call.set_exception, e)
    with suppress(RuntimeError):  # the loop has ended, and the caller with it
        loop.call_soon_threadsafe(settle)


def _settle(call: "asyncio.Future[T]", how: Callable[[Any], None], answer: Any) -> None:
    if not call.done():
        how(answer)


_MOMENT = 0.01
"""After this share of the deadline without an answer, another thread continues with the remaining GPUs."""


class Poll(Generic[T]):
    """Queries GPUs one after the other in one thread: parallel calls contend in the driver and cost twice.

    Args:
        question: Function called for each GPU.
        deadline_s: Deadline of a round.
        threads: Threads for the calls.
    """

    def __init__(self, question: Callable[[GpuUuid], T], deadline_s: float, threads: CallThreads) -> None:
        self._question, self._deadline_s, self._threads = question, deadline_s, threads
        self._stuck: dict[GpuUuid, _PollRound[T]] = {}

    async def ask(self, uuids: Collection[GpuUuid]) -> Mapping[GpuUuid, T | DeviceError]:
        """Query these GPUs once each; skip a GPU whose earlier query has not returned.

        Returns:
            Each GPU's answer, or the error.

        Raises:
            Exception: Any exception of the question except DeviceError.
        """
        self._stuck = {uuid: round_ for uuid, round_ in self._stuck.items() if uuid not in round_.answers}
        round_ = _PollRound(self._question, [uuid for uuid in uuids if uuid not in self._stuck])
        await round_.run(self._threads, self._deadline_s)
        return {uuid: self._answer(uuid, round_) for uuid in uuids}

    def _answer(self, uuid: GpuUuid, round_: "_PollRound[T]") -> T | DeviceError:
        if uuid in self._stuck:
            return DeviceError(f"GPU {uuid}: an earlier call has not come back yet; look at the GPU's driver")
        if uuid not in round_.answers:
            self._stuck[uuid] = round_
            return DeviceError(f"GPU {uuid}: expected an answer within {self._deadline_s:g} s, found none")
        answer = round_.answers[uuid]
        if isinstance(answer, Exception) and not isinstance(answer, DeviceError):
            raise answer
        return answer


class _PollRound(Generic[T]):
    def __init__(self, question: Callable[[GpuUuid], T], uuids: Collection[GpuUuid]) -> None:
        self._question, self._left, self._count = question, deque(uuids), len(uuids)
        self.answers: dict[GpuUuid, T | Exception] = {}
        self._loop = asyncio.get_running_loop()
        self._is_over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, threads: CallThreads, deadline_s: float) -> None:
        """Query until all have answered, or until the deadline."""
        answered, end = 0, self._loop.time() + deadline_s
        while len(self.answers) < self._count and (left_s := end - self._loop.time()) > 0:
            if self._left and len(self.answers) == answered:
                threads.run(self._ask)
            answered = len(self.answers)
            await asyncio.wait({self._is_over}, timeout=min(_MOMENT * deadline_s, left_s) if self._left else left_s)

    def _ask(self) -> None:
        """Runs in a thread; several threads share the remaining GPUs."""
        while self._left:
            try:
                uuid = self._left.popleft()
            except IndexError:
                break  # another thread took the last one
            try:
                self.answers[uuid] = self._question(uuid)
            except Exception as e:  # raised again where it was asked
                self.answers[uuid] = e
        if len(self.answers) == self._count:
            with suppress(RuntimeError):  # the loop has ended, and the caller with it
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)
