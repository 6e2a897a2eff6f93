"""The benchmarks of placement: what they are made on, and what they say; without measuring."""

import random

import msgspec
from carpool_core.resources.node import GpuNode
from carpool_e2e.bench.naive import filter_and_prioritize
from carpool_e2e.bench.placement import Decision, Size, percentile
from carpool_e2e.bench.placement_report import placement_section
from carpool_e2e.bench.world import Shape, draw_shape, world


def size(nodes: int, each_s: float, resident_mib: float) -> Size:
    decisions = [Decision(each_s / 2, each_s / 2, n % 10 == 0) for n in range(100)]
    return Size(nodes, 6 * nodes, decisions, 100 * each_s, 50 * each_s, [each_s], resident_mib, 0.3, "It rained.")


def test_the_paper_cluster_holds_what_it_says_and_promises_no_memory_twice() -> None:
    shapes = [draw_shape(random.Random(1)) for _ in range(3)]  # noqa: S311  # no secret
    made = world(20, 4, 60, shapes)
    assert sum(len(node.spec.reservations) for node in made.nodes) == 60
    assert (len(made.jobs), len(made.pods), len(made.waiting)) == (63, 60, 3)
    for node in made.nodes:
        assert msgspec.json.decode(msgspec.json.encode(node), type=GpuNode) == node
        for device in node.status.devices:
            here = [r for r in node.spec.reservations if device.uuid in r.gpu_uuids]
            assert len({r.mode for r in here}) <= 1
            assert sum(r.tenant.memory_mib or 0 for r in here) <= device.memory_mib - device.reserved_mib


def test_the_naive_loop_finds_places_and_none_for_what_is_too_large() -> None:
    made = world(20, 4, 60, [])
    fits, scores = filter_and_prioritize(made.nodes, Shape(4000, 0.3, 0.2, 0.2))
    assert set(fits) == set(scores)
    assert fits
    assert all(0 <= score <= 10 for score in scores.values())
    assert filter_and_prioritize(made.nodes, Shape(10**6, 0.3, 0.2, 0.2)) == ([], {})


def test_percentiles_are_values_that_were_found() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0] * 99 + [9.0], 0.99) == 9.0


def test_the_section_says_what_is_kept_and_what_is_missed() -> None:
    told = "\n".join(placement_section([size(500, 0.002, 90), size(5000, 0.02, 330)]))
    assert "| filter and prioritize, p99 | 20.0 ms | ≤ 15 ms, aimed at 8 ms | missed |" in told
    assert "| decisions a second | 50 | ≥ 150, aimed at 300 | missed |" in told
    assert "It rained." in told
    assert "| memory | 330 MiB | ≤ 400 MiB | kept |" in told
    assert "| median with 10 times the nodes | 10.0 times | ≤ 10 | kept |" in told
