"""Which models are being traced or wait for it, in their order; each input once, however many jobs ask."""

import asyncio
from collections.abc import Callable

from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import ModelSource, Training
from carpool_predictor.features.abstention import Abstention
from carpool_predictor.tracing.source import Tracer

from carpool_operator.decisions.predicting import MOST_TOLD


class TraceQueue:
    """Traces models, and knows how many stand before each.

    Args:
        tracer: What traces; it limits itself to `at_once`.
        at_once: How many models it traces at the same time.
        moved: Told the digests whose place in the queue has changed.
    """

    def __init__(self, tracer: Tracer, at_once: int, moved: Callable[[list[str]], None]) -> None:
        self._tracer, self._at_once, self._moved = tracer, at_once, moved
        self._under_way: dict[str, asyncio.Task[ModelFeatures | Abstention]] = {}

    def ahead(self, digest: str) -> int:
        """How many traces must end before that of this input begins, at most one more than `MOST_TOLD`."""
        order = list(self._under_way)
        place = order.index(digest) if digest in self._under_way else len(order)
        return min(MOST_TOLD + 1, max(0, place - self._at_once + 1))

    async def trace(self, digest: str, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        """Trace a model, or wait for the trace of an equal one that is under way."""
        if digest not in self._under_way:
            task = asyncio.create_task(self._tracer.trace(model, training), name=f"trace {digest}")
            self._under_way[digest] = task
            task.add_done_callback(lambda _: self._ended(digest))
        return await asyncio.shield(self._under_way[digest])

    def _ended(self, digest: str) -> None:
        del self._under_way[digest]
        self._moved(list(self._under_way)[: self._at_once + MOST_TOLD])

    async def close(self) -> None:
        """Stop tracing."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
