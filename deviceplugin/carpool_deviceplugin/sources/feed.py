"""The first source that answers, asked anew each time; what it said counts for a while only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog
from carpool_core.values import GpuUuid

Place = tuple[GpuUuid, int | None]
"""A GPU, or a MIG instance of it by NVML's ID."""
Counters = Mapping[str, float]
"""Values by DCGM's field names, in DCGM's units."""

_GOOD_FOR_S = 60.0
"""dcgm-exporter reads its GPUs each 30 s, unless it is told otherwise."""
_TRY_AGAIN_S = 60.0
"""A source that failed is left alone for so long: it may not run on this node at all."""


class SourceError(Exception):
    """A source gave no answer; `str()` says what was expected and what was found."""


class Source(Protocol):
    """Somebody else on the node who measures its GPUs."""

    @property
    def name(self) -> str:
        """Such as `dcgm-exporter`."""
        ...

    @property
    def is_public(self) -> bool:
        """Whether it shows its values to Prometheus itself, so that nobody else must."""
        ...

    def values(self) -> Mapping[Place, Counters]:
        """Return what it says now; raises SourceError. May block."""
        ...


class Feed:
    """What the first source that answers said at last.

    Args:
        sources: The best one first.
        monotonic: Seconds.
    """

    def __init__(self, sources: Sequence[Source], monotonic: Callable[[], float]) -> None:
        self._sources, self._monotonic = sources, monotonic
        self._failed_at: dict[str, float] = {}
        self._said: tuple[float, Source, Mapping[Place, Counters]] | None = None
        self._log = structlog.get_logger()

    def refresh(self) -> None:
        """Ask again; a source that fails is passed over, and said once."""
        for source in self._sources:
            now = self._monotonic()
            if now - self._failed_at.get(source.name, float("-inf")) < _TRY_AGAIN_S:
                continue
            try:
                values = source.values()
            except SourceError as e:
                if source.name not in self._failed_at:
                    self._log.info("metrics source not used", source=source.name, reason=str(e))
                self._failed_at[source.name] = now
                continue
            if self._failed_at.pop(source.name, None) is not None:
                self._log.info("metrics source used again", source=source.name)
            self._said = (now, source, values)
            return
        self._said = None

    def at(self, uuid: GpuUuid, instance: int | None = None) -> tuple[Source, Counters] | None:
        """Return what is known of a GPU or MIG instance, and from whom; None where nobody said anything lately."""
        said = self._said
        if said is None or self._monotonic() - said[0] > _GOOD_FOR_S:
            return None
        counters = said[2].get((uuid, instance))
        return None if not counters else (said[1], counters)
