"""How long the agent waits for what, and calls that may never come back."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")


Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often things are looked at, in seconds, and how that time is waited for."""

    sleep: Sleep = asyncio.sleep
    """Waits so many seconds."""

    step_deadline_s: float = 10.0
    """How long one step of a GPU may take."""
    slow_s: float = 0.3
    """Steps that take longer are reported as Preparing in the meantime."""
    waiting_s: float = 1.0
    """How often a GPU is looked at that somebody must leave first."""
    resync_s: float = 10.0
    """How often a GPU is looked at anyhow."""
    sample_s: float = 1.0
    """How often the tenants' use is measured."""
    others_s: float = 10.0
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
    patience_s: float = 5.0
    """How long PreStartContainer waits for word that may be on its way; the kubelet gives it 30 s."""
    retry_s: float = 1.0
    """After a failed call to the API server; doubled with each further failure, to 32 times this."""


async def woken(event: asyncio.Event, seconds: float, sleep: Sleep) -> None:
    """Wait for an event, for so long at most."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(sleep(seconds))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


REAL = Rhythm(sample_s=5.0, idle_samples=2, resync_s=60.0, measures_s=10.0, kubelet_s=3.0, holders_s=30.0)
"""For real GPUs: their own counters lose nothing between two looks, and each look costs. Their health is looked at with
each second sample; where it has changed, the GPU is looked at as a whole."""


class Caller(Protocol):
    """Makes blocking calls."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call; raises DeviceError where no answer comes, and whatever the function raises."""
        ...


class Patient:
    """Makes blocking calls in threads, with a deadline. After one that never came back, all others fail at once.

    Each call has a thread to itself: in a pool of some size, those that never come back would take those of all others.

    Args:
        what: For messages, such as `GPU GPU-1`.
        deadline_s: How long a call may take.
        threads: To call in; those of nobody else when None.
    """

    def __init__(self, what: str, deadline_s: float, threads: Threads | None = None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._threads = threads or Threads()
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
