"""The replay of CUDA's caching allocator, on sequences whose answer follows from its rules."""

from carpool_predictor.tracing.allocator import CachingAllocator, reserved_after
from hypothesis import given, settings
from hypothesis import strategies as st

MIB = 1 << 20


def test_small_tensors_share_a_segment_of_two_mib() -> None:
    assert reserved_after([(1, 100), (2, 500_000), (3, 1_000_000)]) == 2 * MIB


def test_medium_tensors_share_a_segment_of_twenty_mib() -> None:
    assert reserved_after([(1, 5 * MIB), (2, 5 * MIB), (3, 9 * MIB)]) == 20 * MIB


def test_a_large_tensor_gets_a_segment_rounded_to_two_mib() -> None:
    assert reserved_after([(1, 11 * MIB)]) == 12 * MIB


def test_a_released_block_is_used_again() -> None:
    assert reserved_after([(1, 40 * MIB), (1, -1), (2, 30 * MIB), (3, 9 * MIB)]) == 40 * MIB


def test_neighbours_merge() -> None:
    halves = [(1, 40 * MIB), (1, -1), (2, 20 * MIB), (3, 20 * MIB), (2, -1), (3, -1)]
    assert reserved_after([*halves, (4, 40 * MIB)]) == 40 * MIB


def test_fragments_are_held_though_they_fit_nobody() -> None:
    assert reserved_after([(1, 30 * MIB), (2, 30 * MIB), (1, -1), (2, -1), (3, 60 * MIB)]) == 120 * MIB


def test_nothing_and_the_unknown_are_free() -> None:
    assert reserved_after([(1, 0), (1, -1), (7, -1)]) == 0


@settings(deadline=None)  # wall clock says nothing on a machine with other work
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60))
def test_what_is_live_is_always_reserved_and_freeing_all_leaves_whole_segments(steps: list[tuple[bool, int]]) -> None:
    allocator, live, number = CachingAllocator(), {}, 0
    for release, size in steps:
        if release and live:
            key = next(iter(live))
            allocator.free(key)
            del live[key]
        else:
            number += 1
            allocator.allocate(number, size)
            live[number] = size
        assert sum(live.values()) <= allocator.reserved_bytes
    before = allocator.reserved_bytes
    for key in live:
        allocator.free(key)
    assert sum(block.size for pool in allocator._free.values() for _, _, block in pool) == before
