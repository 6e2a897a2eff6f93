"""When all jobs are listed again, to hear of what kopf's watch missed."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog
from carpool_core.kube.errors import KubeError

_EVERY_S = 600.0
"""How often all jobs are listed at the least."""

_SOON_S = 1.0
"""How long after kopf has listed again, during which it hands over the rest of its list."""

_LONGEST_RETRY_S = 60.0


class Sweeps:
    """Sweeps when asked to, and every ten minutes; one that fails is repeated after pauses that double."""

    def __init__(
        self, sweep: Callable[[], Awaitable[None]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._sweep, self._sleep = sweep, sleep
        self._wanted = asyncio.Event()
        self._log = structlog.get_logger()

    def ask(self) -> None:
        """Have a sweep made soon."""
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        """Whether a sweep is due."""
        return self._wanted.is_set()

    async def run(self) -> None:
        """Sweep for ever."""
        pause_s = _SOON_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._wanted.wait()
            await self._sleep(pause_s)
            self._wanted.clear()
            try:
                await self._sweep()
            except KubeError as error:
                pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)
                self._log.warning("sweep failed", error=str(error), retry_in_s=pause_s)
                self._wanted.set()
            else:
                pause_s = _SOON_S
