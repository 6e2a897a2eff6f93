"""An evaluation that is updated after changes equals a new one."""

import numpy as np
import pytest
from carpool_core.values import Tenancy
from carpool_extender.framework.scores import POLICIES, SchedulerConfig, find_policy
from carpool_extender.framework.selection import (
    FEW,
    MAX_CANDIDATES,
    MAX_ENTRIES,
    SPARE,
    EvaluationCache,
    filter_nodes,
    place_on_node,
    score_nodes,
)
from carpool_extender.testing import cluster, gpu_node, pod_request, prediction, tenant
from evaluations import evaluate
from hypothesis import given
from hypothesis import strategies as st

NAMES = list("abcd")


def fit(policy="least-slowdown"):
    return SchedulerConfig(find_policy(policy), slots=8)


def results(found):
    return found.fits, found.refused, found.unsuitable


def a_node(name, gpus, held):
    tenants = [
        tenant(f"{name}-{i}", [f"GPU-{name}-{gpu}"], memory_limit_mib=memory, namespace=space, tenancy=Tenancy.CLUSTER)
        for i, (gpu, memory, space) in enumerate(held)
        if gpu < gpus
    ]
    return gpu_node(name, gpus, tenants)


nodes = st.builds(
    a_node,
    st.sampled_from(NAMES),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30000), st.sampled_from(["default", "other"])), max_size=4),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=st.lists(st.one_of(nodes, st.sampled_from(NAMES)), max_size=12), gpus=st.integers(1, 2))
def test_following_equals_beginning_anew(policy, steps, gpus):
    known, rules = cluster(slots=2), fit(policy)
    following, newcomer = EvaluationCache(known, rules), pod_request(gpus=gpus, prediction=prediction(util=80, sm=0.6))
    for step in steps:
        if isinstance(step, str):
            known.remove(step)
        else:
            known.apply(step)
        mine, fresh = following.of(newcomer), evaluate(known, newcomer, rules)
        assert results(filter_nodes(mine, NAMES)) == results(filter_nodes(fresh, NAMES))
        assert score_nodes(mine, NAMES).tolist() == score_nodes(fresh, NAMES).tolist()
        assert [place_on_node(mine, name) for name in NAMES] == [place_on_node(fresh, name) for name in NAMES]


def test_jobs_of_the_same_shape_share_an_assessment_and_others_do_not():
    following = EvaluationCache(cluster(gpu_node("a", 1)), fit())
    first = following.of(pod_request("one"))
    assert following.of(pod_request("two")) is first
    assert following.of(pod_request("two", max_slowdown=1.2)) is not first
    for i in range(MAX_ENTRIES):
        following.of(pod_request("x", min_memory_mib=i + 1))
    assert following.of(pod_request("one")) is not first


def test_many_nodes_that_do_not_fit_get_no_reason_if_another_fits():
    full = [gpu_node(f"n{i}", 1, [tenant(f"t{i}", [f"GPU-n{i}-0"], memory_limit_mib=40000)]) for i in range(101)]
    names = ["a", *(node.metadata.name for node in full)]
    found = filter_nodes(evaluate(cluster(gpu_node("a", 1), *full)), names)
    assert (found.fits, found.refused, found.unsuitable) == (["a"], {}, {})
    few = filter_nodes(evaluate(cluster(gpu_node("a", 1), *full)), names[:FEW])
    assert few.refused.keys() == set(names[1:FEW])
    found = filter_nodes(evaluate(cluster(*full)), names[1:])
    assert "960 MiB free" in found.refused["n0"]


@pytest.mark.parametrize("unoffered", [0, 5, SPARE + MAX_CANDIDATES // 2])
def test_best_of_many_nodes_that_fit_are_returned_best_first(unoffered):
    empty = [gpu_node(f"n{i}", 1) for i in range(4 * MAX_CANDIDATES)]
    taken = [tenant("t", [f"GPU-used-{i}"], memory_limit_mib=4000 * i) for i in (1, 2)]
    full = tenant("f", ["GPU-full-0"], memory_limit_mib=40000)
    known = cluster(*empty, gpu_node("used", 3, taken), gpu_node("full", 1, [full]))
    names = ["full", *(node.metadata.name for node in empty[unoffered:]), "used"]
    found = evaluate(known)
    all_of_them, fits = score_nodes(found, names).tolist(), filter_nodes(found, names).fits
    assert len(fits) == MAX_CANDIDATES
    assert fits[0] == "used"
    assert set(fits) < set(names) - {"full"}
    assert score_nodes(found, fits).tolist()[0] == all_of_them[names.index("used")] == 10


def test_unknown_node_fits_no_pod():
    found = evaluate(gpu_node("a", 1))
    assert filter_nodes(found, ["z"]).unsuitable.keys() == {"z"}
    assert score_nodes(found, ["z", "a"]).tolist() == [0, 10]
    assert place_on_node(found, "z") == "NoGpuFits: no node offered reports GPUs; is the node agent running there?"
    empty = evaluate(cluster())
    assert filter_nodes(empty, ["z"]).fits == []
    assert np.array_equal(score_nodes(empty, []), [])
