"""Several workers, and several GPUs of one: all places before the first, and NVLink where there is some."""

import pytest
from carpool_core.values import RequestedMode, SharingMode
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.gang import gang_refusal, max_workers, place_gang
from carpool_extender.framework.scores import MAX_SCORE
from carpool_extender.framework.selection import EvaluationCache, filter_nodes, place_on_node, score_nodes
from carpool_extender.testing import cluster, demand, device, gpu_node, pod_request, prediction, tenant
from evaluations import RULES, evaluate
from msgspec.structs import replace

ALONE = RequestedMode.EXCLUSIVE


def refusal(found, workers, *, rules=RULES, **wants):
    """Return the message if so many workers do not fit at once; None if they do."""
    cached = EvaluationCache(found, rules).of(PodRequest(demand("new", **wants), workers=workers))
    places = place_gang(cached, workers)
    assert (places is not None) == (max_workers(cached) >= workers)
    return None if places is not None else gang_refusal(cached, workers, "default/new")


def linked(node, *groups):
    """A node of GPUs whose groups are linked."""
    devices = [
        device(i, node, nvlink_peers=[f"GPU-{node}-{j}" for j in group if j != i]) for group in groups for i in group
    ]
    return gpu_node(node, sorted(devices, key=lambda one: one.index))


def test_no_worker_starts_before_all_can():
    found = cluster(gpu_node("a", 2), gpu_node("b", 1))
    assert refusal(found, 3, mode=ALONE) is None
    room = "4 workers of 1 GPU at once, there is room for 3, and for 3 at most if all GPUs were empty"
    expected = f"NoGpuFits: job default/new needs places for {room}; none starts before all can"
    assert refusal(found, 4, mode=ALONE) == expected


def test_a_worker_gets_no_gpu_of_another_worker_from_filter_bind_and_queue():
    small = prediction(memory_mib=100, util=1, sm=0.01)
    found = cluster(gpu_node("a", 2, [tenant("x", ["GPU-a-0"], prediction=small)]), gpu_node("b", 1))
    cached = evaluate(found, pod_request(prediction=small))
    among = found.without_workers("job-x", ["pod-other"])
    assert place_on_node(cached, "a", among).gpu_uuids == ["GPU-a-1"]
    found.assume("b", replace(tenant("x", ["GPU-b-0"], prediction=small), pod_uid="pod-x-1"))
    cached, among = evaluate(found, pod_request(prediction=small)), found.without_workers("job-x", ["pod-other"])
    refused = "NoGpuFits: each GPU that would do has another worker of the job"
    assert place_on_node(cached, "b", among) == refused
    assert filter_nodes(cached, ["a", "b"], among=among).fits == ["a"]
    assert filter_nodes(cached, ["b"], among=among).refused == {"b": refused}
    assert [place.placement.gpu_uuids for place in place_gang(cached, 1, among)] == [["GPU-a-1"]]
    assert place_gang(cached, 2, among) is None


def test_claims_count_as_tenants():
    """Regression: workers were placed beside written reservations only, so a gang began that could not end."""
    found = cluster(gpu_node("a", 2))
    assert refusal(found, 2, mode=ALONE) is None
    found.assume("a", tenant("other", ["GPU-a-0"]))
    assert "there is room for 1" in refusal(found, 2, mode=ALONE)


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
