"""Numbers for things that come and go, so that arrays can speak of them."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Numbering(Generic[K]):
    """Numbers things from 0 for as long as somebody holds them; a number that nobody holds goes to the next thing.

    So there are never more numbers than things that were held at the same time.
    """

    def __init__(self) -> None:
        self.ids: dict[K, int] = {}
        """The number of each thing that is held; do not change it."""
        self.things: list[K] = []
        """The things by number; what stands at a number that nobody holds means nothing."""
        self._holders: list[int] = []
        self._spare: list[int] = []

    def hold(self, things: Iterable[K]) -> None:
        """Keep the numbers of some things, and give numbers to those that have none."""
        for thing in things:
            number = self.ids.get(thing)
            self._holders[self._new(thing) if number is None else number] += 1

    def let_go(self, things: Iterable[K]) -> None:
        """Take back what `hold` did once for each of them."""
        for thing in things:
            number = self.ids[thing]
            self._holders[number] -= 1
            if not self._holders[number]:
                del self.ids[thing]
                self._spare.append(number)

    def _new(self, thing: K) -> int:
        if self._spare:
            number = self._spare.pop()
            self.things[number] = thing
        else:
            number = len(self.things)
            self.things.append(thing)
            self._holders.append(0)
        self.ids[thing] = number
        return number
