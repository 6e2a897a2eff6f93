"""Many things to be done, a few of them at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 10
"""Most nodes about which the server is asked or told at once, so that it answers binds meanwhile."""


async def few_at_once(work: Callable[[str, T], Awaitable[None]], items: Iterable[tuple[str, T]]) -> None:
    """Do something for each of some nodes; one that takes long keeps its place, and the others go on."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, item: T) -> None:
        async with places:
            await work(name, item)

    await asyncio.gather(*(one(name, item) for name, item in items))
