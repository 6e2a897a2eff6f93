"""Why a place won, and by how much: the score of the best places, by the very functions that the extender goes by."""

import numpy as np
import pytest
from asking_world import OPTIONS, RULES, job_of, predicted, what_if
from carpool_core.testing.kube import FakeKube
from carpool_core.values import SharingMode
from carpool_extender.explain.dry_run import MAX_RANKED_LINES, ranking, ranking_lines
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import POLICIES, Policy, SchedulerConfig, Score, find_policy
from carpool_extender.framework.selection import best_place
from carpool_extender.testing import cluster, device, gpu_node, pod_request, prediction, seed_node, tenant
from hypothesis import given
from hypothesis import strategies as st

MPS, TURNS = SharingMode.MPS, SharingMode.TIME_SLICING
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5), "max_slowdown": 9.0}
LINKED = [device(i, "a", nvlink_peers=[f"GPU-a-{1 - i}"]) for i in range(2)]


def assessment_of(known, policy="least-slowdown", **wants):
    return CachedEvaluation(pod_request(**wants), SchedulerConfig(find_policy(policy), slots=8), known.snapshot())


def everywhere(cached_evaluation):
    return cached_evaluation.evaluation.snapshot.gpus.alive


def told(known, policy="least-slowdown", **wants):
    cached_evaluation = assessment_of(known, policy, **wants)
    return ranking_lines(cached_evaluation, everywhere(cached_evaluation))


def held(name, node, mib, gpu=0):
    return tenant(name, [f"GPU-{node}-{gpu}"], memory_limit_mib=mib)


USED = [gpu_node("n", 3, [held("x", "n", 8000), held("y", "n", 20000, 1)]), gpu_node("m", 1)]


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        pytest.param(
            "most-available-memory",
            [
                "  1. GPU 2 of n: 40,960 MiB promised to nobody",
                "  2. GPU 0 of m: 40,960 MiB promised to nobody; a tie, but the first place comes first in order",
                "  3. GPU 0 of n: 32,960 MiB promised to nobody; 8,000 MiB less",
                "  4. GPU 1 of n: 20,960 MiB promised to nobody; 20,000 MiB less",
            ],
            id="as much as possible",
        ),
        pytest.param(
            "best-fit",
            [
                "  1. GPU 1 of n: 16,960 MiB left over",
                "  2. GPU 0 of n: 28,960 MiB left over; 12,000 MiB more",
                "  3. GPU 2 of n and 1 GPU like it: 36,960 MiB left over; 20,000 MiB more",
            ],
            id="as little as possible, and some alike",
        ),
        pytest.param(
            "first-fit",
            [
                "  1. GPU 0 of n: 0 before it in the order of the cluster",
                "  2. GPU 1 of n: 1 before it in the order of the cluster; 1 more",
                "  3. GPU 2 of n: 2 before it in the order of the cluster; 2 more",
                "  4. GPU 0 of m: 3 before it in the order of the cluster; 3 more",
            ],
            id="an order",
        ),
        pytest.param(
            "exclusive",
            ["  1. GPU 2 of n: the best", "  2. GPU 0 of m: a tie, but the first place comes first in order"],
            id="nothing to choose by",
        ),
    ],
)
def test_each_place_tells_its_score_in_the_policys_unit_and_by_how_much_it_lost(policy, lines):
    head, *found = told(cluster(*USED), policy)
    assert head.startswith(f"places by {policy} ({find_policy(policy).meaning}")
    assert found == lines


def test_a_tie_says_by_what_it_was_decided():
    nodes = [
        gpu_node("idle", 1),
        gpu_node("used", 1, [held("x", "used", 8000)]),
        gpu_node("fuller", 1, [held("y", "fuller", 20000)]),
        gpu_node("busy", 1, [tenant("z", ["GPU-busy-0"], **BUSY)]),
    ]
    head, *lines = told(cluster(*nodes))
    assert head == ("places by least-slowdown (least progress lost by all tenants together; within 0.02 is a tie):")
    assert lines[:3] == [
        "  1. GPU 0 of fuller: 0.00 of slowdown added",
        "  2. GPU 0 of used: 0.00 of slowdown added; a tie, but the first place leaves 12,000 MiB less",
        "  3. GPU 0 of idle: 0.00 of slowdown added; a tie, but the first place is in use, and idle GPUs stay free",
    ]
    assert lines[3].startswith("  4. GPU 0 of busy: 0.")
    assert lines[3].endswith(" more")


