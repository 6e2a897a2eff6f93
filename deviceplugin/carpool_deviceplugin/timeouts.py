"""How long the agent waits for what, and calls that may never come back."""

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
"""A thread without work for so long ends."""

Work = Callable[[], None]


class CallThreads:
    """As many threads as there is work at the same time; work that never ends keeps nobody else from one.

    Args:
        idle_s: How long a thread waits for more work before it ends.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        """Let work, which must not raise, be done by a thread that has none."""
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
    """How often things are looked at, in seconds, and how that time is waited for."""

    sleep: Sleep = asyncio.sleep
    """Waits so many seconds."""

    step_deadline_s: float = 10.0
    """How long one step of a GPU may take."""
    progress_after_s: float = 0.3
    """Steps that take longer are reported as Preparing in the meantime."""
    blocked_retry_s: float = 1.0
    """How often a GPU is looked at that somebody must leave first."""
    resync_s: float = 10.0
    """How often a GPU is looked at anyhow."""
    sample_s: float = 1.0
    """How often the tenants' use is measured."""
    counters_s: float = 10.0
    """How often those are asked who else measure the GPUs."""
    idle_samples: int = 5
    """GPUs that nobody uses are measured only each so many samples."""
    measures_s: float = 3.0
    """Status writes that only bring new measures keep this distance."""
    heartbeat_s: float = 25.0
    """After this time the status is written though nothing has changed: the scheduler leaves GPUs out of which it has
    heard nothing for a minute, and one such write may be lost."""
    labels_s: float = 300.0
    """How often the Node's labels are read; besides that, always before MIG instances are changed."""
    kubelet_s: float = 1.0
    """How often the kubelet's sockets are looked at."""
    holders_s: float = 10.0
    """How often the kubelet is asked who holds slots, and what ended pods left is removed."""
    reservation_wait_s: float = 5.0
    """How long PreStartContainer waits for word that may be on its way; the kubelet gives it 30 s."""
    retry_s: float = 1.0
    """After a failed call to the API server; doubled with each further failure, to 32 times this."""


async def wait_for_event(event: asyncio.Event, seconds: float, sleep: Sleep) -> None:
    """Wait for an event, for so long at most."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(sleep(seconds))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


HARDWARE_INTERVALS = Intervals(
    sample_s=5.0, idle_samples=2, resync_s=60.0, measures_s=10.0, kubelet_s=3.0, holders_s=30.0
)
"""For real GPUs: their own counters lose nothing between two looks, and each look costs. Their health is looked at with
each second sample; where it has changed, the GPU is looked at as a whole."""


class Caller(Protocol):
    """Makes blocking calls."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call; raises DeviceError where no answer comes, and whatever the function raises."""
        ...


class TimeLimitedCaller:
    """Makes blocking calls in threads, with a deadline. After one that never came back, all others fail at once.

    Each call has a thread to itself: in a pool of some size, those that never come back would take those of all others.

    Args:
        what: For messages, such as `GPU GPU-1`.
        deadline_s: How long a call may take.
        threads: To call in; those of nobody else when None.
    """

    def __init__(self, what: str, deadline_s: float, threads: CallThreads | None = None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._threads = threads or CallThreads()
        self._stuck: asyncio.Future[object] | None = None

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread; raises DeviceError where no answer comes, and whatever the function raises."""
        if self._stuck is not None and not self._stuck.done():
            raise DeviceError(f"{self._what}: an earlier call has not come back yet; look at the GPU's driver")
        loop = asyncio.get_running_loop()
        call: asyncio.Future[T] = loop.create_future()
        work = functools.partial(function, *args, **kwargs)
        self._threads.run(functools.partial(_answer, loop, call, work))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            call.cancel()  # nobody waits for it any more, nor for what it raises
            raise
        if not done:
            self._stuck = call  # type: ignore[assignment]  # only whether it is done matters
            call.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it any more
            raise DeviceError(f"{self._what}: expected an answer within {self._deadline_s:g} s, found none")
        return call.result()


def _answer(loop: asyncio.AbstractEventLoop, call: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    try:
        settle = functools.partial(_settle, call, call.set_result, work())
    except Exception as e:  # raised again where the call is awaited
        settle = functools.partial(_settle, call, call.set_exception, e)
    with suppress(RuntimeError):  # the loop has ended meanwhile, and with it whoever asked
        loop.call_soon_threadsafe(settle)


def _settle(call: "asyncio.Future[T]", how: Callable[[Any], None], answer: Any) -> None:
    if not call.done():
        how(answer)


_MOMENT = 0.01
"""When nobody has answered for this share of the deadline, that GPU is left to its thread, and another goes on."""


class Poll(Generic[T]):
    """Asks one GPU after the other in one thread: with a thread for each they hinder each other, and cost twice.

    Args:
        question: Asked of each GPU.
        deadline_s: How long a round may take.
        threads: To ask in.
    """

    def __init__(self, question: Callable[[GpuUuid], T], deadline_s: float, threads: CallThreads) -> None:
        self._question, self._deadline_s, self._threads = question, deadline_s, threads
        self._stuck: dict[GpuUuid, _PollRound[T]] = {}

    async def ask(self, uuids: Collection[GpuUuid]) -> Mapping[GpuUuid, T | DeviceError]:
        """Ask these GPUs, each once; one whose earlier question never came back is not asked.

        Returns:
            Each GPU's answer, or why there is none.

        Raises:
            Exception: Whatever the question raises besides DeviceError.
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
        """Ask until everybody has answered, or the time is over."""
        answered, end = 0, self._loop.time() + deadline_s
        while len(self.answers) < self._count and (left_s := end - self._loop.time()) > 0:
            if self._left and len(self.answers) == answered:
                threads.run(self._ask)
            answered = len(self.answers)
            await asyncio.wait({self._is_over}, timeout=min(_MOMENT * deadline_s, left_s) if self._left else left_s)

    def _ask(self) -> None:
        """In a thread; several of them share what is left."""
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
            with suppress(RuntimeError):  # the loop has ended meanwhile, and with it whoever asked
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)
