"""Replays the allocations of a step in CUDA's caching allocator, to get the memory that the process reserves.

`nvidia-smi` shows the segments that the allocator took from the driver, free blocks included. The rules are those of
c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x, default settings): sizes round up to 512 bytes. Blocks of at most 1 MiB
come from 2 MiB segments, larger ones from 20 MiB segments. From 10 MiB on a block has its own segment, rounded up to
2 MiB. The smallest free block that fits is taken and split if enough is left; free neighbours merge.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import chain
from math import log2

GRANULE = 512
"""Size in bytes to which each block is rounded up (kMinBlockSize)."""
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20
_ROUND = 2 << 20


class _Block:
    __slots__ = ("free", "next", "order", "previous", "size", "small")

    def __init__(self, size: int, *, small: bool) -> None:
        self.size = size
        self.small = small
        self.free = True
        self.order = 0
        self.previous: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """Free lists and segments of one stream; segments never return to the driver."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._live: dict[int, _Block] = {}
        self._order = 0

    def replay(self, events: Iterable[tuple[int, int]]) -> None:
        """Repeat events: (key, size) allocates, (key, -1) frees."""
        for key, size in events:
            if size < 0:
                self.free(key)
            else:
                self.allocate(key, size)

    def allocate(self, key: int, size: int) -> None:
        """Allocate a block for the tensor with this key; a size of 0 bytes allocates nothing."""
        if size <= 0:
            return
        size = -(-size // GRANULE) * GRANULE
        small = size <= _SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, small=small)
        block.free = False
        rest = block.size - size
        if rest >= GRANULE if small else rest > _SMALL:
            self._split(block, size)
        self._live[key] = block

    def free(self, key: int) -> None:
        """Free a tensor's block; unknown keys belong to empty tensors."""
        block = self._live.pop(key, None)
        if block is None:
            return
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
        if block.previous is not None and block.previous.free:
            previous = block.previous
            block.size += previous.size
            block.previous = previous.previous
            if block.previous is not None:
                block.previous.next = block
        if block.next is not None and block.next.free:
            following = block.next
            block.size += following.size
            block.next = following.next
            if block.next is not None:
                block.next.previous = block
        self._remember(block)

    def _segment(self, size: int, *, small: bool) -> _Block:
        if small:
            length = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _ROUND) * _ROUND
        self.reserved_bytes += length
        return _Block(length, small=small)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, small=block.small)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.size, block.next = size, rest
        self._remember(rest)

    def _remember(self, block: _Block) -> None:
        self._order += 1
        insort(self._free[block.small], (block.size, self._order, block))
        block.order = self._order

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.order))]


Events = Sequence[tuple[int, int]]
"""(key, size) allocates, (key, -1) frees."""


def reserved_by_training(events: Events, state: slice, update: int) -> int:
    """Return the reserved bytes after the events of a step ran twice; the second run reuses the blocks of the first.

    Args:
        events: Events of a step.
        state: Events of the optimizer's state, which precede the passes.
        update: Number of events before the update.
    """
    return _reserved_by_steps([events, events], state, update)


_STEPS = 60
"""Replayed steps of many lengths; after 40 to 50 of them reserved memory grew no more."""


def reserved_by_lengths(whole: Events, half: Events, state: slice, update: int) -> int:
    """Return the reserved bytes after steps of many lengths, the last of them the longest.

    A tensor of one length does not fit the free blocks that one of another length has left, so more segments are
    needed. Lengths are uniform at random. Sizes follow a power of the length through those of two lengths: 0 for
    weights, 1 for activations, 2 for scores of attention.

    Args:
        whole: Events of a step of the greatest length.
        half: Events of a step of half this length, with the same keys.
        state: Events of the optimizer's state, which precede the passes.
        update: Number of events before the update.
    """
    lengths = random.Random(0)  # noqa: S311
    shares = (*(lengths.random() for _ in range(_STEPS - 1)), 1.0)
    return _reserved_by_steps((events_at(share, whole, half) for share in shares), state, update)


def events_at(share: float, whole: Events, half: Events) -> Events:
    """Return the events of a step whose length is a share of the greatest one's; see `reserved_by_lengths`."""
    short = dict(event for event in half if event[1] >= 0)
    return [(key, size if size <= 0 else int(size * share ** log2(size / short[key]))) for key, size in whole]


def _reserved_by_steps(steps: Iterable[Events], state: slice, update: int) -> int:
    """Return the reserved bytes after steps with the same keys.

    The optimizer allocates its state in the update of the first step, from blocks that its passes have freed: the
    second step finds them in pieces, and needs new segments for its largest tensors. Weights and optimizer state
    outlive the first step and exist when the others run.
    """
    allocator = CachingAllocator()
    freed: set[int] = set()
    for number, events in enumerate(steps):
        if number == 0:
            freed = {key for key, size in events if size < 0}
            allocator.replay(chain(events[: state.start], events[state.stop : update], events[state], events[update:]))
        else:
            allocator.replay(event for event in events if event[0] in freed)
    return allocator.reserved_bytes