def test_what_ranks_further_behind_is_counted():
    nodes = [gpu_node(f"n{i}", 1, [held(f"x{i}", f"n{i}", 1000 * i)]) for i in range(1, MAX_RANKED_LINES + 4)]
    *lines, last = told(cluster(*nodes), "worst-fit")
    assert len(lines) == 1 + MAX_RANKED_LINES
    assert last == "  and 3 places more"


def test_of_many_ties_those_that_were_lost_by_the_same_stand_on_one_line():
    """Otherwise a large cluster would tell of nothing but its first few ties."""
    used = [gpu_node(f"n{i}", 1, [held(f"x{i}", f"n{i}", 1000 * i)]) for i in range(1, 7)]
    busy = gpu_node("busy", 1, [tenant("z", ["GPU-busy-0"], **BUSY)])
    assert told(cluster(*used, gpu_node("idle", 2), busy))[1:4] == [
        "  1. GPU 0 of n6: 0.00 of slowdown added",
        "  2. GPU 0 of n5 and 4 GPUs more: a tie, but the first place leaves at least 1,000 MiB less",
        "  3. GPU 0 of idle and 1 GPU like it: 0.00 of slowdown added; a tie, but the first place is in use, and "
        "idle GPUs stay free",
    ]


def test_several_gpus_of_one_worker_rank_by_node_and_linked_ones_first():
    head, *lines = told(cluster(gpu_node("b", 2), gpu_node("a", LINKED)), "best-fit", gpus=2)
    assert head == "places by best-fit (least memory left over; mean of its 2 GPUs):"
    assert lines == [
        "  1. GPUs 0, 1 of a: 36,960 MiB left over",
        "  2. GPUs 0, 1 of b: 36,960 MiB left over; not all linked by NVLink",
    ]


def test_nothing_is_ranked_where_nothing_fits():
    assert told(cluster(gpu_node("a", 1)), memory_limit_mib=10**6) == []


def test_gpus_that_are_not_in_question_are_left_out():
    cached_evaluation = assessment_of(cluster(*USED), "most-available-memory")
    among = everywhere(cached_evaluation) & (np.arange(len(everywhere(cached_evaluation))) != 2)
    assert ranking_lines(cached_evaluation, among)[1].startswith("  1. GPU 0 of m")


@pytest.mark.parametrize(
    ("costs", "lines"),
    [
        pytest.param(
            {"GPU-m-0": 0.03, "GPU-n-0": 0.0, "GPU-n-1": 0.02},
            [
                "  1. GPU 0 of m: 0.03 lost",
                "  2. GPU 1 of n: 0.02 lost; a tie, but the first place leaves 1,000 MiB less",
                "  3. GPU 0 of n: 0.00 lost; a tie, but the first place is in use, and idle GPUs stay free",
            ],
            id="a tie of the dearer one that its node came with",
        ),
        pytest.param(
            {"GPU-m-0": 0.0, "GPU-n-0": 0.01, "GPU-n-1": 0.03},
            [
                "  1. GPU 0 of m: 0.00 lost",
                "  2. GPU 0 of n: 0.01 lost; a tie, but the first place is in use, and idle GPUs stay free",
                "  3. GPU 1 of n: 0.03 lost; 0.03 more",
            ],
            id="its node came with a dearer one, which is no tie",
        ),
    ],
)
def test_where_a_node_comes_with_the_dearer_of_its_gpus(costs, lines):
    """Each node comes with the readiest of its own ties; among the nodes' choices ties are looked for once more."""
    known = cluster(gpu_node("n", 2, [held("x", "n", 8000, 1)]), gpu_node("m", 1, [held("y", "m", 9000)]))
    odd = Policy(
        "odd", "as told", lambda evaluation, rows: np.array([costs[u] for u in evaluation.snapshot.gpus.uuid[rows]]),
        Score("{:.2f}".format, "lost"), tolerance=0.02,
    )  # fmt: skip
    cached_evaluation = CachedEvaluation(pod_request(), SchedulerConfig(odd, slots=8), known.snapshot())
    assert ranking_lines(cached_evaluation, everywhere(cached_evaluation))[1:] == lines


