"""Intervals of the agent, and blocking calls to GPUs with deadlines."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from carpool_core.values import GpuUuid

from carpool_deviceplugin.gpu import DeviceError

P = ParamSpec("P")
T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals and deadlines, in seconds. The defaults are those of simulated GPUs."""

    sleep: Sleep = asyncio.sleep
    """Waits for the given number of seconds."""
    step_deadline_s: float = 10.0
    """Deadline of one call to a GPU."""
    progress_after_s: float = 0.3
    """Longer preparations are reported as Preparing in the meantime."""
    blocked_retry_s: float = 1.0
    """Interval of retries on a GPU that failed or is not free yet."""
    resync_s: float = 10.0
    """Interval of reconciling a GPU without a change."""
    sample_s: float = 1.0
    """Interval of reading the GPUs that pods use."""
    counters_s: float = 10.0
    """Interval of reading DCGM and dcgm-exporter."""
    idle_samples: int = 5
    """GPUs without pods are read at every Nth sample only."""
    measures_s: float = 3.0
    """Minimum time between two status writes that contain new measurements only."""
    labels_s: float = 30.0
    """Interval of reading the Node's labels. They are also read before each MIG change."""
    preflight_s: float = 30.0
    """Interval of the preflight, after that at the start."""
    kubelet_s: float = 1.0
    """Interval of checking the kubelet's sockets."""
    holders_s: float = 10.0
    """Interval of reading PodResources, and of removing CDI specifications of ended pods."""
    reservation_wait_s: float = 5.0
    """How long PreStartContainer waits for a reservation; the kubelet's timeout is 30 s."""
    retry_s: float = 1.0
    """First delay after a failed status write; doubled up to 32 times this."""


HARDWARE_INTERVALS = Intervals(
    sample_s=5.0, idle_samples=2, resync_s=60.0, measures_s=10.0, preflight_s=120.0, kubelet_s=3.0, holders_s=30.0
)
"""Intervals for hardware: its counters accumulate between two readings, and each reading takes processor time."""


async def wait_for_event(event: asyncio.Event, seconds: float, sleep: Sleep) -> None:
    """Wait for the event, at most for the given number of seconds of `sleep`."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(sleep(seconds))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def run_in_thread(work: Work) -> None:
    """Run work, which must not raise, in a daemon thread: if it never returns, it blocks no other work and no exit."""
    threading.Thread(target=work, daemon=True).start()


class TimeLimitedCaller:
    """Makes blocking calls in threads, with a deadline. While a call has not returned, all others fail at once.

    `what` is the subject of the error messages, such as `GPU GPU-1`. `start` starts the work of a call.
    """

    def __init__(self, what: str, deadline_s: float, start: Callable[[Work], None] = run_in_thread) -> None:
        self._what, self._deadline_s, self._start = what, deadline_s, start
        self._stuck: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result; raises DeviceError after the deadline, and whatever the function raises."""
        if self._stuck is not None and not self._stuck.done():
            raise DeviceError(f"{self._what}: an earlier call has not come back yet; check the GPU's driver")
        loop = asyncio.get_running_loop()
        call: asyncio.Future[T] = loop.create_future()
        self._start(functools.partial(_run, loop, call, functools.partial(function, *args, **kwargs)))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not done:
            self._stuck = call
            call.add_done_callback(lambda late: late.cancelled() or late.exception())  # no caller awaits it any more
            raise DeviceError(f"{self._what}: expected an answer within {self._deadline_s:g} s, found none")
        return call.result()


def _run(loop: asyncio.AbstractEventLoop, call: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    settle: Work
    try:
        settle = functools.partial(call.set_result, work())
    except Exception as e:  # raised again in the event loop
        settle = functools.partial(call.set_exception, e)
    with suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(lambda: None if call.done() else settle())


class Poll:
    """Asks GPUs at the same time; a GPU that does not answer in time delays no other one."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._callers: dict[GpuUuid, TimeLimitedCaller] = {}

    async def ask(
        self, question: Callable[[GpuUuid], T], uuids: Collection[GpuUuid]
    ) -> Mapping[GpuUuid, T | DeviceError]:
        """Return the answer of each GPU, or why it has none; raises the question's other errors."""
        answers = await asyncio.gather(*(self._ask(question, uuid) for uuid in uuids))
        return dict(zip(uuids, answers, strict=True))

    async def _ask(self, question: Callable[[GpuUuid], T], uuid: GpuUuid) -> T | DeviceError:
        if uuid not in self._callers:
            self._callers[uuid] = TimeLimitedCaller(f"GPU {uuid}", self._deadline_s)
        try:
            return await self._callers[uuid].call(question, uuid)
        except DeviceError as e:
            return e
