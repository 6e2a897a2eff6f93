"""The same question to every GPU of a node, again and again; none holds up the others for longer than the deadline."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.threads import Threads

T = TypeVar("T")
_MOMENT = 0.01
"""When nobody has answered for this share of the deadline, that GPU is left to its thread, and another goes on."""


class Rounds(Generic[T]):
    """Asks one GPU after the other in one thread: with a thread for each they hinder each other, and cost twice.

    Args:
        question: Asked of each GPU.
        deadline_s: How long a round may take.
        threads: To ask in.
    """

    def __init__(self, question: Callable[[GpuUuid], T], deadline_s: float, threads: Threads) -> None:
        self._question, self._deadline_s, self._threads = question, deadline_s, threads
        self._stuck: dict[GpuUuid, _Round[T]] = {}

    async def ask(self, uuids: Collection[GpuUuid]) -> Mapping[GpuUuid, T | DeviceError]:
        """Ask these GPUs, each once; one whose earlier question never came back is not asked.

        Returns:
            Each GPU's answer, or why there is none.

        Raises:
            Exception: Whatever the question raises besides DeviceError.
        """
        self._stuck = {uuid: round_ for uuid, round_ in self._stuck.items() if uuid not in round_.answers}
        round_ = _Round(self._question, [uuid for uuid in uuids if uuid not in self._stuck])
        await round_.run(self._threads, self._deadline_s)
        return {uuid: self._answer(uuid, round_) for uuid in uuids}

    def _answer(self, uuid: GpuUuid, round_: "_Round[T]") -> T | DeviceError:
        if uuid in self._stuck:
            return DeviceError(f"GPU {uuid}: an earlier call has not come back yet; look at the GPU's driver")
        if uuid not in round_.answers:
            self._stuck[uuid] = round_
            return DeviceError(f"GPU {uuid}: expected an answer within {self._deadline_s:g} s, found none")
        answer = round_.answers[uuid]
        if isinstance(answer, Exception) and not isinstance(answer, DeviceError):
            raise answer
        return answer


class _Round(Generic[T]):
    def __init__(self, question: Callable[[GpuUuid], T], uuids: Collection[GpuUuid]) -> None:
        self._question, self._left, self._count = question, deque(uuids), len(uuids)
        self.answers: dict[GpuUuid, T | Exception] = {}
        self._loop = asyncio.get_running_loop()
        self._is_over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, threads: Threads, deadline_s: float) -> None:
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
