"""Several workers, and several GPUs of one: all places before the first, and NVLink where there is some."""

from dataclasses import replace

import pytest
from carpool_core.values import RequestedMode, SharingMode
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.gang import gang_refusal, max_workers, place_gang
from carpool_extender.framework.scores import MAX_SCORE, SchedulerConfig, find_policy
from carpool_extender.framework.selection import EvaluationCache, filter_nodes, place_on_node, score_nodes
from carpool_extender.testing import cluster, demand, device, gpu_node, pod_request, prediction, tenant
from evaluations import RULES, evaluate

ALONE = RequestedMode.EXCLUSIVE


def refusal(found, workers, *, rules=RULES, **wants):
    """Return the message if so many workers do not fit at once; None if they do."""
    cached = EvaluationCache(found, rules).of(PodRequest(demand("new", **wants), workers=workers))
    places = place_gang(cached, workers)
    assert (places is not None) == (max_workers(cached, workers) == workers)
    return None if places is not None else gang_refusal(cached, workers, "default/new")


def linked(node, *groups):
    """A node of GPUs whose groups are linked."""
    devices = [
        device(i, node, nvlink_peers=[f"GPU-{node}-{j}" for j in group if j != i]) for group in groups for i in group
    ]
    return gpu_node(node, sorted(devices, key=lambda one: one.index))


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        pytest.param(3, None, id="a GPU for each"),
        pytest.param(
            4,
            "4 workers of 1 GPU at once, there is room for 3, and for 3 at most if all GPUs were empty",
            id="one too many",
        ),
    ],
)
def test_no_worker_starts_before_all_can(workers, found):
    told = refusal(cluster(gpu_node("a", 2), gpu_node("b", 1)), workers, mode=ALONE)
    assert told == (
        None if found is None else f"NoGpuFits: job default/new needs places for {found}; none starts before all can"
    )


def test_workers_of_a_job_may_share_a_gpu():
    alone = cluster(gpu_node("a", 1))
    light = prediction(memory_mib=4000, util=20, sm=0.1, dram=0.1)
    assert refusal(alone, 4, prediction=light) is None
    heavy = prediction(memory_mib=4000, util=100, sm=0.9)
    assert "there is room for 1;" in refusal(alone, 4, prediction=heavy)
    assert "9 workers of 1 GPU at once, there is room for 8, and for 8 at most if all" in refusal(
        alone, 9, prediction=light
    )


def test_refusal_of_a_large_gang_names_the_exact_number_of_places():
    """Regression: beyond 128 workers memory and slots were counted, so that jobs began of which most could not."""
    wide = cluster(gpu_node("a", 16))
    light = prediction(memory_mib=100, util=1, sm=0.01)
    heavy = prediction(memory_mib=400, util=100, sm=0.9)
    assert refusal(wide, 128, prediction=light) is None
    assert "there is room for 128, and" in refusal(wide, 129, prediction=light)
    assert "there is room for 16, and" in refusal(wide, 129, mode=ALONE)
    assert "there is room for 16, and" in refusal(wide, 129, prediction=heavy)
    wider = cluster(*(gpu_node(f"n{number}", 8) for number in range(17)))
    assert "there is room for 136;" in refusal(wider, 137, prediction=heavy)
    assert refusal(wider, 136, prediction=heavy) is None


def test_no_more_jobs_count_on_a_gpu_than_the_site_allows():
    """Regression: memory and slots alone had room for 16, where the site allows two jobs on a GPU."""
    rules = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(max_jobs=2))
    small = prediction(memory_mib=100, util=1, sm=0.01)
    found = refusal(cluster(gpu_node("a", 2)), 20, rules=rules, prediction=small)
    assert "there is room for 4, and for 4 at most if" in found


def test_workers_that_are_spread_share_no_gpu():
    spread = replace(RULES, spread_workers=True)
    small = prediction(memory_mib=100, util=1, sm=0.01)
    assert refusal(cluster(gpu_node("a", 2)), 2, rules=spread, prediction=small) is None
    assert "room for 2" in refusal(cluster(gpu_node("a", 2)), 3, rules=spread, prediction=small)


def test_claims_count_as_tenants():
    """Regression: workers were placed beside written reservations only, so a gang began that could not end."""
    found = cluster(gpu_node("a", 2))
    wants = {"prediction": prediction(memory_mib=4000, util=40, sm=0.5)}
    assert refusal(found, 8, **wants) is None
    found.assume("a", tenant("other", ["GPU-a-0"], **wants))
    assert refusal(found, 7, **wants) is None
    assert "there is room for 7" in refusal(found, 8, **wants)


def test_workers_of_several_gpus_need_them_on_one_node_each():
    apart = cluster(gpu_node("a", 3), gpu_node("b", 3))
    assert refusal(apart, 2, gpus=2, mode=ALONE) is None
    assert "3 workers of 2 GPUs at once, there is room for 2, and" in refusal(apart, 3, gpus=2, mode=ALONE)
    single = cluster(*(gpu_node(name, 1) for name in "abcdef"))
    assert "2 workers of 2 GPUs at once, there is room for 0, and" in refusal(single, 2, gpus=2, mode=ALONE)


def test_a_worker_gets_gpus_that_are_linked_though_others_are_as_good():
    node = linked("a", [0], [1, 3], [2])
    assert place_on_node(evaluate(node, pod_request(gpus=2)), "a").gpu_uuids == ["GPU-a-1", "GPU-a-3"]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param([], [0, 1], id="the first of equals"),
        pytest.param([(2, 4000), (3, 4000)], [2, 3], id="those in use, so that whole ones stay free"),
        pytest.param([(0, 4000), (1, 4000), (2, 9000), (3, 9000)], [2, 3], id="those with the least left over"),
    ],
)
def test_of_islands_that_are_as_good_one_is_taken_as_of_single_gpus(held, expected):
    """Regression: costs within a policy's tolerance were ties of GPUs, and none of islands."""
    island = linked("a", [0, 1], [2, 3])
    busy = {"prediction": prediction(memory_mib=1, util=20, sm=0.1, dram=0.1), "max_slowdown": 9}
    tenants = [
        tenant(f"t{gpu}", [f"GPU-a-{gpu}"], SharingMode.TIME_SLICING, **busy, memory_limit_mib=memory)
        for gpu, memory in held
    ]
    node = gpu_node("a", island.status.devices, tenants)
    wants = pod_request(gpus=2, prediction=prediction(util=5, sm=0.01))
    found = evaluate(node, wants)
    assert place_on_node(found, "a").gpu_uuids == [f"GPU-a-{gpu}" for gpu in expected]
    if len(held) == 2:
        assert 0.0 < found.evaluation.results.added_slowdown[2] <= RULES.policy.tolerance


def test_a_node_with_linked_gpus_scores_best_and_others_do_where_there_is_none():
    known = cluster(gpu_node("plain", 2), linked("fast", [0, 1]))
    found = evaluate(known, pod_request(gpus=2))
    plain, fast = score_nodes(found, ["plain", "fast"]).tolist()
    assert fast == MAX_SCORE > plain
    assert filter_nodes(found, ["plain", "fast"]).fits == ["fast", "plain"]
    assert score_nodes(evaluate(gpu_node("plain", 2), pod_request(gpus=2)), ["plain"]) == [MAX_SCORE]


def test_gpus_that_are_not_linked_do_where_an_island_is_too_small():
    node = linked("a", [0, 1], [2, 3])
    assert len(place_on_node(evaluate(node, pod_request(gpus=3)), "a").gpu_uuids) == 3
