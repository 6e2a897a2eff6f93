"""For how many workers there is room at once: as many as find a place one after the other."""

import pytest
from carpool_core.values import RequestedMode, SharingMode, Tenancy
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.gang import infeasible_when_empty, max_workers, max_workers_when_empty, place_workers
from carpool_extender.framework.scores import POLICIES, SchedulerConfig, find_policy
from carpool_extender.testing import A100, T4, cluster, demand, device, gpu_node, prediction, tenant
from evaluations import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st

EXCLUSIVE, TURNS, MPS, MIG = SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS, SharingMode.MIG
KINDS = st.sampled_from([(EXCLUSIVE, TURNS, MPS), (EXCLUSIVE, TURNS), (EXCLUSIVE,), (EXCLUSIVE, TURNS, MPS, MIG)])
PROFILES = ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]
WORK = st.builds(
    prediction,
    memory_mib=st.sampled_from([500, 5000, 14_000]),
    util=st.sampled_from([5, 50, 95]),
    sm=st.sampled_from([0.05, 0.3, 0.9]),
    unenforced_mib=st.sampled_from([0, 9000]),
)
SITES = st.sampled_from(
    [
        AdmissionLimits(),
        AdmissionLimits(max_jobs=2),
        AdmissionLimits(max_joint_sm_active=0.8),
        AdmissionLimits(min_free_mib=5000),
    ]
)


@st.composite
def a_node(draw, name):
    """A node of a few GPUs, some of which have tenants."""
    devices, held = [], []
    for index in range(draw(st.integers(1, 5))):
        modes, product = draw(KINDS), draw(st.sampled_from([A100, T4]))
        profiles = PROFILES if MIG in modes else []
        devices.append(device(index, name, product=product, modes=list(modes), mig_profiles=profiles))
        mode = draw(st.sampled_from([None, None, *(mode for mode in modes if mode is not MIG)]))
        tenants = 0 if mode is None else 1 if mode is EXCLUSIVE else draw(st.integers(1, 3))
        held += [
            tenant(
                f"{name}-{index}-{number}",
                [devices[-1].uuid],
                mode,
                product=product,
                namespace=draw(st.sampled_from(["default", "default", "other"])),
                prediction=draw(WORK),
                max_slowdown=draw(st.sampled_from([1.1, 1.5, 3.0])),
            )
            for number in range(tenants)
        ]
    return gpu_node(name, devices, held)


@st.composite
def a_case(draw):
    """Some nodes, what a site has chosen, and a job of several workers."""
    nodes = [draw(a_node(name)) for name in "abcd"[: draw(st.integers(1, 4))]]
    rules = SchedulerConfig(
        find_policy(draw(st.sampled_from(sorted(POLICIES)))), draw(st.sampled_from([2, 8])), draw(SITES)
    )
    asked = demand(
        "new",
        gpus=draw(st.sampled_from([1, 1, 2, 3])),
        prediction=draw(st.one_of(st.none(), WORK)),
        max_slowdown=draw(st.sampled_from([1.1, 1.5, 5.0])),
        mode=draw(st.sampled_from([RequestedMode.AUTO, RequestedMode.AUTO, *RequestedMode])),
        tenancy=draw(st.sampled_from(Tenancy)),
    )
    user = draw(st.sampled_from([None, 1000]))
    return (
        nodes,
        rules,
        PodRequest(asked, workers=draw(st.integers(2, 20)), user=user, may_use_measured_peak=draw(st.booleans())),
    )


@settings(max_examples=300, deadline=None)
@given(case=a_case())
def test_there_is_room_for_as_many_as_find_a_place_one_after_the_other(case):
    nodes, rules, pod_request = case
    cached = evaluate(cluster(*nodes, slots=rules.slots), pod_request, rules)
    fits = max_workers(cached)
    found = place_workers(evaluate(cluster(*nodes, slots=rules.slots), pod_request, rules), pod_request.workers)
    assert min(fits, pod_request.workers) == len(found)
    taken = [gpu for _, place in found for gpu in place.gpu_uuids]
    assert len(taken) == len(set(taken))
    assert fits <= max_workers_when_empty(cached.evaluation)
    assert fits < pod_request.workers or infeasible_when_empty(cached.evaluation, pod_request.workers) is None


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_best_places_come_first(gpus):
    """Those that the job would get: on GPUs that are in use, by the policy."""
    used = [tenant("y", ["GPU-c-0", "GPU-c-1"], TURNS, prediction=prediction(memory_mib=400, util=5, sm=0.05))]
    nodes = (gpu_node("a", 2, [tenant("x", ["GPU-a-0", "GPU-a-1"], EXCLUSIVE)]), gpu_node("b", 2))
    found = cluster(*nodes, gpu_node("c", 2, used))
    rules = SchedulerConfig(find_policy("most-utilized"), 8)
    light = prediction(memory_mib=400, util=5, sm=0.05)
    wants = PodRequest(demand("new", gpus=gpus, mode=RequestedMode.TIME_SLICING, prediction=light))
    cached_evaluation = evaluate(found, wants, rules)
    places = place_workers(cached_evaluation, 2 // gpus)
    assert [gpu for _, place in places for gpu in place.gpu_uuids] == ["GPU-c-0", "GPU-c-1"]
