"""The benchmarks of placement: what they are made on, what they count, and what they say."""

import os
import random
import subprocess
import time
from dataclasses import replace

import msgspec
import pytest
from carpool_core.resources.node import GpuNode
from carpool_e2e.bench.placement import (
    LIFE,
    NEW_EVERY,
    STEPS,
    WARM_UP,
    Decision,
    Profile,
    Round,
    Size,
    draw_jobs,
    filter_and_prioritize,
    percentile,
    placement_section,
    processor_s,
    profile,
    waited_ms,
)
from carpool_e2e.bench.world import Shape, draw_shape, world

PROFILE = Profile(5000, dict.fromkeys((*STEPS, LIFE), 0.25), dict.fromkeys((*STEPS, LIFE), 0.5))


def one_round(each_s: float, stolen: float = 0.0) -> Round:
    decisions = [Decision(each_s / 2, each_s / 2, each_s / 4, n % NEW_EVERY == 0) for n in range(100)]
    return Round(decisions, [each_s], 0.3, stolen)


def size(nodes: int, each_s: tuple[float, ...], resident_mib: float) -> Size:
    return Size(nodes, 6 * nodes, [one_round(s) for s in each_s], 0, resident_mib, "It rained.")


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


def test_a_bad_moment_of_the_machine_decides_nothing_and_is_told() -> None:
    rounds = [one_round(0.01), one_round(0.9, stolen=0.25), one_round(0.012)]
    found = Size(5000, 30000, rounds, 3, 330, "It rained.")
    assert found.typical(lambda one: waited_ms(one, 0.99)) == pytest.approx(12)
    assert found.span(lambda one: waited_ms(one, 0.99)) == pytest.approx((10, 900))
    told = "\n".join(placement_section([found], PROFILE))
    assert "3 at 5,000 nodes were left out" in told
    assert "12.0 (10.0 to 900.0)" in told
    assert "0% (0 to 25)" in told
    assert "| filter and prioritize, p99 | 12.0 ms | ≤ 15 ms, aimed at 8 ms | kept |" in told


def test_what_it_costs_to_look_after_those_that_wait_is_told() -> None:
    found = replace(size(5000, (0.02,), 330), behind=one_round(0.03).decisions)
    assert "p50 30.0 ms, p99 30.0 ms, 7.5 ms of processor" in "\n".join(placement_section([found], PROFILE))


def test_the_rest_of_a_decision_is_what_no_step_explains() -> None:
    told = "\n".join(placement_section([size(5000, (0.02,), 330)], PROFILE))
    steps = len(STEPS) * 0.25
    assert f"| the rest | {5 - steps:.2f} | {5 - 2 * steps:.2f} |" in told  # a round takes a quarter of 20 ms
    assert "| all | 5.00 | 5.00 |" in told


def test_each_step_of_a_decision_is_replayed() -> None:
    said: list[str] = []
    found = profile(said.append, nodes=40, decisions=20)
    assert said
    for of in (found.known_ms, found.new_ms):
        assert set(of) == {*STEPS, LIFE}
        assert all(took > 0 for took in of.values())


def test_one_job_in_so_many_has_a_shape_that_nobody_had_before() -> None:
    shapes, new = draw_jobs(random.Random(1), 40)  # noqa: S311  # no secret
    before = [shapes[:number] for number in range(len(shapes))]
    assert [shape not in known for shape, known in zip(shapes, before, strict=True)][WARM_UP:] == new[WARM_UP:]
    assert sum(new) == 40 // NEW_EVERY


def test_processor_time_is_that_of_the_process_and_counts_work_not_waiting() -> None:
    began, own = processor_s(os.getpid()), time.process_time()
    while time.process_time() - own < 0.02:
        pass
    assert 0.02 <= processor_s(os.getpid()) - began < 1.0
    with subprocess.Popen(["sleep", "9"]) as asleep:  # wherever it is
        assert processor_s(asleep.pid) < 0.5
        asleep.kill()


def test_the_section_says_what_is_kept_and_what_is_missed() -> None:
    told = "\n".join(placement_section([size(500, (0.002,), 90), size(5000, (0.02, 0.001, 0.03), 330)], PROFILE))
    assert "| filter and prioritize, p99 | 20.0 ms | ≤ 15 ms, aimed at 8 ms | missed |" in told
    assert "| decisions a second | 50 | ≥ 150, aimed at 300 | missed |" in told
    assert "It rained." in told
    assert "| memory | 330 MiB | ≤ 400 MiB | kept |" in told
    assert "| median with 10 times the nodes | 10.0 times | ≤ 10 | kept |" in told
    assert "measured elsewhere and not in this run" in told
