"""Step times at a place, and the ranking of places by the functions that the extender chooses with."""

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_extender.explain.dry_run import MAX_RANKED_LINES, ranking, ranking_lines, step_time_at
from carpool_extender.framework.scores import POLICIES, Policy, SchedulerConfig, Score, find_policy
from carpool_extender.framework.selection import CachedEvaluation, best_place
from carpool_extender.testing import A100, T4, cluster, demand, device, gpu_node, pod_request, prediction, tenant
from evaluations import LAYOUTS, nodes_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

MPS, TURNS = SharingMode.MPS, SharingMode.TIME_SLICING
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5), "max_slowdown": 9.0}
LINKED = [device(i, "a", nvlink_peers=[f"GPU-a-{1 - i}"]) for i in range(2)]
STEPS_S = {A100: 0.041, T4: 0.7}


def by_product():
    """A prediction whose step times differ between products."""
    found = prediction()
    times = {p.product: replace(p.step_time_seconds, median=STEPS_S[p.product]) for p in found.products}
    return replace(found, products=[replace(p, step_time_seconds=times[p.product]) for p in found.products])


@pytest.mark.parametrize(
    ("products", "gpus", "mode", "slowdown", "steps", "expected"),
    [
        pytest.param([A100], [0], MPS, 1.0, 35_000, "about 41 ms there, 35,000 steps 24 min", id="alone"),
        pytest.param([A100], [0], MPS, 1.5, 35_000, "about 62 ms there, 35,000 steps 36 min", id="slowed"),
        pytest.param([A100], [0], MPS, 1.0, 1, "about 41 ms there, 1 step 41 ms", id="one step"),
        pytest.param([A100], [0], MPS, 1.0, None, "about 41 ms there", id="unknown steps"),
        pytest.param([T4], [0], MPS, 1.0, 35_000, "about 700 ms there, 35,000 steps 6.8 h", id="another product"),
        pytest.param([A100], [0], SharingMode.MIG, 1.0, 35_000, "", id="an instance: predictions are for whole GPUs"),
        pytest.param([A100, T4], [0, 1], MPS, 1.0, None, "about 700 ms there", id="the slowest of two"),
        pytest.param([A100, "NVIDIA L4"], [0, 1], MPS, 1.0, None, "", id="one of two without prediction"),
    ],
)
def test_step_time_is_that_of_the_slowest_product_times_the_slowdown(products, gpus, mode, slowdown, steps, expected):
    place = replace(tenant("x", [f"GPU-a-{i}" for i in gpus], mode), expected_slowdown=slowdown)
    devices = [*(device(i, product=product) for i, product in enumerate(products)), device(7, product=T4)]
    text = step_time_at(demand(prediction=by_product()), place, devices, steps)
    assert text == (expected and f" (a step takes {expected})")


def evaluated(found, policy="least-slowdown", **wants):
    return CachedEvaluation(pod_request(**wants), SchedulerConfig(find_policy(policy), slots=8), found.snapshot())


def ranked(found, policy="least-slowdown", **wants):
    return ranking_lines(evaluated(found, policy, **wants))


def held(name, node, mib, gpu=0):
    return tenant(name, [f"GPU-{node}-{gpu}"], memory_limit_mib=mib)


USED = [gpu_node("n", 3, [held("x", "n", 8000), held("y", "n", 20000, 1)]), gpu_node("m", 1)]
FIRST = "a tie, but the first place"


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        pytest.param(
            "most-available-memory",
            [
                "GPU 2 of n: 40,960 MiB unreserved",
                f"GPU 0 of m: 40,960 MiB unreserved; {FIRST} comes first in order",
                "GPU 0 of n: 32,960 MiB unreserved; 8,000 MiB less",
                "GPU 1 of n: 20,960 MiB unreserved; 20,000 MiB less",
            ],
            id="largest",
        ),
        pytest.param(
            "best-fit",
            [
                "GPU 1 of n: 16,960 MiB left over",
                "GPU 0 of n: 28,960 MiB left over; 12,000 MiB more",
                "GPU 2 of n and 1 GPU like it: 36,960 MiB left over; 20,000 MiB more",
            ],
            id="smallest, with equal places",
        ),
        pytest.param(
            "first-fit",
            [
                "GPU 0 of n: 0 before it in the order of the cluster",
                "GPU 1 of n: 1 before it in the order of the cluster; 1 more",
                "GPU 2 of n: 2 before it in the order of the cluster; 2 more",
                "GPU 0 of m: 3 before it in the order of the cluster; 3 more",
            ],
            id="order",
        ),
        pytest.param("exclusive", ["GPU 2 of n: the best", f"GPU 0 of m: {FIRST} comes first in order"], id="no score"),
    ],
)
def test_each_place_has_its_score_in_the_unit_of_the_policy_and_its_distance(policy, lines):
    head, *found = ranked(cluster(*USED), policy)
    assert head.startswith(f"places by {policy} ({find_policy(policy).meaning}")
    assert found == [f"  {number}. {line}" for number, line in enumerate(lines, start=1)]


