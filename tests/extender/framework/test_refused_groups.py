"""Sentences about several GPUs: which one they tell of, and whether it stands for all."""

import pytest
from carpool_core.values import SharingMode
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.gang import infeasible_when_empty
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import filter_nodes
from carpool_extender.testing import cluster, device, gpu_node, pod_request, prediction, tenant

MPS, TURNS = SharingMode.MPS, SharingMode.TIME_SLICING
RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}


def test_of_several_gpus_the_one_that_came_closest_is_the_example():
    busy = [tenant(f"y{i}", [f"GPU-a-{i}"], **BUSY, max_slowdown=limit) for i, limit in enumerate((1.1, 1.8, 1.2))]
    found = filter_nodes(
        CachedEvaluation(pod_request(**BUSY, max_slowdown=5), RULES, cluster(gpu_node("a", 3, busy)).snapshot()), ["a"]
    )
    assert found.refused == {"a": "NoGpuFits: 3 GPUs: at best would slow default/y1 to 1.90 of 1.80"}


def told_of(*nodes, **wants):
    names = [node.metadata.name for node in nodes]
    found = filter_nodes(CachedEvaluation(pod_request(**wants), RULES, cluster(*nodes).snapshot()), names)
    (told,) = {*found.refused.values(), *found.unsuitable.values()}
    return told


def test_where_others_are_out_for_something_else_one_is_an_example():
    """Regression: what was wrong with one node, or whose one GPU was, was said of all."""
    sick = [gpu_node(name, [device(0, name, health="Unhealthy", health_message=f"Xid {name}")]) for name in "ab"]
    assert told_of(*sick) == "NoGpuFits: 2 nodes: for example unhealthy: Xid a"
    alike = [gpu_node(name, [device(0, name, health="Unhealthy", health_message="Xid")]) for name in "ab"]
    assert told_of(*alike) == "NoGpuFits: 2 nodes: unhealthy: Xid"
    others = [tenant(f"y{i}", [f"GPU-a-{i}"], namespace=name) for i, name in enumerate(("alpha", "beta"))]
    assert "2 GPUs: for example its MPS server belongs to namespace alpha" in told_of(gpu_node("a", 2, others))
    same = [tenant(f"y{i}", [f"GPU-a-{i}"], namespace="alpha") for i in range(2)]
    assert "2 GPUs: its MPS server belongs to namespace alpha" in told_of(gpu_node("a", 2, same))


STRICT = AdmissionLimits(max_sm_active=0.2, min_free_mib=40000, max_jobs=1)
HARD = {"prediction": prediction(util=100, sm=1.0), "max_slowdown": 5}


@pytest.mark.parametrize(
    ("held", "conditions", "said"),
    [
        pytest.param(
            [([i], {"prediction": prediction(util=40, sm=sm)}) for i, sm in enumerate((0.6, 0.3, 0.9))],
            AdmissionLimits(max_sm_active=0.2),
            "3 GPUs: at best SM activity 0.30, the site's limit is 0.20",
            id="busier",
        ),
        pytest.param(
            [([i], {"prediction": prediction(util=40, sm=0.3)}) for i in range(2)],
            AdmissionLimits(max_sm_active=0.2),
            "2 GPUs: SM activity 0.30, the site's limit is 0.20",
            id="all as busy",
        ),
        pytest.param(
            [([i], {"memory_limit_mib": 1000 + 1000 * i}) for i in range(2)],
            AdmissionLimits(min_free_mib=40000),
            "2 GPUs: at best free memory 39,960 MiB, the site's limit is 40,000 MiB",
            id="less free",
        ),
        pytest.param(
            [([i], {"prediction": prediction(util=40, sm=sm)}) for i, sm in enumerate((0.5, 0.05))],
            AdmissionLimits(max_sm_active=0.2, max_jobs=1),
            "2 GPUs: for example jobs on a GPU 2, the site's limit is 1",
            id="each for another reason",
        ),
        pytest.param(
            [([i], {"memory_limit_mib": 1000 + 1000 * i}) for i in range(2)],
            AdmissionLimits(min_free_mib=10000, max_jobs=1),
            "2 GPUs: jobs on a GPU 2, the site's limit is 1",
            id="less free, and nobody asked for that",
        ),
        pytest.param(
            [([0], {"memory_limit_mib": 1000, "prediction": prediction(util=40, sm=0.3)})],
            STRICT,
            "1 GPU: SM activity 0.30, the site's limit is 0.20 and free memory 39,960 MiB, the site's limit is 40,000 "
            "MiB and jobs on a GPU 2, the site's limit is 1",
            id="one",
        ),
        pytest.param(
            [([i], HARD | {"max_slowdown": 1.1}) for i in range(2)],
            AdmissionLimits(),
            "2 GPUs: at best would slow default/y0 to 2.00 of 1.10",
            id="as slow, others",
        ),
        pytest.param(
            [([0, 1], HARD | {"max_slowdown": 1.1})],
            AdmissionLimits(),
            "2 GPUs: would slow default/y0 to 2.00 of 1.10",
            id="as slow, the same",
        ),
    ],
)
def test_a_number_of_the_closest_is_told_as_that_where_others_differ(held, conditions, said):
    """Regression: `7 GPUs: 80,351 MiB free` was said of GPUs of which one had that."""
    there = [
        tenant(f"y{i}", [f"GPU-a-{gpu}" for gpu in gpus], TURNS if len(gpus) > 1 else MPS, **changes)
        for i, (gpus, changes) in enumerate(held)
    ]
    gpus = sum(len(of) for of, _ in held)
    known, rules = cluster(gpu_node("a", gpus, there)), SchedulerConfig(find_policy("least-slowdown"), 8, conditions)
    found = filter_nodes(CachedEvaluation(pod_request(**HARD), rules, known.snapshot()), ["a"])
    assert found.refused == {"a": f"NoGpuFits: {said}"}


@pytest.mark.parametrize(("least_mib", "hopes"), [(40960, True), (40961, False)])
def test_no_gpu_ever_meets_a_precondition_on_memory_that_it_does_not_have(least_mib, hopes):
    """Regression: a job was told to wait for GPUs to become as free as none of the cluster can be."""
    known = cluster(gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    rules = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(min_free_mib=least_mib))
    assert (
        infeasible_when_empty(CachedEvaluation(pod_request(), rules, known.snapshot()).evaluation, 8, 1) is None
    ) is hopes
    found = filter_nodes(CachedEvaluation(pod_request(), rules, known.snapshot()), ["a"])
    assert (bool(found.refused), bool(found.unsuitable)) == (hopes, not hopes)
