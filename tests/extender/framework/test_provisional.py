"""Jobs that never ran: in which mode they have a GPU to themselves, and who may join them later."""

import pytest
from carpool_core.values import RequestedMode, SharingMode, Tenancy
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import place_on_node
from carpool_extender.testing import cluster, demand, device, gpu_node, prediction, tenant
from msgspec.structs import replace

RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
MPS, TURNS, ALONE, MIG = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE, SharingMode.MIG
UNMEASURED, LOST = prediction(trusted=False), prediction(trusted=False, learned_runs=2)


def chosen(node, rules=RULES, *, settles=True, **wants):
    return place_on_node(
        CachedEvaluation(PodRequest(demand(**wants), may_use_measured_peak=settles), rules, cluster(node).snapshot()),
        "a",
    )


def mig_node():
    modes = [ALONE, TURNS, MPS, MIG]
    return gpu_node("a", [device(modes=modes, mig_profiles=["1g.5gb", "7g.40gb"])])


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {"prediction": None}, (MPS, True), id="nothing is known"),
        pytest.param(gpu_node(), {"prediction": UNMEASURED}, (MPS, True), id="nothing was measured"),
        pytest.param(gpu_node(), {"prediction": LOST}, (ALONE, False), id="it died of memory before"),
        pytest.param(gpu_node(), {}, (MPS, True), id="its first run"),
        pytest.param(gpu_node(), {"prediction": prediction(learned_runs=1)}, (MPS, False), id="its second run"),
        pytest.param(gpu_node(), {"memory_limit_mib": 9000}, (MPS, False), id="the user's own number"),
        pytest.param(
            gpu_node(), {"mode": RequestedMode.EXCLUSIVE, "prediction": None}, (ALONE, False), id="it wants to be alone"
        ),
        pytest.param(
            gpu_node(), {"mode": RequestedMode.TIME_SLICING, "prediction": None}, (TURNS, True), id="it wants turns"
        ),
        pytest.param(gpu_node("a", 2), {"gpus": 2, "prediction": None}, (TURNS, True), id="several GPUs"),
        pytest.param(
            gpu_node("a", [device(modes=[ALONE, TURNS])]), {"prediction": None}, (TURNS, True), id="no MPS there"
        ),
        pytest.param(
            gpu_node("a", [device(modes=[ALONE])]), {"prediction": None}, (ALONE, False), id="nothing else there"
        ),
        pytest.param(
            mig_node(), {"tenancy": Tenancy.CLUSTER, "prediction": UNMEASURED}, (MPS, True), id="it shares with anybody"
        ),
        pytest.param(
            mig_node(), {"tenancy": Tenancy.CLUSTER, "prediction": prediction(sm=0.1)}, (MIG, False), id="an instance"
        ),
    ],
)
def test_who_may_be_joined_later_has_a_mode_in_which_that_can_be(node, wants, expected):
    found = chosen(node, **wants)
    assert (found.mode, found.tenant.provisional) == expected


def test_who_has_the_gpu_for_want_of_a_bound_has_no_limit_to_run_against():
    found = chosen(gpu_node(), prediction=UNMEASURED)
    assert (found.memory_limit_mib, found.thread_percentage, found.tenant.memory_mib) == (None, 100, None)
    assert "MPS so that others can join it later: too little was measured on such GPUs" in found.reason


def test_it_is_as_before_where_the_site_does_not_want_it():
    found = chosen(gpu_node(), prediction=None, settles=False)
    assert (found.mode, found.tenant.provisional) == (ALONE, False)


def test_a_policy_that_gives_every_job_a_gpu_of_its_own_keeps_it_so():
    found = chosen(gpu_node(), SchedulerConfig(find_policy("exclusive"), slots=8), prediction=None)
    assert (found.mode, found.tenant.provisional) == (ALONE, False)


def lone(measured_mib=None, namespace="default", user=None):
    found = tenant("x", ["GPU-a-0"], MPS, prediction=None, namespace=namespace, user=user)
    return replace(found, tenant=replace(found.tenant, provisional=True, measured_mib=measured_mib))


@pytest.mark.parametrize(
    ("held", "wants", "refused"),
    [
        pytest.param(lone(), {}, "needs 4,000 MiB; freest NVIDIA A100-SXM4-40GB has 0 MiB free", id="not measured yet"),
        pytest.param(lone(30000), {}, None, id="measured"),
        pytest.param(lone(30000), {"prediction": prediction(memory_mib=11000)}, "has 10,960 MiB free", id="too large"),
        pytest.param(lone(30000), {"prediction": None}, "in use, and the job must be alone", id="unknown"),
        pytest.param(
            lone(30000, "other"), {"tenancy": Tenancy.CLUSTER}, "server belongs to namespace other", id="strange"
        ),
    ],
)
def test_who_may_join(held, wants, refused):
    found = chosen(gpu_node("a", 1, [held]), **wants)
    if refused is None:
        assert (found.mode, found.memory_limit_mib) == (MPS, 4000)
    else:
        assert refused in found


def test_nobody_of_another_user_joins():
    node = gpu_node("a", 1, [lone(30000, user=1)])
    newcomer = PodRequest(demand(), user=2, may_use_measured_peak=True)
    assert "serves user 1" in place_on_node(CachedEvaluation(newcomer, RULES, cluster(node).snapshot()), "a")