def test_tie_has_its_reason():
    nodes = [
        gpu_node("idle", 1),
        gpu_node("used", 1, [held("x", "used", 8000)]),
        gpu_node("fuller", 1, [held("y", "fuller", 20000)]),
        gpu_node("busy", 1, [tenant("z", ["GPU-busy-0"], **BUSY)]),
    ]
    head, *lines = ranked(cluster(*nodes))
    assert head == "places by least-slowdown (least progress lost by all tenants together; within 0.02 is a tie):"
    assert lines[:3] == [
        "  1. GPU 0 of fuller: 0.00 of slowdown added",
        f"  2. GPU 0 of used: 0.00 of slowdown added; {FIRST} leaves 12,000 MiB less",
        f"  3. GPU 0 of idle: 0.00 of slowdown added; {FIRST} is in use, and idle GPUs stay free",
    ]
    assert lines[3].startswith("  4. GPU 0 of busy: 0.")
    assert lines[3].endswith(" more")


def test_places_further_behind_are_counted():
    nodes = [gpu_node(f"n{i}", 1, [held(f"x{i}", f"n{i}", 1000 * i)]) for i in range(1, MAX_RANKED_LINES + 4)]
    *lines, last = ranked(cluster(*nodes), "worst-fit")
    assert len(lines) == 1 + MAX_RANKED_LINES
    assert last == "  and 3 places more"


def test_several_gpus_are_ranked_by_node_and_linked_ones_come_first():
    head, *lines = ranked(cluster(gpu_node("b", 2), gpu_node("a", LINKED)), "best-fit", gpus=2)
    assert head == "places by best-fit (least memory left over; mean of its 2 GPUs):"
    assert lines == [
        "  1. GPUs 0, 1 of a: 36,960 MiB left over",
        "  2. GPUs 0, 1 of b: 36,960 MiB left over; not all linked by NVLink",
    ]


@pytest.mark.parametrize(
    ("costs", "large", "lines"),
    [
        pytest.param(
            {"GPU-m-0": 0.03, "GPU-n-0": 0.0, "GPU-n-1": 0.02},
            {},
            [
                "GPU 0 of m: 0.03 lost",
                f"GPU 1 of n: 0.02 lost; {FIRST} leaves 1,000 MiB less",
                f"GPU 0 of n: 0.00 lost; {FIRST} is in use, and idle GPUs stay free",
            ],
            id="the costlier one, which ties",
        ),
        pytest.param(
            {"GPU-m-0": 0.0, "GPU-n-0": 0.01, "GPU-n-1": 0.03},
            {"memory_mib": 81920},
            ["GPU 0 of m: 0.00 lost", "GPU 0 of n: 0.01 lost; a tie, but its node offers another GPU first"],
            id="not the one that would win a tie",
        ),
    ],
)
def test_ties_are_those_between_the_offers_of_nodes(costs, large, lines):
    """A node offers the readiest of its own ties, which may be a costlier GPU; nodes tie by their offers."""
    there = [] if large else [held("y", "m", 9000)]
    found = cluster(gpu_node("n", 2, [held("x", "n", 8000, 1)]), gpu_node("m", [device(0, "m", **large)], there))
    odd = Policy(
        "odd", "by a table", lambda evaluation, rows: np.array([costs[u] for u in evaluation.snapshot.gpus.uuid[rows]]),
        Score("{:.2f}".format, "lost"), tolerance=0.02,
    )  # fmt: skip
    cached = CachedEvaluation(pod_request(), SchedulerConfig(odd, slots=8), found.snapshot())
    expected = [f"  {number}. {line}" for number, line in enumerate(lines, start=1)]
    assert ranking_lines(cached)[1 : 1 + len(lines)] == expected


@pytest.mark.parametrize("policy", POLICIES)
@given(layout=LAYOUTS, wanted=st.integers(1, 3), util=st.integers(1, 100))
def test_first_place_is_the_one_that_the_extender_takes_and_others_follow_by_score(policy, layout, wanted, util):
    busy = prediction(util=util, sm=util / 100, dram=util / 200)
    nodes = nodes_of(layout, prediction=busy, max_slowdown=9)
    cached = evaluated(cluster(*nodes), policy, gpus=wanted, prediction=busy, max_slowdown=9)
    found, taken, lines = ranking(cached), best_place(cached, with_reason=False), ranking_lines(cached)
    assert (taken is None) == (not found) == (not lines)
    if taken is None:
        return
    columns = cached.evaluation.snapshot.gpus
    assert [columns.uuid[row] for row in found[0].rows] == taken[1].gpu_uuids
    behind = [one.cost for one in found[1:] if not one.is_tied and one.is_linked]
    assert behind == sorted(behind)
    assert len({one.rows for one in found}) == len(found)
    if wanted == 1:
        assert len(found) == int(cached.evaluation.ok.sum())
    assert "a tie" not in lines[1]
