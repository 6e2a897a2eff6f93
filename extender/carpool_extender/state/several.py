"""What is found under a key: nothing, mostly one thing, seldom several."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Several(Generic[K, V]):
    """Things by keys, each once. With one thing each, sets would take several times the memory.

    Adding the n-th thing under a key copies those before it.
    """

    def __init__(self) -> None:
        self._found: dict[K, tuple[V, ...]] = {}

    def of(self, key: K) -> tuple[V, ...]:
        """Return what is found under a key, in the order in which it came."""
        return self._found.get(key, ())

    def add(self, key: K, thing: V) -> None:
        """Have a thing found under a key."""
        found = self.of(key)
        if thing not in found:
            self._found[key] = (*found, thing)

    def discard(self, key: K, thing: V) -> None:
        """Have it found there no more."""
        left = tuple(one for one in self.of(key) if one != thing)
        if left:
            self._found[key] = left
        else:
            self._found.pop(key, None)