def test_a_gpu_that_its_node_did_not_come_with_can_have_won_no_tie():
    known = cluster(gpu_node("n", 2, [held("x", "n", 8000, 1)]), gpu_node("m", [device(0, "m", memory_mib=81920)]))
    costs = {"GPU-n-0": 0.01, "GPU-n-1": 0.03, "GPU-m-0": 0.0}
    odd = Policy(
        "odd", "as told", lambda evaluation, rows: np.array([costs[u] for u in evaluation.snapshot.gpus.uuid[rows]]),
        Score("{:.2f}".format, "lost"), tolerance=0.02,
    )  # fmt: skip
    cached_evaluation = CachedEvaluation(pod_request(), SchedulerConfig(odd, slots=8), known.snapshot())
    assert ranking_lines(cached_evaluation, everywhere(cached_evaluation))[1:3] == [
        "  1. GPU 0 of m: 0.00 lost",
        "  2. GPU 0 of n: 0.01 lost; a tie, but its node offers another GPU first",
    ]


gpus = st.lists(
    st.tuples(st.lists(st.integers(0, 30000), max_size=3), st.sampled_from([MPS, TURNS])), min_size=1, max_size=4
)


@pytest.mark.parametrize("policy", POLICIES)
@given(layout=st.lists(gpus, min_size=1, max_size=3), wanted=st.integers(1, 3), util=st.integers(1, 100))
def test_the_first_is_what_the_extender_takes_and_the_others_follow_by_their_scores(policy, layout, wanted, util):
    busy = prediction(util=util, sm=util / 100, dram=util / 200)
    nodes = [
        gpu_node(
            f"n{n}",
            len(row),
            [
                tenant(f"{n}-{g}-{t}", [f"GPU-n{n}-{g}"], mode, memory_limit_mib=m, prediction=busy, max_slowdown=9)
                for g, (tenants, mode) in enumerate(row)
                for t, m in enumerate(tenants)
            ],
        )
        for n, row in enumerate(layout)
    ]
    cached_evaluation = assessment_of(cluster(*nodes), policy, gpus=wanted, prediction=busy, max_slowdown=9)
    found, taken = (
        ranking(cached_evaluation, everywhere(cached_evaluation)),
        best_place(cached_evaluation, with_reason=False),
    )
    lines = ranking_lines(cached_evaluation, everywhere(cached_evaluation))
    assert (taken is None) == (not found) == (not lines)
    if taken is None:
        return
    columns = cached_evaluation.evaluation.snapshot.gpus
    assert [columns.uuid[row] for row in found[0].rows] == taken[1].gpu_uuids
    behind = [one.cost for one in found[1:] if not one.is_tied and one.is_linked]
    assert behind == sorted(behind)
    assert len({one.rows for one in found}) == len(found)
    if wanted == 1:
        assert len(found) == int(cached_evaluation.evaluation.ok.sum())
    assert sum(line.startswith("  1. ") for line in lines) == 1
    assert "a tie" not in lines[1]


async def test_what_if_tells_the_ranking_behind_the_place():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("y", ["GPU-a-0"])]))
    lines = (await what_if(kube, job_of(), RULES, predicted, OPTIONS)).lines
    assert lines[1].startswith("would go to a ")
    assert lines[2].startswith("places by least-slowdown (")
    assert lines[3] == "  1. GPU 0 of a: 0.00 of slowdown added"
    assert lines[4].startswith("  2. GPU 1 of a: 0.00 of slowdown added; a tie, but the first place is in use, ")
